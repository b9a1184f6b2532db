//! libtorch as what trains: [`Policy`] behind the loop's trait.

use std::path::Path;

use driftless_trainer::learner::{self, Learner, Place, Progress, StepStats, Stepped, Weights};
use driftless_trainer::{Dtype, Error as LoopError, Estimator, LearnOptions, Result as LoopResult};
use driftless_transport::checkpoint::write_checkpoint;
use tch::Kind;

use crate::batch::{Batch, Reduction, Sample, micro_batches, token_weights};
use crate::checkpoint;
use crate::config::Config;
use crate::error::{Error, Result, input};
use crate::loss::{PolicyLoss, Surrogate};
use crate::models::Model;
use crate::optimizer::AdamWOptions;
use crate::policy::Policy;
use crate::snapshot::PolicySnapshot;
use crate::torch;

/// Tensor data per file of a checkpoint that is written for others.
const SHARD_BYTES_MAX: u64 = 5 << 30;

/// Settings of a [`TorchLearner`].
#[derive(Debug, Clone)]
pub struct TorchOptions {
    /// What the optimiser and the loss are told.
    pub learn: LearnOptions,
    /// Temperature of the rollouts.
    pub temperature: f64,
    /// CPU threads of libtorch.
    pub num_threads: usize,
    /// As for [`crate::device`].
    pub device: String,
}

/// A policy that the loop trains with libtorch, in this process.
#[derive(Debug)]
pub struct TorchLearner {
    options: TorchOptions,
    loaded: Option<(Policy, Place)>,
}

impl TorchLearner {
    /// Makes ready to train; [`Learner::load`] reads the model.
    #[must_use]
    pub fn new(options: TorchOptions) -> Self {
        TorchLearner { options, loaded: None }
    }

    fn open(&self, place: &Place) -> Result<(Policy, Option<Progress>)> {
        torch::set_threads(self.options.num_threads)?;
        let learn = &self.options.learn;
        let adamw = AdamWOptions {
            beta1: learn.adam_beta1,
            beta2: learn.adam_beta2,
            weight_decay: learn.weight_decay,
            clip_grad: learn.clip_grad,
            ..AdamWOptions::default()
        };
        let device = torch::device(&self.options.device)?;
        let published = Config::published_kind(&place.hf_checkpoint)?;
        // As engines compute, unless told: with activations that round otherwise, log-probs would differ.
        let kind = learn.dtype.map_or(published, kind_of);
        let model = Model::open(&place.hf_checkpoint, kind, device)?;
        let mut policy = Policy::new(model, published, adamw)?
            .with_recompute(learn.recompute)
            .with_log_probs_chunk_size(learn.log_probs_chunk_size);
        if let Some(loss) = &learn.kl_loss {
            let dir = loss.ref_load.as_ref().unwrap_or(&place.hf_checkpoint);
            policy = policy.with_reference(Model::open(dir, kind, device)?)?;
        }
        let progress = checkpoint::load(&checkpoint::dir(&place.save), &mut policy)?;
        Ok((policy, progress))
    }

    fn loaded(&mut self) -> Result<&mut (Policy, Place)> {
        self.loaded.as_mut().ok_or_else(|| input("learner", "one that was loaded", "none"))
    }

    /// The error as the loop has it.
    fn failed(&self, error: Error) -> LoopError {
        match error {
            Error::Transport(error) => LoopError::Transport(error),
            Error::Loop(error) => error,
            error => LoopError::Learner { learner: self.describe(), source: Box::new(error) },
        }
    }

    fn weights(&mut self) -> Result<PolicySnapshot> {
        let (policy, place) = self.loaded()?;
        PolicySnapshot::new(policy, &place.hf_checkpoint)
    }

    fn train(&mut self, batch: &learner::Batch<'_>) -> Result<learner::StepStats> {
        let TorchOptions { learn, temperature, .. } = self.options.clone();
        let loss = PolicyLoss {
            surrogate: match learn.advantage_estimator {
                Estimator::Gspo => Surrogate::Sequence,
                Estimator::Cispo => Surrogate::Cispo,
                Estimator::Grpo | Estimator::ReinforcePlusPlus | Estimator::ReinforcePlusPlusBaseline => {
                    Surrogate::Token
                }
            },
            eps_clip: learn.eps_clip,
            eps_clip_high: learn.eps_clip_high,
            eps_clip_c: learn.eps_clip_c,
            tis: learn.tis,
            kl: learn.kl_loss.as_ref().map(|loss| (loss.kind, loss.coef)),
            entropy_coef: learn.entropy_coef,
            temperature,
        };
        let reduction =
            if learn.calculate_per_token_loss { Reduction::PerToken } else { Reduction::PerRollout };
        let (policy, _) = self.loaded()?;
        let batches = batches(policy, batch, learn.max_tokens_per_gpu, reduction)?;
        let batches: Vec<_> = batches.into_iter().map(|(_, batch)| batch).collect();
        let lr = learn.lr_schedule().at(policy.optimizer().steps());
        let stats = policy.policy_step(&batches, &loss, lr)?;
        Ok(StepStats {
            loss: stats.loss,
            grad_norm: stats.grad_norm,
            lr,
            pg_clipfrac: stats.clipped,
            ppo_kl: stats.ppo_kl,
            kl_loss: stats.kl_loss,
            tis_clipfrac: stats.tis_clipped,
            mismatch_k3: stats.behaviour_kl,
            entropy: stats.entropy,
            log_prob_diff_mean: stats.log_prob_difference,
            log_prob_diff_max: stats.log_prob_difference_max,
        })
    }

    fn log_probs_of(&mut self, batch: &learner::Batch<'_>) -> Result<Vec<Vec<f32>>> {
        let (temperature, most) = (self.options.temperature, self.options.learn.max_tokens_per_gpu);
        let (policy, _) = self.loaded()?;
        let mut found = vec![Vec::new(); batch.samples.len()];
        // Of all response tokens, those that are not trained on included.
        let unmasked = learner::Batch {
            rollout_id: batch.rollout_id,
            samples: batch
                .samples
                .iter()
                .map(|sample| learner::Sample { loss_mask: &[], ..*sample })
                .collect(),
        };
        for (chosen, packed) in batches(policy, &unmasked, most, Reduction::PerToken)? {
            let log_probs: Vec<f32> = Vec::try_from(policy.log_probs(&packed, temperature)?)?;
            let mut rest = log_probs.as_slice();
            for index in chosen {
                let (own, others) = rest.split_at(batch.samples[index].response_len().min(rest.len()));
                found[index] = own.to_vec();
                rest = others;
            }
        }
        Ok(found)
    }
}

impl Learner for TorchLearner {
    fn describe(&self) -> String {
        format!("libtorch on {}", self.options.device)
    }

    fn load(&mut self, place: &Place) -> LoopResult<Option<Progress>> {
        // Two models at once may not fit.
        self.loaded = None;
        let (policy, progress) = self.open(place).map_err(|error| self.failed(error))?;
        self.loaded = Some((policy, place.clone()));
        Ok(progress)
    }

    fn log_probs(&mut self, batch: &learner::Batch<'_>) -> LoopResult<Vec<Vec<f32>>> {
        self.log_probs_of(batch).map_err(|error| self.failed(error))
    }

    fn step(&mut self, batch: &learner::Batch<'_>) -> LoopResult<Stepped> {
        match self.train(batch) {
            Ok(stats) => Ok(Stepped::Done(stats)),
            Err(Error::NotFinite { what, found, .. }) => Ok(Stepped::NotFinite(format!("{what} is {found}"))),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn snapshot(&mut self, _step: u64) -> LoopResult<Weights> {
        let snapshot = self.weights().map_err(|error| self.failed(error))?;
        Ok(Weights::Tensors(Box::new(snapshot)))
    }

    fn save(&mut self, progress: &Progress) -> LoopResult<()> {
        let save = |learner: &mut Self| {
            let (policy, place) = learner.loaded()?;
            checkpoint::save(&checkpoint::dir(&place.save), policy, progress, place.keep)
        };
        save(self).map_err(|error| self.failed(error))
    }

    fn save_hf(&mut self, dir: &Path) -> LoopResult<()> {
        let snapshot = self.weights().map_err(|error| self.failed(error))?;
        Ok(write_checkpoint(dir, &snapshot, SHARD_BYTES_MAX)?)
    }
}

fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float32 => Kind::Float,
    }
}

/// The samples as packed micro-batches, each with its samples' places in `batch`. Columns are read where they
/// lie.
fn batches(
    policy: &Policy,
    batch: &learner::Batch<'_>,
    max_tokens: usize,
    reduction: Reduction,
) -> Result<Vec<(Vec<usize>, Batch)>> {
    let samples = batch.samples.iter().map(|sample| Sample {
        tokens: sample.tokens,
        prompt_len: sample.prompt_len,
        loss_mask: sample.loss_mask,
        log_probs: sample.log_probs,
        rollout_id: sample.rollout_id,
        advantage: sample.advantage,
    });
    let samples: Vec<_> = samples.collect();
    let weights = token_weights(&samples, reduction);
    let lengths: Vec<_> = samples.iter().map(|sample| sample.tokens.len()).collect();
    let (vocabulary, device) = (policy.model().config().vocab_size, policy.model().device());
    let packed = micro_batches(&lengths, max_tokens).into_iter().map(|chosen| {
        let some: Vec<_> = chosen.iter().map(|index| samples[*index]).collect();
        let some_weights: Vec<_> = chosen.iter().map(|index| weights[*index]).collect();
        Ok((chosen, Batch::new(&some, &some_weights, vocabulary, device)?))
    });
    packed.collect()
}
