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
    starts: Tensor,
    longest: i64,
    /// What each query attends to.
    pub(super) mixed: Tensor,
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
        let (dropout, causal, mask) = (Value::Float(0.0), Value::Bool(true), Value::Bool(false));
        let mut arguments = vec![query, key, value, starts, starts, longest, longest, dropout, causal, mask];
        // Scale, both ends of the window, used keys, slopes: as they are by default.
        arguments.extend([absent; 5]);
        let found = call(c"aten::_flash_attention_forward", c"", &arguments)?;
        let [mixed, log_sums, state, unused, _] = found;
        let Bounds { starts, longest } = bounds;
        let (starts, longest) = (starts.shallow_clone(), *longest);
        Ok(Flash { qkv, starts, longest, mixed, log_sums, random: [state, unused] })
    }

    /// Gradients of queries, keys and values.
    pub(super) fn backward(self, gradient: &Tensor) -> Result<[Tensor; 3]> {
        let gradient = gradient.f_contiguous()?;
        let absent = Value::MaybeTensor(None);
        let [query, key, value] = self.qkv.each_ref().map(Value::Tensor);
        let starts = Value::Tensor(&self.starts);
        let longest = Value::Int(self.longest);
        let [state, unused] = self.random.each_ref().map(Value::Tensor);
        let [gradient, mixed, log_sums] = [&gradient, &self.mixed, &self.log_sums].map(Value::Tensor);
        let (dropout, causal) = (Value::Float(0.0), Value::Bool(true));
        let mut arguments =
            vec![gradient, query, key, value, mixed, log_sums, starts, starts, longest, longest];
        arguments.extend([dropout, causal, state, unused, absent, absent, absent]);
        call(c"aten::_flash_attention_backward", c"", &arguments)
    }
}
