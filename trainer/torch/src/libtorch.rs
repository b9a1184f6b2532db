//! The edge to libtorch: devices, threads, and bytes in and out of tensors.
//!
//! Its `unsafe`, beside that of `dispatcher`, opens a shared library, sets flags of libtorch's, and lends it memory.
#![expect(
    unsafe_code,
    reason = "dlopen of CUDA's half of libtorch, its flags, and tensors over borrowed memory"
)]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use driftless_transport::Dtype;
use driftless_transport::snapshot::TensorInfo;
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use crate::dispatcher::{Value, call};
use crate::error::{Error, Result, driver, input};

/// Chooses a device: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA where there is one, else the CPU).
///
/// One binary serves both: it links only libtorch's CPU half, and this opens `libtorch_cuda.so`
/// beside it the first time something other than `cpu` is asked for.
///
/// # Errors
/// [`Error::Device`] with the reason, when CUDA was asked for by name and is not there.
pub fn device(asked: &str) -> Result<Device> {
    let refuse = |reason: String| Error::Device { asked: asked.to_owned(), reason };
    let index = match asked {
        "cpu" => return Ok(Device::Cpu),
        "auto" => return Ok(if cuda_devices().is_ok() { Device::Cuda(0) } else { Device::Cpu }),
        "cuda" => 0,
        other => other
            .strip_prefix("cuda:")
            .and_then(|index| index.parse::<usize>().ok())
            .ok_or_else(|| refuse("expected cpu, cuda, cuda:N or auto".to_owned()))?,
    };
    match cuda_devices() {
        Ok(count) if index < count => Ok(Device::Cuda(index)),
        Ok(count) => Err(refuse(format!("there are {count} CUDA devices, counted from 0"))),
        Err(reason) => Err(refuse(reason)),
    }
}

/// Sets how many threads libtorch uses for one operation in this process.
///
/// # Errors
/// [`Error::Input`] for 0 or an absurd count.
pub fn set_threads(count: usize) -> Result<()> {
    match i32::try_from(count) {
        Ok(threads @ 1..=4096) => {
            tch::set_num_threads(threads);
            Ok(())
        }
        _ => Err(input("threads", "1..=4096", count)),
    }
}

/// Whether this process was told to be deterministic.
static DETERMINISTIC: AtomicBool = AtomicBool::new(false);

/// Whether [`set_deterministic`] was called.
pub(crate) fn is_deterministic() -> bool {
    DETERMINISTIC.load(Relaxed)
}

/// Has libtorch compute the same bits for the same inputs from now on, in this process (`--deterministic`). It
/// refuses operations that cannot. cuBLAS wants to be told before CUDA's first use: see [`CUBLAS_WORKSPACE`].
pub fn set_deterministic() {
    DETERMINISTIC.store(true, Relaxed);
    // SAFETY: both are C++ functions of libtorch 2.11, which `tch` links: `at::Context& at::globalContext()`, and
    // `void at::Context::setDeterministicAlgorithms(bool, bool)`, which takes the context as a method does, in
    // front. The context lives as long as the process, and the flags are plain ones that are read at each
    // operation.
    unsafe {
        let context = global_context();
        set_deterministic_algorithms(context, true, false);
        // No operation of ours reads what it did not write.
        set_deterministic_fill(context, false);
    }
}

/// The environment in which cuBLAS computes the same bits each time.
pub const CUBLAS_WORKSPACE: (&str, &str) = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8");

unsafe extern "C" {
    #[link_name = "_ZN2at13globalContextEv"]
    fn global_context() -> *mut c_void;
    #[link_name = "_ZN2at7Context26setDeterministicAlgorithmsEbb"]
    fn set_deterministic_algorithms(context: *mut c_void, deterministic: bool, warn_only: bool);
    #[link_name = "_ZN2at7Context39setDeterministicFillUninitializedMemoryEb"]
    fn set_deterministic_fill(context: *mut c_void, fill: bool);
}

/// Number of usable CUDA devices (at least 1), or why there is none. Probed once per process.
pub(crate) fn cuda_devices() -> Result<usize, String> {
    static PROBE: OnceLock<Result<usize, String>> = OnceLock::new();
    PROBE
        .get_or_init(|| {
            open_libtorch_cuda()?;
            match usize::try_from(tch::Cuda::device_count()) {
                Ok(count) if count > 0 && tch::Cuda::is_available() => Ok(count),
                _ => Err("libtorch_cuda.so is loaded, but the driver shows no GPU".to_owned()),
            }
        })
        .clone()
}

/// Dense bf16 operations a second of a device, as its vendor's datasheet has them; `None` for the CPU and what is
/// not listed.
pub(crate) fn operations_per_second(device: Device) -> Option<f64> {
    const KNOWN: [(&str, f64); 5] =
        [("H100", 989e12), ("H200", 989e12), ("A100", 312e12), ("L40S", 362e12), ("B200", 2250e12)];
    let Device::Cuda(index) = device else { return None };
    let name = cudarc::driver::CudaContext::new(index).and_then(|context| context.name()).ok()?;
    KNOWN.into_iter().find(|(known, _)| name.contains(known)).map(|(_, peak)| peak)
}

/// Waits until a CUDA device has done what libtorch has queued there.
///
/// # Errors
/// [`Error::Kernels`] with what failed there, if something did.
pub(crate) fn synchronize(ordinal: usize) -> Result<()> {
    let done = cudarc::driver::CudaContext::new(ordinal).and_then(|context| {
        context.bind_to_thread()?;
        context.synchronize()
    });
    done.map_err(driver(format!("waiting for the work on device {ordinal}")))
}

/// Opens `libtorch_cuda.so` for the rest of the process: from beside the loaded `libtorch_cpu.so`, else from
/// the loader's search path. The linker drops it from the binary because no symbol of it is named.
fn open_libtorch_cuda() -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    const NAME: &str = "libtorch_cuda.so";
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let beside = maps
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .find_map(|path| path.strip_suffix("libtorch_cpu.so"))
        .map(|directory| format!("{directory}{NAME}"));
    let mut reasons = Vec::new();
    for candidate in beside.into_iter().chain([NAME.to_owned()]) {
        // SAFETY: libtorch_cuda.so's initialisers register kernels with the libtorch already loaded; they are
        // meant to run at any time before CUDA's first use and touch none of our memory.
        match unsafe { Library::open(Some(&candidate), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => {
                // Registered kernels point into it, so it must never be unloaded.
                std::mem::forget(library);
                return Ok(());
            }
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(reasons.join("; "))
}

/// Zeros `[length]` in pinned host memory: a CUDA device copies from and to it several times faster.
pub(crate) fn pinned(length: i64, kind: Kind) -> Result<Tensor> {
    let zeros = Tensor::f_zeros(length, (kind, Device::Cpu))?;
    let [pinned] = call(c"aten::pin_memory", c"", &[Value::Tensor(&zeros), Value::MaybeTensor(None)])?;
    Ok(pinned)
}

/// Where a flat tensor rests in host memory while its device is needed otherwise; kept for the next time.
#[derive(Debug, Default)]
pub(crate) struct Rest(Option<Tensor>);

impl Rest {
    /// The tensor on a device, or from a GPU in host memory.
    pub(crate) fn moved(&mut self, tensor: &Tensor, to: Device) -> Result<Tensor> {
        if to.is_cuda() || !tensor.device().is_cuda() {
            return Ok(tensor.f_to_device(to)?);
        }
        let place = self.0.take().map_or_else(|| pinned(tensor.numel() as i64, tensor.f_kind()?), Ok);
        let mut place = place?;
        place.f_copy_(tensor)?;
        self.0 = Some(place.shallow_clone());
        Ok(place)
    }
}

/// A tensor over memory that Rust owns: no copy, and no longer-lived than the memory.
#[derive(Debug)]
pub struct Borrowed<'a> {
    tensor: Tensor,
    memory: PhantomData<&'a [u8]>,
}

impl Deref for Borrowed<'_> {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Shows a column to libtorch as a 1-D CPU tensor without copying it.
///
/// Only for reading: the memory may be a read-only map. [`Borrowed`] gives out `&Tensor`, and libtorch's
/// in-place operations need `&mut`.
///
/// # Errors
/// [`Error::Torch`] if libtorch refuses.
pub fn borrow<T: Element>(column: &[T]) -> Result<Borrowed<'_>> {
    let length = i64::try_from(column.len()).unwrap_or(i64::MAX);
    let data = column.as_ptr().cast::<u8>();
    // SAFETY: `data` points to `length` aligned, initialised elements of `T::KIND`, which `Borrowed`'s
    // lifetime keeps alive and unchanged; libtorch frees nothing, since a blob has no deleter.
    let tensor = unsafe { Tensor::f_from_blob(data, &[length], &[1], T::KIND, Device::Cpu) }?;
    Ok(Borrowed { tensor, memory: PhantomData })
}

/// A CPU tensor holding a copy of little-endian `bytes`.
///
/// # Errors
/// [`Error::Input`] if the length is not that of `shape` and `kind`.
pub(crate) fn tensor_of(bytes: &[u8], shape: &[i64], kind: Kind) -> Result<Tensor> {
    let elements = shape.iter().try_fold(1_usize, |n, &size| n.checked_mul(usize::try_from(size).ok()?));
    let needed = elements.and_then(|n| n.checked_mul(kind.elt_size_in_bytes()));
    if needed != Some(bytes.len()) {
        return Err(input("tensor bytes", format!("{needed:?} for {kind:?} {shape:?}"), bytes.len()));
    }
    Ok(Tensor::f_from_data_size(bytes, shape, kind)?)
}

/// The tensor's elements, in its own kind, little-endian, row-major.
///
/// # Errors
/// [`Error::Torch`] if libtorch refuses.
pub(crate) fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let mut bytes = vec![0; tensor.numel() * tensor.f_kind()?.elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

/// The dtype that a tensor of this kind is written in.
pub(crate) fn dtype_of(kind: Kind) -> Dtype {
    match kind {
        Kind::BFloat16 => Dtype::Bf16,
        Kind::Float8e4m3fn => Dtype::F8E4M3,
        _ => Dtype::F32,
    }
}

/// A tensor as checkpoints and publications name it.
///
/// # Errors
/// [`Error::Torch`] for a tensor of no kind.
pub(crate) fn info_of(name: String, tensor: &Tensor) -> Result<TensorInfo> {
    let shape = tensor.size().into_iter().map(i64::unsigned_abs).collect();
    Ok(TensorInfo { name, dtype: dtype_of(tensor.f_kind()?), shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowed_columns_are_not_copied() {
        let tokens = [3_i32, -1, 7];
        let tensor = borrow(&tokens).unwrap();
        assert_eq!(tensor.data_ptr().cast_const().cast(), tokens.as_ptr());
        assert_eq!(Vec::<i64>::try_from(tensor.to_kind(Kind::Int64)).unwrap(), [3, -1, 7]);
        assert_eq!(borrow::<f32>(&[]).unwrap().size(), [0]);
    }

    #[test]
    fn bytes_round_trip_and_short_bytes_are_refused() {
        let bytes: Vec<u8> = (0..12).collect();
        let tensor = tensor_of(&bytes, &[2, 3], Kind::BFloat16).unwrap();
        assert_eq!(bytes_of(&tensor).unwrap(), bytes);
        assert!(matches!(tensor_of(&bytes, &[2, 4], Kind::BFloat16), Err(Error::Input { .. })));
        assert!(matches!(tensor_of(&bytes, &[-2, 3], Kind::BFloat16), Err(Error::Input { .. })));
    }

    #[test]
    fn devices_by_name() {
        assert_eq!(device("cpu").unwrap(), Device::Cpu);
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:4096"] {
            assert!(matches!(device(wrong), Err(Error::Device { .. })), "{wrong}");
        }
        assert!(device("auto").is_ok());
    }
}
