//! Gathering tensors that are on the device: one launch for a bucket, however many tensors it has. A copy of
//! its own for each would cost 2 µs, which is more than the bytes of a small tensor take.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

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
pub(super) struct Gather {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    function: sys::CUfunction,
}

// SAFETY: modules and functions belong to a context, not to a thread; the context is made current before each
// use.
unsafe impl Send for Gather {}

impl Gather {
    /// Compiles the kernel for the device; the context is current.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self> {
        let text = std::ffi::CString::new(PTX).unwrap_or_default();
        // SAFETY: the image is a NUL-terminated text, as cuModuleLoadData wants PTX.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
        let module = module.map_err(cuda("cuModuleLoadData"))?;
        // SAFETY: the module was just loaded; it is unloaded when this is dropped.
        let function = unsafe { result::module::get_function(module, c"gather".to_owned()) };
        let function = function.map_err(cuda("cuModuleGetFunction"))?;
        Ok(Self { context: context.clone(), module, function })
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
        stream: sys::CUstream,
    ) -> Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        table.reserve(size_of_val(pieces))?;
        // SAFETY: the table has room; pageable memory has been read when the call returns.
        unsafe { result::memcpy_htod_async(table.address, pieces, stream) }
            .map_err(cuda("cuMemcpyHtoDAsync"))?;
        let mut address = table.address;
        // A bucket has far fewer pieces than this: each has half a MiB, or is a tensor's last.
        let mut count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let mut arguments = [(&raw mut address).cast::<c_void>(), (&raw mut count).cast()];
        let blocks = pieces.len().min(BLOCKS_MAX) as u32;
        // SAFETY: the arguments are those of gather.cu and are copied by the call; the caller vouches for the
        // memory.
        unsafe {
            result::launch_kernel(self.function, (blocks, 1, 1), (THREADS, 1, 1), 0, stream, &mut arguments)
        }
        .map_err(cuda("cuLaunchKernel"))
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: it was loaded in this context, and is unloaded once.
            let _ = unsafe { result::module::unload(self.module) };
        }
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
