//! Losses. Each is a weighted sum over tokens; the weights carry the loss mask and the reduction
//! ([`crate::token_weights`]), so that micro-batches add up to the mean over the whole batch.

use tch::{Kind, Tensor};

use crate::batch::Batch;
use crate::error::{Error, Result};

/// Estimator of KL(policy ‖ reference) from one sample per token (Schulman 2020); `d = log p − log p_ref`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kl {
    /// `d`: unbiased, high variance, zero gradient in expectation as a loss.
    K1,
    /// `d² / 2`.
    K2,
    /// `exp(−d) + d − 1`: unbiased, never negative; `d` is kept within ±10.
    K3,
}

/// The policy loss: clipped surrogate (PPO, Schulman et al. 2017), optionally with KL and entropy terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLoss {
    /// The probability ratio counts down to `1 − eps_clip`.
    pub eps_clip: f64,
    /// The probability ratio counts up to `1 + eps_clip_high` ("clip higher" when above `eps_clip`).
    pub eps_clip_high: f64,
    /// Penalty on the distance to a reference policy; the batch must then carry its log-probs.
    pub kl: Option<(Kl, f64)>,
    /// Entropy bonus.
    pub entropy_coef: f64,
    /// Divides logits, as when the tokens were sampled.
    pub temperature: f64,
}

/// A policy loss and what one wants to watch; all are weighted like the loss.
#[derive(Debug)]
pub struct PolicyTerms {
    /// To be minimised; a scalar that carries gradients.
    pub loss: Tensor,
    /// Share of tokens whose ratio was clipped.
    pub clipped: f64,
    /// Estimate k3 of KL(policy that sampled ‖ policy).
    pub behaviour_kl: f64,
    /// Mean entropy in nats.
    pub entropy: f64,
    /// Mean of |log-prob here − log-prob recorded by the engine|.
    pub log_prob_difference: f64,
    /// The largest of those differences.
    pub log_prob_difference_max: f64,
}

/// Log-probabilities `[B, T]` of `labels` `[B, T]` under `logits` `[B, T, V]` divided by `temperature`.
///
/// # Errors
/// [`Error::Torch`] if shapes disagree.
pub fn log_probs(logits: &Tensor, labels: &Tensor, temperature: f64) -> Result<Tensor> {
    let logits = scaled(logits, temperature)?;
    let chosen = logits.f_gather(-1, &labels.f_unsqueeze(-1)?, false)?.f_squeeze_dim(-1)?;
    Ok(chosen.f_sub(&logits.f_logsumexp([-1], false)?)?)
}

/// Entropy `[B, T]`, in nats, of the distributions given by `logits` `[B, T, V]` divided by `temperature`.
///
/// # Errors
/// [`Error::Torch`] if libtorch refuses.
pub fn entropy(logits: &Tensor, temperature: f64) -> Result<Tensor> {
    let log_p = scaled(logits, temperature)?.f_log_softmax(-1, Kind::Float)?;
    let sum = log_p.f_exp()?.f_mul(&log_p)?.f_sum_dim_intlist([-1].as_slice(), false, Kind::Float)?;
    Ok(sum.f_neg()?)
}

/// Cross-entropy of the batch's labels: a scalar that carries gradients.
///
/// # Errors
/// [`Error::Torch`] if shapes disagree.
pub fn sft_loss(logits: &Tensor, batch: &Batch) -> Result<Tensor> {
    let losses = log_probs(logits, &batch.labels, 1.0)?.f_neg()?;
    weighted(&losses, &batch.weights)
}

/// The clipped policy loss of a batch.
///
/// # Errors
/// [`Error::Input`] if a KL is asked for and the batch has no reference log-probs.
pub fn policy_loss(logits: &Tensor, batch: &Batch, options: &PolicyLoss) -> Result<PolicyTerms> {
    let new = log_probs(logits, &batch.labels, options.temperature)?;
    let difference = new.f_sub(&batch.old_log_probs)?;
    let ratio = difference.f_exp()?;
    let clipped = ratio.f_clamp(1.0 - options.eps_clip, 1.0 + options.eps_clip_high)?;
    let gain = ratio.f_mul(&batch.advantages)?;
    let clipped_gain = clipped.f_mul(&batch.advantages)?;
    let mut losses = gain.f_minimum(&clipped_gain)?.f_neg()?;
    if let Some((kind, coefficient)) = options.kl {
        let reference = batch.reference_log_probs.as_ref();
        let reference = reference.ok_or_else(|| missing("reference log-probs"))?;
        losses = losses.f_add(&kl(kind, &new, reference)?.f_mul_scalar(coefficient)?)?;
    }
    let entropy = match options.entropy_coef {
        // Only watched: no gradient, no memory for one.
        0.0 => tch::no_grad(|| entropy(logits, options.temperature))?,
        coefficient => {
            let entropy = entropy(logits, options.temperature)?;
            losses = losses.f_sub(&entropy.f_mul_scalar(coefficient)?)?;
            entropy
        }
    };
    let loss = weighted(&losses, &batch.weights)?;
    tch::no_grad(|| {
        let distance = difference.f_abs()?;
        let mean = |x: &Tensor| Ok::<_, Error>(f64::try_from(weighted(x, &batch.weights)?)?);
        Ok(PolicyTerms {
            clipped: mean(&clipped_gain.f_lt_tensor(&gain)?)?,
            behaviour_kl: mean(&kl(Kl::K3, &batch.old_log_probs, &new)?)?,
            entropy: mean(&entropy)?,
            log_prob_difference: mean(&distance)?,
            log_prob_difference_max: f64::try_from(trained(&distance, &batch.weights)?.f_max()?)?,
            loss,
        })
    })
}

/// Per-token estimate of KL(policy ‖ reference) from both log-probs of the sampled tokens.
///
/// # Errors
/// [`Error::Torch`] if shapes disagree.
pub fn kl(kind: Kl, policy: &Tensor, reference: &Tensor) -> Result<Tensor> {
    let d = policy.f_sub(reference)?;
    Ok(match kind {
        Kl::K1 => d,
        Kl::K2 => d.f_square()?.f_mul_scalar(0.5)?,
        Kl::K3 => {
            let d = d.f_clamp(-10.0, 10.0)?;
            d.f_neg()?.f_expm1()?.f_add(&d)?
        }
    })
}

fn scaled(logits: &Tensor, temperature: f64) -> Result<Tensor> {
    Ok(if temperature == 1.0 { logits.shallow_clone() } else { logits.f_div_scalar(temperature)? })
}

/// Sum of `values × weights`.
fn weighted(values: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(trained(values, weights)?.f_mul(weights)?.f_sum(Kind::Float)?)
}

/// `values` as f32 where the weight is not 0, else 0 (also in place of infinities).
fn trained(values: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(values.f_to_kind(Kind::Float)?.f_masked_fill(&weights.f_eq(0)?, 0.0)?)
}

fn missing(what: &'static str) -> Error {
    crate::error::input("batch", "reference log-probs, since a KL term is on", what)
}
