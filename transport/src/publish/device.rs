//! Tensors that lie on CUDA devices, encoded there: only payloads come to the host.
//!
//! A device keeps what was published last of each tensor, the base of the next delta. The promises are those
//! of [`super::encode`]:
//!
//! - The base moves after a commit, not before. It is a copy of the tensor that was published, and its digest
//!   is the published one: a tensor that somebody has written to meanwhile has no base.
//! - A base that is missing, behind a reference or a restart, is made of the tensor if its digest is that of the
//!   version before, and else of the baseline's bytes. The copy's digest decides here too.
//! - The base of a whole tensor is trusted if its digests add up to that in the manifest of the version that
//!   the delta starts from.
//! - The codec digests the new tensor where it lies. So a bit that flipped in a base or in its digests shows,
//!   and the tensor is encoded on the host, against the baseline there.
//!
//! What cannot be encoded on its device is copied to the host and encoded there.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use driftless_delta::Digest;
use driftless_delta::cuda::{self, Codec, Part, Pool, Source, Tensor};
use driftless_store::pool::{Bounds, as_they_come};
use driftless_store::wait::Stop;

use super::encode::{BaseView, Coder, Done, Payloads};
use super::finite;
use super::shard::{Shard, Slice};
use crate::error::{Error, Result as OrError};
use crate::manifest::{Base, Kind};

pub use driftless_delta::cuda::BaseMemory;

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
    pools: BTreeMap<usize, Pool>,
    /// What was published last.
    bases: BTreeMap<Key, Arc<cuda::Base>>,
    /// The version that the bases are of.
    version: Option<Base>,
    /// What became of the last publication.
    pub(super) used: DeviceUse,
}

/// A tensor's name, and the first element of a slice of it.
type Key = (String, u64);

fn key(slice: &Slice) -> Key {
    (slice.tensor.name.clone(), slice.start)
}

fn part(slice: &Slice) -> Part {
    Part { element: slice.tensor.dtype.element(), first: slice.first() }
}

fn no_base(slice: &Slice, error: &cuda::Error) -> String {
    format!("tensor `{}` has no base on its device: {error}", slice.tensor.name)
}

/// A slice that can be encoded where it lies.
#[derive(Clone, Copy)]
pub(super) struct DeviceJob<'a> {
    slice: &'a Slice,
    new: &'a Tensor,
    kept: &'a cuda::Base,
    pool: &'a Pool,
}

/// A base that is to be made: of one slice, or of several that lie at one place and were one.
struct Missing<'a> {
    slice: &'a Slice,
    new: &'a Tensor,
    pool: &'a Pool,
    keys: Vec<Key>,
}

/// Why a slice is encoded on the host; `None` where that is usual.
type Because = Option<String>;

impl Devices {
    /// Has tensors on the codec's device encoded there from now on.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn add(&mut self, codec: Codec, memory: BaseMemory) -> cuda::Result<()> {
        self.pools.insert(codec.device(), Pool::new(codec, memory)?);
        Ok(())
    }

    /// Makes the bases that are missing of slices that are to be encoded against `base`. Returns why there is none
    /// of a slice that might have one: the first reason.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub(super) fn complete(
        &mut self,
        shard: &dyn Shard,
        chosen: &[usize],
        base: &BaseView<'_>,
        threads: usize,
        stop: &Stop,
    ) -> OrError<Because> {
        let Self { pools, bases, version, .. } = self;
        if *version != base.version() {
            bases.clear();
            *version = base.version();
        }
        let mut missing = BTreeMap::new();
        for &index in chosen {
            let slice = &shard.slices()[index];
            let Some(new) = shard.on_device(index).filter(|new| new.bytes() > 0) else { continue };
            let Some(pool) = pools.get(&new.device()) else { continue };
            if bases.get(&key(slice)).is_some_and(|kept| kept.tensor.device() == new.device()) {
                continue;
            }
            if let Ok((_, table)) = base.tensor(&slice.tensor) {
                // The largest first: none is left to one thread when the others are done.
                let form = (Reverse(new.bytes()), slice.tensor.dtype, slice.start);
                let place = (form, new.address(), table.total().to_bytes());
                let one = || Missing { slice, new, pool, keys: Vec::new() };
                missing.entry(place).or_insert_with(one).keys.push(key(slice));
            }
        }
        let missing: Vec<Missing<'_>> = missing.into_values().collect();
        let weights: Vec<u64> = missing.iter().map(|missing| missing.new.bytes() as u64).collect();
        let mut why = None;
        let work = |at: usize| match stop.is_stopped() {
            true => Err(Error::Cancelled { what: "the publication" }),
            false => Ok(missing[at].make(base)),
        };
        let bounds = Bounds { threads, weight: u64::MAX };
        as_they_come(&weights, bounds, work, |at, made| {
            match made.map(Arc::new) {
                Ok(made) => bases.extend(missing[at].keys.iter().map(|key| (key.clone(), Arc::clone(&made)))),
                Err(because) => why = why.take().or(because),
            }
            Ok(())
        })?;
        Ok(why)
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
        let Some(pool) = self.pools.get(&new.device()) else {
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
        let kept = self.bases.get(&key(slice));
        let Some(kept) = kept.filter(|kept| kept.tensor.device() == new.device()) else { return Err(None) };
        if coder.plan.kind != Kind::Delta || coder.plan.anchor || kept.tensor.bytes() != new.bytes() {
            return Err(None);
        }
        // What is wrong with the baseline's table, the host says.
        let (_, table) = base.tensor(&slice.tensor).map_err(|_| None)?;
        if slice.is_whole().map_err(|_| None)? && kept.digests.total() != table.total() {
            return Err(Some(format!("a bit flipped in the digests of the base of tensor `{name}`")));
        }
        Ok(DeviceJob { slice, new, kept, pool })
    }

    /// Digest of a slice where it lies, if it lies on one of the devices.
    pub(super) fn digest(&self, shard: &dyn Shard, index: usize) -> Option<Digest> {
        let tensor = shard.on_device(index)?;
        self.pools.get(&tensor.device())?.digest(part(&shard.slices()[index]), tensor).ok()
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
            let Some(pool) = self.pools.get(&new.device()) else { continue };
            let same = twins.iter().chain([index]).map(|&index| key(&shard.slices()[index]));
            // Unless another tensor's base is the same.
            let room =
                same.clone().filter_map(|key| old.remove(&key)).fold(None, |_, kept| Arc::into_inner(kept));
            match pool.keep(part(slice), Source::Device(new), room.map(|kept| kept.tensor)) {
                Ok((kept, found)) if found == *digest => {
                    let kept = Arc::new(kept);
                    self.bases.extend(same.map(|key| (key, Arc::clone(&kept))));
                }
                Ok(_) => {
                    let name = &slice.tensor.name;
                    let why = format!("tensor `{name}` was written to before its publication had ended");
                    self.used.note(Some(why));
                }
                Err(error) => self.used.note(Some(no_base(slice, &error))),
            }
        }
    }
}

impl Missing<'_> {
    fn make(&self, base: &BaseView<'_>) -> Result<cuda::Base, Because> {
        let Self { slice, new, pool, .. } = self;
        let failed = |error: cuda::Error| Some(no_base(slice, &error));
        let now = pool.digest(part(slice), new).map_err(failed)?;
        // What is wrong with the baseline, the host says.
        let (bytes, expected) = base.slice(slice).map_err(|_| None)?;
        let source = if now == expected { Source::Device(new) } else { Source::Host(bytes) };
        let (made, found) = pool.keep(part(slice), source, None).map_err(failed)?;
        if found == expected { Ok(made) } else { Err(None) }
    }
}

impl DeviceJob<'_> {
    pub(super) fn bytes(&self) -> u64 {
        self.new.bytes() as u64
    }

    /// Encodes the slice where it lies, or says why the host has to.
    pub(super) fn encode(&self, coder: &Coder) -> Result<Payloads, Because> {
        let Self { slice, new, kept, pool } = self;
        let name = &slice.tensor.name;
        let failed = |error: cuda::Error| match error {
            cuda::Error::Codec(driftless_delta::Error::BlockMismatch { .. }) => {
                tracing::warn!(tensor = name, %error, "the base on the device is not what was published");
                format!("a bit flipped in the base of tensor `{name}`: {error}")
            }
            error => format!("tensor `{name}`: {error}"),
        };
        let mut codec = pool.codec();
        let Part { element, first } = part(slice);
        let encoded = codec.encode_checked(element, &kept.tensor, new, &kept.digests, coder.profile);
        let encoded = encoded.map_err(|error| Some(failed(error)))?;
        // The host says which element it is, and cuts what does not fit into an object.
        if encoded.not_finite && !coder.allow_non_finite || encoded.payload.len() > coder.object_bytes_max {
            return Err(None);
        }
        let (payload, changed) = (encoded.payload.to_vec(), encoded.changed);
        let digest = match first {
            0 => encoded.digests.total(),
            _ => codec.digest(element, first, new).map_err(|error| Some(failed(error)))?.total(),
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
