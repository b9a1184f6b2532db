//! What engine and trainer disagree about: importance weights and rejection. No gradient flows through either.

use driftless_trainer::options::{Estimator, LearnOptions, Level, TisMode};
use tch::{Kind, Tensor};

use super::{Tokens, bounded};
use crate::batch::Batch;
use crate::error::Result;

/// What is said of the whole sample of a token; each column is `[m]` f32.
#[derive(Debug)]
pub struct Sequence {
    /// Mean of policy − old log-prob.
    pub ratio: Tensor,
    /// Sum of old − engine's log-prob.
    pub sum: Tensor,
    /// Mean of the same.
    pub mean: Tensor,
    /// Least of the same.
    pub least: Tensor,
}

impl Sequence {
    /// Whether `options` ask for it.
    pub(crate) fn asked(options: &LearnOptions) -> bool {
        let coarse = |level: Level| level != Level::Token;
        options.advantage_estimator == Estimator::Gspo
            || options.use_opsm
            || (options.use_tis && coarse(options.tis_level))
            || (options.use_rs && (coarse(options.rs_level) || options.rs_veto_threshold.is_some()))
    }

    /// That of a whole batch, whose trained tokens have log-probs `now` `[M]`.
    pub(crate) fn of(now: &Tensor, batch: &Batch, options: &LearnOptions) -> Result<Sequence> {
        let old = batch.old(options).unwrap_or(now);
        let none = Tensor::f_zeros([batch.lengths.len() as i64], (Kind::Double, now.device()))?;
        let sum = |x: &Tensor| none.f_index_add(0, &batch.samples, &x.f_to_kind(Kind::Double)?);
        let spread = |x: &Tensor| x.f_index_select(0, &batch.samples)?.f_to_kind(Kind::Float);
        let counts = sum(&now.f_ones_like()?)?.f_clamp_min(1.0)?;
        let behind = old.f_sub(&batch.rollout_log_probs)?;
        let total = sum(&behind)?;
        let least = none.f_to_kind(Kind::Float)?.f_index_reduce(0, &batch.samples, &behind, "amin", false)?;
        Ok(Sequence {
            ratio: spread(&sum(&now.f_sub(old)?)?.f_div(&counts)?)?,
            sum: spread(&total)?,
            mean: spread(&total.f_div(&counts)?)?,
            least: spread(&least)?,
        })
    }

    /// The columns of `length` tokens from `start` on.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Result<Sequence> {
        let some = |column: &Tensor| column.f_narrow(0, start, length);
        Ok(Sequence {
            ratio: some(&self.ratio)?,
            sum: some(&self.sum)?,
            mean: some(&self.mean)?,
            least: some(&self.least)?,
        })
    }
}

/// Importance weights `[m]` of trainer over engine, and where they were out of bounds. `behind` `[m]` is trainer −
/// engine's log-prob.
pub(super) fn weights(options: &LearnOptions, behind: &Tensor, tokens: &Tokens) -> Result<(Tensor, Tensor)> {
    let (low, high) = (options.tis_clip_low, options.tis_clip);
    let ratio = ratio(options.tis_level, behind, tokens)?;
    let cut = match options.tis_mode {
        TisMode::Clip => ratio.f_clamp(low, high)?,
        TisMode::Mask => ratio.f_mul(&within(&ratio, low, high)?)?,
    };
    let out = cut.f_ne_tensor(&ratio)?;
    Ok((cut, out))
}

/// 1 `[m]` where a token is learned from, 0 where it is rejected.
pub(super) fn kept(options: &LearnOptions, behind: &Tensor, tokens: &Tokens) -> Result<Tensor> {
    let ratio = ratio(options.rs_level, behind, tokens)?;
    let kept = within(&ratio, options.rs_lower_bound, options.rs_upper_bound)?;
    let Some(veto) = options.rs_veto_threshold else { return Ok(kept) };
    Ok(kept.f_mul(&tokens.of_sample("veto")?.least.f_ge(veto.ln())?)?)
}

/// The probability ratio `[m]` of trainer and engine.
fn ratio(level: Level, behind: &Tensor, tokens: &Tokens) -> Result<Tensor> {
    let log_ratio = match level {
        Level::Token => behind,
        Level::Sequence => &tokens.of_sample("ratio of samples")?.sum,
        Level::Geometric => &tokens.of_sample("ratio of samples")?.mean,
    };
    Ok(bounded(log_ratio)?.f_exp()?)
}

fn within(ratio: &Tensor, low: f64, high: f64) -> Result<Tensor> {
    let (above, below) = (ratio.f_ge(low)?, ratio.f_le(high)?);
    Ok(above.f_logical_and(&below)?.f_to_kind(Kind::Float)?)
}
