//! Ranks with a GPU each, over NCCL. Numbers of the host, and signs of life, go over the sockets.
#![expect(unsafe_code, reason = "NCCL works on addresses")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, sys};
use driftless_bridge::nccl::{Communicator, Nccl};
use tch::Tensor;

use super::{Exchange, Star, part};
use crate::error::{Result, driver, input};

/// The library that libtorch's CUDA half has opened, or that the loader finds.
const LIBRARY: &str = "libnccl.so.2";
/// Time between two looks at a transfer that takes long.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// Looks between two at whether the other ranks are still there.
const LOOKS: u32 = 200;

/// A rank's end of it.
#[derive(Debug)]
pub(crate) struct OverNccl {
    // Dropped first: it aborts what still uses the device's memory.
    comm: Communicator,
    star: Star,
    context: Arc<CudaContext>,
}

/// The stream that libtorch uses unless told otherwise.
fn stream() -> sys::CUstream {
    std::ptr::null_mut()
}

impl OverNccl {
    /// Joins the ranks of `star`, each with a GPU; this one with that of number `ordinal`.
    pub(crate) fn join(mut star: Star, ordinal: usize) -> Result<OverNccl> {
        let library = Nccl::open(Path::new(LIBRARY), None)?;
        let context = CudaContext::new(ordinal).map_err(driver("opening the device"))?;
        context.bind_to_thread().map_err(driver("binding the context"))?;
        // Rank 0 draws it; the others add zeros.
        let (rank, ranks) = star.place();
        let mut id = match rank {
            0 => library.unique_id()?.map(f64::from),
            _ => [0.0; 128],
        };
        star.sum(&mut id)?;
        let id = id.map(|byte| byte as u8);
        let mut comm = Communicator::join(&library, id, rank as u32, ranks as u32)?;
        wait(&star, "join", || Ok(comm.settled()?))?;
        Ok(OverNccl { comm, star, context })
    }

    /// Runs a transfer to its end.
    fn transfer(
        &mut self,
        buffer: &Tensor,
        begin: impl FnOnce(&mut Communicator, u64, i64, usize) -> driftless_bridge::Result<()>,
    ) -> Result<()> {
        let (rank, ranks) = self.star.place();
        if !buffer.device().is_cuda() || !buffer.is_contiguous() {
            return Err(input("what ranks exchange over NCCL", "a buffer on a GPU", format!("{buffer:?}")));
        }
        self.context.bind_to_thread().map_err(driver("binding the context"))?;
        let part = part(buffer.numel() as i64, 0, ranks);
        begin(&mut self.comm, buffer.data_ptr() as u64, part.end, rank)?;
        let comm = &mut self.comm;
        wait(&self.star, "give its part", || Ok(comm.settled()?))?;
        wait(&self.star, "give its part", || {
            // SAFETY: asks after the null stream of the current context.
            match unsafe { sys::cuStreamQuery(stream()) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                answer => answer.result().map(|()| true).map_err(driver("waiting for the device")),
            }
        })
    }
}

/// Looks until it is done, for as long as the other ranks are there and the deadline is not over.
fn wait(star: &Star, what: &'static str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + star.deadline;
    for look in 0_u32.. {
        if done()? {
            return Ok(());
        }
        if look % LOOKS == LOOKS - 1 {
            star.check(what)?;
            if Instant::now() >= end {
                return Err(star.late(what));
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

impl Exchange for OverNccl {
    fn place(&self) -> (usize, usize) {
        self.star.place()
    }

    fn reduce_scatter(&mut self, buffer: &Tensor) -> Result<()> {
        self.transfer(buffer, |comm, address, count, rank| {
            // SAFETY: the buffer is memory of this device and lives until the transfer has ended, or the
            // communicator is dropped; no other stream looks at it.
            unsafe { comm.reduce_scatter(address, count as usize, rank, stream()) }
        })
    }

    fn all_gather(&mut self, buffer: &Tensor) -> Result<()> {
        let width = buffer.f_kind()?.elt_size_in_bytes();
        self.transfer(buffer, |comm, address, count, rank| {
            // SAFETY: as in `reduce_scatter`.
            unsafe { comm.all_gather(address, count as usize * width, rank, stream()) }
        })
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<()> {
        self.star.sum(numbers)
    }
}
