//! Supervised training: on conversations, or on next bytes of a text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use derive_setters::Setters;
use driftless_trainer::data::{Dataset, Order};
use driftless_trainer::learner::Sample;
use driftless_trainer::options::LearnOptions;
use driftless_trainer::tasks::tiny::VOCABULARY;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::snapshot::AuxFile;
use driftless_transport::{Checkpoint, Snapshot};
use tch::{Device, Kind};

use crate::batch::{Batch, Reduction, token_weights};
use crate::checkpoint::{self, Progress};
use crate::config::Config;
use crate::error::{Error, Result, input, io};
use crate::learn::pack;
use crate::libtorch;
use crate::models::Model;
use crate::optimizer::AdamWOptions;
use crate::policy::Policy;
use crate::snapshot::{SHARD_BYTES_MAX, of_trained};
use crate::tasks::text::Text;
use crate::tasks::tiny;

/// The learning rate rises linearly over so many steps.
const WARMUP_STEPS: u64 = 20;
/// Steps over which the loss is averaged before it is compared with the one to stop at.
const LOSS_WINDOW: usize = 5;
/// Decay of AdamW's first moment: gradients turn quickly in so short a training.
const BETA1: f64 = 0.8;
/// Stands for the number of steps done in [`SftOptions::save_hf`].
const ROLLOUT_ID: &str = "{rollout_id}";

/// What is predicted.
#[derive(Clone, Debug)]
pub enum SftTask {
    /// What the assistant says in conversations, with these settings of loss and optimiser. The loss is the mean
    /// over each conversation's learned tokens, then over conversations, unless they say otherwise. A fresh model
    /// learns those that [`driftless_trainer::tasks::tiny::reader`] has read.
    Chat {
        /// The conversations, read with a loss mask.
        data: Arc<Dataset>,
        /// The order in which they are taken.
        order: Order,
        /// Settings of loss and optimiser.
        learn: Box<LearnOptions>,
    },
    /// The next byte, anywhere in the text.
    Text(Text),
}

/// Settings of a supervised training.
#[derive(Clone, Debug, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct SftOptions {
    /// What is predicted.
    pub task: SftTask,
    /// Shape of the fresh model; not used with `hf_checkpoint`.
    pub config: Config,
    /// Checkpoint directory to start from, instead of fresh weights.
    pub hf_checkpoint: Option<PathBuf>,
    /// Go on from the newest training checkpoint in this directory: weights, moments of the optimizer, steps
    /// done.
    pub load: Option<PathBuf>,
    /// Leave a training checkpoint in this directory at the end.
    pub save: Option<PathBuf>,
    /// Where the result goes as a Hugging Face checkpoint. With `{rollout_id}` in its name it is a series:
    /// one after each step, named by the number of steps done.
    pub save_hf: PathBuf,
    /// Kind that the model computes in: `BFloat16` or `Float`; that of `hf_checkpoint`, else `BFloat16`, if
    /// `None`. A fresh model is written in it.
    pub dtype: Option<Kind>,
    /// Optimizer steps, at most; those before `load` count.
    pub steps: u64,
    /// Stop as soon as the mean loss of the last five steps is down to this.
    pub stop_loss: Option<f64>,
    /// Conversations or sequences of a step.
    pub batch_size: u64,
    /// Peak learning rate of [`SftTask::Text`].
    pub lr: f64,
    /// Seed of weights and data.
    pub seed: u64,
    /// CPU threads of libtorch.
    pub num_threads: usize,
    /// As for [`crate::libtorch::device`].
    pub device: String,
}

/// What came of a supervised training.
#[derive(Clone, Copy, Debug)]
pub struct SftSummary {
    /// Optimizer steps done, those before `load` included.
    pub steps: u64,
    /// Loss of the last step; NaN if there was none to do.
    pub loss: f64,
    /// Weights of the model.
    pub parameters: i64,
}

/// Trains and writes the checkpoints that are asked for; `observe(steps done, loss)` is called after each
/// step.
///
/// # Errors
/// [`crate::Error::NotFinite`] when training diverges, [`crate::Error::Resume`] when there is nothing to load
/// or it is of another model or seed, else whatever the disk or libtorch answer. A checkpoint appears only
/// when it is whole.
pub fn sft(options: &SftOptions, mut observe: impl FnMut(u64, f64)) -> Result<SftSummary> {
    libtorch::set_threads(options.num_threads)?;
    let device = libtorch::device(&options.device)?;
    let (mut policy, files) = begin(options, device)?;
    let done = options.load.as_deref().map_or(Ok(0), |dir| load(dir, options.seed, &mut policy))?;
    let series = options.save_hf.to_str().filter(|path| path.contains(ROLLOUT_ID));
    // What cannot be kept is not trained first.
    let parent = options.save_hf.parent().filter(|dir| series.is_none() && !dir.as_os_str().is_empty());
    for dir in options.save.as_deref().into_iter().chain(parent) {
        std::fs::create_dir_all(dir).map_err(io("create", dir))?;
    }
    let mut losses = Vec::new();
    for step in done..options.steps {
        let loss = policy.sft_step(&batches(options, step, policy.model())?, options.lr_at(step))?.loss;
        losses.push(loss);
        if let Some(series) = series {
            let path = series.replace(ROLLOUT_ID, &(step + 1).to_string());
            save_hf(Path::new(&path), &policy, &files)?;
        }
        observe(step + 1, loss);
        if options.stop_loss.is_some_and(|target| recent_mean(&losses).is_some_and(|mean| mean <= target)) {
            break;
        }
    }
    if series.is_none() {
        save_hf(&options.save_hf, &policy, &files)?;
    }
    let steps = done + losses.len() as u64;
    if let Some(dir) = &options.save {
        let progress = Progress { step: steps, seed: options.seed, ..Progress::default() };
        checkpoint::save(dir, &policy, None, &progress, 1)?;
    }
    Ok(SftSummary {
        steps,
        loss: losses.last().copied().unwrap_or(f64::NAN),
        parameters: policy.model().config().elements(),
    })
}

/// The policy before its first step, and the files that belong beside its weights.
fn begin(options: &SftOptions, device: Device) -> Result<(Policy, Vec<AuxFile>)> {
    let (model, published, files) = match &options.hf_checkpoint {
        Some(dir) => {
            let published = Config::published_kind(dir)?;
            let model = Model::open(dir, options.dtype.unwrap_or(published), device)?;
            (model, published, Checkpoint::open(dir)?.files().to_vec())
        }
        None => {
            let kind = options.dtype.unwrap_or(Kind::BFloat16);
            let files = fresh_files(options, kind)?;
            (Model::fresh(options.config.clone(), options.seed as i64, kind, device)?, kind, files)
        }
    };
    let SftTask::Chat { learn, .. } = &options.task else {
        let adamw = AdamWOptions { beta1: BETA1, ..AdamWOptions::default() };
        return Ok((Policy::new(model, published, adamw)?, files));
    };
    let policy = Policy::new(model, published, AdamWOptions::of(learn))?
        .with_recompute(learn.recomputes())
        .with_log_probs_chunk_size(learn.log_probs_chunk_size);
    Ok((policy, files))
}

/// What lies beside fresh weights.
fn fresh_files(options: &SftOptions, kind: Kind) -> Result<Vec<AuxFile>> {
    let config = format!("{:#}\n", options.config.to_json(kind));
    let mut files = vec![AuxFile::new("config.json", config.into_bytes())?];
    match &options.task {
        SftTask::Chat { data, .. } if data.tokenizer.ids() != VOCABULARY.len() as u64 => {
            return Err(input("conversations", "a checkpoint to start from", "none"));
        }
        SftTask::Chat { .. } => files.extend(tiny::files()?),
        SftTask::Text(_) => {}
    }
    Ok(files)
}

/// Takes up a training checkpoint and returns the steps it has done.
fn load(dir: &Path, seed: u64, policy: &mut Policy) -> Result<u64> {
    let refused = |what, expected, found| Error::Resume { path: dir.to_owned(), what, expected, found };
    match checkpoint::load(dir, policy, None)? {
        Some(progress) if progress.seed == seed => Ok(progress.step),
        Some(progress) => Err(refused("seed", seed.to_string(), progress.seed.to_string())),
        None => Err(refused("checkpoints", "one".to_owned(), "none".to_owned())),
    }
}

fn save_hf(dir: &Path, policy: &Policy, files: &[AuxFile]) -> Result<()> {
    let snapshot = of_trained(&policy.trained, files)?;
    Ok(write_checkpoint(dir, &snapshot, SHARD_BYTES_MAX)?)
}

/// Mean of the last [`LOSS_WINDOW`] losses, once there are so many.
fn recent_mean(losses: &[f64]) -> Option<f64> {
    let recent = losses.last_chunk::<LOSS_WINDOW>()?;
    Some(recent.iter().sum::<f64>() / LOSS_WINDOW as f64)
}

impl SftOptions {
    /// So many steps of four sequences, from fresh weights, at a rate of 1e-3, with seed 1 on two threads of the CPU.
    #[must_use]
    pub fn new(task: SftTask, config: Config, save_hf: impl Into<PathBuf>, steps: u64) -> Self {
        SftOptions {
            task,
            config,
            hf_checkpoint: None,
            load: None,
            save: None,
            save_hf: save_hf.into(),
            dtype: None,
            steps,
            stop_loss: None,
            batch_size: 4,
            lr: 1e-3,
            seed: 1,
            num_threads: 2,
            device: "cpu".to_owned(),
        }
    }

    /// The learning rate of the step that follows `steps` others.
    fn lr_at(&self, steps: u64) -> f64 {
        match &self.task {
            SftTask::Chat { learn, .. } => learn.lr_schedule().at(steps),
            SftTask::Text(_) => self.lr * ((steps + 1) as f64 / WARMUP_STEPS as f64).min(1.0),
        }
    }
}

/// The micro-batches of a step.
fn batches(options: &SftOptions, step: u64, model: &Model) -> Result<Vec<Batch>> {
    let numbers = step * options.batch_size..(step + 1) * options.batch_size;
    match &options.task {
        SftTask::Chat { data, order, learn } => {
            let samples: Vec<_> = numbers.map(|number| conversation(data, order, number)).collect();
            Ok(pack(model, &samples, learn)?.batches)
        }
        SftTask::Text(text) => {
            let windows: Vec<_> = numbers.map(|number| text.draw(number, options.seed)).collect();
            let sample = |(tokens, answer)| Sample { tokens, prompt_len: 1, answer, ..Sample::default() };
            let samples: Vec<_> = windows.iter().map(Vec::as_slice).zip(0..).map(sample).collect();
            let weights = token_weights(&samples, Reduction::PerToken);
            Ok(vec![Batch::new(&samples, &weights, model.config().vocab_size, model.device())?])
        }
    }
}

/// Conversation `number` of the training, from its first learned token on.
fn conversation<'a>(data: &'a Dataset, order: &Order, number: u64) -> Sample<'a> {
    let example = &data.examples[order.at(number).0 as usize];
    let learned = |place: &usize| example.loss_mask[*place] == 1;
    let prompt_len = (1..example.tokens.len()).find(learned).unwrap_or(example.tokens.len());
    let loss_mask = &example.loss_mask[prompt_len..];
    Sample { tokens: &example.tokens, prompt_len, loss_mask, answer: number, ..Sample::default() }
}
