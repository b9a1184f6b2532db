//! Where the weights of a push are.

use std::borrow::Cow;

use driftless_transport::Snapshot;
use driftless_transport::snapshot::TensorInfo;

use crate::error::{Error, Result};

/// Weights to be pushed: every tensor that engines should have, by its Hugging Face name.
pub trait Weights: Sync {
    /// The tensors.
    fn tensors(&self) -> &[TensorInfo];

    /// Where the bytes of `tensors()[index]` are; they stay as they are until the push has ended.
    ///
    /// # Errors
    /// [`Error::Root`] when they cannot be had.
    fn bytes(&self, index: usize) -> Result<Bytes<'_>>;
}

/// A tensor's bytes, row-major and without padding.
#[derive(Debug, Clone)]
pub enum Bytes<'a> {
    /// In this process's memory.
    Host(Cow<'a, [u8]>),
    /// At this address of the memory of the device that is pushed from.
    Device(u64),
}

/// Weights in host memory: a checkpoint, for example.
#[derive(Debug)]
pub struct HostWeights<'a, S: ?Sized>(pub &'a S);

impl<S: Snapshot + Sync + ?Sized> Weights for HostWeights<'_, S> {
    fn tensors(&self) -> &[TensorInfo] {
        self.0.tensors()
    }

    fn bytes(&self, index: usize) -> Result<Bytes<'_>> {
        let name = || self.0.tensors().get(index).map_or_else(|| index.to_string(), |info| info.name.clone());
        let fail =
            |error| Error::Root { what: format!("cannot read tensor {}", name()), source: Box::new(error) };
        self.0.bytes(index).map(Bytes::Host).map_err(fail)
    }
}

/// Weights that are in a device's memory already: a trainer's.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct DeviceWeights {
    tensors: Vec<TensorInfo>,
    addresses: Vec<u64>,
}

#[cfg(feature = "cuda")]
impl DeviceWeights {
    /// Tensors and the addresses of their bytes, one each. Tensors that lie in the order of a bucket are
    /// broadcast from where they are.
    ///
    /// # Errors
    /// [`Error::Root`] when there are more of one than of the other.
    ///
    /// # Safety
    /// Every address is the beginning of the tensor's bytes, contiguous, in the memory of the device from
    /// which they are pushed; what wrote them has ended; and they stay as they are until the push has ended.
    #[allow(unsafe_code, reason = "the caller vouches for raw addresses")]
    pub unsafe fn new(tensors: Vec<TensorInfo>, addresses: Vec<u64>) -> Result<Self> {
        if tensors.len() != addresses.len() {
            let source = format!("{} tensors and {} addresses", tensors.len(), addresses.len()).into();
            return Err(Error::Root { what: "the weights".into(), source });
        }
        Ok(Self { tensors, addresses })
    }
}

#[cfg(feature = "cuda")]
impl Weights for DeviceWeights {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Result<Bytes<'_>> {
        let missing =
            || Error::Root { what: "the weights".into(), source: format!("no tensor {index}").into() };
        self.addresses.get(index).copied().map(Bytes::Device).ok_or_else(missing)
    }
}
