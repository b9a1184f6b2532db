//! Cross-entropy: of SFT, and of what rejection sampling keeps.

use tch::Tensor;

use super::{Surrogate, Tokens, weighted};
use crate::error::Result;

/// The sum of `−log π` over tokens, by `weights`: a scalar that carries the gradients of `log_probs` `[m]`.
pub(crate) fn sft_loss(log_probs: &Tensor, weights: &Tensor) -> Result<Tensor> {
    weighted(&log_probs.f_neg()?, weights)
}

/// `−A log π`, from log-probs `new`.
pub(super) fn loss(new: &Tensor, tokens: &Tokens) -> Result<Surrogate> {
    let losses = new.f_mul(&tokens.advantages)?.f_neg()?;
    Ok(Surrogate { losses, clipped: new.f_detach()?.f_zeros_like()? })
}
