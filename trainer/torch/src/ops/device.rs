//! A CUDA device: the kernels of one model, compiled for it at run time, in the context that libtorch uses.
#![expect(unsafe_code, reason = "the CUDA driver launches kernels on addresses")]

use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, DriverError, result, sys};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::kernels::{Arguments, Kernel};
use crate::error::{Error, Result};

const SOURCE: &str = include_str!("kernels.cu");

/// The device and its kernels, by [`Kernel`].
#[derive(Debug)]
pub(super) struct Device {
    context: Arc<CudaContext>,
    functions: Vec<CudaFunction>,
}

fn failed(what: &str) -> impl FnOnce(DriverError) -> Error {
    let what = what.to_owned();
    move |error| Error::Kernels { what, why: format!("{error:?}") }
}

/// Compiles the kernels for an architecture such as `compute_90`; no device is needed.
pub(super) fn compile(architecture: &str, definitions: &[String]) -> Result<Ptx> {
    let what = || format!("compiling the kernels for {architecture}");
    // SAFETY: opens a library and closes it again; it has no constructors that anything here depends on.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        let searched = cudarc::get_lib_name_candidates("nvrtc").join(", ");
        let why =
            format!("no libnvrtc (searched: {searched}); it comes with PyTorch, or as nvidia-cuda-nvrtc");
        return Err(Error::Kernels { what: what(), why });
    }
    let mut options = vec![format!("--gpu-architecture={architecture}")];
    options.extend_from_slice(definitions);
    let options = CompileOptions { options, ..CompileOptions::default() };
    compile_ptx_with_opts(SOURCE, options).map_err(|error| {
        let why = match error {
            CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
            other => format!("{other:?}"),
        };
        Error::Kernels { what: what(), why }
    })
}

impl Device {
    pub(super) fn open(ordinal: usize, definitions: &[String]) -> Result<Self> {
        let context = CudaContext::new(ordinal).map_err(failed("opening the device"))?;
        let attribute =
            |attribute| context.attribute(attribute).map_err(failed("asking for its architecture"));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let image = compile(&format!("compute_{major}{minor}"), definitions)?;
        let module = context.load_module(image).map_err(failed("loading the kernels"))?;
        let function = |kernel: Kernel| {
            let name = kernel.name();
            module.load_function(name).map_err(failed(&format!("loading the kernel `{name}`")))
        };
        let functions = Kernel::ALL.map(function).into_iter().collect::<Result<_>>()?;
        Ok(Self { context, functions })
    }

    /// Queues a kernel behind what libtorch has queued, on the stream that it uses unless told otherwise.
    ///
    /// # Safety
    /// Addresses in `arguments` are memory of this device, with as much behind them as the kernel uses.
    pub(super) unsafe fn launch<A: Arguments>(
        &self,
        kernel: Kernel,
        blocks: u32,
        threads: u32,
        arguments: &A,
    ) -> Result<()> {
        self.context.bind_to_thread().map_err(failed("binding the context"))?;
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast()];
        let stream: sys::CUstream = std::ptr::null_mut();
        let function = self.functions[kernel as usize].cu_function();
        // SAFETY: the kernel takes one argument, of the layout that `Arguments` promises, and copies it; the
        // rest is the caller's promise.
        unsafe {
            result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, &mut parameters)
        }
        .map_err(failed(&format!("launching `{}`", kernel.name())))
    }
}
