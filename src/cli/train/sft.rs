//! `driftless train --loss-type sft_loss`: on conversations of `--prompt-data`, on a text, or on the arithmetic task.

use super::task::Conversations;
use crate::cli::shared::error::Result;
use crate::cli::shared::output::Output;
use crate::cli::shared::{paths, progress};
use driftless::torch::sft::{SftOptions, SftTask, sft};
use driftless::torch::tasks::arithmetic::Recipe;
use driftless::torch::tasks::text::{self, Text};
use driftless::torch::{Config, Kind, checkpoint};
use driftless::trainer::options::{Dtype, LearnOptions};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;

/// Only for `--loss-type sft_loss`.
#[derive(clap::Args)]
#[command(next_help_heading = "SFT")]
pub(crate) struct SftArgs {
    /// Learn to predict this text byte by byte, instead of conversations or the arithmetic task.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt_data")]
    text: Option<PathBuf>,
    /// State directory of an earlier SFT to go on from: its weights, moments and steps.
    #[arg(long, value_name = "DIR")]
    load: Option<PathBuf>,
    /// `config.json` of the fresh model [default: a Qwen3 of 1.2 M parameters; with --text, of 21 M].
    #[arg(long, value_name = "FILE", conflicts_with = "hf_checkpoint")]
    model_config: Option<PathBuf>,
}

/// What a supervised training shares with the RL loop.
pub(crate) struct Common {
    pub(crate) hf_checkpoint: Option<PathBuf>,
    pub(crate) save: PathBuf,
    pub(crate) save_hf: Option<PathBuf>,
    pub(crate) num_rollout: Option<u64>,
    pub(crate) rollout_batch_size: Option<u64>,
    pub(crate) lr: Option<f64>,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) seed: u64,
    pub(crate) num_threads: usize,
    pub(crate) device: String,
    /// What is learned, where --prompt-data has conversations.
    pub(crate) chat: Option<Chat>,
}

/// Conversations, and how they are learned.
pub(crate) struct Chat {
    pub(crate) data: Conversations,
    pub(crate) learn: LearnOptions,
}

pub(crate) fn run(args: &SftArgs, common: Common, output: Output) -> Result<()> {
    for (name, file) in [("--text", &args.text), ("--model-config", &args.model_config)] {
        file.as_ref().map_or(Ok(()), |file| paths::open(name, file).map(drop))?;
    }
    args.load.as_ref().map_or(Ok(()), |dir| paths::check_dir("--load", dir))?;
    let options = options(args, common)?;
    let bar = progress::bar(options.steps, "sft");
    let mut losses = Vec::new();
    let summary = sft(&options, |step, loss| {
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

/// Conversations in one step, unless told.
pub(crate) const CHAT_BATCH_SIZE: u64 = 32;
/// Learning rate on conversations, unless told.
pub(crate) const CHAT_LR: f64 = 1e-5;
/// Sequences of text in one step, unless told.
const TEXT_BATCH_SIZE: u64 = 16;

fn options(args: &SftArgs, common: Common) -> Result<SftOptions> {
    let recipe = Recipe::default();
    let mut steps = recipe.sft_steps;
    let (task, config, batch_size) = match (&args.text, common.chat) {
        (Some(path), _) => (SftTask::Text(Text::open(path)?), text::config(), TEXT_BATCH_SIZE),
        (None, Some(Chat { data: Conversations { data, order, epochs }, learn })) => {
            let batch_size = common.rollout_batch_size.unwrap_or(CHAT_BATCH_SIZE);
            steps = order.prompts.saturating_mul(epochs).div_ceil(batch_size);
            let data = Arc::new(data);
            (SftTask::Chat { data, order, learn: Box::new(learn) }, recipe.config, CHAT_BATCH_SIZE)
        }
        (None, None) => (SftTask::Arithmetic, recipe.config, recipe.sft_batch_size),
    };
    let until_solved = common.num_rollout.is_none() && matches!(task, SftTask::Arithmetic);
    Ok(SftOptions {
        task,
        config: args.model_config.as_deref().map_or(Ok(config), Config::read)?,
        hf_checkpoint: common.hf_checkpoint,
        load: args.load.as_deref().map(checkpoint::dir),
        save: Some(checkpoint::dir(&common.save)),
        save_hf: common.save_hf.unwrap_or_else(|| common.save.join("hf")),
        dtype: common.dtype.map(|dtype| match dtype {
            Dtype::Bfloat16 => Kind::BFloat16,
            Dtype::Float32 => Kind::Float,
        }),
        steps: common.num_rollout.unwrap_or(steps),
        stop_loss: until_solved.then_some(recipe.sft_stop_loss),
        batch_size: common.rollout_batch_size.unwrap_or(batch_size),
        lr: common.lr.unwrap_or(recipe.sft_lr),
        seed: common.seed,
        num_threads: common.num_threads,
        device: common.device,
    })
}
