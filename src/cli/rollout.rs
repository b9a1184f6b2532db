//! `driftless rollout`: the half of a run that generates, as a process of its own.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::Output;
use crate::cli::train;

const EXAMPLES: &str = "\
Example, with the flags that both are given in a file:
    cat > run.toml <<END
    hf-checkpoint = \"runs/sft-hf\"
    store = \"file:///shared/store\"
    run = \"demo\"
    task = \"arithmetic\"
    rollout-max-response-len = 4
    num-rollout = 120
    max-staleness = 2
    use-tis = true
    rollout-external-engine-addrs = [\"10.0.0.1:30000\"]
    END
    driftless rollout --config run.toml --save runs/rl &
    driftless train --config run.toml --rollouts runs/rl

Both are on one host and share the directory, and nothing else. Either may end, by any signal, and be started again with the
same command: engines, answers under way and hooks go on while the trainer is away, and the trainer learns from what the log
has while the rollouts are. This command ends once the trainer has done all steps. What is measured on held-out prompts is
`driftless eval`'s.

Every flag of `train` is taken, so that one file holds for both; those of the learner and of publications say nothing here.";

/// Generate for a run that `driftless train --rollouts` trains: engines, schedule, hooks and log in a process of their own.
#[derive(clap::Args)]
#[group(skip)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    train: train::Args,
}

pub(crate) fn run(args: Args, _: Output) -> Result<()> {
    train::rollout(args.train)
}
