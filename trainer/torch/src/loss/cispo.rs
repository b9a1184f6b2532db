//! CISPO (MiniMax-M1, 2025): the clipped ratio is a constant weight of the log-prob, so that a clipped token still
//! has a gradient.

use driftless_trainer::options::LearnOptions;
use tch::Tensor;

use super::{Surrogate, Tokens};
use crate::error::Result;

/// `−sg(clip(r)) A log π`, from log-probs `new`.
pub(super) fn loss(
    new: &Tensor,
    log_ratio: &Tensor,
    tokens: &Tokens,
    options: &LearnOptions,
) -> Result<Surrogate> {
    let ratio = log_ratio.f_detach()?.f_exp()?;
    let cut = ratio.f_clamp(1.0 - options.eps_clip, 1.0 + options.eps_clip_high())?;
    let losses = cut.f_mul(&tokens.advantages)?.f_mul(new)?.f_neg()?;
    Ok(Surrogate { losses, clipped: cut.f_ne_tensor(&ratio)? })
}
