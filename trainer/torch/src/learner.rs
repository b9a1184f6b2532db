//! libtorch as what trains: [`Policy`] behind the loop's trait.

use std::path::Path;

use driftless_trainer::learner::{self, Learner, Place, Progress, StepStats, Stepped, Weights};
use driftless_trainer::{Dtype, Error as LoopError, LearnOptions, Result as LoopResult};
use driftless_transport::checkpoint::write_checkpoint;
use tch::Kind;

use crate::checkpoint;
use crate::config::Config;
use crate::critic::Critic;
use crate::error::{Error, Result, input};
use crate::learn;
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
    loaded: Option<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    policy: Policy,
    critic: Option<Critic>,
    place: Place,
}

impl TorchLearner {
    /// Makes ready to train; [`Learner::load`] reads the model.
    #[must_use]
    pub fn new(options: TorchOptions) -> Self {
        TorchLearner { options, loaded: None }
    }

    fn open(&self, place: &Place) -> Result<(Loaded, Option<Progress>)> {
        torch::set_threads(self.options.num_threads)?;
        let learn = &self.options.learn;
        let adamw = AdamWOptions::of(learn);
        let device = torch::device(&self.options.device)?;
        let published = Config::published_kind(&place.hf_checkpoint)?;
        // As engines compute, unless told: with activations that round otherwise, log-probs would differ.
        let kind = learn.dtype.map_or(published, kind_of);
        let model = Model::open(&place.hf_checkpoint, kind, device)?;
        let mut policy = Policy::new(model, published, adamw)?
            .with_recompute(learn.recompute)
            .with_log_probs_chunk_size(learn.log_probs_chunk_size);
        if let Some(penalty) = learn.kl_penalty() {
            let dir = penalty.ref_load.as_ref().unwrap_or(&place.hf_checkpoint);
            policy = policy
                .with_reference(Model::open(dir, kind, device)?, learn.ref_update_interval.is_some())?;
        }
        if let Some(dir) = learn.opd.as_ref().and_then(|opd| opd.teacher_load.as_ref()) {
            policy = policy.with_teacher(Model::open(dir, kind, device)?)?;
        }
        let critic = learn.critic.as_ref().map(|critic| {
            let dir = critic.load.as_ref().unwrap_or(&place.hf_checkpoint);
            let model = Model::open_critic(dir, kind, device)?;
            Ok::<_, Error>(Critic::new(model, published, adamw)?.with_recompute(learn.recompute))
        });
        let mut loaded = Loaded { policy, critic: critic.transpose()?, place: place.clone() };
        let Loaded { policy, critic, .. } = &mut loaded;
        let progress = checkpoint::load(&checkpoint::dir(&place.save), policy, critic.as_mut())?;
        Ok((loaded, progress))
    }

    fn loaded(&mut self) -> Result<&mut Loaded> {
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
        let Loaded { policy, place, .. } = self.loaded()?;
        PolicySnapshot::new(policy, &place.hf_checkpoint)
    }

    fn train(&mut self, batch: &learner::Batch<'_>) -> Result<StepStats> {
        let TorchOptions { learn: options, temperature, .. } = self.options.clone();
        let Loaded { policy, critic, .. } = self.loaded()?;
        learn::learn(policy, critic.as_mut(), batch, &options, temperature)
    }

    fn log_probs_of(&mut self, batch: &learner::Batch<'_>) -> Result<Vec<Vec<f32>>> {
        let TorchOptions { learn: options, temperature, .. } = self.options.clone();
        let Loaded { policy, .. } = self.loaded()?;
        let mut found = vec![Vec::new(); batch.samples.len()];
        // Of all response tokens, those that are not trained on included.
        let unmasked = batch.samples.iter().map(|sample| learner::Sample { loss_mask: &[], ..*sample });
        let packed = learn::pack(policy.model(), &unmasked.collect::<Vec<_>>(), &options)?;
        for (chosen, packed) in packed.chosen.into_iter().zip(packed.batches) {
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
        let (loaded, progress) = self.open(place).map_err(|error| self.failed(error))?;
        self.loaded = Some(loaded);
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
            let save = learner.options.learn.critic.as_ref().and_then(|critic| critic.save.clone());
            let Loaded { policy, critic, place } = learner.loaded()?;
            checkpoint::save(&checkpoint::dir(&place.save), policy, critic.as_ref(), progress, place.keep)?;
            if let (Some(dir), Some(critic)) = (save, critic) {
                let snapshot = PolicySnapshot::of_critic(critic, &place.hf_checkpoint)?;
                write_checkpoint(&dir, &snapshot, SHARD_BYTES_MAX)?;
            }
            Ok(())
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
