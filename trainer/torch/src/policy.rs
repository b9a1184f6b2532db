//! A model being trained: its weights as published, its optimizer, and one step of either kind of training.

use tch::{Kind, Tensor};

use crate::batch::Batch;
use crate::error::{Error, Result, input};
use crate::head::{Chosen, Entropy, default_rows};
use crate::loss::{self, PolicyLoss, PolicyTerms, Surrogate, Tokens};
use crate::models::{Model, Pass};
use crate::optimizer::{AdamW, AdamWOptions};

/// A model with the optimizer that moves it.
#[derive(Debug)]
pub struct Policy {
    model: Model,
    optimizer: AdamW,
    reference: Option<Model>,
    recompute: bool,
    chunk: Option<usize>,
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
    /// Estimate k1 of KL(old policy ‖ policy before the step): the mean of old − new log-prob.
    pub ppo_kl: f64,
    /// Estimate k3 of KL(policy that sampled ‖ policy before the step).
    pub behaviour_kl: f64,
    /// Mean entropy in nats.
    pub entropy: f64,
    /// Mean estimate of KL(policy ‖ reference), if it is part of the loss.
    pub kl_loss: f64,
    /// Share of trained tokens whose importance weight was cut.
    pub tis_clipped: f64,
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
        Ok(Policy { model, optimizer, reference: None, recompute: false, chunk: None })
    }

    /// The same with activations computed again on the way back (`--recompute-granularity full`): a tenth of
    /// the memory for a third more work.
    #[must_use]
    pub fn with_recompute(self, recompute: bool) -> Policy {
        Policy { recompute, ..self }
    }

    /// The same with logits of so many tokens at once; of as many as fit half a GiB, if `None`.
    #[must_use]
    pub fn with_log_probs_chunk_size(self, chunk: Option<usize>) -> Policy {
        Policy { chunk, ..self }
    }

    /// The same with a reference policy for KL terms.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a model of another vocabulary or on another device.
    pub fn with_reference(self, reference: Model) -> Result<Policy> {
        let described =
            |model: &Model| format!("{} tokens on {:?}", model.config().vocab_size, model.device());
        if described(&reference) != described(&self.model) {
            return Err(input("reference policy", described(&self.model), described(&reference)));
        }
        Ok(Policy { reference: Some(reference), ..self })
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
    /// [`crate::Error::NotFinite`] if the loss or the gradients are not, or what libtorch answers. Nothing
    /// has then changed: the same step may be tried again.
    pub fn sft_step(&mut self, batches: &[Batch], lr: f64) -> Result<StepStats> {
        let mut stats = StepStats::default();
        self.optimizer.clear()?;
        for batch in batches.iter().filter(|batch| batch.trains()) {
            let (pass, hidden) = self.forward(batch)?;
            let chosen = self.chosen(&hidden, batch, 1.0)?;
            let mut losses = Vec::new();
            let head = self.model.head_index();
            let gradient = chosen.descend(
                &self.model,
                Entropy::Unasked,
                |rows, scores| {
                    let weights = batch.weights.f_narrow(0, rows.start, rows.end - rows.start)?;
                    let loss = loss::sft_loss(&scores.log_probs, &weights)?;
                    losses.push(loss.f_detach()?);
                    Ok(loss)
                },
                |gradient| self.optimizer.add(head, gradient),
            )?;
            stats.loss += f64::try_from(Tensor::f_stack(&losses, 0)?.f_sum(Kind::Double)?)?;
            self.backward(pass, batch, &gradient)?;
        }
        self.apply(stats, lr)
    }

    /// One policy-gradient step over micro-batches that together are the batch.
    ///
    /// # Errors
    /// As for [`Policy::sft_step`], and [`crate::Error::Input`] for a KL term without a reference policy.
    pub fn policy_step(&mut self, batches: &[Batch], options: &PolicyLoss, lr: f64) -> Result<StepStats> {
        let mut stats = StepStats::default();
        self.optimizer.clear()?;
        for batch in batches.iter().filter(|batch| batch.trains()) {
            let reference =
                options.kl.map(|_| self.reference_log_probs(batch, options.temperature)).transpose()?;
            let (pass, hidden) = self.forward(batch)?;
            let chosen = self.chosen(&hidden, batch, options.temperature)?;
            let sequence = match options.surrogate {
                Surrogate::Sequence => {
                    let now = chosen.log_probs(&self.model)?;
                    Some(loss::sequence_log_ratios(&now, batch, options)?)
                }
                Surrogate::Token | Surrogate::Cispo => None,
            };
            let columns = Tokens {
                weights: batch.weights.shallow_clone(),
                old_log_probs: batch.old_log_probs.shallow_clone(),
                advantages: batch.advantages.shallow_clone(),
                reference,
                sequence,
            };
            let entropy =
                if options.entropy_coef == 0.0 { Entropy::Watched } else { Entropy::Differentiated };
            let head = self.model.head_index();
            let mut seen = Vec::new();
            let gradient = chosen.descend(
                &self.model,
                entropy,
                |rows, scores| {
                    let tokens = columns.narrow(rows.start, rows.end - rows.start)?;
                    let terms =
                        loss::policy_loss(&scores.log_probs, scores.entropy.as_ref(), &tokens, options)?;
                    let loss = terms.loss.shallow_clone();
                    seen.push(terms);
                    Ok(loss)
                },
                |gradient| self.optimizer.add(head, gradient),
            )?;
            stats.add(&seen)?;
            self.backward(pass, batch, &gradient)?;
        }
        self.apply(stats, lr)
    }

    /// Log-probs `[M]` of a batch's trained tokens under the current weights, without gradients.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch refuses.
    pub fn log_probs(&self, batch: &Batch, temperature: f64) -> Result<Tensor> {
        self.log_probs_of(&self.model, batch, temperature)
    }

    fn reference_log_probs(&self, batch: &Batch, temperature: f64) -> Result<Tensor> {
        let model = self.reference.as_ref();
        let model =
            model.ok_or_else(|| input("policy", "a reference policy, since there is a KL term", "none"))?;
        self.log_probs_of(model, batch, temperature)
    }

    fn log_probs_of(&self, model: &Model, batch: &Batch, temperature: f64) -> Result<Tensor> {
        tch::no_grad(|| {
            let hidden = model.packed(&batch.tokens, &batch.lengths)?.f_index_select(0, &batch.trained)?;
            self.chosen(&hidden, batch, temperature)?.log_probs(model)
        })
    }

    /// The forward pass, and the hidden states `[M, hidden]` that predict trained tokens.
    fn forward(&self, batch: &Batch) -> Result<(Pass, Tensor)> {
        let pass = self.model.pass(&batch.tokens, &batch.lengths, self.recompute)?;
        let hidden = pass.hidden().f_detach()?.f_index_select(0, &batch.trained)?;
        Ok((pass, hidden))
    }

    fn chosen<'a>(&self, hidden: &'a Tensor, batch: &'a Batch, temperature: f64) -> Result<Chosen<'a>> {
        let rows = self.chunk.map_or_else(
            || default_rows(self.model.config().vocab_size),
            |chunk| i64::try_from(chunk).unwrap_or(i64::MAX),
        );
        let temperature = Tensor::f_from_slice(&[temperature as f32])?.f_to_device(hidden.device())?;
        Ok(Chosen { hidden, labels: &batch.labels, temperature, rows })
    }

    /// Takes the gradient `[M, hidden]` of the chosen hidden states back through the model.
    fn backward(&mut self, pass: Pass, batch: &Batch, gradient: &Tensor) -> Result<()> {
        let whole = pass.hidden().f_detach()?.f_zeros_like()?;
        let whole = whole.f_index_copy(0, &batch.trained, gradient)?;
        let Policy { model, optimizer, .. } = self;
        model.backward(pass, &whole, &mut |index, gradient| optimizer.add(index, gradient))
    }

    fn apply(&mut self, mut stats: StepStats, lr: f64) -> Result<StepStats> {
        if !stats.loss.is_finite() {
            return Err(Error::NotFinite { what: "loss", found: stats.loss, step: self.optimizer.steps() });
        }
        stats.grad_norm = self.optimizer.step(&mut self.model, lr)?;
        Ok(stats)
    }
}

impl StepStats {
    /// Adds what the chunks of a micro-batch were like.
    fn add(&mut self, chunks: &[PolicyTerms]) -> Result<()> {
        let stacked = |of: fn(&PolicyTerms) -> &Tensor| {
            let chunks = chunks.iter().map(|terms| of(terms).f_detach()).collect::<Result<Vec<_>, _>>()?;
            Tensor::f_stack(&chunks, 0)
        };
        let sums = stacked(|terms| &terms.sums)?.f_sum_dim_intlist(0_i64, false, Kind::Double)?;
        let [clipped, ppo_kl, difference, k3, entropy, kl_loss, tis] = array(&sums)?;
        self.loss += f64::try_from(stacked(|terms| &terms.loss)?.f_sum(Kind::Double)?)?;
        self.clipped += clipped;
        self.ppo_kl += ppo_kl;
        self.log_prob_difference += difference;
        self.behaviour_kl += k3;
        self.entropy += entropy;
        self.kl_loss += kl_loss;
        self.tis_clipped += tis;
        let furthest = f64::try_from(stacked(|terms| &terms.furthest)?.f_max()?)?;
        self.log_prob_difference_max = self.log_prob_difference_max.max(furthest);
        Ok(())
    }
}

/// The elements of a tensor of so many.
fn array<const N: usize>(tensor: &Tensor) -> Result<[f64; N]> {
    let values: Vec<f64> = Vec::try_from(tensor)?;
    values.try_into().map_err(|values: Vec<f64>| input("sums", N, values.len()))
}
