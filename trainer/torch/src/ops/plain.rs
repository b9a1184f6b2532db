//! The operations as Hugging Face's models have them, one after the other; autograd knows the way back.

use tch::{Kind, Tensor};

use super::{Angles, HeadNorms, Heads};
use crate::error::Result;

/// The weight is not part of libtorch's fused operation: with it, bf16 would be rounded once, where Hugging
/// Face's models round before and after.
pub(super) fn norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(x.f_rms_norm(weight.size(), None::<&Tensor>, eps)?.f_mul(weight)?)
}

pub(super) fn turn(
    qkv: &Tensor,
    norms: HeadNorms<'_>,
    angles: &Angles,
    heads: Heads,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let Heads { heads, kv_heads, head_dim } = heads;
    let parts = qkv.f_unflatten(-1, [heads + 2 * kv_heads, head_dim])?;
    let part = |start: i64, length: i64| parts.f_narrow(-2, start, length);
    let (mut query, mut key) = (part(0, heads)?, part(heads, kv_heads)?);
    if let Some([query_norm, key_norm]) = norms {
        (query, key) = (norm(&query, query_norm, eps)?, norm(&key, key_norm, eps)?);
    }
    Ok([rotated(&query, angles)?, rotated(&key, angles)?, part(heads + kv_heads, kv_heads)?])
}

/// Rotates `[…, heads, head_dim]`: `(a, b) → (a cos − b sin, b cos + a sin)`, a and b the two halves.
fn rotated(x: &Tensor, angles: &Angles) -> Result<Tensor> {
    let halves = x.f_chunk(2, -1)?;
    let (a, b) = (&halves[0], &halves[1]);
    let first = a.f_mul(&angles.cos)?.f_sub(&b.f_mul(&angles.sin)?)?;
    let second = b.f_mul(&angles.cos)?.f_add(&a.f_mul(&angles.sin)?)?;
    Ok(Tensor::f_cat(&[first, second], -1)?)
}

pub(super) fn gate(gate_up: &Tensor) -> Result<Tensor> {
    let halves = gate_up.f_chunk(2, -1)?;
    Ok(halves[0].f_silu()?.f_mul(&halves[1])?)
}

/// Log-probs `[…, V]` of a softmax over `logits` `[…, V]` (f32) divided by `temperature`.
pub(super) fn log_softmax(logits: &Tensor, temperature: f64) -> Result<Tensor> {
    let temperature = Tensor::f_from_slice(&[temperature as f32])?.f_to_device(logits.device())?;
    super::log_softmax(logits, &temperature)
}

/// Entropy `[…]`, in nats, of distributions given by their log-probs `[…, V]`.
pub(super) fn entropy(log_probs: &Tensor) -> Result<Tensor> {
    Ok(log_probs.f_exp()?.f_mul(log_probs)?.f_sum_dim_intlist(-1_i64, false, Kind::Float)?.f_neg()?)
}

/// Of log-prob l of the label and entropy H, with p the softmax of z / T:
/// `∂l/∂z = (onehot − p) / T` and `∂H/∂z = −p (log p + H) / T`.
pub(super) fn score_backward(
    log_probs: &Tensor,
    labels: &Tensor,
    temperature: f64,
    gradient: &Tensor,
    entropy_gradient: Option<&Tensor>,
) -> Result<Tensor> {
    let column = |x: &Tensor| x.f_unsqueeze(-1);
    let probs = log_probs.f_exp()?;
    let mut back = probs.f_mul(&column(gradient)?.f_neg()?)?;
    let _ = back.f_scatter_add_(-1, &column(labels)?, &column(gradient)?)?;
    if let Some(spread) = entropy_gradient {
        let above = log_probs.f_add(&column(&entropy(log_probs)?)?)?;
        let _ = back.f_sub_(&probs.f_mul(&above)?.f_mul(&column(spread)?)?)?;
    }
    let temperature = Tensor::f_from_slice(&[temperature as f32])?.f_to_device(back.device())?;
    Ok(back.f_div_(&temperature)?)
}

/// Gradients of `inputs`, given those of what `forward` makes of them, which it computes again.
pub(super) fn backward<const N: usize>(
    inputs: [&Tensor; N],
    gradients: &[&Tensor],
    forward: impl FnOnce([&Tensor; N]) -> Result<Vec<Tensor>>,
) -> Result<[Tensor; N]> {
    let mut leaves = inputs.map(Tensor::shallow_clone);
    for leaf in &mut leaves {
        *leaf = leaf.f_detach()?.f_set_requires_grad(true)?;
    }
    let outputs = tch::with_grad(|| forward(leaves.each_ref()))?;
    let found = pull(&outputs, gradients, &leaves.each_ref())?;
    found.try_into().map_err(|found: Vec<Tensor>| crate::error::input("gradients", N, found.len()))
}

/// Gradients of `inputs`, given those of `outputs`. The sum's own gradient is 1 everywhere, so that the
/// product's is the given one to the bit.
pub(crate) fn pull(outputs: &[Tensor], gradients: &[&Tensor], inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let products = tch::with_grad(|| {
        let product = |(output, gradient): (&Tensor, &&Tensor)| {
            Ok::<_, crate::error::Error>(output.f_mul(gradient)?.f_sum(Kind::Float)?)
        };
        outputs.iter().zip(gradients).map(product).collect::<Result<Vec<_>>>()
    })?;
    Ok(Tensor::f_run_backward(&products, inputs, false, false)?)
}
