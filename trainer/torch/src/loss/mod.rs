//! Losses over trained tokens. Each is a weighted sum; the weights carry the reduction
//! ([`crate::batch::token_weights`]), so that chunks and micro-batches add up to the mean over the whole batch.
//! Formulas and sources: `docs/algorithms.md`.
//!
//! A new loss is a file here and a line of `surrogate`.

mod cispo;
mod clipped;
mod kl;
mod likelihood;
mod mismatch;
mod value;

use driftless_trainer::options::{Estimator, LearnOptions};
use tch::{Kind, Tensor};

use crate::error::Result;

pub use kl::kl;
pub(crate) use likelihood::sft_loss;
pub use mismatch::Sequence;
pub use value::value_loss;

/// Log-ratios beyond ± this count as this: a ratio of `e^20` says only that the two policies have nothing to
/// do with each other, and an infinite one would poison the step.
const LOG_RATIO_MAX: f64 = 20.0;

/// Trained tokens with what is known of them; every column is `[m]` f32.
#[derive(Debug)]
pub struct Tokens {
    /// Share in the loss.
    pub weights: Tensor,
    /// Log-prob under the engine that sampled.
    pub rollout_log_probs: Tensor,
    /// Log-prob under the old policy; that of the policy itself, if `None`.
    pub old_log_probs: Option<Tensor>,
    /// Advantage.
    pub advantages: Tensor,
    /// Log-prob under the reference policy; needed for a KL term.
    pub reference: Option<Tensor>,
    /// What is said of the token's sample; needed for what compares samples.
    pub sequence: Option<Sequence>,
}

impl Tokens {
    /// The columns of `length` tokens from `start` on.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Result<Tokens> {
        let some = |column: &Tensor| column.f_narrow(0, start, length);
        let maybe = |column: &Option<Tensor>| column.as_ref().map(some).transpose();
        Ok(Tokens {
            weights: some(&self.weights)?,
            rollout_log_probs: some(&self.rollout_log_probs)?,
            old_log_probs: maybe(&self.old_log_probs)?,
            advantages: some(&self.advantages)?,
            reference: maybe(&self.reference)?,
            sequence: self.sequence.as_ref().map(|columns| columns.narrow(start, length)).transpose()?,
        })
    }

    fn of_sample(&self, wanted: &str) -> Result<&Sequence> {
        self.sequence.as_ref().ok_or_else(|| missing("columns of samples", wanted))
    }
}

/// A policy loss and what one wants to watch, over some tokens.
#[derive(Debug)]
pub struct PolicyTerms {
    /// To be minimised; a scalar that carries gradients.
    pub loss: Tensor,
    /// f64 sums over tokens, weighted as the loss is, in the order of [`Watched`].
    pub(crate) sums: Tensor,
    /// The trainer's log-prob of each token that is compared with the engine's.
    pub(crate) compared: Tensor,
}

/// What a sum of [`PolicyTerms`] is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watched {
    /// Tokens whose ratio was clipped.
    Clipped,
    /// Old − policy log-prob: estimate k1 of KL(old ‖ policy).
    PpoKl,
    /// |trainer's − engine's log-prob|.
    Difference,
    /// Estimate k3 of KL(engine ‖ trainer).
    K3,
    /// Entropy in nats.
    Entropy,
    /// Estimate of KL(policy ‖ reference).
    KlLoss,
    /// Tokens whose importance weight was out of bounds.
    TisClipped,
    /// Tokens that were rejected.
    Rejected,
    /// Tokens of samples that are too far from the old policy.
    OpsmClipped,
}

impl PolicyTerms {
    /// The weighted sum over tokens, which is a mean where the weights add up to 1.
    #[must_use]
    pub fn mean(&self, of: Watched) -> f64 {
        self.sums.double_value(&[of as i64])
    }
}

/// What an algorithm makes of the probability ratio, both `[m]`.
struct Surrogate {
    /// The loss of each token, with gradients.
    losses: Tensor,
    /// Where the ratio was clipped.
    clipped: Tensor,
}

/// The loss of each estimator, from log-probs `new` `[m]` and log-ratios `[m]` of policy and old policy.
fn surrogate(new: &Tensor, log_ratio: &Tensor, tokens: &Tokens, options: &LearnOptions) -> Result<Surrogate> {
    match options.advantage_estimator {
        Estimator::Cispo => cispo::loss(new, log_ratio, tokens, options),
        Estimator::RejectionSampling => likelihood::loss(new, tokens),
        Estimator::Grpo
        | Estimator::Gspo
        | Estimator::ReinforcePlusPlus
        | Estimator::ReinforcePlusPlusBaseline
        | Estimator::Ppo => clipped::loss(log_ratio, tokens, options),
    }
}

/// The policy loss of some tokens with log-probs `new` `[m]`, which carry gradients. `entropy` `[m]` is
/// needed for an entropy bonus.
///
/// # Errors
/// [`crate::Error::Input`] if a column is missing that the options need; [`crate::Error::Torch`] if shapes
/// disagree.
pub fn policy_loss(
    new: &Tensor,
    entropy: Option<&Tensor>,
    tokens: &Tokens,
    options: &LearnOptions,
) -> Result<PolicyTerms> {
    let now = new.f_detach()?;
    let old = tokens.old_log_probs.as_ref().unwrap_or(&now);
    let log_ratio = bounded(&match options.advantage_estimator {
        // A sample's tokens weigh the same. So their gradients, each for itself, add up to that of the mean.
        Estimator::Gspo => tokens.of_sample("ratio of samples")?.ratio.f_add(&new.f_sub(&now)?)?,
        _ => new.f_sub(old)?,
    })?;
    let Surrogate { losses, clipped } = surrogate(new, &log_ratio, tokens, options)?;
    let compared = if options.use_rollout_logprobs { &now } else { old };
    let behind = compared.f_sub(&tokens.rollout_log_probs)?;
    let zero = now.f_zeros_like()?;
    let (mut losses, [tis_clipped, rejected, opsm_clipped]) = corrected(losses, &behind, tokens, options)?;
    let mut kl_loss = zero.shallow_clone();
    if options.use_kl_loss {
        let reference = tokens.reference.as_ref().ok_or_else(|| missing("reference log-probs", "KL term"))?;
        let ratio = options
            .use_unbiased_kl
            .then(|| Ok::<_, crate::error::Error>(bounded(&new.f_sub(old)?)?.f_exp()?));
        let term = kl(options.kl_loss_type, new, reference, ratio.transpose()?.as_ref())?;
        losses = losses.f_add(&term.f_mul_scalar(options.kl_loss_coef)?)?;
        kl_loss = term.f_detach()?;
    }
    if options.entropy_coef != 0.0 {
        let entropy = entropy.ok_or_else(|| missing("entropy", "entropy bonus"))?;
        losses = losses.f_sub(&entropy.f_mul_scalar(options.entropy_coef)?)?;
    }
    let sum = |x: &Tensor| weighted(x, &tokens.weights);
    let loss = sum(&losses)?;
    tch::no_grad(|| {
        let sums = [
            sum(&clipped)?,
            sum(&log_ratio.f_neg()?)?,
            sum(&behind.f_abs()?)?,
            sum(&kl::k3(&bounded(&behind)?.f_neg()?)?)?,
            sum(entropy.unwrap_or(&zero))?,
            sum(&kl_loss)?,
            sum(&tis_clipped)?,
            sum(&rejected)?,
            sum(&opsm_clipped)?,
        ];
        Ok(PolicyTerms { loss, sums: Tensor::f_stack(&sums, 0)?, compared: compared.shallow_clone() })
    })
}

/// Losses after what is done about samples and engines that are too far away, and where that was: importance weights
/// out of bounds, rejected tokens, masked samples; all `[m]`. `behind` `[m]` is trainer's − engine's log-prob.
fn corrected(
    mut losses: Tensor,
    behind: &Tensor,
    tokens: &Tokens,
    options: &LearnOptions,
) -> Result<(Tensor, [Tensor; 3])> {
    let zero = || behind.f_zeros_like();
    let [mut tis_clipped, mut rejected, mut opsm_clipped] = [zero()?, zero()?, zero()?];
    if options.use_opsm {
        let far = tokens.of_sample("mask of samples")?.ratio.f_neg()?.f_gt(options.opsm_delta)?;
        opsm_clipped = far.f_logical_and(&tokens.advantages.f_lt(0.0)?)?.f_to_kind(Kind::Float)?;
        losses = losses.f_mul(&opsm_clipped.f_rsub_scalar(1.0)?)?;
    }
    if options.use_tis {
        let (weights, out) = mismatch::weights(options, behind, tokens)?;
        losses = losses.f_mul(&weights)?;
        tis_clipped = out;
    }
    if options.use_rs {
        let kept = mismatch::kept(options, behind, tokens)?;
        losses = losses.f_mul(&kept)?;
        rejected = kept.f_rsub_scalar(1.0)?;
    }
    Ok((losses, [tis_clipped, rejected, opsm_clipped]))
}

fn bounded(log_ratio: &Tensor) -> Result<Tensor> {
    Ok(log_ratio.f_clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)?)
}

/// Sum of `values × weights`, in f64.
fn weighted(values: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(values.f_mul(weights)?.f_sum(Kind::Double)?)
}

fn missing(what: &'static str, of: &str) -> crate::error::Error {
    crate::error::input("tokens", format!("{what}, since there is a {of}"), "none")
}
