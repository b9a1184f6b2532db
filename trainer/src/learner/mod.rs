//! What trains: one trait, with libtorch in this process or a child process behind it.

mod child;
#[cfg(feature = "conformance")]
pub mod conformance;
mod process;
mod serve;
mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;

use driftless_buffer::sample::Verdict;
use driftless_buffer::{Position, Record};
use driftless_transport::Snapshot;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::metrics::{StepMetrics, StepStats};
use crate::sample::answer_of;

pub use child::{Child, ChildOptions, program};
pub use serve::serve;
pub use wire::{Hello, PROTOCOL};

/// Name of the policy among the models of a run.
pub const MODEL: &str = "policy";

/// Where a learner finds what it works on, and where it keeps its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Workspace {
    /// State directory of the run.
    pub save: PathBuf,
    /// Hugging Face checkpoint that the run starts from.
    pub hf_checkpoint: PathBuf,
    /// Directory of the rollout log.
    pub log: PathBuf,
    /// The store of the publications, as its user names it.
    pub store: String,
    /// Name of the run in the store.
    pub run: String,
    /// Identity of the run, 32 hex digits.
    pub run_id: String,
    /// Name of the policy among the models of the run.
    pub model: String,
    /// Directory of the publisher's baseline.
    #[serde(rename = "baseline_dir")]
    pub baseline: PathBuf,
    /// Training checkpoints to keep; at least 1.
    pub keep: usize,
    /// A version whose number is a multiple of this carries full tensors too; none does, if `None`.
    pub anchor_every: Option<u64>,
    /// So does one where the deltas since the last full tensors weigh this share of their bytes, or more.
    pub anchor_share: Option<f64>,
}

/// How far a run is; a training checkpoint holds it beside the weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps of the loop that are done.
    pub step: u64,
    /// Seed of the run.
    pub seed: u64,
    /// What the last step was like.
    pub metrics: Option<StepMetrics>,
    /// The settings that samples and steps depend on, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
}

/// A rollout, which is learned from in one optimiser step or several: samples that lie in the mapped log.
#[derive(Debug, Clone, Default)]
pub struct Batch<'a> {
    /// The rollout that all samples belong to.
    pub rollout_id: u64,
    /// The samples, group by group.
    pub samples: Vec<Sample<'a>>,
}

/// One sample of a batch. All columns lie in the map of the log.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample<'a> {
    /// Its place in the log.
    pub position: Position,
    /// Prompt and response.
    pub tokens: &'a [i32],
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Per response token: 1 to train on it, 0 not to. Empty means all ones.
    pub loss_mask: &'a [u8],
    /// Leading response tokens that are not trained on, whatever the mask says: the weights that drew them are too old,
    /// or, where it is all of them, the answer's score masks it.
    pub stale: usize,
    /// Per response token: log-probability when it was sampled.
    pub log_probs: &'a [f32],
    /// Per response token: log-probability under a teacher; empty where there is none.
    pub teacher_log_probs: &'a [f32],
    /// The answer that it is part of. Samples of one answer count as one in the loss: their tokens share a
    /// denominator.
    pub answer: u64,
    /// Advantage of every response token, or what the advantages of its tokens begin with
    /// ([`LearnOptions::per_token`](crate::options::LearnOptions::per_token)).
    pub advantage: f32,
}

impl<'a> Sample<'a> {
    /// A record of the log with its advantage. None of its tokens is trained on, if its answer's score says so.
    #[must_use]
    pub fn of(record: &'a Record, advantage: f32) -> Self {
        let is_masked = record.verdict() == Verdict::Masked;
        Sample {
            position: record.position(),
            tokens: record.tokens(),
            prompt_len: record.prompt_len(),
            loss_mask: record.loss_mask(),
            stale: if is_masked { record.response().len() } else { 0 },
            log_probs: record.log_probs(),
            teacher_log_probs: record.teacher_log_probs(),
            answer: answer_of(record.scalars().sample_id),
            advantage,
        }
    }

    /// How many of its tokens are trained on.
    #[must_use]
    pub fn trained(&self) -> usize {
        match self.loss_mask {
            [] => self.response_len().saturating_sub(self.stale),
            mask => mask.iter().skip(self.stale).filter(|&&keep| keep != 0).count(),
        }
    }

    /// Whether this token of the response is trained on.
    #[must_use]
    pub fn is_trained(&self, place: usize) -> bool {
        place >= self.stale && self.loss_mask.get(place) != Some(&0)
    }

    /// Tokens of the response.
    #[must_use]
    pub fn response_len(&self) -> usize {
        self.tokens.len().saturating_sub(self.prompt_len)
    }
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Stepped {
    /// The weights moved.
    Done(StepStats),
    /// A loss or a gradient was NaN or infinite; says which. The weights are those before that step. Of several
    /// steps on a rollout, those before it are done, and those after it left out.
    NotFinite(String),
}

/// The weights of a learner at one moment, for the engines.
pub enum Weights {
    /// As tensors, which the loop publishes. They may be the learner's own, wherever it has them: they stay as they
    /// are until it is asked for its next step, and the loop has dropped them by then.
    Tensors(Box<dyn Snapshot + Sync>),
    /// As the version of this number, which the learner has published.
    Published(u64),
}

/// What trains. The loop calls one method at a time.
pub trait Learner: Send {
    /// What it is, for messages.
    fn describe(&self) -> String;

    /// Whether it publishes its weights by itself. The loop then begins the run and leaves the rest of its
    /// versions alone.
    fn publishes(&self) -> bool {
        false
    }

    /// What another learner like this one is made with, beside its [`LearnOptions`](crate::options::LearnOptions): it
    /// then makes the same weights of the same samples. `None` of one that nothing else can make.
    fn settings(&self) -> Option<serde_json::Value> {
        None
    }

    /// Takes up the newest checkpoint below [`Workspace::save`], and says how far that is; without one, begins
    /// with the weights of [`Workspace::hf_checkpoint`]. Called before any other method, and again after
    /// [`crate::Error::LearnerLost`].
    ///
    /// # Errors
    /// What keeps it from starting, or a checkpoint of another model.
    fn load(&mut self, place: &Workspace) -> Result<Option<Progress>>;

    /// A codec of the device that the tensors of its snapshots lie on ([`Snapshot::on_device`]), by which they are
    /// encoded there; `None` where they lie in host memory. Asked for after each [`Learner::load`].
    #[cfg(feature = "cuda")]
    fn codec(&mut self) -> Option<driftless_delta::cuda::Codec> {
        None
    }

    /// Log-probabilities of the response tokens of each sample under the current weights, in nats, at the
    /// temperature of the rollouts.
    ///
    /// # Errors
    /// [`crate::Error::LearnerLost`] if it has to be loaded again; what it says otherwise.
    fn log_probs(&mut self, batch: &Batch<'_>) -> Result<Vec<Vec<f32>>>;

    /// The optimiser steps on a rollout.
    ///
    /// # Errors
    /// As [`Learner::log_probs`].
    fn step(&mut self, batch: &Batch<'_>) -> Result<Stepped>;

    /// Log-probabilities of the tokens that the last step learned from, under the weights before it: a number for each
    /// response token of the batch, sample after sample; NaN where a token is not trained on. Asked for once behind each
    /// [`Stepped::Done`]. `None` from a learner that does not tell, or where no step of the policy was due.
    fn take_log_probs(&mut self) -> Option<Vec<f32>> {
        None
    }

    /// The weights after `step` steps of the loop, for the engines. Whatever writes them has ended.
    ///
    /// # Errors
    /// As [`Learner::log_probs`], and what the store says.
    fn snapshot(&mut self, step: u64) -> Result<Weights>;

    /// Writes a training checkpoint: weights, optimiser and `progress`, all or nothing. On return it is
    /// durable.
    ///
    /// # Errors
    /// As [`Learner::log_probs`], and what the disk says; older checkpoints are then untouched.
    fn save(&mut self, progress: &Progress) -> Result<()>;

    /// Writes the weights as a Hugging Face checkpoint directory.
    ///
    /// # Errors
    /// As [`Learner::save`].
    fn save_hf(&mut self, dir: &std::path::Path) -> Result<()>;
}
