//! A model being trained: its weights as published, its optimizer, and one step of either kind of training.

use driftless_trainer::metrics::StepStats;
use driftless_trainer::options::LearnOptions;
use tch::{Kind, Tensor};

use crate::apart::Compared;
use crate::batch::Batch;
use crate::error::{Result, input};
use crate::head::{Chosen, Entropy, default_rows};
use crate::loss::{self, PolicyTerms, Sequence, Tokens};
use crate::models::Model;
use crate::optimizer::{AdamW, AdamWOptions};
use crate::trained::{Trained, hidden};

/// A model with the optimizer that moves it, and the models that it is compared with.
#[derive(Debug)]
pub struct Policy {
    pub(crate) trained: Trained,
    reference: Option<Model>,
    reference_moves: bool,
    teacher: Option<Model>,
    chunk: Option<usize>,
    /// Of the tokens trained on since it was taken.
    compared: Compared,
}

impl Policy {
    /// Takes a model into training; `published` is the kind of the weights that engines get (`BFloat16` or
    /// `Float`), to which the model's own weights are rounded.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for kinds that do not go together.
    pub fn new(model: Model, published: Kind, options: AdamWOptions) -> Result<Policy> {
        Ok(Policy::of(Trained::new(model, published, options, None)?))
    }

    pub(crate) fn of(trained: Trained) -> Policy {
        let compared = Compared::default();
        Policy { trained, reference: None, reference_moves: false, teacher: None, chunk: None, compared }
    }

    /// The same with activations computed again on the way back (`--recompute-granularity full`): a tenth of
    /// the memory for a third more work.
    #[must_use]
    pub fn with_recompute(mut self, recompute: bool) -> Policy {
        self.trained.recompute = recompute;
        self
    }

    /// The same with logits of so many tokens at once; of as many as fit half a GiB, if `None`.
    #[must_use]
    pub fn with_log_probs_chunk_size(self, chunk: Option<usize>) -> Policy {
        Policy { chunk, ..self }
    }

    /// The same with a reference policy for KL terms. One that `moves` (`Policy::update_reference`) has to be of
    /// the policy's shape, and is part of training checkpoints.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a model of another vocabulary, on another device, or of another shape.
    pub fn with_reference(self, reference: Model, moves: bool) -> Result<Policy> {
        self.check_like("reference policy", &reference)?;
        if moves && reference.config() != self.model().config() {
            let expected = format!("the policy's shape, {:?}", self.model().config());
            return Err(input("reference policy that moves", expected, format!("{:?}", reference.config())));
        }
        Ok(Policy { reference: Some(reference), reference_moves: moves, ..self })
    }

    /// The same with a teacher for on-policy distillation.
    ///
    /// # Errors
    /// As for [`Policy::with_reference`].
    pub fn with_teacher(self, teacher: Model) -> Result<Policy> {
        self.check_like("teacher", &teacher)?;
        Ok(Policy { teacher: Some(teacher), ..self })
    }

    fn check_like(&self, what: &'static str, other: &Model) -> Result<()> {
        let described =
            |model: &Model| format!("{} tokens on {:?}", model.config().vocab_size, model.device());
        match (described(self.model()), described(other)) {
            (own, others) if own == others => Ok(()),
            (own, others) => Err(input(what, own, others)),
        }
    }

    /// The model, with the weights that are published.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.trained.model
    }

    /// The optimizer.
    #[must_use]
    pub fn optimizer(&self) -> &AdamW {
        &self.trained.optimizer
    }

    /// The reference policy, if it moves.
    pub(crate) fn moving_reference(&self) -> Option<&Model> {
        self.reference.as_ref().filter(|_| self.reference_moves)
    }

    /// Takes the policy as it is for the reference.
    pub(crate) fn update_reference(&mut self) -> Result<()> {
        let weights =
            self.trained.model.parameters().iter().map(|parameter| parameter.tensor.shallow_clone());
        self.restore_reference(&weights.collect::<Vec<_>>())
    }

    /// Puts weights, in the order of [`Model::parameters`], in place of the reference's.
    pub(crate) fn restore_reference(&mut self, weights: &[Tensor]) -> Result<()> {
        self.reference.as_mut().map_or(Ok(()), |reference| reference.copy_from(weights))
    }

    /// One supervised step over micro-batches that together are the batch.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`] if the loss or the gradients are not, or what libtorch answers. Nothing
    /// has then changed: the same step may be tried again.
    pub fn sft_step(&mut self, batches: &[Batch], lr: f64) -> Result<StepStats> {
        self.step(batches, lr, |policy, batch, stats| {
            stats.loss += policy.sft_pass(batch)?;
            Ok(())
        })
    }

    /// Adds the gradients of a micro-batch, and returns its loss.
    fn sft_pass(&mut self, batch: &Batch) -> Result<f64> {
        let (pass, hidden) = self.trained.forward(batch)?;
        let mut losses = Vec::new();
        let chosen = self.chosen(&hidden, batch, 1.0);
        let Trained { model, optimizer, .. } = &mut self.trained;
        let gradients = &mut optimizer.gradients;
        let gradient = chosen.descend(model, Entropy::Unasked, gradients, |rows, scores| {
            let weights = batch.weights.f_narrow(0, rows.start, rows.end - rows.start)?;
            let loss = loss::sft_loss(&scores.log_probs, &weights)?;
            losses.push(loss.f_detach()?);
            Ok(loss)
        })?;
        self.trained.backward(pass, batch, &gradient)?;
        // Waits for the device: not before it has all of its work.
        Ok(f64::try_from(Tensor::f_stack(&losses, 0)?.f_sum(Kind::Double)?)?)
    }

    /// One policy-gradient step over micro-batches that together are the batch. Logits are divided by
    /// `temperature`, as when the tokens were sampled.
    ///
    /// # Errors
    /// As for [`Policy::sft_step`], and [`crate::Error::Input`] for a KL term without a reference policy.
    pub fn policy_step(
        &mut self,
        batches: &[Batch],
        options: &LearnOptions,
        temperature: f64,
        lr: f64,
    ) -> Result<StepStats> {
        self.step(batches, lr, |policy, batch, stats| policy.policy_pass(batch, options, temperature, stats))
    }

    /// One step: `pass` adds the gradients of a micro-batch, and its figures.
    fn step(
        &mut self,
        batches: &[Batch],
        lr: f64,
        pass: impl Fn(&mut Policy, &Batch, &mut StepStats) -> Result<()>,
    ) -> Result<StepStats> {
        let mut stats = StepStats { lr, ..StepStats::default() };
        self.trained.optimizer.gradients.clear()?;
        for batch in batches.iter().filter(|batch| batch.trains()) {
            batch.pass(|| pass(self, batch, &mut stats))?;
        }
        stats.grad_norm = self.trained.apply(stats.loss, lr)?;
        Ok(stats)
    }

    /// Adds the gradients of a micro-batch, and its figures.
    fn policy_pass(
        &mut self,
        batch: &Batch,
        options: &LearnOptions,
        temperature: f64,
        stats: &mut StepStats,
    ) -> Result<()> {
        let reference =
            options.use_kl_loss.then(|| self.reference_log_probs(batch, temperature)).transpose()?;
        let (pass, hidden) = self.trained.forward(batch)?;
        let chosen = self.chosen(&hidden, batch, temperature);
        let sequence = Sequence::asked(options).then(|| {
            let now = chosen.log_probs(self.model())?;
            tch::no_grad(|| Sequence::of(&now, batch, options))
        });
        let columns = Tokens {
            weights: batch.weights.shallow_clone(),
            rollout_log_probs: batch.rollout_log_probs.shallow_clone(),
            old_log_probs: batch.old(options).map(Tensor::shallow_clone),
            advantages: batch.advantages.shallow_clone(),
            reference,
            sequence: sequence.transpose()?,
        };
        let entropy = if options.entropy_coef == 0.0 { Entropy::Watched } else { Entropy::Differentiated };
        let mut seen = Vec::new();
        let Trained { model, optimizer, .. } = &mut self.trained;
        let gradient = chosen.descend(model, entropy, &mut optimizer.gradients, |rows, scores| {
            let tokens = columns.narrow(rows.start, rows.end - rows.start)?;
            let terms = loss::policy_loss(&scores.log_probs, scores.entropy.as_ref(), &tokens, options)?;
            let loss = terms.loss.shallow_clone();
            seen.push(terms);
            Ok(loss)
        })?;
        self.trained.backward(pass, batch, &gradient)?;
        add(stats, &mut self.compared, &seen, &batch.rollout_log_probs)
    }

    /// What was compared of the tokens that were trained on since the last call.
    pub(crate) fn take_compared(&mut self) -> Compared {
        std::mem::take(&mut self.compared)
    }

    /// Log-probs `[M]` of a batch's trained tokens under the current weights, without gradients.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch refuses.
    pub fn log_probs(&self, batch: &Batch, temperature: f64) -> Result<Tensor> {
        self.log_probs_of(self.model(), batch, temperature)
    }

    /// The same under the reference policy.
    ///
    /// # Errors
    /// [`crate::Error::Input`] if there is none.
    pub(crate) fn reference_log_probs(&self, batch: &Batch, temperature: f64) -> Result<Tensor> {
        let model = self.reference.as_ref();
        let model =
            model.ok_or_else(|| input("policy", "a reference policy, since there is a KL term", "none"))?;
        self.log_probs_of(model, batch, temperature)
    }

    /// The same under the teacher, if there is one.
    pub(crate) fn teacher_log_probs(&self, batch: &Batch, temperature: f64) -> Result<Option<Tensor>> {
        self.teacher.as_ref().map(|model| self.log_probs_of(model, batch, temperature)).transpose()
    }

    fn log_probs_of(&self, model: &Model, batch: &Batch, temperature: f64) -> Result<Tensor> {
        if !batch.trains() {
            return Ok(batch.weights.shallow_clone());
        }
        batch.pass(|| self.chosen(&hidden(model, batch)?, batch, temperature).log_probs(model))
    }

    fn chosen<'a>(&self, hidden: &'a Tensor, batch: &'a Batch, temperature: f64) -> Chosen<'a> {
        let rows = self.chunk.map_or_else(
            || default_rows(self.model().config().vocab_size),
            |chunk| i64::try_from(chunk).unwrap_or(i64::MAX),
        );
        Chosen { hidden, labels: &batch.labels, temperature, rows }
    }
}

/// Adds what the chunks of a micro-batch were like, whose tokens had these log-probs `[M]` when they were sampled.
fn add(
    stats: &mut StepStats,
    compared: &mut Compared,
    chunks: &[PolicyTerms],
    rollout_log_probs: &Tensor,
) -> Result<()> {
    let stacked = |of: fn(&PolicyTerms) -> &Tensor| {
        let chunks = chunks.iter().map(|terms| of(terms).f_detach()).collect::<Result<Vec<_>, _>>()?;
        Tensor::f_stack(&chunks, 0)
    };
    let sums = stacked(|terms| &terms.sums)?.f_sum_dim_intlist(0_i64, false, Kind::Double)?;
    let sums: Vec<f64> = Vec::try_from(&sums)?;
    let sums: [f64; 9] = sums.try_into().map_err(|sums: Vec<f64>| input("sums", 9, sums.len()))?;
    let [clipped, ppo_kl, difference, k3, entropy, kl_loss, tis, rejected, opsm] = sums;
    stats.loss += f64::try_from(stacked(|terms| &terms.loss)?.f_sum(Kind::Double)?)?;
    stats.pg_clipfrac += clipped;
    stats.ppo_kl += ppo_kl;
    stats.log_prob_diff_mean += difference;
    stats.mismatch_k3 += k3;
    stats.entropy += entropy;
    stats.kl_loss += kl_loss;
    stats.tis_clipfrac += tis;
    stats.rs_clipfrac += rejected;
    stats.opsm_clipfrac += opsm;
    let chunks: Vec<&Tensor> = chunks.iter().map(|terms| &terms.compared).collect();
    let log_probs = Tensor::f_cat(&chunks, 0)?;
    let differences: Vec<f32> = Vec::try_from(log_probs.f_sub(rollout_log_probs)?.f_abs()?)?;
    let furthest = differences.iter().fold(0.0_f32, |furthest, difference| furthest.max(*difference));
    stats.log_prob_diff_max = stats.log_prob_diff_max.max(f64::from(furthest));
    compared.apart.add(&differences);
    compared.log_probs.extend(Vec::<f32>::try_from(log_probs)?);
    Ok(())
}
