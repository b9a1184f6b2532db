//! The way of slices through an encoder: handed out in order, encoded on threads, packed in order.

use std::borrow::Cow;
use std::collections::BTreeMap;

use driftless_delta::Digest;

use super::device::{DeviceJob, DeviceUse};
use super::encode::{Coded, Coder, Encoder, Job, Payload, Payloads};
use super::shard::{digest, digest_of, slice_bytes};
use super::upload::Packer;
use super::{Progress, ProgressFn};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::manifest::{Part, Piece};
use crate::snapshot::TensorInfo;
use driftless_store::pool::in_order;

/// What a thread is given.
enum Work<'a> {
    Host(Job<'a>),
    Device(DeviceJob<'a>),
    /// Nothing: the slice is the same as this one of those that are encoded.
    Twin(usize),
}

/// What a thread made of it.
enum Made<'a> {
    Payloads(Payloads),
    /// The host has to encode it after all.
    ForHost(DeviceJob<'a>, Option<String>),
    Twin(usize),
}

impl<'a> Work<'a> {
    fn encode(self, coder: &Coder) -> Result<Made<'a>> {
        Ok(match self {
            Work::Host(job) => Made::Payloads(coder.encode(&job)?),
            Work::Device(job) => match job.encode(coder) {
                Ok(payloads) => Made::Payloads(payloads),
                Err(because) => Made::ForHost(job, because),
            },
            Work::Twin(twin) => Made::Twin(twin),
        })
    }
}

/// A slice that is encoded: its number among those, and which one of the shard it is.
#[derive(Debug, Clone, Copy)]
struct Fed {
    position: usize,
    index: usize,
}

/// Slices that may turn out to be the same: type, shape, and the digest of the base (of the slice itself,
/// without one).
type Likeness = (Dtype, Vec<u64>, [u8; 16]);

/// Slices of one likeness that are encoded.
#[derive(Default)]
struct Alike {
    first: Option<Fed>,
    /// Once there is a second one, all of them by the digest of their bytes now: thousands that began alike
    /// (zeros, scales) are not compared with each other.
    known: BTreeMap<[u8; 16], Vec<Fed>>,
}

/// The slices that no thread has been given.
struct Feed<'a> {
    encoder: &'a Encoder<'a>,
    chosen: &'a [usize],
    on_device: Vec<Option<DeviceJob<'a>>>,
    alike: BTreeMap<Likeness, Alike>,
    fed: usize,
}

/// The slices that were encoded.
struct Taken<'a, 'p> {
    encoder: &'a Encoder<'a>,
    chosen: &'a [usize],
    lengths: &'a [u64],
    packer: &'a mut Packer<'p>,
    used: &'a mut DeviceUse,
    progress: Option<&'a mut ProgressFn>,
    state: Progress,
    coded: Vec<Coded>,
}

impl Encoder<'_> {
    /// Encodes the slices at `chosen` into `packer`, in order.
    pub(super) fn slices(
        &self,
        chosen: &[usize],
        packer: &mut Packer<'_>,
        progress: Option<&mut ProgressFn>,
        used: &mut DeviceUse,
    ) -> Result<Vec<Coded>> {
        let (slices, coder) = (self.shard.slices(), self.coder);
        let lengths = chosen.iter().map(|&index| slices[index].byte_len()).collect::<Result<Vec<_>>>()?;
        let job = |&index: &usize| self.devices.job(self.shard, index, self.base.as_ref(), &coder, used);
        let on_device: Vec<_> = chosen.iter().map(job).collect();
        let weigh = |(length, job): (&u64, &Option<_>)| match job {
            Some(_) => *length,
            None => length.saturating_mul(coder.copies()),
        };
        let weights: Vec<u64> = lengths.iter().zip(&on_device).map(weigh).collect();
        let state = Progress {
            tensors_total: chosen.len() as u64,
            bytes_total: lengths.iter().copied().fold(0, u64::saturating_add),
            ..Progress::default()
        };
        let mut feed = Feed { encoder: self, chosen, on_device, alike: BTreeMap::new(), fed: 0 };
        let coded = Vec::with_capacity(chosen.len());
        let mut taken =
            Taken { encoder: self, chosen, lengths: &lengths, packer, used, progress, state, coded };
        in_order(
            &weights,
            self.bounds,
            |position| feed.next(position),
            |work: Work<'_>| work.encode(&coder),
            |position, made| taken.take(position, made),
        )?;
        Ok(taken.coded)
    }
}

impl<'a> Feed<'a> {
    fn next(&mut self, position: usize) -> Result<Work<'a>> {
        fail::fail_point!("publish.encode");
        if self.encoder.stop.is_stopped() {
            return Err(Error::Cancelled { what: "the publication" });
        }
        let index = self.chosen[position];
        let work = match self.on_device[position].take() {
            Some(job) => Work::Device(job),
            None => Work::Host(self.encoder.job(index)?),
        };
        if self.encoder.tie {
            let likeness = self.likeness(index, &work)?;
            let mut alike = self.alike.remove(&likeness).unwrap_or_default();
            let twin = self.find_twin(&work, &mut alike, Fed { position: self.fed, index })?;
            self.alike.insert(likeness, alike);
            if let Some(twin) = twin {
                return Ok(Work::Twin(twin));
            }
        }
        self.fed += 1;
        Ok(work)
    }

    /// The one of those `alike` whose bytes are the same now, and in the base if there is one; without it,
    /// `own` is one more of them.
    fn find_twin(&self, work: &Work<'_>, alike: &mut Alike, own: Fed) -> Result<Option<usize>> {
        let Some(first) = alike.first else {
            alike.first = Some(own);
            return Ok(None);
        };
        let shard = self.encoder.shard;
        let tensor = |index: usize| &shard.slices()[index].tensor;
        let same_base = |index: usize| match &self.encoder.base {
            Some(base) => base.are_same(tensor(index), tensor(own.index)),
            None => Ok(true),
        };
        // Tied weights are one tensor under two names.
        if self.are_one(first.index, work, own.index)? && same_base(first.index)? {
            return Ok(Some(first.position));
        }
        if alike.known.is_empty() {
            alike.known.insert(self.digest(first.index, None)?.to_bytes(), vec![first]);
        }
        let candidates = alike.known.entry(self.digest(own.index, Some(work))?.to_bytes()).or_default();
        for &Fed { position, index } in &*candidates {
            if same_base(index)? && *slice_bytes(shard, index)? == *slice_bytes(shard, own.index)? {
                return Ok(Some(position));
            }
        }
        candidates.push(own);
        Ok(None)
    }

    /// Whether two slices are the same memory.
    fn are_one(&self, index: usize, work: &Work<'_>, own: usize) -> Result<bool> {
        let shard = self.encoder.shard;
        match work {
            Work::Host(Job { new: Cow::Borrowed(new), .. }) => match slice_bytes(shard, index)? {
                Cow::Borrowed(bytes) => Ok(std::ptr::eq(bytes, *new)),
                Cow::Owned(_) => Ok(false),
            },
            Work::Device(_) => Ok(self.encoder.devices.are_one(shard, index, own)),
            Work::Host(_) | Work::Twin(_) => Ok(false),
        }
    }

    /// Digest of a slice's bytes, which are those of `work` if it is given.
    fn digest(&self, index: usize, work: Option<&Work<'_>>) -> Result<Digest> {
        let shard = self.encoder.shard;
        match work {
            Some(Work::Host(job)) => Ok(digest_of(shard, index, &job.new)),
            _ => digest(shard, self.encoder.devices, index),
        }
    }

    fn likeness(&self, index: usize, work: &Work<'_>) -> Result<Likeness> {
        let tensor = &self.encoder.shard.slices()[index].tensor;
        let digest = match &self.encoder.base {
            Some(base) => base.tensor(tensor)?.1.total(),
            None => self.digest(index, Some(work))?,
        };
        let TensorInfo { dtype, shape, .. } = tensor;
        Ok((*dtype, shape.clone(), digest.to_bytes()))
    }
}

impl Taken<'_, '_> {
    fn take(&mut self, position: usize, made: Made<'_>) -> Result<()> {
        let index = self.chosen[position];
        match made {
            Made::Payloads(payloads) => self.pack(index, payloads)?,
            Made::ForHost(job, because) => {
                self.used.redone(&job, because);
                // Here, one after the other, so that no more is in memory than one slice.
                let payloads = self.encoder.coder.encode(&self.encoder.job(index)?)?;
                self.pack(index, payloads)?;
            }
            Made::Twin(twin) => self.coded.get_mut(twin).iter_mut().for_each(|twin| twin.twins.push(index)),
        }
        self.state.tensors += 1;
        self.state.bytes_encoded += self.lengths[position];
        self.state.bytes_uploaded = self.packer.bytes_uploaded();
        if let Some(progress) = &mut self.progress {
            progress(self.state);
        }
        Ok(())
    }

    fn pack(&mut self, index: usize, payloads: Payloads) -> Result<()> {
        let Payloads { pieces, anchor, digest, changed, .. } = payloads;
        let (pieces, anchor) = (pack(pieces, self.packer)?, pack(anchor, self.packer)?);
        self.coded.push(Coded { index, twins: Vec::new(), digest, changed, pieces, anchor });
        Ok(())
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
