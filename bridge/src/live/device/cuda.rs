//! A CUDA device, on the context that the engine's torch uses.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::{Kernel, Machine, THREADS};
use crate::error::{Error, Result};

/// See `patch.cu`.
const PTX: &str = include_str!("patch.ptx");

/// A device, a stream of its own on it, and the kernels.
pub(in crate::live) struct Cuda {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    patch: sys::CUfunction,
    checksum: sys::CUfunction,
}

// SAFETY: functions belong to a context, not to a thread; each entry makes the context current.
unsafe impl Send for Cuda {}

/// What went wrong in a call of the driver.
fn driver(call: impl Into<String>) -> impl FnOnce(DriverError) -> Error {
    let what = call.into();
    move |error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let found = text.unwrap_or_else(|_| format!("{error:?}"));
        Error::Live { what, expected: "success".into(), found }
    }
}

impl Cuda {
    /// Opens the device with this number, of those that the process sees.
    pub(in crate::live) fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: libcuda runs its initialisers; the engine has loaded it. Without the question the first call
        // would panic.
        if !unsafe { sys::is_culib_present() } {
            let (what, expected) = ("the CUDA driver".into(), "libcuda.so.1".into());
            return Err(Error::Live { what, expected, found: "none".into() });
        }
        let context = CudaContext::new(ordinal).map_err(driver("cuDevicePrimaryCtxRetain"))?;
        let stream = context.new_stream().map_err(driver("cuStreamCreate"))?;
        let text = std::ffi::CString::new(PTX).unwrap_or_default();
        // SAFETY: the image is a NUL-terminated text, as cuModuleLoadData wants PTX; the context is current.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
        // It stays until the process ends, as the weights do.
        let module = module.map_err(driver("cuModuleLoadData"))?;
        // SAFETY: the module was just loaded.
        let function =
            |name: &std::ffi::CStr| unsafe { result::module::get_function(module, name.to_owned()) };
        let patch = function(c"patch").map_err(driver("cuModuleGetFunction"))?;
        let checksum = function(c"checksum").map_err(driver("cuModuleGetFunction"))?;
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
        let launch = |function, arguments: &mut [*mut c_void]| {
            // SAFETY: the arguments are those of the kernel in `patch.cu`, and are copied by the call; what
            // they say is the caller's promise.
            unsafe {
                let (grid, block) = ((blocks, 1, 1), (THREADS, 1, 1));
                result::launch_kernel(function, grid, block, 0, self.stream.cu_stream(), arguments)
            }
            .map_err(driver("cuLaunchKernel"))
        };
        match kernel {
            Kernel::Patch { mut parts, mut count, mut task, mut results } => {
                let pointers: [*mut c_void; 4] = [
                    (&raw mut parts).cast(),
                    (&raw mut count).cast(),
                    (&raw mut task).cast(),
                    (&raw mut results).cast(),
                ];
                launch(self.patch, &mut { pointers })
            }
            Kernel::Checksum { mut words, mut start, mut count, mut results } => {
                let pointers: [*mut c_void; 4] = [
                    (&raw mut words).cast(),
                    (&raw mut start).cast(),
                    (&raw mut count).cast(),
                    (&raw mut results).cast(),
                ];
                launch(self.checksum, &mut { pointers })
            }
        }
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
