//! A CUDA device: kernels compiled for it at run time, and its memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute, CUresult,
};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DevicePtr, DriverError, result};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::machine::{Arguments, Grid, Kernel, Machine, Memory, Pinned};
use super::{Error, Result};
use crate::element::Element;

/// The kernels' source, in the order in which its parts refer to each other.
pub(super) const SOURCE: &str = concat!(
    "#define DEVICE static __device__ __forceinline__\n",
    "#define DEVICE_MEMBER __device__ __forceinline__\n",
    "#define KERNEL extern \"C\" __global__\n",
    "#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)\n",
    "#define SHARED __shared__\n",
    "#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]\n",
    include_str!("kernels/common.cu"),
    include_str!("kernels/encode.cu"),
    include_str!("kernels/emit.cu"),
    include_str!("kernels/frame.cu"),
    include_str!("kernels/decode.cu"),
    include_str!("kernels/parse.cu"),
);

/// What the compiler must know of an element type.
pub(super) fn definitions(element: Element) -> [String; 3] {
    [
        format!("-DELEMENT_BITS={}", element.bits()),
        format!("-DMANTISSA_BITS={}", element.mantissa_bits()),
        format!("-DOPAQUE={}", u32::from(element == Element::Bytes)),
    ]
}

/// A device, a stream on it, and the kernels compiled for it so far.
pub(super) struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    processors: usize,
    architecture: String,
    kernels: Arc<Mutex<Kernels>>,
}

type Kernels = HashMap<Element, Arc<Vec<CudaFunction>>>;

fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> Error {
    let what = what.into();
    move |error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        Error::Driver { what, why: text.unwrap_or_else(|_| format!("{error:?}")) }
    }
}

fn missing(library: &'static str, package: &'static str, name: &str) -> Error {
    Error::NoLibrary { library, package, searched: cudarc::get_lib_name_candidates(name).join(", ") }
}

/// What the driver says of itself and of the devices that this process sees. None of them is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Driver {
    /// The CUDA release that it has, major and minor.
    pub version: [u32; 2],
    /// Name and bytes of memory of each device.
    pub devices: Vec<(String, u64)>,
}

impl Driver {
    /// Asks it.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] without libcuda, [`Error::Driver`] for one that does not work. Without a device it works.
    pub fn look() -> Result<Self> {
        libcuda()?;
        let mut version = 0;
        // SAFETY: it writes one integer, which outlives the call, and needs no context.
        let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        asked.map_err(driver("asking for the driver's version"))?;
        let version = u32::try_from(version).unwrap_or_default();
        let version = [version / 1000, version % 1000 / 10];
        let count = match result::init() {
            Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
            started => {
                started.and_then(|()| result::device::get_count()).map_err(driver("starting the driver"))?
            }
        };
        let described = |ordinal| {
            let device = result::device::get(ordinal)?;
            // SAFETY: the device is one that the driver named.
            let bytes = unsafe { result::device::total_mem(device) }?;
            Ok((result::device::get_name(device)?, bytes as u64))
        };
        let devices = (0..count).map(|ordinal| {
            described(ordinal).map_err(driver(format!("asking for the name and memory of device {ordinal}")))
        });
        Ok(Self { version, devices: devices.collect::<Result<_>>()? })
    }
}

/// Whether the runtime compiler, which the codec's kernels need, is on this machine.
///
/// # Errors
/// [`Error::NoLibrary`] if it is not.
pub fn compiler() -> Result<()> {
    // SAFETY: opens a library and closes it again; it has no constructors that anything here depends on.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Ok(());
    }
    Err(missing("libnvrtc", "CUDA's runtime compiler (on PyPI: nvidia-cuda-nvrtc)", "nvrtc"))
}

/// Whether the driver is on this machine.
fn libcuda() -> Result<()> {
    // SAFETY: as in `compiler`.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(missing("libcuda", "the NVIDIA driver", "cuda"))
}

/// Compiles the kernels for an element type and an architecture such as `compute_90`; no device is needed.
pub(super) fn compile(architecture: &str, element: Element) -> Result<Ptx> {
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        // The choice of tables must come out as it does without fused multiply-add.
        "--fmad=false".to_owned(),
    ];
    options.extend(definitions(element));
    let options = CompileOptions { options, ..CompileOptions::default() };
    compile_ptx_with_opts(SOURCE, options).map_err(|error| Error::Compile {
        architecture: architecture.to_owned(),
        log: match error {
            CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
            other => format!("{other:?}"),
        },
    })
}

impl Device {
    pub(super) fn open(ordinal: usize) -> Result<Self> {
        libcuda()?;
        compiler()?;
        let opening = || format!("opening device {ordinal}");
        let context = CudaContext::new(ordinal).map_err(driver(opening()))?;
        let (major, minor) = context.compute_capability().map_err(driver(opening()))?;
        let processors = context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(driver(opening()))?;
        let stream = context.new_stream().map_err(driver("making a stream"))?;
        Ok(Self {
            context,
            stream,
            processors: processors.max(1) as usize,
            architecture: format!("compute_{major}{minor}"),
            kernels: Arc::default(),
        })
    }

    /// Compiles the kernels for an element type, the first time that it is asked for.
    fn kernels(&self, element: Element) -> Result<Arc<Vec<CudaFunction>>> {
        let mut compiled = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = compiled.get(&element) {
            return Ok(Arc::clone(kernels));
        }
        let image = compile(&self.architecture, element)?;
        let module = self.context.load_module(image).map_err(driver("loading the kernels"))?;
        let mut kernels = Vec::with_capacity(Kernel::NAMES.len());
        for name in Kernel::NAMES {
            let what = || format!("loading the kernel `{name}`");
            let function = module.load_function(name).map_err(driver(what()))?;
            let most = self
                .context
                .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
                .map_err(driver(what()))?;
            let own = function.shared_size_bytes().map_err(driver(what()))?;
            function
                .set_attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - own)
                .map_err(driver(what()))?;
            kernels.push(function);
        }
        let kernels = Arc::new(kernels);
        compiled.insert(element, Arc::clone(&kernels));
        Ok(kernels)
    }
}

impl Machine for Device {
    fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    fn enter(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("binding the context"))
    }

    fn prepare(&self, element: Element) -> Result<()> {
        self.kernels(element).map(drop)
    }

    fn fork(&self) -> Result<Box<dyn Machine>> {
        let stream = self.context.new_stream().map_err(driver("making a stream"))?;
        Ok(Box::new(Self {
            context: Arc::clone(&self.context),
            stream,
            processors: self.processors,
            architecture: self.architecture.clone(),
            kernels: Arc::clone(&self.kernels),
        }))
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        let what = || format!("allocating {bytes} bytes on device {}", self.ordinal());
        // SAFETY: what is in the memory does not matter before kernels or copies have written it.
        let memory = unsafe { self.stream.alloc::<u8>(bytes.max(1)) }.map_err(driver(what()))?;
        let address = memory.device_ptr(&self.stream).0;
        Ok(Memory::new(address, memory))
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let what = || format!("allocating {bytes} bytes of pinned memory");
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is set to zero before it is read.
        let mut slice = unsafe { self.context.alloc_pinned_with_flags::<u8>(bytes.max(1), flags) }
            .map_err(driver(what()))?;
        let start = slice.as_mut_ptr().map_err(driver(what()))?;
        // SAFETY: the allocation has that many bytes, which are its owner's alone.
        unsafe {
            start.write_bytes(0, bytes.max(1));
            Ok(Pinned::new(start, bytes.max(1), slice))
        }
    }

    fn emitters(&self) -> usize {
        self.processors * 6
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) }
            .map_err(driver(format!("clearing {bytes} bytes")))
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_htod_async(to, from, self.stream.cu_stream()) }
            .map_err(driver(format!("copying {} bytes to the device", from.len())))
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        let bytes = to.len();
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream.cu_stream()) }
            .map_err(driver(format!("copying {bytes} bytes from the device")))
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // Either may be pinned memory of the host, which has the same address here and there.
        // SAFETY: the caller's promise.
        unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream.cu_stream()) }
            .result()
            .map_err(driver(format!("copying {bytes} bytes")))
    }

    unsafe fn launch(
        &self,
        element: Element,
        kernel: Kernel,
        grid: Grid,
        arguments: &dyn Arguments,
    ) -> Result<()> {
        let kernels = self.kernels(element)?;
        let Some(function) = kernels.get(kernel as usize) else { return Ok(()) };
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast()];
        let (blocks, shared) = (grid.blocks as u32, grid.shared as u32);
        // SAFETY: the kernel takes one argument, of the layout that `Arguments` promises, and copies it; the
        // rest is the caller's promise.
        unsafe {
            result::launch_kernel(
                function.cu_function(),
                (blocks, 1, 1),
                (grid.threads, 1, 1),
                shared,
                self.stream.cu_stream(),
                &mut parameters,
            )
        }
        .map_err(driver(format!("launching `{}`", kernel.name())))
    }

    fn finish(&self) -> Result<()> {
        self.stream.synchronize().map_err(driver("waiting for the device"))
    }
}
