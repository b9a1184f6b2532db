//! A CUDA device: the kernels of one model, compiled for it at run time, in the context that libtorch uses.
#![expect(unsafe_code, reason = "the CUDA driver launches kernels on addresses")]

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, result, sys};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::kernels::{Arguments, KERNELS};
use crate::error::{Error, Result, driver};

const SOURCE: &str = include_str!("kernels.cu");

/// The device and its kernels by name.
#[derive(Debug)]
pub(super) struct Device {
    context: Arc<CudaContext>,
    functions: BTreeMap<&'static str, CudaFunction>,
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
        let context = CudaContext::new(ordinal).map_err(driver("opening the device"))?;
        let attribute =
            |attribute| context.attribute(attribute).map_err(driver("asking for its architecture"));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let image = compile(&format!("compute_{major}{minor}"), definitions)?;
        let module = context.load_module(image).map_err(driver("loading the kernels"))?;
        let function = |name: &'static str| {
            let loaded = module.load_function(name);
            Ok((name, loaded.map_err(driver(format!("loading the kernel `{name}`")))?))
        };
        let functions = KERNELS.into_iter().map(function).collect::<Result<_>>()?;
        Ok(Self { context, functions })
    }

    /// Queues a kernel behind what libtorch has queued, on the stream that it uses unless told otherwise.
    ///
    /// # Safety
    /// `arguments` are those of the kernel's struct. Their addresses are memory of this device, with as much behind
    /// them as the kernel uses.
    pub(super) unsafe fn launch<const A: usize, const N: usize>(
        &self,
        kernel: &'static str,
        blocks: u32,
        threads: u32,
        arguments: &Arguments<A, N>,
    ) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("binding the context"))?;
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast()];
        let stream: sys::CUstream = std::ptr::null_mut();
        let function = self.functions[kernel].cu_function();
        // SAFETY: the kernel takes one argument and copies it; the rest is the caller's promise.
        unsafe {
            result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, &mut parameters)
        }
        .map_err(driver(format!("launching `{kernel}`")))
    }
}
