//! Attention over sequences of many lengths at once, by CUDA's flash kernel.
//!
//! tch does not bind `_flash_attention_forward`, so it is called through libtorch's own dispatcher, which
//! records it for the backward pass as it does any other operation.

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

/// Causal attention `[N, heads, head_dim]` within each sequence. Keys and values may have fewer heads, which
/// divide those of the queries.
pub(super) fn attention(query: &Tensor, key: &Tensor, value: &Tensor, bounds: &Bounds) -> Result<Tensor> {
    let longest = Value::Int(bounds.longest);
    let starts = || Value::MaybeTensor(Some(&bounds.starts));
    let arguments = [
        Value::Tensor(query),
        Value::Tensor(key),
        Value::Tensor(value),
        starts(),
        starts(),
        longest,
        longest,
        // Dropout; causal; no mask to look at.
        Value::Float(0.0),
        Value::Bool(true),
        Value::Bool(false),
        // Scale, both ends of the window, used keys, slopes: as they are by default.
        Value::MaybeTensor(None),
        Value::MaybeTensor(None),
        Value::MaybeTensor(None),
        Value::MaybeTensor(None),
        Value::MaybeTensor(None),
    ];
    let [output, ..] = call::<5>(c"aten::_flash_attention_forward", c"", &arguments)?;
    Ok(output)
}
