//! Gathering tensors that are on the device: one launch for a bucket, however many tensors it has. A copy of
//! its own for each would cost 2 µs, which is more than the bytes of a small tensor take.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg as _, result};
use cudarc::nvrtc::Ptx;

use super::{Memory, cuda};
use crate::error::Result;

/// What `bridge/ptx.py` makes of `gather.cu`: for compute_75, marked as PTX 7.0 so that older drivers take it. Every
/// driver compiles it for its own GPU.
const PTX: &str = include_str!("gather.ptx");

/// Longest piece, so that one large tensor is shared out.
const PIECE_BYTES: u64 = 512 << 10;
/// Blocks at most: enough to fill the memory's bandwidth, and so few that half of an H200's 132
/// multiprocessors are free. A broadcast's blocks do not fit beside these on one, so a gathering that has all
/// of them holds up the broadcast that is about to begin: 0.2 ms for 384 MiB.
const BLOCKS_MAX: usize = 64;
const THREADS: u32 = 1024;

/// The kernel.
#[derive(Debug)]
pub(super) struct Gather(CudaFunction);

impl Gather {
    /// Compiles the kernel for the device.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self> {
        let module = context.load_module(Ptx::from_src(PTX)).map_err(cuda("cuModuleLoadData"))?;
        Ok(Self(module.load_function("gather").map_err(cuda("cuModuleGetFunction"))?))
    }

    /// Begins to copy pieces, in a stream.
    ///
    /// # Safety
    /// Sources and targets are device memory of these lengths, targets do not overlap, and all stay until the
    /// stream has passed. What used `table` before has ended.
    pub(super) unsafe fn launch(
        &self,
        pieces: &[[u64; 3]],
        table: &mut Memory,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        table.reserve(size_of_val(pieces))?;
        // SAFETY: the table has room; pageable memory has been read when the call returns.
        unsafe { result::memcpy_htod_async(table.address, pieces, stream.cu_stream()) }
            .map_err(cuda("cuMemcpyHtoDAsync"))?;
        // A bucket has far fewer pieces than this: each has half a MiB, or is a tensor's last.
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let blocks = pieces.len().min(BLOCKS_MAX) as u32;
        let config =
            LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those of gather.cu and are copied by the call; the caller vouches for the
        // memory.
        let launched =
            unsafe { stream.launch_builder(&self.0).arg(&table.address).arg(&count).launch(config) };
        launched.map(drop).map_err(cuda("cuLaunchKernel"))
    }
}

/// A copy as pieces, each `[source, target, bytes]`.
pub(super) fn pieces(source: u64, target: u64, bytes: u64) -> impl Iterator<Item = [u64; 3]> {
    let starts = (0..bytes.div_ceil(PIECE_BYTES)).map(|n| n * PIECE_BYTES);
    starts.map(move |start| [source + start, target + start, PIECE_BYTES.min(bytes - start)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_copy_once() {
        for bytes in [1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 5] {
            let mut at = 0;
            for [source, target, length] in pieces(1000, 9000, bytes) {
                assert_eq!((source, target), (1000 + at, 9000 + at));
                assert!(length > 0 && length <= PIECE_BYTES);
                at += length;
            }
            assert_eq!(at, bytes);
        }
        assert_eq!(pieces(0, 0, 0).count(), 0);
    }

    #[test]
    fn the_kernel_has_the_name_it_is_asked_for() {
        assert!(PTX.contains(".visible .entry gather(") && !PTX.contains('\0'));
    }
}
