//! Encodes tensors, or slices of them, into payloads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use driftless_delta::{BLOCK_ELEMENTS, Digest, DigestTable, Profile};
use driftless_store::ContentDigest;
use driftless_store::wait::Stop;

use super::device::Devices;
use super::finite;
use super::plan::Encoding;
use super::shard::{Shard, Slice, slice_bytes};
use super::upload::Packer;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::{Base, File, Kind, Manifest, Piece};
use crate::replica::Replica;
use crate::snapshot::TensorInfo;
use driftless_store::pool::Bounds;

/// Where a piece of a tensor too large for one object may be cut, in bytes: whole blocks of every element
/// type.
pub(super) const PIECE_UNIT: usize = BLOCK_ELEMENTS * 8;

/// What a tensor's error says where the baseline is at fault.
const IN_BASELINE: &str = "digest in the baseline";

/// Whether an error says that the baseline's bytes or digests are not what the version has.
pub(super) fn is_baseline_damage(error: &Error) -> bool {
    matches!(error, Error::TensorMismatch { what: IN_BASELINE, .. })
}

fn rotten(tensor: &str, expected: Digest, found: Digest) -> Error {
    let (expected, found) = (expected.to_string(), found.to_string());
    Error::TensorMismatch { tensor: tensor.to_owned(), what: IN_BASELINE, expected, found }
}

/// The base of a delta: the manifest, and the bytes and digests behind it.
pub(super) struct BaseView<'a> {
    manifest: &'a Manifest,
    replica: &'a Replica,
    checkpoint: &'a Checkpoint,
    /// Each tensor, and under which name the replica keeps its digests.
    entries: BTreeMap<&'a str, &'a crate::manifest::Tensor>,
}

impl<'a> BaseView<'a> {
    /// The version that a replica at rest has, if it has one.
    pub(super) fn of(replica: &'a Replica) -> Result<Option<Self>> {
        let Some(manifest) = replica.manifest() else { return Ok(None) };
        let (checkpoint, entries) = (replica.checkpoint()?, manifest.named_tensors().into_iter().collect());
        Ok(Some(Self { manifest, replica, checkpoint, entries }))
    }

    /// The version that it is.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "devices ask for it"))]
    pub(super) fn version(&self) -> Option<Base> {
        self.replica.identity()
    }

    /// Whether two tensors are the same one, or have the same bytes.
    pub(super) fn are_same(&self, a: &TensorInfo, b: &TensorInfo) -> Result<bool> {
        match (self.entries.get(a.name.as_str()), self.entries.get(b.name.as_str())) {
            (Some(a), Some(b)) if std::ptr::eq(*a, *b) => Ok(true),
            _ => Ok(self.tensor(a)?.0 == self.tensor(b)?.0),
        }
    }

    pub(super) fn tensor(&self, info: &TensorInfo) -> Result<(&'a [u8], &'a DigestTable)> {
        let find = || {
            let entry = self.entries.get(info.name.as_str())?;
            let bytes = self.checkpoint.tensor(self.checkpoint.position(&info.name)?)?;
            let alike = entry.dtype == info.dtype && entry.shape == info.shape;
            alike.then_some((entry.digest, bytes, self.replica.digests(&entry.name)?))
        };
        let (digest, bytes, table) = find().ok_or_else(|| Error::TensorMismatch {
            tensor: info.name.clone(),
            what: "entry in the baseline's tensor table",
            expected: self
                .entries
                .get(info.name.as_str())
                .map_or("none; publish in full".to_owned(), |entry| {
                    format!("{} {:?}; publish in full to change it", entry.dtype, entry.shape)
                }),
            found: format!("{} {:?}", info.dtype, info.shape),
        })?;
        if table.total() == digest {
            Ok((bytes, table))
        } else {
            Err(rotten(&info.name, digest, table.total()))
        }
    }

    /// The bytes of a slice, and their share of the tensor's digest.
    #[cfg(feature = "cuda")]
    pub(super) fn slice(&self, slice: &Slice) -> Result<(&'a [u8], Digest)> {
        let (bytes, table) = self.tensor(&slice.tensor)?;
        if slice.is_whole()? {
            return Ok((bytes, table.total()));
        }
        let range = slice.byte_range(bytes.len())?;
        check_blocks(slice, bytes, &range, table)?;
        Ok((&bytes[range.clone()], Digest::of(slice.tensor.dtype.element(), slice.first(), &bytes[range])))
    }
}

/// What became of one slice.
pub(super) struct Coded {
    /// Which slice it is.
    pub(super) index: usize,
    /// Slices with the same bytes, now and in the base.
    pub(super) twins: Vec<usize>,
    /// Its share of the tensor's digest.
    pub(super) digest: Digest,
    pub(super) changed: u64,
    pub(super) pieces: Vec<Piece>,
    pub(super) anchor: Vec<Piece>,
}

/// What was published of a slice.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "devices read it"))]
pub(super) struct Done {
    /// Which slice it is.
    pub(super) index: usize,
    /// Slices with the same bytes.
    pub(super) twins: Vec<usize>,
    /// Its share of the tensor's digest.
    pub(super) digest: Digest,
}

/// Encodes slices.
pub(super) struct Encoder<'a> {
    pub(super) shard: &'a dyn Shard,
    pub(super) devices: &'a Devices,
    pub(super) base: Option<BaseView<'a>>,
    pub(super) coder: Coder,
    pub(super) bounds: Bounds,
    /// Whether equal tensors are published once.
    pub(super) tie: bool,
    /// Ends the work when it is thrown.
    pub(super) stop: &'a Stop,
}

/// What a thread has to know to encode a slice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coder {
    pub(super) plan: Encoding,
    pub(super) profile: Profile,
    pub(super) object_bytes_max: usize,
    /// Whether NaN and infinities are published.
    pub(super) allow_non_finite: bool,
}

/// A slice whose bytes are in the host's memory.
pub(super) struct Job<'a> {
    slice: &'a Slice,
    pub(super) new: Cow<'a, [u8]>,
    base: Option<(&'a [u8], &'a DigestTable)>,
}

/// A piece that has no place in an object yet.
pub(super) struct Payload {
    pub(super) start: u64,
    pub(super) elements: u64,
    pub(super) bytes: Vec<u8>,
}

#[derive(Default)]
pub(super) struct Payloads {
    pub(super) pieces: Vec<Payload>,
    pub(super) anchor: Vec<Payload>,
    pub(super) digest: Digest,
    pub(super) changed: u64,
    /// Whether an element that changed is NaN or infinite, as far as the codec knows the type.
    not_finite: bool,
}

impl Encoder<'_> {
    /// The slice at `index`, with its bytes in the host's memory.
    pub(super) fn job(&self, index: usize) -> Result<Job<'_>> {
        let slice = &self.shard.slices()[index];
        let base = self.base.as_ref().map(|base| base.tensor(&slice.tensor)).transpose()?;
        Ok(Job { slice, new: slice_bytes(self.shard, index)?, base })
    }

    /// The table of files, with the bytes of those that readers of this publication may not have.
    pub(super) fn files(&self, packer: &mut Packer<'_>) -> Result<Vec<File>> {
        let known = self.base.as_ref().map_or(&[][..], |base| &base.manifest.files);
        let mut files = Vec::new();
        for file in self.shard.files() {
            let (size, blake3) = (file.bytes().len() as u64, ContentDigest::of(file.bytes()));
            let unchanged = known.iter().any(|known| known.name == file.name() && known.blake3 == blake3);
            let parts = if unchanged && self.coder.plan.kind == Kind::Delta && !self.coder.plan.anchor {
                Vec::new()
            } else {
                packer.append_bytes(file.bytes())?
            };
            files.push(File { name: file.name().to_owned(), size, blake3, parts });
        }
        Ok(files)
    }
}

impl Coder {
    /// How many times the bytes of a slice may be in memory while it is under way: as given, as coded, and
    /// once more while that buffer grows. An anchor adds one.
    pub(super) fn copies(&self) -> u64 {
        3 + u64::from(self.plan.anchor)
    }

    /// Encodes a slice. What is promised of it is the digest of its own bytes, and what is encoded is known
    /// to lead there:
    ///
    /// - The changes are taken from the baseline's bytes, so they are right for a host exactly if those are
    ///   the host's. Digests are linear: the digest of the new bytes is that of the table and the changes exactly if the baseline's bytes have the table's digests. [`BaseView::tensor`] has compared the table with the manifest, as hosts have theirs. So a bit that rotted in the weights, or in the table, ends the publication. Where both rotted alike, the manifest shows it.
    /// - What is encoded in full is decoded again.
    pub(super) fn encode(&self, job: &Job<'_>) -> Result<Payloads> {
        let Job { slice, new, base } = job;
        let element = slice.tensor.dtype.element();
        let first = slice.first();
        let mut payloads = match base {
            None => {
                let digest = Digest::of(element, first, new);
                let (pieces, not_finite) = self.full(slice, new, digest)?;
                Payloads { pieces, digest, changed: slice.elements, not_finite, ..Payloads::default() }
            }
            Some((bytes, table)) if slice.is_whole()? => self.delta(slice, bytes, new, table)?,
            Some((bytes, table)) => {
                let range = slice.byte_range(bytes.len())?;
                check_blocks(slice, bytes, &range, table)?;
                let part = &bytes[range];
                let table = DigestTable::of(element, part).map_err(|source| codec(slice, source))?;
                Payloads { digest: Digest::of(element, first, new), ..self.delta(slice, part, new, &table)? }
            }
        };
        let unseen = payloads.changed > 0 && finite::is_opaque(slice.tensor.dtype);
        if !self.allow_non_finite && (payloads.not_finite || unseen) {
            let base = base.map(|(bytes, _)| slice.byte_range(bytes.len()).map(|range| &bytes[range]));
            finite::check(&slice.tensor, slice.start, new, base.transpose()?)?;
        }
        if self.plan.anchor {
            payloads.anchor = self.full(slice, new, payloads.digest)?.0;
        }
        Ok(payloads)
    }

    /// A slice in full, which has this digest: one payload, or as many as objects of bounded size need. Also
    /// whether it has NaN or infinity.
    fn full(&self, slice: &Slice, new: &[u8], digest: Digest) -> Result<(Vec<Payload>, bool)> {
        let element = slice.tensor.dtype.element();
        let mut not_finite = false;
        let encode = |(start, bytes): (usize, &[u8])| {
            // What does not shrink grows by less than a sixteenth.
            let mut out = Vec::with_capacity(bytes.len() / 16 * 17 + 64);
            let encoded = driftless_delta::encode_full(element, bytes, &mut out);
            out.shrink_to_fit();
            not_finite |= encoded.map_err(|source| codec(slice, source))?.not_finite;
            self.payload(slice, start, bytes.len(), out)
        };
        let payloads = self.cut(new).map(encode).collect::<Result<Vec<_>>>()?;
        check_full(slice, &payloads, digest)?;
        Ok((payloads, not_finite))
    }

    /// A slice against its base. A whole tensor that did not change has no payload at all.
    fn delta(&self, slice: &Slice, base: &[u8], new: &[u8], table: &DigestTable) -> Result<Payloads> {
        let element = slice.tensor.dtype.element();
        // A delta of the whole slice, whose digest the codec carries along, fits into an object but for the
        // rare case of a huge tensor that changed nearly everywhere.
        let mut out = Vec::new();
        let encoded = driftless_delta::encode_checked(element, base, new, table, self.profile, &mut out);
        let encoded = encoded.map_err(|source| match source {
            driftless_delta::Error::BlockMismatch { expected, found, .. } => {
                rotten(&slice.tensor.name, expected, found)
            }
            source => codec(slice, source),
        })?;
        let (digest, not_finite) = (encoded.digests.total(), encoded.not_finite);
        if out.len() <= self.object_bytes_max {
            let payloads = self.one_piece(slice, digest, encoded.changed, out)?;
            return Ok(Payloads { not_finite, ..payloads });
        }
        drop(out);
        let mut pieces = Vec::new();
        for ((start, base), (_, new)) in self.cut(base).zip(self.cut(new)) {
            let table = DigestTable::of(element, base).map_err(|source| codec(slice, source))?;
            let mut out = Vec::new();
            driftless_delta::encode(element, base, new, &table, self.profile, &mut out)
                .map_err(|source| codec(slice, source))?;
            out.shrink_to_fit();
            pieces.push(self.payload(slice, start, new.len(), out)?);
        }
        let changed = encoded.changed.min(slice.elements);
        Ok(Payloads { pieces, digest, changed, not_finite, ..Payloads::default() })
    }

    /// A slice as one payload against its base; none for a whole tensor that did not change.
    pub(super) fn one_piece(
        &self,
        slice: &Slice,
        digest: Digest,
        changed: u64,
        mut payload: Vec<u8>,
    ) -> Result<Payloads> {
        payload.shrink_to_fit();
        let changed = changed.min(slice.elements);
        let pieces = if changed == 0 && slice.is_whole()? {
            Vec::new()
        } else {
            vec![self.payload(slice, 0, slice.byte_len()? as usize, payload)?]
        };
        Ok(Payloads { pieces, digest, changed, ..Payloads::default() })
    }

    /// Ranges of bytes that are sure to fit into an object when coded, with their first byte.
    fn cut<'b>(&self, bytes: &'b [u8]) -> impl Iterator<Item = (usize, &'b [u8])> {
        // What does not shrink grows by less than a sixteenth.
        let room = self.object_bytes_max / 16 * 15;
        let length = (room / PIECE_UNIT).max(1) * PIECE_UNIT;
        bytes.chunks(length).enumerate().map(move |(index, chunk)| (index * length, chunk))
    }

    /// The payload of `length` bytes of the slice from its byte `at`.
    fn payload(&self, slice: &Slice, at: usize, length: usize, bytes: Vec<u8>) -> Result<Payload> {
        if bytes.len() > self.object_bytes_max {
            let what = format!("a piece of {length} bytes of tensor `{}`", slice.tensor.name);
            return Err(Error::TooLarge { what, max: self.object_bytes_max as u64 });
        }
        let size = slice.tensor.dtype.size();
        Ok(Payload { start: slice.start + at as u64 / size, elements: length as u64 / size, bytes })
    }
}

/// Refuses a baseline whose blocks around `range` are not what their digests say.
fn check_blocks(slice: &Slice, bytes: &[u8], range: &Range<usize>, table: &DigestTable) -> Result<()> {
    let element = slice.tensor.dtype.element();
    let length = BLOCK_ELEMENTS * element.size();
    let blocks = bytes.chunks(length).zip(table.blocks()).enumerate();
    let last = range.end.div_ceil(length);
    for (block, (bytes, expected)) in blocks.take(last).skip(range.start / length) {
        let found = Digest::of(element, (block * BLOCK_ELEMENTS) as u64, bytes);
        if found != *expected {
            return Err(rotten(&slice.tensor.name, *expected, found));
        }
    }
    Ok(())
}

/// Decodes what a slice was encoded to in full, and refuses it if it has not this digest.
fn check_full(slice: &Slice, payloads: &[Payload], expected: Digest) -> Result<()> {
    let dtype = slice.tensor.dtype;
    let codec_elements = dtype.size() / dtype.element().size() as u64;
    let mut found = Digest::default();
    for payload in payloads {
        let decoded =
            driftless_delta::full_digest(dtype.element(), payload.start * codec_elements, &payload.bytes);
        found += decoded.map_err(|source| codec(slice, source))?;
    }
    if found == expected {
        return Ok(());
    }
    Err(Error::ChangedWhileRead { tensor: slice.tensor.name.clone() })
}

fn codec(slice: &Slice, source: driftless_delta::Error) -> Error {
    Error::Codec { tensor: slice.tensor.name.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    #[test]
    fn a_full_payload_that_decodes_to_something_else_is_refused() {
        let tensor = TensorInfo { name: "a".to_owned(), dtype: Dtype::Bf16, shape: vec![3 << 20] };
        let slice = Slice { tensor, start: 777, elements: 3 << 19 };
        let bytes: Vec<u8> = (0..slice.elements as usize * 2).map(|i| [i as u8 / 2, 0x3c][i % 2]).collect();
        let plan = Encoding { kind: Kind::Full, anchor: false };
        let coder =
            Coder { plan, profile: Profile::Wire, object_bytes_max: 1 << 20, allow_non_finite: false };
        let digest = Digest::of(slice.tensor.dtype.element(), slice.start, &bytes);
        let (mut payloads, not_finite) = coder.full(&slice, &bytes, digest).unwrap();
        assert!(payloads.len() > 2 && !not_finite);
        assert!(matches!(coder.full(&slice, &bytes, Digest::default()), Err(Error::ChangedWhileRead { .. })));
        let last = payloads.len() - 1;
        for (piece, at) in [(0, 100), (1, 5000), (last, 200_000)] {
            payloads[piece].bytes[at] ^= 4;
            check_full(&slice, &payloads, digest).unwrap_err();
            payloads[piece].bytes[at] ^= 4;
        }
        check_full(&slice, &payloads, digest).unwrap();
    }
}
