//! The memory of numpy arrays and torch tensors, read in place.
#![allow(unsafe_code, reason = "reads memory that Python owns")]

use crate::error;
use driftless::bridge::engine::torch_name;
use driftless::delta::cuda;
use driftless::transport::snapshot::TensorInfo;
use driftless::transport::{Dtype, Error};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;
use std::slice;

/// Where tensors have to be, but for those that are published.
const HOST: &str = "a tensor in host memory: `tensor.cpu()`";
const CONTIGUOUS: &str = "row-major without gaps: `tensor.contiguous()`, or `numpy.ascontiguousarray`";

/// A tensor in memory that Python owns.
pub(crate) struct Borrowed {
    pub(crate) info: TensorInfo,
    start: *const u8,
    len: usize,
    owner: Owner,
}

/// What keeps the memory from being given back.
enum Owner {
    /// An export of the buffer protocol, which keeps the array that owns the memory; and a weak reference to that
    /// array: `resize` of numpy counts no exports, but refuses an array with a weak reference.
    Buffer(PyUntypedBuffer, #[expect(dead_code, reason = "held, never read")] Py<PyWeakrefReference>),
    /// The tensor's storage, which the tensor may change for another one. Only `resize_` gives its memory back.
    Storage(#[expect(dead_code, reason = "held, never read")] Py<PyAny>),
}

// SAFETY: the pointer is only read, and what keeps its memory is the owner, which may be held and dropped by
// any thread: `Py` and buffers put off what needs the interpreter.
unsafe impl Send for Borrowed {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    /// Borrows `value`, a numpy array or a torch tensor in host memory.
    ///
    /// # Errors
    /// `TensorError` for anything else, for what is not contiguous, and for element types that publications
    /// do not have.
    pub(crate) fn new(name: String, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if value.hasattr("untyped_storage")? {
            Self::torch(name, value)
        } else if value.hasattr("__array_interface__")? {
            Self::numpy(name, value)
        } else {
            let found = value.get_type().fully_qualified_name()?.to_string();
            Err(error::tensor(&name, "its class", "a numpy array or a torch tensor", &found))
        }
    }

    fn torch(name: String, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let device = value.getattr("device")?.getattr("type")?.extract::<String>()?;
        if device != "cpu" {
            let expected = if device == "meta" { "a tensor with content" } else { HOST };
            return Err(error::tensor(&name, "its device", expected, &format!("`{device}`")));
        }
        let (info, start, len) = place(name, value)?;
        let owner = Owner::Storage(value.call_method0("untyped_storage")?.unbind());
        Ok(Self { info, start: start as *const u8, len, owner })
    }

    fn numpy(name: String, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !value.getattr("flags")?.getattr("c_contiguous")?.extract::<bool>()? {
            let found = format!("strides {}", value.getattr("strides")?.repr()?);
            return Err(error::tensor(&name, "its layout", CONTIGUOUS, &found));
        }
        if value.hasattr("mask")? {
            let class = value.get_type().fully_qualified_name()?.to_string();
            let expected = "a plain array: `array.filled(value)`";
            return Err(error::tensor(&name, "its class", expected, &format!("`{class}`")));
        }
        let dtype = value.getattr("dtype")?;
        if !dtype.getattr("isnative")?.extract::<bool>()? {
            return Err(error::tensor(&name, "its byte order", "little-endian", "big-endian"));
        }
        let info = info(name, &dtype.getattr("name")?.extract::<String>()?, value)?;
        // Not every element type has a letter in the buffer protocol, and bytes do.
        let bytes = value.call_method1("reshape", (-1,))?.call_method1("view", ("uint8",))?;
        let buffer = PyUntypedBuffer::get(&bytes)?;
        let pin = PyWeakrefReference::new(&owner_of(bytes)?)?.unbind();
        let len = length(&info)?;
        if buffer.len_bytes() != len || !buffer.is_c_contiguous() {
            let found = format!("{} bytes", buffer.len_bytes());
            return Err(error::tensor(&info.name, "its size", &format!("{len} bytes"), &found));
        }
        let start = buffer.buf_ptr().cast_const().cast();
        Ok(Self { info, start, len, owner: Owner::Buffer(buffer, pin) })
    }

    /// Borrows `value` to write to it.
    ///
    /// # Errors
    /// As [`Borrowed::new`], and for a read-only array.
    pub(crate) fn writable(name: String, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let borrowed = Self::new(name, value)?;
        match &borrowed.owner {
            Owner::Buffer(buffer, _) if buffer.readonly() => {
                Err(error::tensor(&borrowed.info.name, "its memory", "writable", "read-only"))
            }
            Owner::Buffer(..) | Owner::Storage(_) => Ok(borrowed),
        }
    }

    /// The tensor's bytes, of a tensor that was borrowed by [`Borrowed::writable`].
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        debug_assert!(!matches!(&self.owner, Owner::Buffer(buffer, _) if buffer.readonly()));
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the memory was writable when it was borrowed, and is borrowed exclusively as
        // far as Rust goes.
        unsafe { slice::from_raw_parts_mut(self.start.cast_mut(), self.len) }
    }

    /// The tensor's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `start` and `len` lie inside of one allocation, which was checked, and the owner keeps it. The
        // package asks its callers to neither write to it nor resize a torch storage meanwhile; a publisher that
        // reads bytes twice compares their digests, and refuses what has changed (`ChangedWhileRead`).
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }
}

/// A tensor whose bytes are not in the host's memory before they are asked for.
pub(crate) struct Remote {
    pub(crate) info: TensorInfo,
    /// Where it lies on a CUDA device, if it does.
    pub(crate) on_device: Option<cuda::Tensor>,
    /// Returns it as a tensor in host memory.
    read: Py<PyAny>,
}

impl Remote {
    /// Takes a `LazyTensor`, or borrows a torch tensor on a CUDA device; `None` for what is neither.
    ///
    /// # Errors
    /// As [`Borrowed::new`].
    pub(crate) fn new(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if value.get_type().name()? == "LazyTensor" {
            let dtype = value.getattr("dtype")?.str()?.to_string();
            let info = info(name.to_owned(), dtype.strip_prefix("torch.").unwrap_or(&dtype), value)?;
            length(&info)?;
            return Ok(Some(Self { info, on_device: None, read: value.getattr("read")?.unbind() }));
        }
        let device = value.getattr("device").and_then(|device| Ok((device.getattr("type")?, device)));
        let Ok((kind, device)) = device else { return Ok(None) };
        if !value.hasattr("untyped_storage")? || !kind.eq("cuda")? {
            return Ok(None);
        }
        let (info, start, len) = place(name.to_owned(), value)?;
        let device = device.getattr("index")?.extract::<usize>()?;
        // SAFETY: the storage has so many bytes on that device and lives as long as the tensor, which is held.
        // That nobody writes meanwhile is what the package asks of its callers.
        let tensor = unsafe { cuda::Tensor::borrowed(device, start as u64, len) };
        // The bound method holds the tensor.
        let read = value.call_method0("detach")?.getattr("cpu")?.unbind();
        Ok(Some(Self { info, on_device: Some(tensor), read }))
    }

    /// The tensor's bytes, which Python reads.
    ///
    /// # Errors
    /// [`Error::HostCopy`]: what was raised, another tensor than announced, an interpreter that has ended.
    pub(crate) fn copy(&self) -> Result<Vec<u8>, Error> {
        let copied = Python::try_attach(|py| {
            let host = Borrowed::new(self.info.name.clone(), &self.read.bind(py).call0()?)?;
            if host.info == self.info {
                return Ok(host.bytes().to_vec());
            }
            let form = |info: &TensorInfo| format!("{} {:?}", info.dtype, info.shape);
            Err(error::tensor(&self.info.name, "what was read of it", &form(&self.info), &form(&host.info)))
        });
        let copied = copied.unwrap_or_else(|| Err(PyRuntimeError::new_err("the interpreter has ended")));
        copied.map_err(|error| Error::HostCopy { tensor: self.info.name.clone(), source: error.into() })
    }
}

/// A torch tensor of one unbroken run of elements: what it is, its address, its length in bytes.
fn place(name: String, value: &Bound<'_, PyAny>) -> PyResult<(TensorInfo, usize, usize)> {
    let flag = |method: &str| value.call_method0(method)?.extract::<bool>();
    if value.hasattr("placements")? {
        let expected = "a plain tensor: `tensor.full_tensor()`, or `driftless_rl.torch.slices` on every rank";
        return Err(error::tensor(&name, "its class", expected, "a DTensor"));
    }
    let layout = value.getattr("layout")?.str()?.to_string();
    if layout != "torch.strided" || !flag("is_contiguous")? {
        let strides = value.call_method0("stride").and_then(|strides| Ok(strides.repr()?.to_string()));
        let found = format!("{layout}, strides {}", strides.unwrap_or_else(|_| "unknown".to_owned()));
        return Err(error::tensor(&name, "its layout", CONTIGUOUS, &found));
    }
    if flag("is_conj")? || flag("is_neg")? {
        let expected = "resolved: `tensor.resolve_conj().resolve_neg()`";
        return Err(error::tensor(&name, "its conjugate or negative bit", expected, "set"));
    }
    let dtype = value.getattr("dtype")?.str()?.to_string();
    let info = info(name, dtype.strip_prefix("torch.").unwrap_or(&dtype), value)?;
    let len = length(&info)?;
    let memory = || -> PyResult<_> {
        let address = |of: &Bound<'_, PyAny>| of.call_method0("data_ptr")?.extract::<usize>();
        let storage = value.call_method0("untyped_storage")?;
        Ok((address(value)?, address(&storage)?, storage.call_method0("nbytes")?.extract::<usize>()?))
    };
    // Without memory an address is 0, or asking for it raises. One that was freed has a storage of 0 bytes.
    let memory = memory().ok().filter(|&(start, _, held)| start != 0 || held < len || len == 0);
    let Some((start, first, held)) = memory else {
        let class = value.get_type().fully_qualified_name()?.to_string();
        let found = format!("`{class}`, which has none");
        return Err(error::tensor(&info.name, "its class", "a tensor with memory of its own", &found));
    };
    let inside = start >= first && start.checked_add(len).is_some_and(|end| end - first <= held);
    if !inside {
        let expected = format!("at least {len} bytes behind its first element");
        let found = format!("{held} bytes: it was freed or resized, as FSDP does between steps");
        return Err(error::tensor(&info.name, "its storage", &expected, &found));
    }
    Ok((info, start, len))
}

/// The array whose memory a view shows.
fn owner_of(view: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let mut owner = view;
    loop {
        let base = owner.getattr("base")?;
        if !base.hasattr("__array_interface__")? {
            return Ok(owner);
        }
        owner = base;
    }
}

/// The tensor's bytes.
pub(crate) fn length(info: &TensorInfo) -> PyResult<usize> {
    let (name, shape) = (&info.name, format!("{:?}", info.shape));
    let bytes = info.byte_len().ok().and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| error::tensor(name, "its shape", "one of fewer than 2^64 bytes", &shape))
}

fn info(name: String, dtype: &str, value: &Bound<'_, PyAny>) -> PyResult<TensorInfo> {
    let Some(dtype) = dtype_named(dtype) else {
        let expected = "one that safetensors has, of a byte or more; publish narrower ones as uint8";
        return Err(error::tensor(&name, "its dtype", expected, dtype));
    };
    let shape = value.getattr("shape")?;
    let Ok(extents) = shape.extract::<Vec<u64>>() else {
        return Err(error::tensor(&name, "its shape", "extents from 0 on", &shape.repr()?.to_string()));
    };
    Ok(TensorInfo { name, dtype, shape: extents })
}

/// The element type that torch, numpy and ml_dtypes call so.
pub(crate) fn dtype_named(name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|dtype| torch_name(*dtype) == name)
}
