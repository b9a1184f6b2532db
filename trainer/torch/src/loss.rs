//! Losses over trained tokens. Each is a weighted sum; the weights carry the reduction
//! ([`crate::token_weights`]), so that chunks and micro-batches add up to the mean over the whole batch.
//! Formulas and sources: `docs/algorithms.md`.

use driftless_trainer::{Kl, Tis};
use tch::{Kind, Tensor};

use crate::batch::Batch;
use crate::error::Result;

/// Log-ratios beyond ± this count as this: a ratio of `e^20` says only that the two policies have nothing to
/// do with each other, and an infinite one would poison the step.
const LOG_RATIO_MAX: f64 = 20.0;

/// What is done with the ratio of the policy's and the old policy's probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surrogate {
    /// Each token's own, clipped (PPO, Schulman et al. 2017).
    Token,
    /// The geometric mean over a sample's trained tokens, clipped (GSPO, Zheng et al. 2025).
    Sequence,
    /// Each token's own, clipped, as a constant weight of the log-prob (CISPO, MiniMax 2025).
    Cispo,
}

/// The policy loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLoss {
    /// What is clipped, and how.
    pub surrogate: Surrogate,
    /// The probability ratio counts down to `1 − eps_clip`.
    pub eps_clip: f64,
    /// The probability ratio counts up to `1 + eps_clip_high` ("clip higher" when above `eps_clip`).
    pub eps_clip_high: f64,
    /// Where the advantage is negative, the ratio counts up to this (dual clip, Ye et al. 2020); above 1.
    pub eps_clip_c: Option<f64>,
    /// Weighs each token by the trainer's probability over the engine's, within bounds. The old policy is
    /// then the trainer's before the step, instead of the engine's.
    pub tis: Option<Tis>,
    /// Penalty on the distance to a reference policy, which the [`crate::Policy`] must then have.
    pub kl: Option<(Kl, f64)>,
    /// Entropy bonus.
    pub entropy_coef: f64,
    /// Divides logits, as when the tokens were sampled.
    pub temperature: f64,
}

impl Default for PolicyLoss {
    fn default() -> Self {
        PolicyLoss {
            surrogate: Surrogate::Token,
            eps_clip: 0.2,
            eps_clip_high: 0.2,
            eps_clip_c: None,
            tis: None,
            kl: None,
            entropy_coef: 0.0,
            temperature: 1.0,
        }
    }
}

/// Trained tokens with what is known of them; every column is `[m]` f32.
#[derive(Debug)]
pub struct Tokens {
    /// Share in the loss.
    pub weights: Tensor,
    /// Log-prob when sampled.
    pub old_log_probs: Tensor,
    /// Advantage.
    pub advantages: Tensor,
    /// Log-prob under the reference policy; needed for a KL term.
    pub reference: Option<Tensor>,
    /// Mean over the token's sample of policy − old log-prob; needed for [`Surrogate::Sequence`].
    pub sequence: Option<Tensor>,
}

impl Tokens {
    /// The columns of `length` tokens from `start` on.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Result<Tokens> {
        let some = |column: &Tensor| column.f_narrow(0, start, length);
        let maybe = |column: &Option<Tensor>| column.as_ref().map(some).transpose();
        Ok(Tokens {
            weights: some(&self.weights)?,
            old_log_probs: some(&self.old_log_probs)?,
            advantages: some(&self.advantages)?,
            reference: maybe(&self.reference)?,
            sequence: maybe(&self.sequence)?,
        })
    }
}

/// A policy loss and what one wants to watch, over some tokens.
#[derive(Debug)]
pub struct PolicyTerms {
    /// To be minimised; a scalar that carries gradients.
    pub loss: Tensor,
    /// f64 sums over tokens, weighted as the loss is, in the order of [`Watched`].
    pub(crate) sums: Tensor,
    /// The largest |policy − engine log-prob|.
    pub(crate) furthest: Tensor,
}

/// What a sum of [`PolicyTerms`] is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watched {
    /// Tokens whose ratio was clipped.
    Clipped,
    /// Old − policy log-prob: estimate k1 of KL(old ‖ policy).
    PpoKl,
    /// |policy − engine log-prob|.
    Difference,
    /// Estimate k3 of KL(engine ‖ policy).
    K3,
    /// Entropy in nats.
    Entropy,
    /// Estimate of KL(policy ‖ reference).
    KlLoss,
    /// Tokens whose importance weight was cut.
    TisClipped,
}

impl PolicyTerms {
    /// The weighted sum over tokens, which is a mean where the weights add up to 1.
    #[must_use]
    pub fn mean(&self, of: Watched) -> f64 {
        self.sums.double_value(&[of as i64])
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
    options: &PolicyLoss,
) -> Result<PolicyTerms> {
    let now = new.f_detach()?;
    let behind = now.f_sub(&tokens.old_log_probs)?;
    let log_ratio = log_ratio(new, tokens, options)?;
    let (mut losses, clipped) = surrogate(new, &log_ratio, tokens, options)?;
    let zero = now.f_zeros_like()?;
    let mut tis_clipped = zero.shallow_clone();
    if let Some(Tis { low, high }) = options.tis {
        let weight = bounded(&behind)?.f_exp()?;
        let cut = weight.f_clamp(low, high)?;
        tis_clipped = cut.f_ne_tensor(&weight)?;
        losses = losses.f_mul(&cut)?;
    }
    let mut kl_loss = zero.shallow_clone();
    if let Some((kind, coefficient)) = options.kl {
        let reference = tokens.reference.as_ref().ok_or_else(|| missing("reference log-probs", "KL term"))?;
        let term = kl(kind, new, reference)?;
        losses = losses.f_add(&term.f_mul_scalar(coefficient)?)?;
        kl_loss = term.f_detach()?;
    }
    if options.entropy_coef != 0.0 {
        let entropy = entropy.ok_or_else(|| missing("entropy", "entropy bonus"))?;
        losses = losses.f_sub(&entropy.f_mul_scalar(options.entropy_coef)?)?;
    }
    let sum = |x: &Tensor| weighted(x, &tokens.weights);
    let loss = sum(&losses)?;
    tch::no_grad(|| {
        let near = bounded(&behind)?;
        let sums = [
            sum(&clipped)?,
            sum(&log_ratio.f_neg()?)?,
            sum(&behind.f_abs()?)?,
            sum(&k3(&near.f_neg()?)?)?,
            sum(entropy.unwrap_or(&zero))?,
            sum(&kl_loss)?,
            sum(&tis_clipped)?,
        ];
        Ok(PolicyTerms { loss, sums: Tensor::f_stack(&sums, 0)?, furthest: behind.f_abs()?.f_max()? })
    })
}

/// Policy − old log-prob, bounded; its gradient is that of the policy's log-prob.
fn log_ratio(new: &Tensor, tokens: &Tokens, options: &PolicyLoss) -> Result<Tensor> {
    let now = new.f_detach()?;
    // One optimiser step a rollout: the trainer's old policy is the one that is being differentiated.
    let old = if options.tis.is_some() { &now } else { &tokens.old_log_probs };
    let own = new.f_sub(old)?;
    let ratio = match options.surrogate {
        Surrogate::Token | Surrogate::Cispo => own,
        Surrogate::Sequence => {
            let mean = tokens.sequence.as_ref();
            let mean = mean.ok_or_else(|| missing("means over samples", "ratio of sequences"))?;
            // A sample's tokens weigh the same. So their gradients, each for itself, add up to that of the
            // mean.
            mean.f_add(&new.f_sub(&now)?)?
        }
    };
    bounded(&ratio)
}

/// The loss of each token, and 1 where its ratio was clipped.
fn surrogate(
    new: &Tensor,
    log_ratio: &Tensor,
    tokens: &Tokens,
    options: &PolicyLoss,
) -> Result<(Tensor, Tensor)> {
    let ratio = log_ratio.f_exp()?;
    let clipped = ratio.f_clamp(1.0 - options.eps_clip, 1.0 + options.eps_clip_high)?;
    if options.surrogate == Surrogate::Cispo {
        let gain = clipped.f_detach()?.f_mul(&tokens.advantages)?.f_mul(new)?;
        return Ok((gain.f_neg()?, clipped.f_ne_tensor(&ratio)?));
    }
    let gain = ratio.f_mul(&tokens.advantages)?;
    let clipped_gain = clipped.f_mul(&tokens.advantages)?;
    let mut losses = gain.f_minimum(&clipped_gain)?.f_neg()?;
    if let Some(c) = options.eps_clip_c {
        let most = losses.f_minimum(&tokens.advantages.f_mul_scalar(-c)?)?;
        losses = most.f_where_self(&tokens.advantages.f_lt(0.0)?, &losses)?;
    }
    Ok((losses, clipped_gain.f_lt_tensor(&gain)?))
}

/// Mean over each token's sample of policy − old log-prob, `[M]`, from the log-probs `now` of a batch's
/// tokens.
pub(crate) fn sequence_log_ratios(now: &Tensor, batch: &Batch, options: &PolicyLoss) -> Result<Tensor> {
    let own = match options.tis {
        Some(_) => now.f_zeros_like()?,
        None => now.f_sub(&batch.old_log_probs)?,
    };
    let empty = Tensor::f_zeros([batch.lengths.len() as i64], (Kind::Double, now.device()))?;
    let sum = |x: &Tensor| empty.f_index_add(0, &batch.samples, &x.f_to_kind(Kind::Double)?);
    let mean = sum(&own)?.f_div(&sum(&own.f_ones_like()?)?)?;
    Ok(mean.f_index_select(0, &batch.samples)?.f_to_kind(Kind::Float)?)
}

/// Cross-entropy: a scalar that carries the gradients of `log_probs` `[m]`.
pub(crate) fn sft_loss(log_probs: &Tensor, weights: &Tensor) -> Result<Tensor> {
    weighted(&log_probs.f_neg()?, weights)
}

/// Per-token estimate of KL(policy ‖ reference) from both log-probs of the sampled tokens.
///
/// # Errors
/// [`crate::Error::Torch`] if shapes disagree.
pub fn kl(kind: Kl, policy: &Tensor, reference: &Tensor) -> Result<Tensor> {
    let d = policy.f_sub(reference)?;
    Ok(match kind {
        Kl::K1 => d,
        Kl::K2 => d.f_square()?.f_mul_scalar(0.5)?,
        Kl::K3 => k3(&d)?,
        // Beyond the inner bound the outer one holds: the estimate stays the same, and its gradient finite.
        Kl::LowVarKl => k3(&bounded(&d)?)?.f_clamp_max(10.0)?,
    })
}

fn k3(d: &Tensor) -> Result<Tensor> {
    Ok(d.f_neg()?.f_expm1()?.f_add(d)?)
}

fn bounded(log_ratio: &Tensor) -> Result<Tensor> {
    Ok(log_ratio.f_clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)?)
}

/// Sum of `values × weights`, in f64.
fn weighted(values: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(values.f_mul(weights)?.f_sum(Kind::Double)?)
}

fn missing(what: &'static str, of: &str) -> crate::Error {
    crate::error::input("tokens", format!("{what}, since there is a {of}"), "none")
}
