//! Prepared deltas: what changes between two versions, as a file that an engine's plugin writes into its
//! weights.
//!
//! The bytes are described in `docs/format/prepared.md`. `Offer` is the follower's side, [`PreparedDelta`]
//! the plugin's.

mod write;

use std::ops::Range;
use std::path::{Path, PathBuf};

use driftless_store::ContentDigest;
use driftless_store::os::regular;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::snapshot::TensorInfo;

pub(crate) use write::Offer;
pub use write::check_dir;

const MAGIC: [u8; 8] = *b"dftlpre1";
const DIGEST_BYTES: usize = 32;
const LENGTH_BYTES: usize = 8;
const POSITION_BYTES: usize = 4;

/// One of the two versions of a prepared delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedVersion {
    /// The label that engines carry for it.
    pub label: String,
    /// Digest of its manifest: its identity.
    pub manifest: ContentDigest,
}

/// A tensor of the model, and where its changes lie in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Elements that change.
    changed: u64,
    /// First byte of the positions, of the new values and of the old values.
    positions: u64,
    new: u64,
    old: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Header {
    base: PreparedVersion,
    target: PreparedVersion,
    tensors: Vec<Entry>,
}

/// The changes of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct PreparedChanges<'a> {
    /// Which elements of the tensor change, in row-major order from 0, strictly ascending: little-endian
    /// `u32`.
    pub positions: &'a [[u8; 4]],
    /// Their values in the target, one after the other, each as long as an element.
    pub new: &'a [u8],
    /// Their values in the base.
    pub old: &'a [u8],
}

/// A prepared delta in memory. It was checked when it was opened: length, digest, and every bound.
#[derive(Debug)]
pub struct PreparedDelta {
    bytes: Vec<u8>,
    base: PreparedVersion,
    target: PreparedVersion,
    tensors: Vec<TensorInfo>,
    places: Vec<[Range<usize>; 3]>,
}

impl PreparedDelta {
    /// Reads the file and checks all of it.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] for a file that is torn, damaged or of another kind; [`Error::Parse`] for a header
    /// that does not parse; the file system's errors.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = regular::read(path).map_err(|source| Error::io("read", path, source))?;
        Self::parse(bytes, &format!("prepared delta `{}`", path.display()))
    }

    fn parse(bytes: Vec<u8>, subject: &str) -> Result<Self> {
        let header = header(&bytes, subject)?;
        let Header { base, target, tensors: entries } = header;
        let mut places = Vec::with_capacity(entries.len());
        for entry in &entries {
            places.push(entry.places(bytes.len(), subject)?);
        }
        let info = |entry: Entry| TensorInfo { name: entry.name, dtype: entry.dtype, shape: entry.shape };
        let delta = Self { bytes, base, target, tensors: entries.into_iter().map(info).collect(), places };
        delta.check_positions(subject)?;
        Ok(delta)
    }

    /// The version whose weights it starts from.
    #[must_use]
    pub fn base(&self) -> &PreparedVersion {
        &self.base
    }

    /// The version that it leads to.
    #[must_use]
    pub fn target(&self) -> &PreparedVersion {
        &self.target
    }

    /// All tensors of the model under all their names, those that do not change too.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The changes of `tensors()[index]`; none past the end.
    #[must_use]
    pub fn changes(&self, index: usize) -> PreparedChanges<'_> {
        let part = |which: usize| {
            let range = self.places.get(index).and_then(|places| places.get(which)).cloned();
            range.and_then(|range| self.bytes.get(range)).unwrap_or_default()
        };
        PreparedChanges { positions: part(0).as_chunks().0, new: part(1), old: part(2) }
    }

    fn check_positions(&self, subject: &str) -> Result<()> {
        for (index, info) in self.tensors.iter().enumerate() {
            let elements = info.elements()?;
            let positions = self.changes(index).positions;
            let ascending = positions.is_sorted_by(|a, b| u32::from_le_bytes(*a) < u32::from_le_bytes(*b));
            let inside = positions.last().is_none_or(|last| u64::from(u32::from_le_bytes(*last)) < elements);
            if !ascending || !inside {
                let expected = format!("positions of `{}` that ascend below {elements}", info.name);
                return Err(corrupt(subject, "its positions", expected, "others".to_owned()));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Where its three arrays lie in a file of so many bytes.
    fn places(&self, length: usize, subject: &str) -> Result<[Range<usize>; 3]> {
        let size = self.dtype.size();
        let place = |start: u64, width: u64| {
            let end = self.changed.checked_mul(width).and_then(|bytes| start.checked_add(bytes))?;
            let range = usize::try_from(start).ok()?..usize::try_from(end).ok()?;
            (range.end <= length).then_some(range)
        };
        let places =
            [place(self.positions, POSITION_BYTES as u64), place(self.new, size), place(self.old, size)];
        match places {
            [Some(positions), Some(new), Some(old)] => Ok([positions, new, old]),
            _ => {
                let expected = format!("arrays of `{}` within {length} bytes", self.name);
                Err(corrupt(subject, "its arrays", expected, format!("{} changes", self.changed)))
            }
        }
    }
}

/// The header of a file whose digest holds.
fn header(bytes: &[u8], subject: &str) -> Result<Header> {
    let torn = || corrupt(subject, "its length", "a whole file".to_owned(), format!("{} bytes", bytes.len()));
    let (body, digest) = bytes.split_last_chunk::<DIGEST_BYTES>().ok_or_else(torn)?;
    let found = ContentDigest::of(body);
    if found.as_bytes() != digest {
        let expected = ContentDigest::from_bytes(*digest).to_string();
        return Err(corrupt(subject, "its digest", expected, found.to_string()));
    }
    if !body.starts_with(&MAGIC) {
        return Err(corrupt(subject, "its first bytes", "dftlpre1".to_owned(), "others".to_owned()));
    }
    let (body, length) = body.split_last_chunk::<LENGTH_BYTES>().ok_or_else(torn)?;
    let start = usize::try_from(u64::from_le_bytes(*length)).ok().and_then(|len| body.len().checked_sub(len));
    let text = start.and_then(|start| body.get(start..)).ok_or_else(torn)?;
    serde_json::from_slice(text).map_err(|source| Error::Parse { subject: subject.to_owned(), source })
}

fn corrupt(subject: &str, what: &'static str, expected: String, found: String) -> Error {
    Error::Corrupt { subject: subject.to_owned(), what, expected, found }
}

/// Where the prepared delta for a checkpoint directory, which exists, lies in the plugins' directory `dir`.
///
/// # Errors
///
/// The file system's, for a checkpoint directory that cannot be resolved.
pub fn offer_path(dir: &Path, checkpoint: &Path) -> Result<PathBuf> {
    let checkpoint =
        std::fs::canonicalize(checkpoint).map_err(|source| Error::io("resolve", checkpoint, source))?;
    let digest = ContentDigest::of(checkpoint.as_os_str().as_encoded_bytes()).to_string();
    Ok(dir.join(format!("delta-{}", digest.get(..16).unwrap_or(&digest))))
}
