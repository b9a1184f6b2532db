//! Tensors that lie on CUDA devices, encoded there: only payloads come to the host.
//!
//! A device keeps what was published last of each tensor, the base of the next delta. The promises are those
//! of [`super::encode`]:
//!
//! - The base moves after a commit, not before. It is a copy of the tensor that was published, and its digest
//!   is the published one: a tensor that somebody has written to meanwhile has no base.
//! - The base of a whole tensor is trusted if its digests add up to that in the manifest of the version that
//!   the delta starts from.
//! - The codec digests the new tensor where it lies. So a bit that flipped in a base or in its digests shows,
//!   and the tensor is encoded on the host, against the baseline there.
//!
//! What cannot be encoded on its device is copied to the host and encoded there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use driftless_delta::cuda::{self, Codec, Tensor};
use driftless_delta::{Digest, DigestTable};
use driftless_store::wait::lock;

use super::encode::{BaseView, Coder, Done, Payloads};
use super::finite;
use super::shard::{Shard, Slice};
use crate::manifest::{Base, Kind};

/// Codecs of one device that work at the same time: most tensors are too small to occupy it alone.
const CODECS: usize = 4;

/// Where a device keeps the base of the next deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BaseMemory {
    /// In its own memory, as much as the model takes; what finds no room there, in the host's.
    #[default]
    Device,
    /// In pinned memory of the host, which kernels read over the bus.
    Host,
}

/// What became of the tensors of a publication that lie on devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceUse {
    /// Bytes of tensors that were encoded where they lie.
    pub device_bytes: u64,
    /// Bytes of tensors that were copied to the host, as all are that are published in full.
    pub host_bytes: u64,
    /// Why a tensor that might have been encoded where it lies was not, or has no base for the next time: the
    /// first reason.
    pub host_because: Option<String>,
}

/// The devices that a publisher encodes on.
#[derive(Debug, Default)]
pub(super) struct Devices {
    streams: BTreeMap<usize, Streams>,
    /// What was published last, by name and first element.
    bases: BTreeMap<(String, u64), Arc<Kept>>,
    /// The version that the bases are of.
    version: Option<Base>,
    /// What became of the last publication.
    pub(super) used: DeviceUse,
}

#[derive(Debug)]
struct Streams {
    codecs: Vec<Mutex<Codec>>,
    memory: BaseMemory,
}

impl Streams {
    /// A codec that nobody uses, or else the first.
    fn codec(&self) -> Option<MutexGuard<'_, Codec>> {
        let free = self.codecs.iter().find_map(|codec| match codec.try_lock() {
            Ok(codec) => Some(codec),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        free.or_else(|| self.codecs.first().map(lock))
    }
}

/// What was published last of a slice.
#[derive(Debug)]
struct Kept {
    base: Tensor,
    /// Of the slice by itself: its first element is element 0.
    table: DigestTable,
}

/// A slice that can be encoded where it lies.
#[derive(Clone, Copy)]
pub(super) struct DeviceJob<'a> {
    slice: &'a Slice,
    new: &'a Tensor,
    kept: &'a Kept,
    streams: &'a Streams,
}

/// Why a slice is encoded on the host; `None` where that is usual.
type Because = Option<String>;

impl Devices {
    /// Has tensors on the codec's device encoded there from now on.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn add(&mut self, codec: Codec, memory: BaseMemory) -> cuda::Result<()> {
        let device = codec.device();
        let others = (1..CODECS).map(|_| codec.fork()).collect::<cuda::Result<Vec<_>>>()?;
        let codecs = std::iter::once(codec).chain(others).map(Mutex::new).collect();
        self.streams.insert(device, Streams { codecs, memory });
        Ok(())
    }

    /// The slice at `index` as something to be encoded where it lies, if it lies on a device and can be.
    pub(super) fn job<'a>(
        &'a self,
        shard: &'a dyn Shard,
        index: usize,
        base: Option<&BaseView<'_>>,
        coder: &Coder,
        used: &mut DeviceUse,
    ) -> Option<DeviceJob<'a>> {
        let (slice, new) = (&shard.slices()[index], shard.on_device(index)?);
        match self.find(slice, new, base, coder) {
            Ok(job) => {
                used.device_bytes += new.bytes() as u64;
                Some(job)
            }
            Err(because) => {
                used.host_bytes += new.bytes() as u64;
                used.note(because);
                None
            }
        }
    }

    fn find<'a>(
        &'a self,
        slice: &'a Slice,
        new: &'a Tensor,
        base: Option<&BaseView<'_>>,
        coder: &Coder,
    ) -> Result<DeviceJob<'a>, Because> {
        let name = &slice.tensor.name;
        let Some(streams) = self.streams.get(&new.device()) else {
            return Err(Some(format!("device {} was not added to the publisher", new.device())));
        };
        if !coder.allow_non_finite && finite::is_opaque(slice.tensor.dtype) {
            let dtype = slice.tensor.dtype;
            return Err(Some(format!("tensor `{name}` is {dtype}, whose NaN only the host knows")));
        }
        if !new.address().is_multiple_of(16) {
            return Err(Some(format!("tensor `{name}` does not begin at a multiple of 16 bytes")));
        }
        let Some(base) =
            base.filter(|base| base.version().is_some_and(|version| Some(version) == self.version))
        else {
            return Err(None);
        };
        let kept = self.bases.get(&(name.clone(), slice.start));
        let Some(kept) = kept.filter(|kept| kept.base.device() == new.device()) else { return Err(None) };
        if coder.plan.kind != Kind::Delta || coder.plan.anchor || kept.base.bytes() != new.bytes() {
            return Err(None);
        }
        // What is wrong with the baseline's table, the host says.
        let (_, table) = base.tensor(&slice.tensor).map_err(|_| None)?;
        if slice.is_whole().map_err(|_| None)? && kept.table.total() != table.total() {
            return Err(Some(format!("a bit flipped in the digests of the base of tensor `{name}`")));
        }
        Ok(DeviceJob { slice, new, kept, streams })
    }

    /// Digest of a slice where it lies, if it lies on one of the devices.
    pub(super) fn digest(&self, shard: &dyn Shard, index: usize) -> Option<Digest> {
        let tensor = shard.on_device(index)?;
        let mut codec = self.streams.get(&tensor.device())?.codec()?;
        share(&mut codec, &shard.slices()[index], tensor).ok()
    }

    /// Whether two slices lie at one place of a device.
    pub(super) fn are_one(&self, shard: &dyn Shard, a: usize, b: usize) -> bool {
        let place =
            |index| shard.on_device(index).map(|tensor| (tensor.device(), tensor.address(), tensor.bytes()));
        place(a).is_some() && place(a) == place(b)
    }

    /// Makes what was published, and is committed as `version`, the base of the next deltas.
    pub(super) fn keep(&mut self, shard: &dyn Shard, done: &[Done], version: Base) {
        let mut old = std::mem::take(&mut self.bases);
        self.version = Some(version);
        for Done { index, twins, digest } in done {
            let slice = &shard.slices()[*index];
            let Some(new) = shard.on_device(*index).filter(|new| new.bytes() > 0) else { continue };
            let Some(streams) = self.streams.get(&new.device()) else { continue };
            let key = |index: usize| {
                let Slice { tensor, start, .. } = &shard.slices()[index];
                (tensor.name.clone(), *start)
            };
            let same = twins.iter().copied().chain([*index]).map(key);
            // Unless another tensor's base is the same.
            let room =
                same.clone().filter_map(|key| old.remove(&key)).fold(None, |_, kept| Arc::into_inner(kept));
            match streams.keep(slice, new, room.map(|kept| kept.base), *digest) {
                Ok(kept) => {
                    let kept = Arc::new(kept);
                    self.bases.extend(same.map(|key| (key, Arc::clone(&kept))));
                }
                Err(why) => self.used.note(Some(why)),
            }
        }
    }
}

impl Streams {
    /// Copies what was published with this digest, into `room` if it suits.
    fn keep(
        &self,
        slice: &Slice,
        new: &Tensor,
        room: Option<Tensor>,
        published: Digest,
    ) -> Result<Kept, String> {
        let name = &slice.tensor.name;
        let failed = |error: cuda::Error| format!("tensor `{name}` has no base on its device: {error}");
        let Some(mut codec) = self.codec() else { return Err("there is no codec".to_owned()) };
        let suits = |room: &Tensor| room.bytes() == new.bytes() && room.device() == new.device();
        let base = match room.filter(suits) {
            Some(room) => Ok(room),
            None => self.allocate(&codec, new.bytes()),
        };
        let mut base = base.map_err(failed)?;
        codec.copy(new, &mut base).map_err(failed)?;
        let table = codec.digest(slice.tensor.dtype.element(), 0, &base).map_err(failed)?;
        let found =
            if slice.start == 0 { table.total() } else { share(&mut codec, slice, &base).map_err(failed)? };
        if found != published {
            return Err(format!("tensor `{name}` was written to before its publication had ended"));
        }
        Ok(Kept { base, table })
    }

    fn allocate(&self, codec: &Codec, bytes: usize) -> cuda::Result<Tensor> {
        let on_device = match self.memory {
            BaseMemory::Device => codec.room(bytes).ok(),
            BaseMemory::Host => None,
        };
        match on_device {
            Some(room) => Ok(room),
            None => Ok(codec.adopt(codec.pinned(bytes)?)),
        }
    }
}

/// The share that a slice, which lies at `tensor`, has of its whole tensor's digest.
fn share(codec: &mut Codec, slice: &Slice, tensor: &Tensor) -> cuda::Result<Digest> {
    let dtype = slice.tensor.dtype;
    let first = slice.start * (dtype.size() / dtype.element().size() as u64);
    Ok(codec.digest(dtype.element(), first, tensor)?.total())
}

impl DeviceJob<'_> {
    pub(super) fn bytes(&self) -> u64 {
        self.new.bytes() as u64
    }

    /// Encodes the slice where it lies, or says why the host has to.
    pub(super) fn encode(&self, coder: &Coder) -> Result<Payloads, Because> {
        let Self { slice, new, kept, streams } = self;
        let name = &slice.tensor.name;
        let failed = |error: cuda::Error| match error {
            cuda::Error::Codec(driftless_delta::Error::BlockMismatch { .. }) => {
                tracing::warn!(tensor = name, %error, "the base on the device is not what was published");
                format!("a bit flipped in the base of tensor `{name}`: {error}")
            }
            error => format!("tensor `{name}`: {error}"),
        };
        let mut codec = streams.codec().ok_or(None)?;
        let element = slice.tensor.dtype.element();
        let encoded = codec.encode_checked(element, &kept.base, new, &kept.table, coder.profile);
        let encoded = encoded.map_err(|error| Some(failed(error)))?;
        // The host says which element it is, and cuts what does not fit into an object.
        if encoded.not_finite && !coder.allow_non_finite || encoded.payload.len() > coder.object_bytes_max {
            return Err(None);
        }
        let (payload, changed) = (encoded.payload.to_vec(), encoded.changed);
        let digest = match slice.start {
            0 => encoded.digests.total(),
            _ => share(&mut codec, slice, new).map_err(|error| Some(failed(error)))?,
        };
        drop(codec);
        coder.one_piece(slice, digest, changed, payload).map_err(|_| None)
    }
}

impl DeviceUse {
    fn note(&mut self, because: Because) {
        if let Some(because) = because {
            self.host_because.get_or_insert(because);
        }
    }

    /// A tensor that was to be encoded on its device was encoded on the host.
    pub(super) fn redone(&mut self, job: &DeviceJob<'_>, because: Because) {
        self.device_bytes -= job.bytes();
        self.host_bytes += job.bytes();
        self.note(because);
    }
}

#[cfg(test)]
mod tests;
