//! The codec on a CUDA device (feature `cuda`): payloads and results are those of [`Encoder`](crate::Encoder)
//! and [`Decoder`](crate::Decoder), bit for bit, but nothing except the payload leaves the device.
//!
//! Kernels are compiled at run time for the device that is there; building needs no CUDA. Where its libraries
//! are missing, [`Codec::open`] says so.
//!
//! ```no_run
//! use driftless_delta::{DigestTable, Element, Profile, cuda::Codec};
//!
//! # let (old, new) = (vec![0; 1 << 20], vec![0; 1 << 20]);
//! let mut codec = Codec::open(0)?;
//! let mut base = codec.upload(&old)?;
//! let new = codec.upload(&new)?;
//! let mut digests = DigestTable::of(Element::Bf16, &old)?;
//! let encoded = codec.encode(Element::Bf16, &base, &new, &digests, Profile::Wire)?;
//! let payload = encoded.payload.to_vec();
//! codec.apply(Element::Bf16, &mut base, &mut digests, &payload)?;
//! # Ok::<(), driftless_delta::cuda::Error>(())
//! ```
#![allow(unsafe_code, reason = "kernels work on addresses, and CUDA's driver is a foreign library")]

mod decode;
mod device;
mod encode;
mod error;
mod machine;
mod pool;
#[cfg(test)]
mod tests;
#[cfg(any(test, feature = "twin"))]
mod twin;

use std::fmt;

use crate::choose::Profile;
use crate::digest::DigestTable;
use crate::element::Element;
use crate::error::expect_length;
use device::Device;
use machine::{HostRoom, Machine, Memory, Placed, finished};

pub use device::{Driver, compiler};
pub use error::{Error, Result};
pub use machine::Pinned;
pub use pool::{Base, BaseMemory, Part, Pool, Source};

/// Bytes that go to a device at once out of pinned memory.
const STAGE: usize = 4 << 20;

/// Encodes and decodes tensors on one device, one after the other; it keeps the memory that the largest
/// needed.
///
/// Everything is queued on a stream of its own, and each call waits for it. What a caller's own streams write
/// to a tensor must be done before. [`Codec::fork`] makes one that works at the same time.
pub struct Codec {
    machine: Box<dyn Machine>,
    encode: encode::State,
    decode: decode::State,
    /// By turns, one is written to and one is on its way.
    stages: [HostRoom; 2],
}

impl fmt::Debug for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Codec").field("device", &self.machine.ordinal()).finish_non_exhaustive()
    }
}

/// Elements that a device reaches: in its memory, or in pinned memory of the host.
pub struct Tensor {
    held: Held,
    device: usize,
    placed: Placed,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("device", &self.device)
            .field("placed", &self.placed)
            .finish_non_exhaustive()
    }
}

enum Held {
    Device { _memory: Memory },
    Pinned(Pinned),
    Borrowed,
}

/// What [`Codec::encode`] found.
#[derive(Debug)]
pub struct Encoded<'a> {
    /// Elements whose bits changed.
    pub changed: u64,
    /// Digests of the new tensor.
    pub digests: &'a DigestTable,
    /// Whether one of the elements that changed is NaN or infinite now.
    pub not_finite: bool,
    /// The payload, in pinned memory that the next call overwrites.
    pub payload: &'a [u8],
}

impl Tensor {
    /// A tensor in memory of another library, such as a torch tensor's.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory of device `device`, or of the host and mapped there under the same address. While a call of the codec uses the tensor, nothing else writes to them, nor reads them for [`Codec::apply`].
    pub unsafe fn borrowed(device: usize, address: u64, bytes: usize) -> Self {
        Self { held: Held::Borrowed, device, placed: Placed { address, bytes } }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.placed.bytes
    }

    /// The number of the device that reaches it.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Where it lies, as the device sees it.
    pub fn address(&self) -> u64 {
        self.placed.address
    }

    /// The pinned memory, if it is a tensor of [`Codec::adopt`].
    pub fn into_pinned(self) -> Option<Pinned> {
        match self.held {
            Held::Pinned(pinned) => Some(pinned),
            _ => None,
        }
    }
}

impl Codec {
    /// Opens device `ordinal` of those that CUDA sees, counted from 0.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] without the driver or the runtime compiler, [`Error::Driver`] if there is no such
    /// device.
    pub fn open(ordinal: usize) -> Result<Self> {
        Ok(Self::on(Box::new(Device::open(ordinal)?)))
    }

    /// A device `ordinal` that is this processor, with so many bytes of memory: the same kernels, compiled by
    /// a C++ compiler. For tests.
    #[cfg(feature = "twin")]
    pub fn twin(ordinal: usize, bytes: usize) -> Self {
        Self::on(Box::new(twin::Twin::new(ordinal, bytes)))
    }

    /// One more on the same device, whose work goes on beside this one's. They share the kernels.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fork(&self) -> Result<Self> {
        self.machine.enter()?;
        Ok(Self::on(self.machine.fork()?))
    }

    fn on(machine: Box<dyn Machine>) -> Self {
        Self {
            machine,
            encode: encode::State::default(),
            decode: decode::State::default(),
            stages: Default::default(),
        }
    }

    /// The number of the device, as CUDA counts those that it sees.
    pub fn device(&self) -> usize {
        self.machine.ordinal()
    }

    /// Compiles the kernels for an element type now, which the first call would do: some seconds.
    ///
    /// # Errors
    /// [`Error::Compile`] and [`Error::Driver`].
    pub fn prepare(&self, element: Element) -> Result<()> {
        self.machine.enter()?;
        self.machine.prepare(element)
    }

    /// Copies a tensor into the device's memory.
    ///
    /// # Errors
    /// [`Error::Driver`], if there is not enough memory for instance.
    pub fn upload(&self, bytes: &[u8]) -> Result<Tensor> {
        let tensor = self.room(bytes.len())?;
        // SAFETY: the memory was allocated for these bytes, which live until the wait.
        let copied = unsafe { self.machine.upload(tensor.placed.address, bytes) };
        finished(&*self.machine, copied).map(|()| tensor)
    }

    /// Device memory with whatever is in it.
    ///
    /// # Errors
    /// [`Error::Driver`], if there is not enough.
    pub fn room(&self, bytes: usize) -> Result<Tensor> {
        self.machine.enter()?;
        let memory = self.machine.allocate(bytes)?;
        let placed = Placed { address: memory.address(), bytes };
        Ok(Tensor { held: Held::Device { _memory: memory }, device: self.device(), placed })
    }

    /// Copies a tensor over another, which may be pinned memory of the host.
    ///
    /// # Errors
    /// [`crate::Error::LengthMismatch`] if they are not of one length, [`Error::OtherDevice`] and
    /// [`Error::Driver`].
    pub fn copy(&self, from: &Tensor, to: &mut Tensor) -> Result<()> {
        let (from, to) = (self.here("source", from)?, self.here("target", to)?);
        expect_length("target", from.bytes as u64, to.bytes)?;
        // SAFETY: both have that many bytes, and live until the wait.
        let copied = unsafe { self.machine.copy(from.address, to.address, from.bytes) };
        finished(&*self.machine, copied)
    }

    /// Copies bytes of the host over a tensor, by way of pinned memory that is kept: faster than the driver's own.
    ///
    /// # Errors
    /// As [`Codec::copy`].
    pub fn fill(&mut self, bytes: &[u8], to: &mut Tensor) -> Result<()> {
        let to = self.here("target", to)?;
        expect_length("target", bytes.len() as u64, to.bytes)?;
        let queued = self.stage(bytes, to.address);
        finished(&*self.machine, queued)
    }

    /// Queues the last copy; those before it are done.
    fn stage(&mut self, bytes: &[u8], mut to: u64) -> Result<()> {
        let Self { machine, stages: [stage, other], .. } = self;
        for part in bytes.chunks(STAGE) {
            let staged = stage.bytes(&**machine, part.len())?;
            staged.copy_from_slice(part);
            // What left the other one has arrived before that is written to.
            machine.finish()?;
            // SAFETY: the tensor has that many bytes from there on, its borrow lasts until the wait in `fill`, and
            // what was staged is not written to before the next wait.
            unsafe { machine.copy(staged.as_ptr() as u64, to, part.len()) }?;
            to += part.len() as u64;
            std::mem::swap(stage, other);
        }
        Ok(())
    }

    /// Copies a tensor back to the host.
    ///
    /// # Errors
    /// [`crate::Error::LengthMismatch`] if `out` is not as long as the tensor, and [`Error::Driver`].
    pub fn download(&self, tensor: &Tensor, out: &mut [u8]) -> Result<()> {
        let placed = self.here("tensor", tensor)?;
        expect_length("target", placed.bytes as u64, out.len())?;
        // SAFETY: the tensor has that many bytes, and `out` is looked at after the wait.
        let copied = unsafe { self.machine.download(placed.address, out) };
        finished(&*self.machine, copied)
    }

    /// Pinned memory: for payloads that come in, and for tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        self.machine.enter()?;
        self.machine.pinned(bytes)
    }

    /// A tensor that stays in the host's memory: a baseline for which the device's has no room. Kernels read
    /// it over the bus.
    pub fn adopt(&self, pinned: Pinned) -> Tensor {
        let placed = Placed { address: pinned.address(), bytes: pinned.len() };
        Tensor { held: Held::Pinned(pinned), device: self.device(), placed }
    }

    /// Encodes what turns `base` into `new`: the payload that [`Encoder::encode`](crate::Encoder::encode)
    /// makes.
    ///
    /// # Errors
    /// As [`Encoder::encode`](crate::Encoder::encode); [`Error::Misaligned`], [`Error::OtherDevice`],
    /// [`Error::Driver`], and [`Error::Compile`] the first time.
    pub fn encode(
        &mut self,
        element: Element,
        base: &Tensor,
        new: &Tensor,
        base_digests: &DigestTable,
        profile: Profile,
    ) -> Result<Encoded<'_>> {
        let (base, new) = (self.placed("base", base)?, self.placed("new tensor", new)?);
        let pair = encode::Pair { element, base, new, digests: base_digests, profile };
        let outcome = self.encode.encode(&*self.machine, pair)?;
        Ok(self.encoded(&outcome))
    }

    /// As [`Codec::encode`], and digests the new tensor itself on the device: a bit that flipped in the base
    /// or in its digests is noticed, as [`Encoder::encode_checked`](crate::Encoder::encode_checked) notices
    /// it.
    ///
    /// # Errors
    /// As [`Codec::encode`], and [`crate::Error::BlockMismatch`] for the first block of the base that has
    /// another digest.
    pub fn encode_checked(
        &mut self,
        element: Element,
        base: &Tensor,
        new: &Tensor,
        base_digests: &DigestTable,
        profile: Profile,
    ) -> Result<Encoded<'_>> {
        let (base, new) = (self.placed("base", base)?, self.placed("new tensor", new)?);
        let pair = encode::Pair { element, base, new, digests: base_digests, profile };
        let outcome = self.encode.encode_checked(&*self.machine, pair)?;
        Ok(self.encoded(&outcome))
    }

    fn encoded(&self, outcome: &encode::Outcome) -> Encoded<'_> {
        let encode::Outcome { changed, bytes, not_finite } = *outcome;
        let payload = self.encode.payload(bytes);
        Encoded { changed, digests: self.encode.digests(), not_finite, payload }
    }

    /// Digests of a tensor's blocks as they are: [`DigestTable::of`]. Of a slice that begins at element
    /// `first` of its tensor, the sum is the slice's share of the tensor's digest: [`crate::Digest::of`].
    ///
    /// # Errors
    /// [`Error::OddSlice`] for a slice that begins inside of a 32-bit word of its tensor;
    /// [`Error::Misaligned`], [`Error::OtherDevice`], [`Error::Driver`], and [`Error::Compile`] the first
    /// time.
    pub fn digest(&mut self, element: Element, first: u64, tensor: &Tensor) -> Result<DigestTable> {
        let tensor = self.placed("tensor", tensor)?;
        self.encode.digest(&*self.machine, element, first, tensor)
    }

    /// Turns `base` into what a payload of [`Encoder::encode`](crate::Encoder::encode) was made of, in place,
    /// and its digests with it. Returns how many elements changed. A payload in [`Pinned`] memory goes to the
    /// device faster than another.
    ///
    /// Nothing is written before the whole payload was decoded and found to have the promised result.
    ///
    /// # Errors
    /// As [`Decoder::decode`](crate::Decoder::decode); [`Error::Misaligned`], [`Error::OtherDevice`],
    /// [`Error::Driver`], and [`Error::Compile`] the first time. But for an error of the driver, after which
    /// the device's memory cannot be relied on, tensor and digests are unchanged then.
    pub fn apply(
        &mut self,
        element: Element,
        base: &mut Tensor,
        digests: &mut DigestTable,
        payload: &[u8],
    ) -> Result<u64> {
        let base = self.placed("base", base)?;
        self.decode.apply(&*self.machine, element, base, digests, payload)
    }

    /// Where a tensor lies, if kernels can work on it.
    fn placed(&self, what: &'static str, tensor: &Tensor) -> Result<Placed> {
        let placed = self.here(what, tensor)?;
        if !placed.address.is_multiple_of(16) {
            return Err(Error::Misaligned { what, address: placed.address });
        }
        Ok(placed)
    }

    /// Where a tensor of this device lies.
    fn here(&self, what: &'static str, tensor: &Tensor) -> Result<Placed> {
        self.machine.enter()?;
        let expected = self.device();
        if tensor.device == expected {
            Ok(tensor.placed)
        } else {
            Err(Error::OtherDevice { what, expected, found: tensor.device })
        }
    }
}
