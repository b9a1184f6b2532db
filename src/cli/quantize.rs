//! `driftless quantize`.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::Output;
use crate::cli::shared::{paths, progress};
use driftless::torch::quantize_checkpoint;
use serde_json::json;
use std::path::PathBuf;

/// Write a checkpoint in fp8, for engines and followers of `train --rollout-dtype fp8` to start from.
///
/// The layers' matrices become e4m3, in blocks of 128 x 128 with f32 scales; embeddings, head, norms and biases stay.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkpoint directory of a Llama, Qwen2 or Qwen3 model in bf16 or f32: --hf-checkpoint of the training.
    #[arg(value_name = "FROM")]
    from: PathBuf,
    /// Directory for the fp8 checkpoint, new or empty: --rollout-hf-checkpoint of the training.
    #[arg(value_name = "TO")]
    to: PathBuf,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_checkpoint("FROM", &args.from)?;
    paths::check_own("TO", &args.to, None)?;
    progress::during("quantize", "", |_| quantize_checkpoint(&args.from, &args.to))?;
    let place = args.to.display().to_string();
    output.print(&json!({ "hf_checkpoint": place }), |_| format!("in fp8: {place}"))
}
