//! The clipped surrogate (PPO, Schulman et al. 2017): GRPO's, REINFORCE++'s and PPO's loss, and with the ratio of
//! whole samples GSPO's (Zheng et al. 2025).

use driftless_trainer::options::LearnOptions;
use tch::Tensor;

use super::{Surrogate, Tokens};
use crate::error::Result;

/// `−min(r A, clip(r) A)`, and with `--eps-clip-c C` at most `−C A` where A is negative (dual clip, Ye et al.
/// 2020).
pub(super) fn loss(log_ratio: &Tensor, tokens: &Tokens, options: &LearnOptions) -> Result<Surrogate> {
    let ratio = log_ratio.f_exp()?;
    let gain = ratio.f_mul(&tokens.advantages)?;
    let cut = ratio.f_clamp(1.0 - options.eps_clip, 1.0 + options.eps_clip_high())?;
    let cut_gain = cut.f_mul(&tokens.advantages)?;
    let mut losses = gain.f_minimum(&cut_gain)?.f_neg()?;
    if let Some(c) = options.eps_clip_c {
        let most = losses.f_minimum(&tokens.advantages.f_mul_scalar(-c)?)?;
        losses = most.f_where_self(&tokens.advantages.f_lt(0.0)?, &losses)?;
    }
    Ok(Surrogate { losses, clipped: cut_gain.f_lt_tensor(&gain)? })
}
