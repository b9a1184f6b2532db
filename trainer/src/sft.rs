//! Supervised cold start on the arithmetic task.

use std::path::PathBuf;

use driftless_transport::{Checkpoint, Snapshot, write_checkpoint};
use tch::{Device, Kind};

use crate::batch::{Batch, Reduction, Sample, token_weights};
use crate::config::Config;
use crate::error::Result;
use crate::models::Qwen3;
use crate::optimizer::AdamWOptions;
use crate::policy::Policy;
use crate::snapshot::PolicySnapshot;
use crate::tasks::arithmetic::{self, Problem, Split};
use crate::torch;

/// The learning rate rises linearly over so many steps.
const WARMUP_STEPS: u64 = 20;
/// Steps over which the loss is averaged before it is compared with the one to stop at.
const LOSS_WINDOW: usize = 5;
/// Decay of AdamW's first moment: gradients turn quickly in so short a training.
const BETA1: f64 = 0.8;
/// Tensor data per file of the checkpoint.
const SHARD_BYTES_MAX: u64 = 5 << 30;

/// Settings of a cold start.
#[derive(Clone, Debug)]
pub struct SftOptions {
    /// Shape of the fresh model; not used with `hf_checkpoint`.
    pub config: Config,
    /// Checkpoint directory to start from, instead of fresh weights.
    pub hf_checkpoint: Option<PathBuf>,
    /// Where the result goes as a Hugging Face checkpoint.
    pub save_hf: PathBuf,
    /// Kind of the weights that are written: `BFloat16` or `Float`; with `hf_checkpoint` it is that checkpoint's.
    pub published: Kind,
    /// Optimizer steps, at most.
    pub steps: u64,
    /// Stop as soon as the mean loss of the last five steps is down to this.
    pub stop_loss: Option<f64>,
    /// Problems of a step.
    pub batch_size: u64,
    /// Peak learning rate.
    pub lr: f64,
    /// Seed of weights and data.
    pub seed: u64,
    /// CPU threads of libtorch.
    pub num_threads: usize,
    /// As for [`crate::device`].
    pub device: String,
}

/// What came of a cold start.
#[derive(Clone, Copy, Debug)]
pub struct SftSummary {
    /// Optimizer steps done.
    pub steps: u64,
    /// Loss of the last step.
    pub loss: f64,
    /// Weights of the model.
    pub parameters: i64,
}

/// Trains on problems of [`Split::Sft`] and writes the checkpoint; `observe(steps done, loss)` is called after each step.
///
/// # Errors
/// [`crate::Error::NotFinite`] when training diverges, else whatever the disk or libtorch answer. The checkpoint appears
/// only when all is done.
pub fn sft(options: &SftOptions, mut observe: impl FnMut(u64, f64)) -> Result<SftSummary> {
    torch::set_threads(options.num_threads)?;
    let device = torch::device(&options.device)?;
    let (model, published, files) = match &options.hf_checkpoint {
        Some(dir) => {
            let model = Qwen3::open(dir, Kind::Float, device)?;
            (model, Config::published_kind(dir)?, Checkpoint::open(dir)?.files().to_vec())
        }
        None => {
            let model = Qwen3::fresh(options.config.clone(), options.seed as i64, Kind::Float, device)?;
            (model, options.published, arithmetic::files(&options.config, options.published)?)
        }
    };
    let mut policy = Policy::new(model, published, AdamWOptions { beta1: BETA1, ..AdamWOptions::default() })?;
    let mut losses = Vec::new();
    for step in 0..options.steps {
        let batch = batch(options, step, policy.model().config().vocab_size, device)?;
        let warmed = ((step + 1) as f64 / WARMUP_STEPS as f64).min(1.0);
        let loss = policy.sft_step(&[batch], options.lr * warmed)?.loss;
        losses.push(loss);
        observe(step + 1, loss);
        if options.stop_loss.is_some_and(|target| recent_mean(&losses).is_some_and(|mean| mean <= target)) {
            break;
        }
    }
    let snapshot = PolicySnapshot::with_files(&policy, files)?;
    write_checkpoint(&options.save_hf, &snapshot, SHARD_BYTES_MAX)?;
    Ok(SftSummary {
        steps: losses.len() as u64,
        loss: losses.last().copied().unwrap_or(f64::NAN),
        parameters: policy.model().config().elements(),
    })
}

/// Mean of the last [`LOSS_WINDOW`] losses, once there are so many.
fn recent_mean(losses: &[f64]) -> Option<f64> {
    let recent = losses.last_chunk::<LOSS_WINDOW>()?;
    Some(recent.iter().sum::<f64>() / LOSS_WINDOW as f64)
}

fn batch(options: &SftOptions, step: u64, vocab_size: i64, device: Device) -> Result<Batch> {
    let numbers = step * options.batch_size..(step + 1) * options.batch_size;
    let problems = numbers.map(|number| Problem::draw(Split::Sft, number, options.seed));
    let texts: Vec<_> = problems.map(|problem| (problem.prompt(), problem.answer())).collect();
    let tokens: Vec<_> = texts.iter().map(|(prompt, answer)| [prompt.as_slice(), answer].concat()).collect();
    let samples = texts.iter().zip(&tokens).zip(0..);
    let samples: Vec<_> = samples
        .map(|(((prompt, _), tokens), index)| Sample::supervised(tokens, prompt.len(), index))
        .collect();
    Batch::new(&samples, &token_weights(&samples, Reduction::PerToken), vocab_size, device)
}
