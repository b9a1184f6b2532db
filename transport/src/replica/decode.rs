//! Tensors of versions: from payloads to bytes or patches, checked against the manifests' digests.

use std::collections::BTreeMap;

use driftless_delta::{DigestTable, Patch, Serial, Source};

use super::buffers::{Buffers, Scratch};
use super::fold::steps;
use super::objects::Objects;
use super::prefault::Prefault;
use super::state::State;
use crate::error::{Error, Result};
use crate::manifest::{Piece, Tensor};
use crate::prepared::Offering;
use crate::run::Committed;

/// Larger tensors do not exist; a manifest that claims one is not believed with an allocation.
const TENSOR_BYTES_MAX: u64 = 1 << 40;

/// How a tensor changes over a fold of deltas.
pub(super) struct Change {
    /// Patches as the journal holds them, each with the byte of the tensor at which it begins.
    pub(super) patches: Vec<(u64, Vec<u8>)>,
    /// The digests of the result.
    pub(super) digests: DigestTable,
}

/// A fold of deltas on a base. Threads decode its tensors.
pub(super) struct Deltas<'a> {
    base: &'a State,
    /// The main name of each of the base's names.
    main_names: BTreeMap<&'a str, &'a str>,
    versions: &'a [Committed],
    objects: &'a Objects<'a>,
    buffers: &'a Buffers,
    /// What the changes are added to, while the old bytes are at hand.
    offering: Option<&'a Offering>,
}

impl<'a> Deltas<'a> {
    pub(super) fn new(
        base: &'a State,
        versions: &'a [Committed],
        objects: &'a Objects<'a>,
        buffers: &'a Buffers,
        offering: Option<&'a Offering>,
    ) -> Self {
        let names = base.manifest.named_tensors();
        let main_names = names.into_iter().map(|(name, entry)| (name, entry.name.as_str())).collect();
        Self { base, main_names, versions, objects, buffers, offering }
    }

    /// Takes the `index`-th tensor through all versions. The pages that change are prefaulted meanwhile.
    pub(super) fn change(&self, index: usize, prefault: &Prefault<'_>) -> Result<Change> {
        let Self { base, versions, objects, buffers, .. } = *self;
        let (mut patches, mut scratch) = (Vec::new(), buffers.scratches.take());
        let mut table = None;
        let mut bytes: &[u8] = &[];
        // The tensor between two versions, once it is not the base's any more.
        let mut between: Option<Vec<u8>> = None;
        let last = steps(versions, index)
            .filter(|(_, tensor)| !tensor.pieces.is_empty())
            .map(|(number, _)| number)
            .last();
        for (number, tensor) in steps(versions, index) {
            let old = match table.take() {
                Some(table) => table,
                None => {
                    bytes = base.checkpoint.named(&tensor.name)?;
                    self.base_table(tensor)?.clone()
                }
            };
            let new = if tensor.pieces.is_empty() {
                old
            } else {
                let before = between.as_deref().unwrap_or(bytes);
                let new = decode_pieces(number, tensor, before, &old, objects, &mut scratch)?;
                if Some(number) != last {
                    apply(tensor, &scratch.patches, between.get_or_insert_with(|| bytes.to_vec()))?;
                }
                prefault.will_change(number, tensor, &scratch.patches);
                for (offset, patch) in &scratch.patches {
                    let mut bytes = buffers.bytes.take();
                    patch.write_to(&mut bytes);
                    patches.push((*offset, bytes));
                }
                new
            };
            check_digest(tensor, &new)?;
            table = Some(new);
        }
        if let (Some(offering), Some((_, tensor))) = (self.offering, steps(versions, index).last())
            // Scratch that decoded nothing still has another tensor's patches.
            && !patches.is_empty()
        {
            match between {
                None => offering.add(tensor, bytes, &scratch.patches),
                Some(_) => offering.add(tensor, bytes, &read_back(tensor, &patches)?),
            }
        }
        buffers.give_scratch(scratch);
        Ok(Change { patches, digests: table.unwrap_or_default() })
    }

    /// The base's digests of a tensor. Tensors may become tied or part from one version to the next; one
    /// delta serves several names only where their bases are the same.
    fn base_table(&self, tensor: &Tensor) -> Result<&'a DigestTable> {
        let table_of = |name: &str| {
            self.main_names
                .get(name)
                .and_then(|main| self.base.tables.get(*main))
                .ok_or_else(|| Error::mismatch(name, "entry in the base's tensor table", "present", "absent"))
        };
        let table = table_of(&tensor.name)?;
        for alias in &tensor.aliases {
            let other = table_of(alias)?;
            if other != table {
                return Err(Error::TensorMismatch {
                    tensor: alias.clone(),
                    what: "digest of the base that it shares a delta with",
                    expected: table.total().to_string(),
                    found: other.total().to_string(),
                });
            }
        }
        Ok(table)
    }
}

/// A tensor's bytes after the last version; `steps` are its entries, the first one in full.
pub(super) fn full_tensor(
    versions: &[Committed],
    steps: &[&Tensor],
    objects: &Objects<'_>,
) -> Result<(Vec<u8>, DigestTable)> {
    let Some((&first, deltas)) = steps.split_first() else { return Ok(Default::default()) };
    let codec = |source| Error::Codec { tensor: first.name.clone(), source };
    let element = first.dtype.element();
    let mut bytes = zeroed(first)?;
    let length = bytes.len();
    let mut scratch = Scratch::default();
    // An empty tensor has none; the digest tells whether any is missing.
    for piece in versions[0].manifest.full_pieces(first).unwrap_or_default() {
        let range = piece_range(first, piece, length)?;
        let payload = objects.range(0, piece.object, piece.offset, piece.length)?;
        scratch.decoder.decode_full(&Serial, element, &payload, &mut bytes[range]).map_err(codec)?;
    }
    let mut table = DigestTable::of(element, &bytes).map_err(codec)?;
    check_digest(first, &table)?;
    for (number, tensor) in (1..).zip(deltas.iter().copied()) {
        if !tensor.pieces.is_empty() {
            table = decode_pieces(number, tensor, &bytes, &table, objects, &mut scratch)?;
            apply(tensor, &scratch.patches, &mut bytes)?;
        }
        check_digest(tensor, &table)?;
    }
    Ok((bytes, table))
}

/// Leaves a tensor's patches in one version, each with the byte at which it begins, in `scratch`. Returns the
/// digests of the result.
fn decode_pieces(
    number: usize,
    tensor: &Tensor,
    bytes: &[u8],
    old: &DigestTable,
    objects: &Objects<'_>,
    Scratch { decoder, patches }: &mut Scratch,
) -> Result<DigestTable> {
    let element = tensor.dtype.element();
    let codec = |source| Error::Codec { tensor: tensor.name.clone(), source };
    patches.resize_with(tensor.pieces.len(), Default::default);
    if let ([piece], [(offset, patch)]) = (tensor.pieces.as_slice(), patches.as_mut_slice()) {
        let payload = objects.range(number, piece.object, piece.offset, piece.length)?;
        *offset = 0;
        decoder.decode(&Serial, Source { element, bytes, digests: old }, &payload, patch).map_err(codec)?;
        return Ok(patch.digests().clone());
    }
    // Pieces of several publishers may be cut anywhere, so their digests are not those of the tensor's
    // blocks: hash again.
    let mut result = bytes.to_vec();
    for (piece, (offset, patch)) in tensor.pieces.iter().zip(patches) {
        let range = piece_range(tensor, piece, bytes.len())?;
        let slice = &bytes[range.clone()];
        let digests = DigestTable::of(element, slice).map_err(codec)?;
        let payload = objects.range(number, piece.object, piece.offset, piece.length)?;
        let source = Source { element, bytes: slice, digests: &digests };
        decoder.decode(&Serial, source, &payload, patch).map_err(codec)?;
        patch.apply_to(&mut result[range.clone()]).map_err(codec)?;
        *offset = range.start as u64;
    }
    DigestTable::of(element, &result).map_err(codec)
}

/// Patches from their journal form.
pub(super) fn read_back(tensor: &Tensor, patches: &[(u64, Vec<u8>)]) -> Result<Vec<(u64, Patch)>> {
    let codec = |source| Error::Codec { tensor: tensor.name.clone(), source };
    patches.iter().map(|(offset, bytes)| Ok((*offset, Patch::from_bytes(bytes).map_err(codec)?))).collect()
}

fn apply(tensor: &Tensor, patches: &[(u64, Patch)], bytes: &mut [u8]) -> Result<()> {
    for (offset, patch) in patches {
        let start = *offset as usize;
        let target =
            bytes.get_mut(start..start.saturating_add(patch.tensor_bytes() as usize)).unwrap_or_default();
        patch.apply_to(target).map_err(|source| Error::Codec { tensor: tensor.name.clone(), source })?;
    }
    Ok(())
}

/// Refuses a tensor whose digest is not the manifest's.
pub(super) fn check_digest(tensor: &Tensor, table: &DigestTable) -> Result<()> {
    let found = table.total();
    if found == tensor.digest {
        return Ok(());
    }
    Err(Error::mismatch(&tensor.name, "digest", tensor.digest, found))
}

/// The bytes of a tensor that a piece covers.
fn piece_range(tensor: &Tensor, piece: &Piece, length: usize) -> Result<std::ops::Range<usize>> {
    let size = tensor.dtype.size();
    let start = piece.start.checked_mul(size).and_then(|start| usize::try_from(start).ok());
    let bytes = piece.elements.checked_mul(size).and_then(|bytes| usize::try_from(bytes).ok());
    match start.zip(bytes).and_then(|(start, bytes)| Some(start..start.checked_add(bytes)?)) {
        Some(range) if range.end <= length => Ok(range),
        _ => Err(Error::TensorMismatch {
            tensor: tensor.name.clone(),
            what: "elements of a piece",
            expected: format!("inside {length} bytes"),
            found: format!("{} from {}", piece.elements, piece.start),
        }),
    }
}

/// A tensor's buffer; a size that cannot be had is an error, not an abort.
fn zeroed(tensor: &Tensor) -> Result<Vec<u8>> {
    let too_large = || Error::TooLarge { what: format!("tensor `{}`", tensor.name), max: TENSOR_BYTES_MAX };
    let length = tensor.info().byte_len()?;
    let length = usize::try_from(length).ok().filter(|_| length <= TENSOR_BYTES_MAX).ok_or_else(too_large)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(|_| too_large())?;
    bytes.resize(length, 0);
    Ok(bytes)
}
