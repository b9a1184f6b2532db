//! The critic's loss.

use tch::Tensor;

use super::weighted;
use crate::error::Result;

/// `max((clip(v) − R)², (v − R)²)` by `weights`, a scalar that carries gradients, and the weighted share of values
/// that were clipped. `clip(v)` is `v` within `clip` of `old`; all columns are `[m]` f32.
///
/// # Errors
/// [`crate::Error::Torch`] if shapes disagree.
pub fn value_loss(
    values: &Tensor,
    old: &Tensor,
    returns: &Tensor,
    weights: &Tensor,
    clip: f64,
) -> Result<(Tensor, Tensor)> {
    let moved = values.f_sub(old)?;
    let clipped = old.f_add(&moved.f_clamp(-clip, clip)?)?;
    let square = |values: &Tensor| values.f_sub(returns)?.f_square();
    let loss = weighted(&square(&clipped)?.f_maximum(&square(values)?)?, weights)?;
    Ok((loss, weighted(&moved.f_detach()?.f_abs()?.f_gt(clip)?, weights)?))
}
