//! A model being trained: its weights as published, its optimizer, and one step of either kind of training.

use tch::{Kind, Tensor};

use crate::batch::Batch;
use crate::error::Result;
use crate::loss::{self, PolicyLoss};
use crate::models::Model;
use crate::optimizer::{AdamW, AdamWOptions};

/// A model with the optimizer that moves it.
#[derive(Debug)]
pub struct Policy {
    model: Model,
    optimizer: AdamW,
}

/// What one optimizer step was like.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// The loss before the step.
    pub loss: f64,
    /// L2 norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Share of trained tokens whose probability ratio was clipped.
    pub clipped: f64,
    /// Estimate of KL(policy that sampled ‖ policy before the step).
    pub behaviour_kl: f64,
    /// Mean entropy in nats.
    pub entropy: f64,
    /// Mean of |trainer's log-prob − engine's log-prob| over trained tokens.
    pub log_prob_difference: f64,
    /// The largest of those differences.
    pub log_prob_difference_max: f64,
}

impl Policy {
    /// Takes a model into training; `published` is the kind of the weights that engines get (`BFloat16` or
    /// `Float`), to which the model's own weights are rounded.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for kinds that do not go together.
    pub fn new(mut model: Model, published: Kind, options: AdamWOptions) -> Result<Policy> {
        let optimizer = AdamW::new(&mut model, published, options)?;
        Ok(Policy { model, optimizer })
    }

    /// The model, with the weights that are published.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The optimizer.
    #[must_use]
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// Puts a saved optimizer state in place; see [`AdamW::restore`].
    pub(crate) fn restore(&mut self, steps: u64, states: &[[Tensor; 3]]) -> Result<()> {
        self.optimizer.restore(&mut self.model, steps, states)
    }

    /// One supervised step over micro-batches that together are the batch.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`] if the gradients are; nothing has then changed.
    pub fn sft_step(&mut self, batches: &[Batch], lr: f64) -> Result<StepStats> {
        let mut stats = StepStats::default();
        for batch in batches {
            let loss = loss::sft_loss(&self.model.forward(&batch.tokens)?, batch)?;
            loss.f_backward()?;
            self.optimizer.accumulate(&mut self.model)?;
            stats.loss += f64::try_from(&loss)?;
        }
        stats.grad_norm = self.optimizer.step(&mut self.model, lr)?;
        Ok(stats)
    }

    /// One policy-gradient step over micro-batches that together are the batch.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`] if the gradients are; nothing has then changed.
    pub fn policy_step(&mut self, batches: &[Batch], options: &PolicyLoss, lr: f64) -> Result<StepStats> {
        let mut stats = StepStats::default();
        for batch in batches {
            let logits = self.model.forward(&batch.tokens)?;
            let terms = loss::policy_loss(&logits, batch, options)?;
            terms.loss.f_backward()?;
            self.optimizer.accumulate(&mut self.model)?;
            stats.loss += f64::try_from(&terms.loss)?;
            stats.clipped += terms.clipped;
            stats.behaviour_kl += terms.behaviour_kl;
            stats.entropy += terms.entropy;
            stats.log_prob_difference += terms.log_prob_difference;
            stats.log_prob_difference_max = stats.log_prob_difference_max.max(terms.log_prob_difference_max);
        }
        stats.grad_norm = self.optimizer.step(&mut self.model, lr)?;
        Ok(stats)
    }

    /// Log-probs `[B, T]` of a batch's labels under the current weights, without gradients.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch refuses.
    pub fn log_probs(&self, batch: &Batch, temperature: f64) -> Result<Tensor> {
        tch::no_grad(|| loss::log_probs(&self.model.forward(&batch.tokens)?, &batch.labels, temperature))
    }
}
