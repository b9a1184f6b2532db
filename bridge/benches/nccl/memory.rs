//! Tensors in device memory, apart from each other as an allocator would lay them.

use std::borrow::Cow;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};
use driftless_delta::cuda::Tensor;
use driftless_transport::snapshot::{AuxFile, TensorInfo};
use driftless_transport::{Dtype, Snapshot};

/// What torch's allocator rounds to.
const ALIGNMENT: u64 = 512;

pub(crate) struct Arena {
    context: Arc<CudaContext>,
    address: u64,
    infos: Vec<TensorInfo>,
    tensors: Vec<Tensor>,
}

impl Arena {
    /// Room for these tensors on device 0, each of its bytes set to something.
    pub(crate) fn new(tensors: Vec<TensorInfo>, apart: bool) -> Self {
        Self::on(0, tensors, apart)
    }

    /// The same on another device, which becomes this thread's.
    pub(crate) fn on(device: usize, tensors: Vec<TensorInfo>, apart: bool) -> Self {
        let context = CudaContext::new(device).unwrap();
        let gap = if apart { ALIGNMENT } else { 0 };
        let sizes: Vec<_> = tensors.iter().map(|info| info.byte_len().unwrap()).collect();
        let starts: Vec<_> = sizes
            .iter()
            .scan(0, |at, size| {
                let start = *at;
                *at += size + gap;
                if apart {
                    *at = at.next_multiple_of(ALIGNMENT);
                }
                Some(start)
            })
            .collect();
        let length = starts.last().unwrap() + sizes.last().unwrap();
        context.bind_to_thread().unwrap();
        // SAFETY: the context is current, and the length is not 0.
        let address = unsafe { result::malloc_sync(length as usize) }.unwrap();
        let tensor = |(start, size): (&u64, &u64)| {
            // SAFETY: so many bytes of the allocation, which lives as long as this arena; nothing else writes to
            // them while a push or a codec reads them.
            unsafe { Tensor::borrowed(device, address + start, *size as usize) }
        };
        let placed = starts.iter().zip(&sizes).map(tensor).collect();
        Self { context, address, infos: tensors, tensors: placed }
    }

    /// A checkpoint's tensors.
    pub(crate) fn upload(snapshot: &dyn Snapshot) -> Self {
        let arena = Self::new(snapshot.tensors().to_vec(), true);
        for (index, tensor) in arena.tensors.iter().enumerate() {
            // SAFETY: the address is a tensor's of these many bytes, and the copy has ended when the call
            // returns.
            unsafe { result::memcpy_htod_sync(tensor.address(), &snapshot.bytes(index).unwrap()) }.unwrap();
        }
        arena
    }
}

impl Snapshot for Arena {
    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }
    fn bytes(&self, _index: usize) -> driftless_transport::Result<Cow<'_, [u8]>> {
        unreachable!("a push reads them where they lie")
    }
    fn on_device(&self, index: usize) -> Option<&Tensor> {
        self.tensors.get(index)
    }
    fn files(&self) -> &[AuxFile] {
        &[]
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: it came from malloc_sync, and is freed once.
        unsafe { result::free_sync(self.address) }.unwrap();
    }
}

/// So many tensors of so many bytes.
pub(crate) fn tensors(count: u64, bytes: u64) -> Vec<TensorInfo> {
    let one = |n| TensorInfo { name: format!("t{n:06}"), dtype: Dtype::Bf16, shape: vec![bytes / 2] };
    (0..count).map(one).collect()
}
