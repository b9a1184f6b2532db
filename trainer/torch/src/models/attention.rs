//! Grouped-query attention: over whole sequences that lie one after the other, or over what a cache holds.

use tch::{Device, Kind, Tensor};

use super::flash::{self, Flash};
use super::layout::{Layout, Run};
use super::parts::ROWS;
use crate::error::{Result, input};
use crate::ops::pull;

/// How many keys the kernel is given for `length` of them; the others are hidden.
///
/// That of the CPU sums over keys in vectors of 16, and its products cut more than 192 keys where their number
/// says. With these numbers, a query's result does not depend on how many keys its mask hides: a token alone,
/// after a cache, gets the bits that it gets in its sequence.
pub(super) fn padded_keys(length: i64, device: Device) -> i64 {
    let unit = if device == Device::Cpu && length > 192 { 512 } else { 16 };
    (length + unit - 1) / unit * unit
}

/// How many queries it is given for `length` of them; see [`ROWS`].
pub(super) fn padded_queries(length: i64, device: Device) -> i64 {
    if device == Device::Cpu { (length + ROWS - 1) / ROWS * ROWS } else { length }
}

/// Attention that can be gone back through.
#[derive(Debug)]
pub(super) enum Attended {
    /// By CUDA's flash kernel.
    Flash(Flash),
    /// By whatever libtorch chose: queries, keys and values, and what autograd has noted of the result.
    Noted { inputs: [Tensor; 3], mixed: Tensor },
}

/// Causal attention `[N, heads, head_dim]` within each sequence. Keys and values may have fewer heads, which
/// divide those of the queries.
pub(super) fn whole(qkv: [Tensor; 3], layout: &Layout) -> Result<Attended> {
    if flash::takes(&qkv[0]) {
        return Ok(Attended::Flash(Flash::forward(qkv, &layout.bounds)?));
    }
    let mut inputs = qkv;
    for tensor in &mut inputs {
        *tensor = tensor.f_detach()?.f_set_requires_grad(true)?;
    }
    let mixed = tch::with_grad(|| runs(&inputs, &layout.runs))?;
    Ok(Attended::Noted { inputs, mixed })
}

/// The same, with no way back.
pub(super) fn whole_once(qkv: [Tensor; 3], layout: &Layout) -> Result<Tensor> {
    match flash::takes(&qkv[0]) {
        true => Ok(Flash::forward(qkv, &layout.bounds)?.mixed),
        false => runs(&qkv, &layout.runs),
    }
}

impl Attended {
    /// What each query attends to.
    pub(super) fn mixed(&self) -> Tensor {
        match self {
            Attended::Flash(flash) => flash.mixed.shallow_clone(),
            Attended::Noted { mixed, .. } => mixed.detach(),
        }
    }

    /// Gradients of queries, keys and values, given that of [`Attended::mixed`].
    pub(super) fn backward(self, gradient: &Tensor) -> Result<[Tensor; 3]> {
        match self {
            Attended::Flash(flash) => flash.backward(gradient),
            Attended::Noted { inputs, mixed } => {
                let found = pull(&[mixed], &[gradient], &inputs.each_ref())?;
                found.try_into().map_err(|found: Vec<Tensor>| input("gradients", 3, found.len()))
            }
        }
    }
}

fn runs(qkv: &[Tensor; 3], runs: &[Run]) -> Result<Tensor> {
    match runs {
        [only] => run(qkv, *only),
        runs => Ok(Tensor::f_cat(&runs.iter().map(|one| run(qkv, *one)).collect::<Result<Vec<_>>>()?, 0)?),
    }
}

/// Sequences of one length.
fn run(qkv: &[Tensor; 3], run: Run) -> Result<Tensor> {
    let [query, key, value] = qkv;
    let Run { start, count, length } = run;
    let (queries, keys) = match query.device() {
        Device::Cpu => (padded_queries(length, Device::Cpu), padded_keys(length, Device::Cpu)),
        _ => (length, length),
    };
    let rows = |x: &Tensor, padded: i64| {
        padded_to(&x.f_narrow(0, start, count * length)?.f_unflatten(0, [count, length])?, padded)
    };
    let mixed = mix(&rows(query, queries)?, &rows(key, keys)?, &rows(value, keys)?, None)?;
    Ok(mixed.f_narrow(1, 0, length)?.f_flatten(0, 1)?)
}

/// Attention of new tokens `[R, T, heads, head_dim]` to what a cache holds of their sequences. The mask
/// `[R, 1, Q, K]` has [`padded_queries`] and [`padded_keys`].
pub(super) fn cached(query: &Tensor, keys: &Tensor, values: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let mixed = mix(&padded_to(query, mask.size()[2])?, keys, values, Some(mask))?;
    Ok(mixed.f_narrow(1, 0, query.size()[1])?)
}

/// `[B, T, heads, head_dim]` with zeros behind its tokens, `length` in all.
fn padded_to(x: &Tensor, length: i64) -> Result<Tensor> {
    match length - x.size()[1] {
        0 => Ok(x.shallow_clone()),
        missing => Ok(x.f_constant_pad_nd([0, 0, 0, 0, 0, missing])?),
    }
}

/// Attention proper over `[B, T, heads, head_dim]`; causal when there is no mask.
fn mix(query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (heads, kv_heads) = (query.size()[2], key.size()[2]);
    let grouped = heads != kv_heads;
    // Of CUDA's kernels only those for 16 bits share keys between heads; in f32 that would be the one that
    // stores every score.
    let spread = grouped && query.device().is_cuda() && query.f_kind()? == Kind::Float;
    let by_head = |x: &Tensor| {
        let by_head = x.f_transpose(1, 2)?;
        if spread { by_head.f_repeat_interleave_self_int(heads / kv_heads, 1, None) } else { Ok(by_head) }
    };
    let mixed = Tensor::f_scaled_dot_product_attention(
        &query.f_transpose(1, 2)?,
        &by_head(key)?,
        &by_head(value)?,
        mask,
        0.0,
        mask.is_none(),
        None,
        grouped && !spread,
    )?;
    Ok(mixed.f_transpose(1, 2)?)
}
