//! Attention over sequences of many lengths at once, by CUDA's flash kernel.
//!
//! tch does not bind `_flash_attention_forward`, so it is called through libtorch's own dispatcher.

use tch::{Kind, Tensor};

use super::layout::Bounds;
use crate::dispatcher::{Value, call};
use crate::error::Result;

/// Widest head that the kernel has.
const HEAD_DIM_MAX: i64 = 256;

/// Whether the kernel is there for tensors like this one, `[N, heads, head_dim]`.
pub(super) fn takes(query: &Tensor) -> bool {
    let head_dim = query.size().last().copied().unwrap_or(0);
    query.device().is_cuda()
        && query.kind() == Kind::BFloat16
        && head_dim <= HEAD_DIM_MAX
        && head_dim % 8 == 0
}

/// A forward pass, with what its way back needs.
#[derive(Debug)]
pub(super) struct Flash {
    qkv: [Tensor; 3],
    bounds: Bounds,
    mixed: Tensor,
    log_sums: Tensor,
    /// State of the dropout that there is none of.
    random: [Tensor; 2],
}

impl Flash {
    pub(super) fn forward(qkv: [Tensor; 3], bounds: &Bounds) -> Result<Flash> {
        let absent = Value::MaybeTensor(None);
        let [query, key, value] = qkv.each_ref().map(Value::Tensor);
        let starts = Value::MaybeTensor(Some(&bounds.starts));
        let longest = Value::Int(bounds.longest);
        let arguments = [
            query,
            key,
            value,
            starts,
            starts,
            longest,
            longest,
            // Dropout; causal; no mask to look at.
            Value::Float(0.0),
            Value::Bool(true),
            Value::Bool(false),
            // Scale, both ends of the window, used keys, slopes: as they are by default.
            absent,
            absent,
            absent,
            absent,
            absent,
        ];
        let found = call::<5>(c"aten::_flash_attention_forward", c"", &arguments)?;
        let [mixed, log_sums, state, unused, _] = found;
        Ok(Flash { qkv, bounds: bounds.shallow_clone(), mixed, log_sums, random: [state, unused] })
    }

    pub(super) fn mixed(&self) -> &Tensor {
        &self.mixed
    }

    /// Gradients of queries, keys and values.
    pub(super) fn backward(self, gradient: &Tensor) -> Result<[Tensor; 3]> {
        let gradient = gradient.f_contiguous()?;
        let absent = Value::MaybeTensor(None);
        let [query, key, value] = self.qkv.each_ref().map(Value::Tensor);
        let starts = Value::Tensor(&self.bounds.starts);
        let longest = Value::Int(self.bounds.longest);
        let [state, unused] = self.random.each_ref().map(Value::Tensor);
        let arguments = [
            Value::Tensor(&gradient),
            query,
            key,
            value,
            Value::Tensor(&self.mixed),
            Value::Tensor(&self.log_sums),
            starts,
            starts,
            longest,
            longest,
            Value::Float(0.0),
            Value::Bool(true),
            state,
            unused,
            absent,
            absent,
            absent,
        ];
        call::<3>(c"aten::_flash_attention_backward", c"", &arguments)
    }
}
