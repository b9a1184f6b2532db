//! What one publisher holds of a version: all tensors, or a rank's slices of them.

use std::borrow::Cow;
use std::ops::Range;

use driftless_delta::Digest;

use super::device::Devices;
use crate::error::{Error, Result};
use crate::snapshot::{AuxFile, Snapshot, TensorInfo};

/// A run of consecutive elements of a tensor, in flat row-major order: what tensor-, expert- or fully-sharded
/// ranks hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The whole tensor.
    pub tensor: TensorInfo,
    /// First element of the slice.
    pub start: u64,
    /// Number of elements.
    pub elements: u64,
}

impl Slice {
    /// All of a tensor.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a shape whose product does not fit in 64 bits.
    pub fn whole(tensor: TensorInfo) -> Result<Self> {
        let elements = tensor.elements()?;
        Ok(Self { tensor, start: 0, elements })
    }

    /// What `held` has of a tensor of this shape, from the element `start` on.
    ///
    /// # Errors
    /// As [`Slice::whole`].
    pub fn of(held: TensorInfo, shape: Vec<u64>, start: u64) -> Result<Self> {
        let elements = held.elements()?;
        let tensor = TensorInfo { shape, ..held };
        Ok(Self { tensor, start, elements })
    }

    /// Number of bytes of the slice.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it does not fit in 64 bits; [`Error::TensorMismatch`] for a slice that leaves
    /// its tensor.
    pub fn byte_len(&self) -> Result<u64> {
        let (total, end) = (self.tensor.elements()?, self.start.checked_add(self.elements));
        if end.is_none_or(|end| end > total) {
            return Err(Error::TensorMismatch {
                tensor: self.tensor.name.clone(),
                what: "elements of a slice",
                expected: format!("inside {total}"),
                found: format!("{} from {}", self.elements, self.start),
            });
        }
        self.tensor.byte_len()?;
        Ok(self.elements * self.tensor.dtype.size())
    }

    pub(super) fn is_whole(&self) -> Result<bool> {
        Ok(self.start == 0 && self.elements == self.tensor.elements()?)
    }

    /// The first element, as the codec counts them.
    pub(super) fn first(&self) -> u64 {
        self.start * (self.tensor.dtype.size() / self.tensor.dtype.element().size() as u64)
    }

    /// Where the slice lies in the `length` bytes of its tensor.
    pub(super) fn byte_range(&self, length: usize) -> Result<Range<usize>> {
        let size = self.tensor.dtype.size();
        let start = (self.start * size) as usize;
        let range = start..start + self.byte_len()? as usize;
        if range.end > length {
            return Err(Error::TensorMismatch {
                tensor: self.tensor.name.clone(),
                what: "number of bytes in the baseline",
                expected: format!("at least {}", range.end),
                found: length.to_string(),
            });
        }
        Ok(range)
    }
}

/// What one rank publishes of a version, readable one slice at a time. Copying from a device to the host is
/// its own affair: [`Shard::bytes`] is asked on the publishing thread while earlier slices are encoded and
/// stored on others.
pub trait Shard {
    /// The slices, sorted by tensor name and first element.
    fn slices(&self) -> &[Slice];

    /// The bytes of `slices()[index]`, row-major, little-endian and without padding.
    ///
    /// # Errors
    /// Whatever reading them meets.
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>>;

    /// Where `slices()[index]` lies on a CUDA device: as [`Snapshot::on_device`].
    #[cfg(feature = "cuda")]
    fn on_device(&self, _index: usize) -> Option<&driftless_delta::cuda::Tensor> {
        None
    }

    /// The auxiliary files of the version, sorted by name. Only those of rank 0 count.
    fn files(&self) -> &[AuxFile];
}

/// A snapshot as what a rank publishes.
pub struct Sliced<'a> {
    snapshot: &'a dyn Snapshot,
    slices: Vec<Slice>,
}

impl<'a> Sliced<'a> {
    /// A snapshot whose tensors are these slices, one each.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for another number of slices than of tensors.
    pub fn new(snapshot: &'a dyn Snapshot, slices: Vec<Slice>) -> Result<Self> {
        let (expected, found) = (snapshot.tensors().len(), slices.len());
        if expected == found {
            return Ok(Self { snapshot, slices });
        }
        let expected = format!("{expected}, one for each tensor of the snapshot");
        Err(Error::BadSetting { name: "number of slices", expected, found: found.to_string() })
    }

    /// A snapshot whose tensors are whole.
    ///
    /// # Errors
    /// As [`Slice::whole`].
    pub fn whole(snapshot: &'a dyn Snapshot) -> Result<Self> {
        let slices = snapshot.tensors().iter().cloned().map(Slice::whole).collect::<Result<_>>()?;
        Ok(Self { snapshot, slices })
    }
}

impl Shard for Sliced<'_> {
    fn slices(&self) -> &[Slice] {
        &self.slices
    }

    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        self.snapshot.bytes(index)
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self, index: usize) -> Option<&driftless_delta::cuda::Tensor> {
        self.snapshot.on_device(index)
    }

    fn files(&self) -> &[AuxFile] {
        self.snapshot.files()
    }
}

/// A slice's digest, found where it lies.
pub(super) fn digest(shard: &dyn Shard, devices: &Devices, index: usize) -> Result<Digest> {
    match devices.digest(shard, index) {
        Some(digest) => Ok(digest),
        None => Ok(digest_of(shard, index, &slice_bytes(shard, index)?)),
    }
}

/// The digest of a slice's bytes.
pub(super) fn digest_of(shard: &dyn Shard, index: usize, bytes: &[u8]) -> Digest {
    Digest::of(shard.slices()[index].tensor.dtype.element(), 0, bytes)
}

/// A slice's bytes, as many as it says.
pub(super) fn slice_bytes(shard: &dyn Shard, index: usize) -> Result<Cow<'_, [u8]>> {
    let slice = &shard.slices()[index];
    let (bytes, expected) = (shard.bytes(index)?, slice.byte_len()?);
    if bytes.len() as u64 != expected {
        return Err(Error::mismatch(&slice.tensor.name, "number of bytes", expected, bytes.len()));
    }
    Ok(bytes)
}
