//! Rank 0 over NCCL: the engines' own version of it, on a device that no engine uses.
//!
//! Nothing here waits for a peer. The communicator is a non-blocking one, whose calls begin something;
//! [`Root::joined`] and [`Root::sent`] look whether it has ended, and dropping the communicator aborts what
//! has not.
#![allow(unsafe_code, reason = "NCCL and the CUDA driver are foreign functions on raw addresses")]

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::CudaEvent;
use derive_setters::Setters;
use driftless_transport::Snapshot;

use super::{Meeting, Root};
use crate::error::Result;
use crate::nccl::{Communicator, Nccl};
use crate::push::Bucket;
use crate::push::device::{Device, cuda, root};

/// Options of an [`NcclRoot`].
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct NcclOptions {
    /// The `libnccl.so.2` that the engines' torch uses: `site-packages/nvidia/nccl/lib` beside it. Two
    /// versions in one group were never tried.
    #[setters(into)]
    pub library: PathBuf,
    /// The version that the library must have, as major, minor and patch: that of the engines, where they run
    /// elsewhere.
    pub version: Option<[u32; 3]>,
    /// Number of the device. It must not be an engine's: NCCL refuses two ranks on one.
    pub device: usize,
    /// Whether this process has `NCCL_CUMEM_ENABLE` other than 0 in its environment, which NCCL reads by
    /// itself. It must be as at the engines: SGLang sets 0, unless it was started with `--enable-symm-mem`.
    pub cumem: bool,
}

impl NcclOptions {
    /// Device 0, any version, `NCCL_CUMEM_ENABLE=0`.
    pub fn new(library: impl Into<PathBuf>) -> Self {
        Self { library: library.into(), version: None, device: 0, cumem: false }
    }
}

/// Rank 0 of a group over NCCL.
#[derive(Debug)]
pub struct NcclRoot {
    // Dropped first: it aborts what still reads the device's memory.
    comm: Option<Communicator>,
    /// Broadcasts that NCCL has not taken yet, in order.
    queue: VecDeque<Sending>,
    /// Recorded behind the last broadcast of each slot.
    ends: [Option<CudaEvent>; 2],
    library: Arc<Nccl>,
    device: Device,
    cumem: bool,
}

/// The broadcasts of a slot.
#[derive(Debug)]
struct Sending {
    slot: usize,
    /// Where the next one begins; `None` before the first.
    at: Option<u64>,
    left: VecDeque<u64>,
}

impl NcclRoot {
    /// Opens the library and the device. No peer hears of it.
    ///
    /// # Errors
    /// [`Error::Nccl`](crate::Error::Nccl) when the library is missing or has another version,
    /// [`Error::Root`](crate::Error::Root) without a device.
    pub fn open(options: &NcclOptions) -> Result<Self> {
        let library = Nccl::open(&options.library, options.version)?;
        let device = Device::open(options.device)?;
        let cumem = options.cumem;
        Ok(Self { comm: None, queue: VecDeque::new(), ends: [None, None], library, device, cumem })
    }

    /// NCCL's version: major, minor, patch.
    pub fn version(&self) -> [u32; 3] {
        self.library.version()
    }

    fn comm(&mut self) -> Result<&mut Communicator> {
        self.comm.as_mut().ok_or_else(|| root("no communicator", "the group was given up"))
    }

    /// Puts broadcasts into the stream, as far as NCCL takes them now.
    fn advance(&mut self) -> Result<()> {
        while let Some(mut sending) = self.queue.pop_front() {
            if !self.comm()?.settled()? {
                self.queue.push_front(sending);
                return Ok(());
            }
            let Some(length) = sending.left.pop_front() else {
                let end = self.device.event()?;
                end.record(&self.device.broadcasts).map_err(cuda("cuEventRecord"))?;
                self.ends[sending.slot] = Some(end);
                continue;
            };
            let at = match sending.at {
                Some(at) => at,
                None => self.device.filled(sending.slot)?,
            };
            let stream = self.device.broadcasts.cu_stream();
            // SAFETY: a slot's memory, or weights whose maker promised it; neither changes before `sent` has
            // said so, or the communicator is dropped. The stream lives as long as the device, which is
            // dropped after the communicator.
            unsafe { self.comm()?.broadcast(at, length as usize, stream) }?;
            sending.at = Some(at + length);
            self.queue.push_front(sending);
        }
        Ok(())
    }
}

impl Root for NcclRoot {
    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn cumem(&self) -> Option<bool> {
        Some(self.cumem)
    }

    fn open(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        self.abort();
        self.device.bind()?;
        let id = self.library.unique_id()?;
        // torch's process group asks for its first communicator by this name: the group twice, by SGLang and
        // by torch, and the device.
        let key = format!("/{0}/{0}//cuda//0", meeting.group);
        meeting.rendezvous.set(&key, &id)?;
        self.comm = Some(Communicator::join(&self.library, id, 0, meeting.world)?);
        Ok(())
    }

    fn joined(&mut self) -> Result<bool> {
        self.device.bind()?;
        self.comm()?.settled()
    }

    fn gather(&mut self, slot: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<()> {
        self.device.bind()?;
        self.advance()?;
        self.device.gather(slot, weights, bucket)
    }

    fn broadcast(&mut self, slot: usize, lengths: &[u64]) -> Result<()> {
        self.device.bind()?;
        self.queue.push_back(Sending { slot: slot % 2, at: None, left: lengths.iter().copied().collect() });
        self.advance()
    }

    fn sent(&mut self, slot: usize) -> Result<bool> {
        self.device.bind()?;
        self.advance()?;
        if self.queue.iter().any(|sending| sending.slot == slot % 2) {
            return Ok(false);
        }
        let Some(end) = &self.ends[slot % 2] else { return Ok(true) };
        let sent = end.try_is_complete().map_err(cuda("cuEventQuery"))?;
        if sent {
            self.ends[slot % 2] = None;
        }
        Ok(sent)
    }

    fn abort(&mut self) {
        if self.device.bind().is_ok() {
            self.comm = None;
            // A copy that is under way must not meet the next group's bytes; if it failed, the next call says
            // so.
            let _ = self.device.settle();
        }
        self.queue.clear();
        self.ends = [None, None];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_machine_without_the_libraries_is_told_so() {
        let missing = NcclRoot::open(&NcclOptions::new("/nowhere/libnccl.so.2")).unwrap_err();
        assert!(missing.to_string().contains("cannot open /nowhere/libnccl.so.2"), "{missing}");
        match Device::open(0) {
            Err(error) => assert!(matches!(error, Error::Root { .. }), "{error}"),
            Ok(device) => println!("skipped: this machine has a GPU, {device:?}"),
        }
    }
}
