//! A CUDA device, on the context that the engine's torch uses.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg as _, result, sys,
};
use cudarc::nvrtc::Ptx;

use super::{Kernel, Machine, THREADS};
use crate::error::{Error, Result};

/// See `patch.cu`.
const PTX: &str = include_str!("patch.ptx");

/// A device, a stream of its own on it, and the kernels.
pub(in crate::live) struct Cuda {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    patch: CudaFunction,
    checksum: CudaFunction,
}

/// What went wrong in a call of the driver.
fn driver(call: impl Into<String>) -> impl FnOnce(DriverError) -> Error {
    let what = call.into();
    move |error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let found = text.unwrap_or_else(|_| format!("{error:?}"));
        Error::live(what, "success", found)
    }
}

impl Cuda {
    /// Opens the device with this number, of those that the process sees.
    pub(in crate::live) fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: libcuda runs its initialisers; the engine has loaded it. Without the question the first call
        // would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::live("the CUDA driver", "libcuda.so.1", "none"));
        }
        let context = CudaContext::new(ordinal).map_err(driver("cuDevicePrimaryCtxRetain"))?;
        let stream = context.new_stream().map_err(driver("cuStreamCreate"))?;
        let module = context.load_module(Ptx::from_src(PTX)).map_err(driver("cuModuleLoadData"))?;
        let patch = module.load_function("patch").map_err(driver("cuModuleGetFunction"))?;
        let checksum = module.load_function("checksum").map_err(driver("cuModuleGetFunction"))?;
        Ok(Self { context, stream, patch, checksum })
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))
    }
}

impl Machine for Cuda {
    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.bind()?;
        // SAFETY: kernels read it after copies have written it.
        let address = unsafe { result::malloc_sync(bytes as usize) };
        address.map_err(driver(format!("cuMemAlloc of {bytes} bytes")))
    }

    unsafe fn lock(&self, start: *mut u8, bytes: usize) -> Result<u64> {
        self.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the pages are mapped, by the caller's promise.
        let locked = unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, flags) };
        locked.result().map_err(driver(format!("cuMemHostRegister of {bytes} bytes")))?;
        let mut address = 0;
        // SAFETY: the pages were just locked, and the pointer is to a local that outlives the call.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, start.cast(), 0) };
        found.result().map_err(driver("cuMemHostGetDevicePointer"))?;
        Ok(address)
    }

    unsafe fn unlock(&self, start: *mut u8) {
        if self.bind().is_ok() {
            // SAFETY: the caller's promise. An error leaves the pages locked, and nothing else.
            let _ = unsafe { sys::cuMemHostUnregister(start.cast()) };
        }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise; with unified addresses the driver sees which memory each is of.
        let copied = unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.stream.cu_stream()) };
        copied.result().map_err(driver(format!("cuMemcpyAsync of {bytes} bytes")))
    }

    unsafe fn upload(&self, to: u64, words: &[u64]) -> Result<()> {
        if words.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's promise; pageable memory has been read when the call returns.
        unsafe { result::memcpy_htod_async(to, words, self.stream.cu_stream()) }
            .map_err(driver("cuMemcpyHtoDAsync"))
    }

    unsafe fn launch(&self, kernel: Kernel, blocks: u32) -> Result<()> {
        self.bind()?;
        let config =
            LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let stream = &self.stream;
        // SAFETY: the arguments are those of the kernel in `patch.cu`, and are copied by the call; what they say
        // is the caller's promise.
        let launched = unsafe {
            match &kernel {
                Kernel::Patch { parts, count, task, results } => {
                    let mut patch = stream.launch_builder(&self.patch);
                    patch.arg(parts).arg(count).arg(task).arg(results).launch(config)
                }
                Kernel::Checksum { words, start, count, results } => {
                    let mut checksum = stream.launch_builder(&self.checksum);
                    checksum.arg(words).arg(start).arg(count).arg(results).launch(config)
                }
            }
        };
        launched.map(drop).map_err(driver("cuLaunchKernel"))
    }

    fn finish(&self) -> Result<()> {
        self.stream.synchronize().map_err(driver("cuStreamSynchronize"))
    }

    unsafe fn download(&self, from: u64, words: &mut [u64]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise; the wait below ends before the borrow does.
        unsafe { result::memcpy_dtoh_async(words, from, self.stream.cu_stream()) }
            .map_err(driver("cuMemcpyDtoHAsync"))?;
        self.finish()
    }

    fn drain(&self) -> Result<()> {
        self.context.synchronize().map_err(driver("cuCtxSynchronize"))
    }
}
