//! `driftless replay`: a run once more, without engines.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::{Output, say};
use crate::cli::shared::scratch::Scratch;
use crate::cli::shared::{numbers, paths, progress};
use crate::cli::train::deterministic;
use driftless::torch::{Settings, TorchLearner};
use driftless::trainer::learner::Learner;
use driftless::trainer::replay::{Recipe, ReplayOptions, Replayed, replay};
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  driftless replay runs/first
  driftless replay runs/first --to 12
  driftless replay runs/first --hf-checkpoint /new/place/of/models/policy

The run's directory is only read, also while the run goes on; its store and its engines are not needed. Each step has to
learn from the samples that ledger.jsonl has digests of, and come to the figures and the weights that metrics.jsonl has.
A difference is named with its step, and the exit code is 1. Only runs with libtorch in their process can be replayed.";

/// Do the steps of a run again from its log, and compare them with what the run did, to the digest of its weights.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Directory of the run, as `train --save` has it.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Version to end with [default: the newest].
    #[arg(long, value_name = "N", value_parser = numbers::ordinal())]
    to: Option<u64>,
    /// Checkpoint directory that the run started from [default: where it lay then].
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: Option<PathBuf>,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_dir("RUN", &args.run)?;
    if let Some(dir) = &args.hf_checkpoint {
        paths::check_checkpoint("--hf-checkpoint", dir)?;
    }
    let scratch = Scratch::new("replay");
    let options = ReplayOptions::new(args.run, &scratch.dir);
    let options = options.with_to(args.to).with_hf_checkpoint(args.hf_checkpoint);
    let replayed = progress::during("replay", "steps", |work| {
        replay(&options, learner, |step, of| {
            work.add(1);
            work.aside(|| say(&format!("step {step} of {of}: same as the run")));
        })
    })?;
    output.print(&replayed, shown)
}

/// A learner of libtorch as the run had it.
fn learner(recipe: &Recipe) -> driftless::trainer::Result<Box<dyn Learner>> {
    let settings = Settings::read(recipe.learner.as_ref())?;
    if settings.deterministic {
        deterministic(&settings.device).map_err(|error| driftless::trainer::Error::Learner {
            learner: format!("libtorch on {}", settings.device),
            source: Box::new(error),
        })?;
    }
    Ok(Box::new(TorchLearner::new(settings.options(recipe.learn.clone(), recipe.temperature))))
}

fn shown(replayed: &Replayed) -> String {
    let Replayed { version, weights_digest, steps, versions } = replayed;
    format!(
        "version {version} is the same to the digest, {weights_digest}: {steps} steps, {versions} versions compared"
    )
}
