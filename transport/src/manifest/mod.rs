//! The manifest: the document that commits a version.
//!
//! It names the version's objects, tensors and files, and the digest that each must have. `check` holds the
//! rules that a manifest must satisfy by itself. `tables` is the part that the weights determine.

mod check;
mod tables;

use driftless_delta::Digest;
use serde::{Deserialize, Serialize};

use driftless_store::ContentDigest;
pub use driftless_store::Object;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::ids::{RunId, Version};
use crate::snapshot::TensorInfo;
pub use tables::Tables;

/// The format that this crate writes and reads.
pub const FORMAT: u32 = 1;
/// Largest manifest in bytes; larger ones are refused before they are read.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// Largest object in bytes that a manifest may name; readers may hold one in memory.
pub const OBJECT_BYTES_MAX: u64 = 256 << 20;
/// Largest version number: what ten decimal digits hold, so that keys sort as versions do.
pub const VERSION_MAX: u64 = 9_999_999_999;

/// Id of the digest that names manifests, objects and files.
const CONTENT: &str = "blake3-256";
/// Id of the block digest of tensors.
const BLOCK: &str = "driftless-block/1";
/// Id of the coder of pieces.
const CODER: &str = "driftless-delta/1";
/// Features this build knows. A manifest that requires another one is refused by its name.
const FEATURES: [&str; 0] = [];

/// What the pieces of a publication hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Every tensor in full; no base is needed.
    Full,
    /// Differences from the base; an anchor carries every tensor in full as well.
    Delta,
    /// No bytes: digests of a checkpoint directory that the host already has. Version 0 only.
    Reference,
}

/// In which form a model's tensors are published. Deltas exist only within one representation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Representation {
    /// Element type or quantisation scheme: `bf16`, `f32`, `fp8`, …
    pub scheme: String,
    /// Digest of the quantisation's configuration, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_digest: Option<ContentDigest>,
}

/// The version in front of this one, by identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Its number.
    pub version: Version,
    /// The digest of its manifest.
    pub manifest_digest: ContentDigest,
}

/// Ids of the algorithms that a publication is made with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// Digest of manifests, objects and files.
    pub content: String,
    /// Block digest of tensors.
    pub block: String,
    /// Coder of pieces.
    pub coder: String,
}

impl Default for Algorithms {
    fn default() -> Self {
        Self { content: CONTENT.to_owned(), block: BLOCK.to_owned(), coder: CODER.to_owned() }
    }
}

/// What a reader has to know (`required`) or may know (`optional`) beyond this format.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// A reader that does not know one of these refuses the manifest.
    #[serde(default)]
    pub required: Vec<String>,
    /// A reader that does not know one of these ignores it.
    #[serde(default)]
    pub optional: Vec<String>,
}

/// One contiguous range of a tensor's elements, coded on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// First element, in the flat row-major order of the tensor.
    pub start: u64,
    /// Number of elements.
    pub elements: u64,
    /// Which object holds the payload: an index into [`Manifest::objects`].
    pub object: u32,
    /// First byte of the payload in the object.
    pub offset: u64,
    /// Bytes of the payload.
    pub length: u64,
}

/// One tensor of the version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Hugging Face name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each dimension, outermost first.
    pub shape: Vec<u64>,
    /// Block digest of the whole tensor in this version.
    #[serde(with = "as_text")]
    pub digest: Digest,
    /// Further names of the same bytes (tied weights), in this version and in its base.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Payloads, in the order of their elements, against the base or in full as [`Manifest::kind`] says. A
    /// delta's tensor without pieces is the base's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Piece>,
    /// In a delta that is an anchor: the tensor in full, for readers that lack the base.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub anchor: Vec<Piece>,
}

impl Tensor {
    /// Name, element type and shape.
    #[must_use]
    pub fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape.clone() }
    }
}

/// A range of bytes of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Which object: an index into [`Manifest::objects`].
    pub object: u32,
    /// First byte in the object.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// One auxiliary file of the version. Files that a version does not list are not part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Plain file name.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Digest of its bytes.
    pub blake3: ContentDigest,
    /// Where its bytes are, in order. None: the file is the base's (or, in a reference, the directory's).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
}

/// What a published version consists of. Its digest, BLAKE3-256 of the exact bytes stored, is the version's
/// identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The run.
    pub run_id: RunId,
    /// The model's name within the run.
    pub model: String,
    /// The version that this manifest commits.
    pub version: Version,
    /// What the pieces hold.
    pub kind: Kind,
    /// The form of the tensors.
    pub representation: Representation,
    /// The version in front of this one; `None` for version 0 only.
    pub base: Option<Base>,
    /// The trainer's optimiser step.
    pub trainer_step: u64,
    /// The trainer's checkpoint that belongs to this version, in the trainer's own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Seconds since 1970 by the publisher's clock. Information only: nothing is decided by it.
    pub created: u64,
    /// Elements that differ from the base; all of them for a full publication. Tied weights count once.
    pub changed: u64,
    /// Ids of the algorithms used.
    pub algorithms: Algorithms,
    /// Feature bits, by name.
    pub features: Features,
    /// All objects of the publication.
    pub objects: Vec<Object>,
    /// All tensors, sorted by name.
    pub tensors: Vec<Tensor>,
    /// All auxiliary files, sorted by name.
    pub files: Vec<File>,
}

/// The fields that decide whether the rest can be read at all.
#[derive(Deserialize)]
struct Preamble {
    format: u32,
    #[serde(default)]
    features: Features,
}

impl Manifest {
    /// Reads a manifest and checks everything that can be checked without fetching an object.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Parse`], [`Error::Unsupported`] (format, algorithm),
    /// [`Error::UnknownFeature`], or [`Error::Corrupt`] naming the tensor, file or object, what was expected
    /// and what was found.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::parse_named(bytes, "manifest")
    }

    /// [`Manifest::parse`], with the manifest's name for errors.
    pub(crate) fn parse_named(bytes: &[u8], subject: &str) -> Result<Self> {
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::TooLarge { what: subject.to_owned(), max: MANIFEST_BYTES_MAX });
        }
        let parse = |source| Error::Parse { subject: subject.to_owned(), source };
        let preamble: Preamble = serde_json::from_slice(bytes).map_err(parse)?;
        if preamble.format != FORMAT {
            return Err(Error::Unsupported {
                what: format!("format {} of {subject}", preamble.format),
                hint: format!("this build reads format {FORMAT}"),
            });
        }
        if let Some(feature) =
            preamble.features.required.iter().find(|name| !FEATURES.contains(&name.as_str()))
        {
            return Err(Error::UnknownFeature { key: subject.to_owned(), feature: feature.clone() });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(parse)?;
        check::all(&manifest, subject)?;
        Ok(manifest)
    }

    /// What [`Manifest::parse`] checks of a document that can be read.
    pub(crate) fn check(&self) -> Result<()> {
        check::all(self, "manifest")
    }

    /// The bytes to store, compact and in the order of the fields.
    ///
    /// # Errors
    /// As [`Manifest::parse`]: a manifest that no reader would accept is not written.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check()?;
        let bytes = serde_json::to_vec(self)
            .map_err(|source| Error::Parse { subject: "manifest".to_owned(), source })?;
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::TooLarge { what: "manifest".to_owned(), max: MANIFEST_BYTES_MAX });
        }
        Ok(bytes)
    }

    /// The text an engine is given for this version.
    #[must_use]
    pub fn label(&self) -> String {
        self.run_id.label(self.version)
    }

    /// True if the version can be materialised from this publication alone.
    #[must_use]
    pub fn is_anchor(&self) -> bool {
        match self.kind {
            Kind::Full => true,
            Kind::Delta => self.tensors.iter().any(|tensor| !tensor.anchor.is_empty()),
            Kind::Reference => false,
        }
    }

    /// The pieces that give `tensor` in full, if this is an anchor; `None` also for an anchor's tensor
    /// without elements.
    #[must_use]
    pub fn full_pieces<'a>(&self, tensor: &'a Tensor) -> Option<&'a [Piece]> {
        match self.kind {
            Kind::Full => Some(&tensor.pieces),
            // What `is_anchor` says of the manifest; asked for each tensor, that would take all tensors'
            // time.
            Kind::Delta => (!tensor.anchor.is_empty()).then_some(&tensor.anchor),
            Kind::Reference => None,
        }
    }

    /// Where the tensor of this main name stands in [`Manifest::tensors`].
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()
    }

    /// Every tensor under every name it has, sorted by name, with its entry: what the checkpoint directory
    /// holds.
    #[must_use]
    pub fn named_tensors(&self) -> Vec<(&str, &Tensor)> {
        let mut named: Vec<_> = self
            .tensors
            .iter()
            .flat_map(|tensor| {
                let names = std::iter::once(&tensor.name).chain(&tensor.aliases);
                names.map(move |name| (name.as_str(), tensor))
            })
            .collect();
        named.sort_unstable_by_key(|(name, _)| *name);
        named
    }

    /// Elements of all tensors; tied weights count once.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.tensors.iter().filter_map(|tensor| tensor.info().elements().ok()).fold(0, u64::saturating_add)
    }

    /// Bytes of all tensors; tied weights count once.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().filter_map(|tensor| tensor.info().byte_len().ok()).fold(0, u64::saturating_add)
    }

    /// Bytes that a reader without the base fetches for tensors; 0 if this is no anchor.
    #[must_use]
    pub fn full_piece_bytes(&self) -> u64 {
        self.tensors
            .iter()
            .filter_map(|tensor| self.full_pieces(tensor))
            .flatten()
            .map(|piece| piece.length)
            .sum()
    }

    /// Bytes that a reader with the base fetches for tensors.
    #[must_use]
    pub fn delta_piece_bytes(&self) -> u64 {
        self.tensors.iter().flat_map(|tensor| &tensor.pieces).map(|piece| piece.length).sum()
    }

    /// Bytes of all objects.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        self.objects.iter().map(|object| object.size).fold(0, u64::saturating_add)
    }
}

/// Serde of a type by its text.
pub(crate) mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
