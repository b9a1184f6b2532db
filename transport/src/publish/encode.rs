//! Turning tensors, or slices of them, into payloads: several at once on threads of their own, packed in order.

use std::borrow::Cow;
use std::collections::BTreeMap;

use driftless_delta::{BLOCK_ELEMENTS, Digest, DigestTable, Profile};

use super::plan::Plan;
use super::shard::{Shard, Slice, slice_bytes};
use super::upload::Packer;
use super::{Progress, ProgressFn};
use crate::follow::Stop;
use crate::manifest::{File, Kind, Manifest, Part, Piece};
use crate::pool::{Bounds, in_order};
use crate::{Checkpoint, ContentDigest, Dtype, Error, Replica, Result, TensorInfo};

/// Where a piece of a tensor too large for one object may be cut, in bytes: whole blocks of every element type.
pub(super) const PIECE_UNIT: usize = BLOCK_ELEMENTS * 8;

/// The base of a delta: the manifest, and the bytes and digests behind it.
pub(super) struct BaseView<'a> {
    manifest: &'a Manifest,
    replica: &'a Replica,
    checkpoint: &'a Checkpoint,
    /// Each tensor, and under which name the replica keeps its digests.
    entries: BTreeMap<&'a str, &'a crate::manifest::Tensor>,
}

impl<'a> BaseView<'a> {
    pub(super) fn new(manifest: &'a Manifest, replica: &'a Replica, checkpoint: &'a Checkpoint) -> Self {
        Self { manifest, replica, checkpoint, entries: manifest.named_tensors().into_iter().collect() }
    }

    fn tensor(&self, info: &TensorInfo) -> Result<(&'a [u8], &'a DigestTable)> {
        let find = || {
            let entry = self.entries.get(info.name.as_str())?;
            let bytes = self.checkpoint.tensor(self.checkpoint.position(&info.name)?)?;
            let alike = entry.dtype == info.dtype && entry.shape == info.shape;
            alike.then_some((bytes, self.replica.digests(&entry.name)?))
        };
        find().ok_or_else(|| Error::TensorMismatch {
            tensor: info.name.clone(),
            what: "entry in the baseline's tensor table",
            expected: self
                .entries
                .get(info.name.as_str())
                .map_or("none; publish in full".to_owned(), |entry| {
                    format!("{} {:?}; publish in full to change it", entry.dtype, entry.shape)
                }),
            found: format!("{} {:?}", info.dtype, info.shape),
        })
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

/// Encodes slices.
pub(super) struct Encoder<'a> {
    pub(super) shard: &'a dyn Shard,
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
    pub(super) plan: Plan,
    pub(super) profile: Profile,
    pub(super) object_bytes_max: usize,
}

/// Slices that may turn out to be the same: type, shape, and the digest of the base (of the slice itself, without one).
type Likeness = (Dtype, Vec<u64>, [u8; 16]);

/// What a thread is given.
struct Job<'a> {
    slice: &'a Slice,
    new: Cow<'a, [u8]>,
    base: Option<(&'a [u8], &'a DigestTable)>,
}

/// A piece that has no place in an object yet.
struct Payload {
    start: u64,
    elements: u64,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Payloads {
    pieces: Vec<Payload>,
    anchor: Vec<Payload>,
    digest: Digest,
    changed: u64,
}

impl Encoder<'_> {
    /// Encodes the slices at `chosen` into `packer`, in order.
    pub(super) fn slices(
        &self,
        chosen: &[usize],
        packer: &mut Packer<'_>,
        mut progress: Option<&mut ProgressFn>,
    ) -> Result<Vec<Coded>> {
        let (slices, coder) = (self.shard.slices(), self.coder);
        let weights = chosen.iter().map(|&index| slices[index].byte_len()).collect::<Result<Vec<_>>>()?;
        let mut state = Progress { tensors_total: chosen.len() as u64, ..Progress::default() };
        let mut alike: BTreeMap<Likeness, Vec<(usize, usize)>> = BTreeMap::new();
        let (mut fed, mut coded) = (0, Vec::<Coded>::with_capacity(chosen.len()));
        in_order(
            &weights,
            self.bounds,
            |position| {
                fail::fail_point!("publish.encode");
                if self.stop.is_stopped() {
                    return Err(Error::Cancelled { what: "the publication" });
                }
                let index = chosen[position];
                let slice = &slices[index];
                let base = self.base.as_ref().map(|base| base.tensor(&slice.tensor)).transpose()?;
                let job = Job { slice, new: slice_bytes(self.shard, index)?, base };
                if self.tie {
                    let candidates = alike.entry(likeness(&job)).or_default();
                    if let Some(twin) = self.find_twin(&job, candidates)? {
                        return Ok((None, Some(twin)));
                    }
                    candidates.push((fed, index));
                }
                fed += 1;
                Ok((Some(job), None))
            },
            |(job, twin): (Option<Job<'_>>, Option<usize>)| {
                Ok((job.map(|job| coder.encode(&job)).transpose()?, twin))
            },
            |position, (payloads, twin)| {
                let index = chosen[position];
                if let Some(twin) = twin.and_then(|twin| coded.get_mut(twin)) {
                    twin.twins.push(index);
                }
                if let Some(Payloads { pieces, anchor, digest, changed }) = payloads {
                    let [pieces, anchor] = [pieces, anchor].map(|payloads| pack(payloads, packer));
                    let (pieces, anchor) = (pieces?, anchor?);
                    coded.push(Coded { index, twins: Vec::new(), digest, changed, pieces, anchor });
                }
                state.tensors += 1;
                state.bytes_encoded += weights[position];
                state.bytes_uploaded = packer.bytes_uploaded();
                if let Some(progress) = &mut progress {
                    progress(state);
                }
                Ok(())
            },
        )?;
        Ok(coded)
    }

    /// The entry among `candidates` whose bytes are the same now, and in the base if there is one.
    fn find_twin(&self, job: &Job<'_>, candidates: &[(usize, usize)]) -> Result<Option<usize>> {
        for &(position, index) in candidates {
            let twin = &self.shard.slices()[index].tensor;
            let same_base = match (job.base, &self.base) {
                (Some((bytes, _)), Some(base)) => bytes == base.tensor(twin)?.0,
                _ => true,
            };
            if same_base && *slice_bytes(self.shard, index)? == *job.new {
                return Ok(Some(position));
            }
        }
        Ok(None)
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
    fn encode(&self, job: &Job<'_>) -> Result<Payloads> {
        let Job { slice, new, base } = job;
        let element = slice.tensor.dtype.element();
        let first = slice.start * (slice.tensor.dtype.size() / element.size() as u64);
        let Some((bytes, table)) = base else {
            let digest = Digest::of(element, first, new);
            return Ok(Payloads {
                pieces: self.full(slice, new)?,
                digest,
                changed: slice.elements,
                ..Payloads::default()
            });
        };
        let mut payloads = if slice.is_whole()? {
            self.delta(slice, bytes, new, table)?
        } else {
            let range = slice.byte_range(bytes.len())?;
            let part = bytes.get(range).unwrap_or_default();
            let table = DigestTable::of(element, part).map_err(|source| codec(slice, source))?;
            Payloads { digest: Digest::of(element, first, new), ..self.delta(slice, part, new, &table)? }
        };
        if self.plan.anchor {
            payloads.anchor = self.full(slice, new)?;
        }
        Ok(payloads)
    }

    /// A slice in full: one payload, or as many as objects of bounded size need.
    fn full(&self, slice: &Slice, new: &[u8]) -> Result<Vec<Payload>> {
        let encode = |(start, bytes): (usize, &[u8])| {
            let mut out = Vec::new();
            driftless_delta::encode_full(slice.tensor.dtype.element(), bytes, &mut out)
                .map_err(|source| codec(slice, source))?;
            self.payload(slice, start, bytes.len(), out)
        };
        self.cut(new).map(encode).collect()
    }

    /// A slice against its base. A whole tensor that did not change has no payload at all.
    fn delta(&self, slice: &Slice, base: &[u8], new: &[u8], table: &DigestTable) -> Result<Payloads> {
        let element = slice.tensor.dtype.element();
        let encode = |base: &[u8], new: &[u8], table: &DigestTable, out: &mut Vec<u8>| {
            driftless_delta::encode(element, base, new, table, self.profile, out)
                .map_err(|source| codec(slice, source))
        };
        // A delta of the whole slice, whose digest the codec carries along, fits into an object but for the rare case
        // of a huge tensor that changed nearly everywhere.
        let mut out = Vec::new();
        let encoded = encode(base, new, table, &mut out)?;
        let (digest, changed) = (encoded.digests.total(), encoded.changed.min(slice.elements));
        if changed == 0 && slice.is_whole()? {
            return Ok(Payloads { digest, ..Payloads::default() });
        }
        if out.len() <= self.object_bytes_max {
            let pieces = vec![self.payload(slice, 0, new.len(), out)?];
            return Ok(Payloads { pieces, digest, changed, ..Payloads::default() });
        }
        drop(out);
        let mut pieces = Vec::new();
        for ((start, base), (_, new)) in self.cut(base).zip(self.cut(new)) {
            let table = DigestTable::of(element, base).map_err(|source| codec(slice, source))?;
            let mut out = Vec::new();
            encode(base, new, &table, &mut out)?;
            pieces.push(self.payload(slice, start, new.len(), out)?);
        }
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

/// Gives payloads their places in objects.
fn pack(payloads: Vec<Payload>, packer: &mut Packer<'_>) -> Result<Vec<Piece>> {
    let place = |payload: Payload| {
        let Part { object, offset, length } = packer.append(&payload.bytes)?;
        Ok(Piece { start: payload.start, elements: payload.elements, object, offset, length })
    };
    payloads.into_iter().map(place).collect()
}

fn likeness(job: &Job<'_>) -> Likeness {
    let TensorInfo { dtype, shape, .. } = &job.slice.tensor;
    let digest = match job.base {
        Some((_, table)) => table.total(),
        None => Digest::of(dtype.element(), 0, &job.new),
    };
    (*dtype, shape.clone(), digest.to_bytes())
}

fn codec(slice: &Slice, source: driftless_delta::Error) -> Error {
    Error::Codec { tensor: slice.tensor.name.clone(), source }
}
