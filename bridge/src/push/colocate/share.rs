//! Where a bucket lies, so that the ranks of engines can open it.

use std::sync::Arc;

use driftless_transport::Snapshot;

use crate::error::Result;
use crate::push::Bucket;

/// Where one rank finds a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In CUDA memory of this host.
    Cuda(CudaPlace),
    /// In the call itself.
    Inline(Arc<[u8]>),
}

/// CUDA memory that another process may open, as torch hands it from one process to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaPlace {
    /// UUID of the device, as `torch.cuda.get_device_properties(n).uuid` prints it.
    pub device: String,
    /// What `cuIpcGetMemHandle` says of the allocation, at whose beginning the bucket lies.
    pub handle: [u8; 64],
    /// Bytes of the bucket.
    pub bytes: u64,
    /// Name of the shared memory with the counters, as `shm_open` takes it.
    pub counters: String,
    /// The counter that this rank takes 1 from when it has let go of the memory.
    pub counter: u64,
}

/// Memory that buckets are laid into and that engines can open.
pub trait Share: Send {
    /// The engines' word for the devices that can open it: `cuda` or `cpu`.
    fn device(&self) -> &'static str;

    /// Whether only processes of this host can open it.
    fn local(&self) -> bool;

    /// Lays a bucket into one of two slots, 0 or 1, and says where each of `ranks` ranks finds it. What was
    /// in the slot has been released.
    ///
    /// # Errors
    /// [`crate::Error::Root`] when there is no room or the weights cannot be read.
    fn place(
        &mut self,
        slot: usize,
        weights: &dyn Snapshot,
        bucket: &Bucket,
        ranks: u32,
    ) -> Result<Vec<Place>>;

    /// Whether every rank has let go of a slot.
    fn released(&self, slot: usize) -> bool;

    /// Gives all memory back. A rank that still has some open keeps it until it lets go.
    fn close(&mut self);
}
