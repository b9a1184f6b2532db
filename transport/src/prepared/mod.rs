//! Prepared deltas: what changes between two versions, as a file that an engine's plugin writes into its
//! weights.
//!
//! The bytes are described in `docs/format/prepared.md`. `Offer` is the follower's side, [`PreparedDelta`]
//! the plugin's.

mod write;

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use driftless_store::ContentDigest;
use driftless_store::os::regular;
use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::snapshot::TensorInfo;

pub use write::check_dir;
pub(crate) use write::{Offer, Offering};

/// When a version that does no more than change weights is offered to engines' plugins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OfferWhen {
    /// Once its journal is durable: no crash takes it back.
    #[default]
    Durable,
    /// Once its payloads are checked and decoded. After a crash the store has to give it once more.
    Decoded,
}

const MAGIC: [u8; 8] = *b"dftlpre2";
/// Magic, where the header begins, how long it is, its digest, and zeros. All zeros: nothing is offered.
const HEAD_BYTES: usize = 64;
const POSITION_BYTES: u64 = 4;
/// Arrays, and the header, begin at multiples of this.
const ALIGN: u64 = 64;
/// How the names of files with prepared deltas begin.
const DELTA: &str = "delta-";
/// More than any model's.
const HEADER_BYTES_MAX: u64 = 1 << 30;

/// One of the two versions of a prepared delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedVersion {
    /// The label that engines carry for it.
    pub label: String,
    /// Digest of its manifest: its identity.
    pub manifest: ContentDigest,
}

/// A tensor of the model under one of its names, and where its changes lie in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PreparedTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Elements that change.
    pub changed: u64,
    /// First byte of their positions: `u32`, strictly ascending, in row-major order from 0.
    pub positions: u64,
    /// First byte of their values in the target, in the order of the positions.
    pub new: u64,
    /// First byte of their values in the base, likewise.
    pub old: u64,
}

impl PreparedTensor {
    /// Where its three arrays lie: positions, new values, old values. `None` for places that no file has.
    fn places(&self) -> Option<[Range<u64>; 3]> {
        let size = self.dtype.size();
        let place =
            |start: u64, width: u64| Some(start..start.checked_add(self.changed.checked_mul(width)?)?);
        Some([place(self.positions, POSITION_BYTES)?, place(self.new, size)?, place(self.old, size)?])
    }

    /// The tensor as the checkpoint has it.
    #[must_use]
    pub fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape.clone() }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Header {
    base: PreparedVersion,
    target: PreparedVersion,
    /// Whether the checkpoint may not be there yet.
    #[serde(default)]
    first: bool,
    /// [`checksum`] of all bytes between the head and the header.
    checksum: u64,
    tensors: Vec<PreparedTensor>,
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

/// A prepared delta that is offered: its header, which was checked, and the file that its arrays lie in.
///
/// The follower writes the next delta into the same file. Arrays are those of this header only if their
/// [`checksum`] says so.
#[derive(Debug)]
pub struct PreparedDelta {
    file: File,
    subject: String,
    id: ContentDigest,
    arrays: Range<u64>,
    header: Header,
}

/// The digest of the header that a file has now, which names the delta; `None` while nothing is offered.
///
/// # Errors
///
/// The file system's.
pub fn offered(path: &Path) -> Result<Option<ContentDigest>> {
    Ok(open_head(path)?.map(|(_, head)| head.digest))
}

impl PreparedDelta {
    /// Opens a file, and reads and checks the header; `None` while nothing is offered.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] for a file that is torn, damaged or of another kind; [`Error::Parse`] for a header
    /// that does not parse; the file system's errors.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let Some((file, head)) = open_head(path)? else { return Ok(None) };
        let subject = format!("prepared delta `{}`", path.display());
        let torn = |found: String| Error::corrupt(&subject, "its header", "within the file", found);
        if head.bytes > HEADER_BYTES_MAX
            || head.start < HEAD_BYTES as u64
            || !head.start.is_multiple_of(ALIGN)
        {
            return Err(torn(format!("{} bytes from {}", head.bytes, head.start)));
        }
        let text = read_at(&file, head.start, head.bytes, &subject)?;
        let found = ContentDigest::of(&text);
        if found != head.digest {
            return Err(Error::corrupt(&subject, "its header's digest", head.digest, found));
        }
        let header: Header = serde_json::from_slice(&text)
            .map_err(|source| Error::Parse { subject: subject.clone(), source })?;
        let arrays = HEAD_BYTES as u64..head.start;
        for tensor in &header.tensors {
            let inside = |place: &Range<u64>| {
                place.is_empty()
                    || place.start >= arrays.start && place.end <= arrays.end && place.start.is_multiple_of(8)
            };
            let fits = tensor.places().is_some_and(|places| places.iter().all(inside));
            if !fits || tensor.changed > tensor.info().elements()? {
                let expected = format!("arrays of `{}` within bytes {arrays:?}", tensor.name);
                return Err(Error::corrupt(
                    &subject,
                    "its arrays",
                    expected,
                    format!("{} changes", tensor.changed),
                ));
            }
        }
        Ok(Some(Self { file, subject, id: head.digest, arrays, header }))
    }

    /// What [`offered`] says as long as the file has this delta.
    #[must_use]
    pub fn id(&self) -> ContentDigest {
        self.id
    }

    /// Whether the file still has this delta.
    #[must_use]
    pub fn is_offered(&self) -> bool {
        let head = read_at(&self.file, 0, HEAD_BYTES as u64, &self.subject);
        head.is_ok_and(|head| head.get(24..56) == Some(self.id.as_bytes().as_slice()))
    }

    /// The version whose weights it starts from.
    #[must_use]
    pub fn base(&self) -> &PreparedVersion {
        &self.header.base
    }

    /// The version that it leads to.
    #[must_use]
    pub fn target(&self) -> &PreparedVersion {
        &self.header.target
    }

    /// Whether the target is offered before its checkpoint is there: nobody loads it as the target's.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.header.first
    }

    /// All tensors of the model under all their names, those that do not change too.
    #[must_use]
    pub fn tensors(&self) -> &[PreparedTensor] {
        &self.header.tensors
    }

    /// The file, open to read and to write, and the bytes of it that all arrays lie in: a multiple of 64, from
    /// a multiple of 64 on.
    #[must_use]
    pub fn arrays(&self) -> (&File, Range<u64>) {
        (&self.file, self.arrays.clone())
    }

    /// What [`checksum`] must say of [`PreparedDelta::arrays`].
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.header.checksum
    }

    /// Refuses arrays whose checksum is another one.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`].
    pub fn check(&self, found: u64) -> Result<()> {
        let expected = self.header.checksum;
        if found == expected {
            return Ok(());
        }
        Err(Error::corrupt(
            &self.subject,
            "the checksum of its arrays",
            format!("{expected:x}"),
            format!("{found:x}"),
        ))
    }

    /// Whether two of its tensors change alike: at the same positions, from the same values to the same. Arrays are
    /// compared as they lie in the file now.
    ///
    /// # Errors
    ///
    /// The file system's; [`Error::Corrupt`] for a file that was made shorter.
    pub fn change_alike(&self, a: &PreparedTensor, b: &PreparedTensor) -> Result<bool> {
        let (Some(of_a), Some(of_b)) = (a.places(), b.places()) else { return Ok(false) };
        if (a.dtype, &a.shape, a.changed) != (b.dtype, &b.shape, b.changed) {
            return Ok(false);
        }
        for (of_a, of_b) in of_a.into_iter().zip(of_b) {
            let read =
                |place: &Range<u64>| read_at(&self.file, place.start, place.end - place.start, &self.subject);
            // Names of one tensor share its arrays.
            if of_a != of_b && read(&of_a)? != read(&of_b)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads the arrays and checks all of them.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] for a file that is torn or damaged, or that the follower writes meanwhile; the file
    /// system's errors.
    pub fn read(&self) -> Result<PreparedArrays> {
        let Range { start, end } = self.arrays;
        let bytes = read_at(&self.file, start, end - start, &self.subject)?;
        self.check(checksum(&bytes, start))?;
        let arrays = PreparedArrays { bytes };
        for tensor in &self.header.tensors {
            let elements = tensor.info().elements()?;
            let positions = arrays.changes(tensor).positions;
            let ascending = positions.is_sorted_by(|a, b| u32::from_le_bytes(*a) < u32::from_le_bytes(*b));
            let inside = positions.last().is_none_or(|last| u64::from(u32::from_le_bytes(*last)) < elements);
            if !ascending || !inside {
                let expected = format!("positions of `{}` that ascend below {elements}", tensor.name);
                return Err(Error::corrupt(&self.subject, "its positions", expected, "others"));
            }
        }
        Ok(arrays)
    }
}

/// The arrays of a prepared delta in memory, checked.
#[derive(Debug)]
pub struct PreparedArrays {
    bytes: Vec<u8>,
}

impl PreparedArrays {
    /// All of them, as [`PreparedDelta::arrays`] says where they lie in the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The changes of a tensor of the delta that this was read from; none of another's.
    #[must_use]
    pub fn changes(&self, tensor: &PreparedTensor) -> PreparedChanges<'_> {
        let part = |place: Range<u64>| {
            let at = |byte: u64| usize::try_from(byte.checked_sub(HEAD_BYTES as u64)?).ok();
            self.bytes.get(at(place.start)?..at(place.end)?)
        };
        let parts = tensor.places().and_then(|[p, new, old]| Some([part(p)?, part(new)?, part(old)?]));
        let [positions, new, old] = parts.unwrap_or_default();
        PreparedChanges { positions: positions.as_chunks().0, new, old }
    }
}

/// The checksum of bytes that begin at byte `start` of a file: the sum of their 64-bit words, each mixed with
/// its place. It is a sum, so that threads, and the threads of a GPU, add up parts in any order. `start` is a
/// multiple of 8; bytes behind the last whole word do not count.
///
/// The mixing is that of `SplitMix64` (Steele, Lea, Flood 2014).
#[must_use]
pub fn checksum(bytes: &[u8], start: u64) -> u64 {
    let words = bytes.as_chunks::<8>().0.iter().zip(start / 8..);
    words.fold(0, |sum, (word, index)| sum.wrapping_add(mix(u64::from_le_bytes(*word), index)))
}

fn mix(word: u64, index: u64) -> u64 {
    let mut z = word.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// What a file begins with.
struct Head {
    start: u64,
    bytes: u64,
    digest: ContentDigest,
}

impl Head {
    fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.start.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[24..56].copy_from_slice(self.digest.as_bytes());
        bytes
    }

    fn parse(bytes: &[u8; HEAD_BYTES], subject: &str) -> Result<Self> {
        let number = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let digest = bytes[24..].first_chunk().map_or([0; 32], |bytes| *bytes);
        let head = Self { start: number(8), bytes: number(16), digest: ContentDigest::from_bytes(digest) };
        if head.to_bytes() == *bytes {
            return Ok(head);
        }
        Err(Error::corrupt(subject, "its first bytes", "dftlpre2", "others"))
    }
}

fn open_head(path: &Path) -> Result<Option<(File, Head)>> {
    // To write as well, which nobody does here: a GPU's driver locks only pages that could be written to.
    let file = regular::open_with(File::options().read(true).write(true), path);
    let file = file.map_err(|source| Error::io("open", path, source))?;
    let subject = format!("prepared delta `{}`", path.display());
    // The follower has created it and written nothing yet.
    if file.metadata().map_err(|source| Error::io("look at", &subject, source))?.len() == 0 {
        return Ok(None);
    }
    let bytes = read_at(&file, 0, HEAD_BYTES as u64, &subject)?;
    let bytes = bytes.first_chunk().unwrap_or(&[0; HEAD_BYTES]);
    if *bytes == [0; HEAD_BYTES] {
        return Ok(None);
    }
    Ok(Some((file, Head::parse(bytes, &subject)?)))
}

fn read_at(file: &File, start: u64, bytes: u64, subject: &str) -> Result<Vec<u8>> {
    let length = file.metadata().map_err(|source| Error::io("look at", subject, source))?.len();
    if start.checked_add(bytes).is_none_or(|end| end > length) {
        let expected = format!("at least {} bytes", start.saturating_add(bytes));
        return Err(Error::corrupt(subject, "its length", expected, format!("{length} bytes")));
    }
    let mut out = vec![0; usize::try_from(bytes).unwrap_or_default()];
    match file.read_exact_at(&mut out, start) {
        Err(source) if source.kind() == ErrorKind::UnexpectedEof => {
            Err(Error::corrupt(subject, "its length", format!("{length} bytes"), "fewer"))
        }
        read => read.map(|()| out).map_err(|source| Error::io("read", subject, source)),
    }
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
    Ok(dir.join(format!("{DELTA}{}", digest.get(..16).unwrap_or(&digest))))
}
