//! `driftless train --loss-type sft_loss`: on conversations of `--prompt-data`, on worked problems of `--task`, or on a
//! text.

use super::task::Conversations;
use super::{Args, learn};
use crate::cli::config;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::{paths, progress};
use driftless::torch::sft::{SftOptions, SftTask, sft};
use driftless::torch::tasks::text::{self, Text};
use driftless::torch::tasks::tiny;
use driftless::torch::{Config, Kind, checkpoint};
use driftless::trainer::options::Dtype;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Only for `--loss-type sft_loss`.
#[derive(clap::Args)]
#[command(next_help_heading = "SFT")]
pub(crate) struct SftArgs {
    /// Learn to predict this text byte by byte, instead of conversations.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_data", "task"])]
    text: Option<PathBuf>,
    /// State directory of an earlier SFT to go on from: its weights, moments and steps.
    #[arg(long, value_name = "DIR")]
    load: Option<PathBuf>,
    /// `config.json` of the fresh model [default: a Qwen3 of 1.2 M parameters; with --text, of 21 M].
    #[arg(long, value_name = "FILE", conflicts_with = "hf_checkpoint")]
    model_config: Option<PathBuf>,
}

/// What is learned, and how long.
struct Course {
    task: SftTask,
    /// Shape of a fresh model that learns it.
    config: Config,
    steps: u64,
    batch_size: u64,
    /// The training ends when the mean loss of five steps is down to this (nats per token).
    stop_loss: Option<f64>,
}

/// Steps of a fresh model, unless told.
const FRESH_STEPS: u64 = 150;
/// Peak learning rate of a fresh model, unless told.
const FRESH_LR: f64 = 1e-3;
/// Conversations of a step of a fresh model, unless told.
const FRESH_BATCH_SIZE: u64 = 256;
/// Mean loss where a fresh model ends, with about half of its answers right. What a fixed number of steps reaches
/// differs much between seeds.
const FRESH_STOP_LOSS: f64 = 0.32;
/// Learning rate of a pretrained model, unless told.
const LR: f64 = 1e-5;
/// Sequences of a text in a step, unless told.
const TEXT_BATCH_SIZE: u64 = 16;
/// Problems that are worked; a longer training meets them again.
const WORKED_MAX: u64 = 1 << 16;

pub(super) fn run(mut args: Args, output: Output) -> Result<()> {
    args.watch.check_sft()?;
    for (name, file) in [("--text", &args.sft.text), ("--model-config", &args.sft.model_config)] {
        file.as_ref().map_or(Ok(()), |file| paths::open(name, file).map(drop))?;
    }
    args.sft.load.as_ref().map_or(Ok(()), |dir| paths::check_dir("--load", dir))?;
    let (save, effective) = (args.save()?, std::mem::take(&mut args.effective));
    let options = options(args)?;
    let bar = progress::bar(options.steps, "sft");
    let mut losses = Vec::new();
    let summary = sft(&options, |step, loss| {
        if losses.is_empty() {
            config::keep(&save, &effective);
        }
        losses.push(loss);
        bar.set_position(step);
        bar.set_message(format!("loss {loss:.3}"));
    })?;
    bar.finish();
    let value = json!({
        "steps": summary.steps, "loss": summary.loss, "losses": losses, "parameters": summary.parameters,
        "hf_checkpoint": options.save_hf.display().to_string(), "seed": options.seed,
    });
    output.print(&value, |_| {
        let place = options.save_hf.display();
        format!(
            "sft: {} parameters, {} steps, loss {:.3}, seed {}: {place}",
            summary.parameters, summary.steps, summary.loss, options.seed
        )
    })
}

fn options(args: Args) -> Result<SftOptions> {
    let course = match &args.sft.text {
        Some(path) => text(path, &args)?,
        None => conversations(&args)?,
    };
    let config = args.sft.model_config.as_deref().map_or(Ok(course.config), Config::read)?;
    let save = args.save()?;
    let save_hf = args.save_hf.unwrap_or_else(|| save.join("hf"));
    let kind = |dtype| match dtype {
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float32 => Kind::Float,
    };
    Ok(SftOptions::new(course.task, config, save_hf, course.steps)
        .with_hf_checkpoint(args.hf_checkpoint)
        .with_load(args.sft.load.as_deref().map(checkpoint::dir))
        .with_save(Some(checkpoint::dir(&save)))
        .with_dtype(args.learn.options.dtype.map(kind))
        .with_stop_loss(course.stop_loss)
        .with_batch_size(course.batch_size)
        .with_lr(args.lr.unwrap_or(FRESH_LR))
        .with_seed(args.seed)
        .with_num_threads(args.num_threads)
        .with_device(args.device))
}

fn text(path: &Path, args: &Args) -> Result<Course> {
    Ok(Course {
        task: SftTask::Text(Text::open(path)?),
        config: text::config(),
        steps: args.num_rollout.unwrap_or(FRESH_STEPS),
        batch_size: args.rollout.rollout_batch_size.unwrap_or(TEXT_BATCH_SIZE),
        stop_loss: None,
    })
}

/// Conversations of files, or worked problems.
fn conversations(args: &Args) -> Result<Course> {
    if let Some(found) = args.task.easy_threshold() {
        return Err(Error::usage("--easy-threshold", "none where answers are given, and not drawn", found));
    }
    let fresh = args.hf_checkpoint.is_none();
    let (batch_size, lr) = if fresh { (FRESH_BATCH_SIZE, FRESH_LR) } else { (super::BATCH_SIZE, LR) };
    let batch_size = args.rollout.rollout_batch_size.unwrap_or(batch_size);
    let steps = args.num_rollout.or(fresh.then_some(FRESH_STEPS));
    let count = steps.map(|steps| steps.saturating_mul(batch_size).min(WORKED_MAX));
    let Conversations { data, order, epochs } =
        args.task.conversations(args.hf_checkpoint.as_deref(), count, args.seed)?;
    let all = order.prompts.saturating_mul(epochs).div_ceil(batch_size);
    let steps = steps.unwrap_or(all);
    let learn = args.learn.options(&learn::Run {
        lr: args.lr.unwrap_or(lr),
        num_rollout: steps,
        rollout_batch_size: batch_size,
        n_samples_per_prompt: 1,
    })?;
    Ok(Course {
        task: SftTask::Chat { data: Arc::new(data), order, learn: Box::new(learn) },
        config: tiny::config(),
        steps,
        batch_size,
        stop_loss: (fresh && args.num_rollout.is_none()).then_some(FRESH_STOP_LOSS),
    })
}
