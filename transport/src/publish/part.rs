//! A rank's part of a version, and joining parts: documents in, a manifest out.

use std::collections::BTreeMap;

use driftless_delta::Digest;
use driftless_store::Object;
use serde::{Deserialize, Serialize};

use super::encode::Coded;
use super::options::Rank;
use super::shard::Slice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::ids::{RunId, Version};
use crate::manifest::{
    Algorithms, Base, FORMAT, Features, File, Kind, MANIFEST_BYTES_MAX, Manifest, Piece, Representation,
    Tensor, as_text,
};
use crate::snapshot::TensorInfo;

/// One rank's share of a version: its objects, and which slices lie where in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartManifest {
    pub(super) format: u32,
    pub(super) run_id: RunId,
    pub(super) model: String,
    pub(super) version: Version,
    pub(super) base: Option<Base>,
    pub(super) attempt: String,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) representation: Option<Representation>,
    pub(super) trainer_step: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) checkpoint: Option<String>,
    pub(super) created: u64,
    pub(super) algorithms: Algorithms,
    pub(super) features: Features,
    pub(super) objects: Vec<Object>,
    pub(super) slices: Vec<PartSlice>,
    /// Those of rank 0 are the version's.
    pub(super) files: Vec<File>,
}

/// A slice of a tensor, as one rank published it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartSlice {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) start: u64,
    pub(super) elements: u64,
    /// The slice's share of the tensor's digest: the shares of all slices add up to it.
    #[serde(with = "as_text")]
    pub(super) digest: Digest,
    pub(super) changed: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) pieces: Vec<Piece>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) anchor: Vec<Piece>,
}

impl PartSlice {
    pub(super) fn new(slice: &Slice, coded: Coded) -> Self {
        let TensorInfo { name, dtype, shape } = slice.tensor.clone();
        let Coded { digest, changed, pieces, anchor, .. } = coded;
        let (start, elements) = (slice.start, slice.elements);
        Self { name, dtype, shape, start, elements, digest, changed, pieces, anchor }
    }
}

impl PartManifest {
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|source| Error::Parse { subject: "part".to_owned(), source })
    }

    /// Reads a part; `subject` names it in errors.
    pub(super) fn parse(bytes: &[u8], subject: &str) -> Result<Self> {
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::TooLarge { what: subject.to_owned(), max: MANIFEST_BYTES_MAX });
        }
        let parse = |source| Error::Parse { subject: subject.to_owned(), source };
        let part: Self = serde_json::from_slice(bytes).map_err(parse)?;
        if part.format != FORMAT {
            return Err(Error::Unsupported {
                what: format!("format {} of {subject}", part.format),
                hint: format!("this build writes format {FORMAT}; publish with one build on all ranks"),
            });
        }
        Ok(part)
    }
}

/// What all parts of a version have to agree on.
pub(super) struct Expected<'a> {
    pub(super) run_id: RunId,
    pub(super) model: &'a str,
    pub(super) version: Version,
    pub(super) base: Option<Base>,
    pub(super) rank: &'a Rank,
    /// The base's form, which a delta has too.
    pub(super) representation: Option<&'a Representation>,
}

/// Joins the parts of all ranks, in the order of the ranks, to the version's manifest. The same parts give
/// the same manifest, whichever rank joins them.
///
/// # Errors
/// [`Error::PartConflict`] names the rank that contradicts the others; [`Error::Pieces`], the elements that
/// come from no rank or from two.
pub(super) fn join(parts: Vec<PartManifest>, expected: &Expected<'_>) -> Result<Manifest> {
    let Some(first) = parts.first() else {
        return Err(Error::BadSetting {
            name: "ranks",
            expected: "at least 1".to_owned(),
            found: "0".to_owned(),
        });
    };
    for (rank, part) in (0..).zip(&parts) {
        agree(rank, part, first, expected)?;
    }
    let version = expected.version;
    let (kind, trainer_step, checkpoint) = (first.kind, first.trainer_step, first.checkpoint.clone());
    let asked = first.representation.clone();
    let created = parts.iter().map(|part| part.created).max().unwrap_or_default();
    let mut objects = Vec::new();
    let mut files = Vec::new();
    let mut slices: BTreeMap<String, Vec<(u32, PartSlice)>> = BTreeMap::new();
    let mut changed = 0u64;
    for part in parts {
        // Behind the objects of the ranks before.
        let shift = u32::try_from(objects.len()).map_err(|_| too_many_objects())?;
        objects.extend(part.objects);
        if part.rank == 0 {
            files = part.files;
        }
        for mut slice in part.slices {
            for piece in slice.pieces.iter_mut().chain(&mut slice.anchor) {
                piece.object = piece.object.checked_add(shift).ok_or_else(too_many_objects)?;
            }
            changed = changed.saturating_add(slice.changed);
            slices.entry(slice.name.clone()).or_default().push((part.rank, slice));
        }
    }
    let tensors = slices.into_values().map(|slices| tensor(version, slices)).collect::<Result<Vec<_>>>()?;
    let infos: Vec<TensorInfo> = tensors.iter().map(Tensor::info).collect();
    let usual = || super::plan::representation(&infos.iter().collect::<Vec<_>>());
    Ok(Manifest {
        format: FORMAT,
        run_id: expected.run_id,
        model: expected.model.to_owned(),
        version,
        kind,
        representation: asked.or_else(|| expected.representation.cloned()).unwrap_or_else(usual),
        base: expected.base,
        trainer_step,
        checkpoint,
        created,
        changed,
        algorithms: Algorithms::default(),
        features: Features::default(),
        objects,
        tensors,
        files,
    })
}

fn too_many_objects() -> Error {
    Error::TooLarge { what: "number of objects of a publication".to_owned(), max: u64::from(u32::MAX) }
}

/// Refuses a part that is not of this version, or contradicts the first one.
fn agree(rank: u32, part: &PartManifest, first: &PartManifest, expected: &Expected<'_>) -> Result<()> {
    let conflict = |what, expected: String, found: String| {
        if expected == found {
            return Ok(());
        }
        Err(Error::PartConflict { version: part.version, rank, what, expected, found })
    };
    let base = |base: Option<Base>| match base {
        Some(base) => format!("version {} with manifest {}", base.version, base.manifest_digest),
        None => "none".to_owned(),
    };
    conflict("run", expected.run_id.to_string(), part.run_id.to_string())?;
    conflict("model", expected.model.to_owned(), part.model.clone())?;
    conflict("version", expected.version.to_string(), part.version.to_string())?;
    conflict("base", base(expected.base), base(part.base))?;
    conflict("attempt", expected.rank.attempt.clone(), part.attempt.clone())?;
    conflict("rank", rank.to_string(), part.rank.to_string())?;
    conflict("number of ranks", expected.rank.ranks.to_string(), part.ranks.to_string())?;
    conflict("kind", format!("{:?}", first.kind), format!("{:?}", part.kind))?;
    conflict("trainer step", first.trainer_step.to_string(), part.trainer_step.to_string())?;
    conflict("algorithms", format!("{:?}", Algorithms::default()), format!("{:?}", part.algorithms))?;
    conflict("required features", "[]".to_owned(), format!("{:?}", part.features.required))?;
    conflict("representation", format!("{:?}", first.representation), format!("{:?}", part.representation))
}

/// One tensor of the slices that ranks published of it.
fn tensor(version: Version, mut slices: Vec<(u32, PartSlice)>) -> Result<Tensor> {
    slices.sort_by_key(|(rank, slice)| (slice.start, slice.elements, *rank));
    let Some((_, first)) = slices.first() else { return Err(too_many_objects()) };
    let (name, dtype, shape) = (first.name.clone(), first.dtype, first.shape.clone());
    let elements = TensorInfo { name: name.clone(), dtype, shape: shape.clone() }.elements()?;
    let wrong = |start, end, found| Error::Pieces { tensor: name.clone(), version, start, end, found };
    let (mut next, mut last_rank) = (0u64, 0);
    let mut tensor = Tensor {
        name: name.clone(),
        dtype,
        shape,
        digest: Digest::default(),
        aliases: Vec::new(),
        pieces: Vec::new(),
        anchor: Vec::new(),
    };
    for (rank, slice) in &slices {
        if (slice.dtype, &slice.shape) != (tensor.dtype, &tensor.shape) {
            return Err(Error::PartConflict {
                version,
                rank: *rank,
                what: "type and shape of a tensor",
                expected: format!("`{name}` {} {:?}", tensor.dtype, tensor.shape),
                found: format!("{} {:?}", slice.dtype, slice.shape),
            });
        }
        let end = slice.start.saturating_add(slice.elements);
        if slice.start > next {
            return Err(wrong(next, slice.start, "no rank".to_owned()));
        }
        if slice.start < next {
            return Err(wrong(slice.start, next.min(end), format!("ranks {last_rank} and {rank}")));
        }
        if end > elements {
            return Err(wrong(elements, end, format!("rank {rank}, though there are none")));
        }
        tensor.digest += slice.digest;
        tensor.pieces.extend(&slice.pieces);
        tensor.anchor.extend(&slice.anchor);
        (next, last_rank) = (end, *rank);
    }
    if next < elements {
        return Err(wrong(next, elements, "no rank".to_owned()));
    }
    Ok(tensor)
}

/// Whether a committed version holds what a part published: its objects, and the tensors that it alone has.
pub(super) fn holds(manifest: &Manifest, part: &PartManifest) -> bool {
    let objects: BTreeMap<_, _> = manifest.objects.iter().map(|object| (&object.key, object)).collect();
    let named = |object: &Object| objects.get(&object.key).is_some_and(|known| *known == object);
    let same = |slice: &PartSlice| {
        let tensor = manifest.position(&slice.name).and_then(|index| manifest.tensors.get(index));
        let whole =
            |tensor: &Tensor| tensor.info().elements().is_ok_and(|elements| elements == slice.elements);
        tensor.is_some_and(|tensor| !whole(tensor) || tensor.digest == slice.digest)
    };
    part.objects.iter().all(named) && part.slices.iter().all(same)
}
