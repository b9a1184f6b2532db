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
#[cfg(test)]
mod tests;

use std::ops::{Deref, DerefMut};

use cudarc::driver::CudaSlice;

use crate::{DigestTable, Element, Profile};
use device::Device;
use machine::{Machine, Placed};

pub use error::{Error, Result};

/// Encodes and decodes tensors on one device, one after the other; it keeps the memory that the largest
/// needed.
///
/// Everything is queued on a stream of its own, and each call waits for it: what a caller's own streams write
/// to a tensor must be done before.
pub struct Codec {
    device: Device,
    encode: encode::State<Device>,
    decode: decode::State<Device>,
}

/// Elements that a device reaches: in its memory, or in pinned memory of the host.
pub struct Tensor {
    held: Held,
    device: usize,
    placed: Placed,
}

enum Held {
    Device { _memory: CudaSlice<u8> },
    Pinned(Pinned),
    Borrowed,
}

/// Pinned memory of the host: copies to and from it go at full speed, and a device can work on it in place.
pub struct Pinned(device::Pinned);

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// What [`Codec::encode`] found.
#[derive(Debug)]
pub struct Encoded<'a> {
    /// Elements whose bits changed.
    pub changed: u64,
    /// Digests of the new tensor.
    pub digests: &'a DigestTable,
    /// The payload, in pinned memory that the next call overwrites.
    pub payload: &'a [u8],
}

impl Tensor {
    /// A tensor in memory of another library, such as a torch tensor's.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory of device `device`, or of the host and mapped there under the
    /// same address, and nobody else writes to them (for [`Codec::apply`]: nor reads them) while a call of
    /// the codec uses the tensor.
    pub unsafe fn borrowed(device: usize, address: u64, bytes: usize) -> Self {
        Self { held: Held::Borrowed, device, placed: Placed { address, bytes } }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.placed.bytes
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
        let device = Device::open(ordinal)?;
        Ok(Self { device, encode: encode::State::default(), decode: decode::State::default() })
    }

    /// Compiles the kernels for an element type now, which the first call would do: some seconds.
    ///
    /// # Errors
    /// [`Error::Compile`] and [`Error::Driver`].
    pub fn prepare(&self, element: Element) -> Result<()> {
        self.device.enter()?;
        self.device.kernels(element).map(drop)
    }

    /// Copies a tensor into the device's memory.
    ///
    /// # Errors
    /// [`Error::Driver`], if there is not enough memory for instance.
    pub fn upload(&self, bytes: &[u8]) -> Result<Tensor> {
        self.device.enter()?;
        let memory = self.device.allocate(bytes.len())?;
        let placed = Placed { address: Device::address(&memory), bytes: bytes.len() };
        // SAFETY: the memory was allocated for these bytes, which live until the wait.
        let copied = unsafe { self.device.upload(placed.address, bytes) };
        self.device.finish()?;
        copied?;
        Ok(Tensor { held: Held::Device { _memory: memory }, device: self.device.ordinal(), placed })
    }

    /// Copies a tensor back to the host.
    ///
    /// # Errors
    /// [`crate::Error::LengthMismatch`] if `out` is not as long as the tensor, and [`Error::Driver`].
    pub fn download(&self, tensor: &Tensor, out: &mut [u8]) -> Result<()> {
        let placed = self.placed("tensor", tensor)?;
        if out.len() != placed.bytes {
            let (expected, found) = (placed.bytes as u64, out.len() as u64);
            return Err(crate::Error::LengthMismatch { what: "target", expected, found }.into());
        }
        // SAFETY: the tensor has that many bytes, and `out` is looked at after the wait.
        let copied = unsafe { self.device.download(placed.address, out) };
        self.device.finish()?;
        copied
    }

    /// Pinned memory, filled with zeros: for payloads that come in, and for tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        self.device.enter()?;
        Ok(Pinned(self.device.pinned(bytes)?))
    }

    /// A tensor that stays in the host's memory: a baseline for which the device's has no room. Kernels read
    /// it over the bus.
    pub fn adopt(&self, pinned: Pinned) -> Tensor {
        let placed = Placed { address: pinned.0.address(), bytes: pinned.len() };
        Tensor { held: Held::Pinned(pinned), device: self.device.ordinal(), placed }
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
        let encode::Outcome { changed, bytes } = self.encode.encode(&self.device, pair)?;
        Ok(self.encoded(changed, bytes))
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
        let encode::Outcome { changed, bytes } = self.encode.encode_checked(&self.device, pair)?;
        Ok(self.encoded(changed, bytes))
    }

    fn encoded(&self, changed: u64, bytes: usize) -> Encoded<'_> {
        Encoded { changed, digests: self.encode.digests(), payload: self.encode.payload(bytes) }
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
        self.decode.apply(&self.device, element, base, digests, payload)
    }

    /// Where a tensor lies, if kernels can work on it.
    fn placed(&self, what: &'static str, tensor: &Tensor) -> Result<Placed> {
        self.device.enter()?;
        let expected = self.device.ordinal();
        if tensor.device != expected {
            return Err(Error::OtherDevice { what, expected, found: tensor.device });
        }
        if !tensor.placed.address.is_multiple_of(16) {
            return Err(Error::Misaligned { what, address: tensor.placed.address });
        }
        Ok(tensor.placed)
    }
}
