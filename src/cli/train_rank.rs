//! `driftless train-rank`: a process that `driftless train` starts for each GPU but the first.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use crate::cli::shared::output::Output;
use driftless::torch::libtorch::set_deterministic;
use driftless::torch::{RankOptions, TorchOptions, serve_rank};
use driftless::trainer::options::LearnOptions;
use std::path::PathBuf;
use std::time::Duration;

/// What the loop says where its socket is with.
const LOOP: &str = "DRIFTLESS_LEARNER_SOCKET";

#[derive(clap::Args)]
#[command(hide = true)]
pub(crate) struct Args {
    /// How many ranks there are.
    #[arg(long, value_parser = numbers::count::<usize>())]
    ranks: usize,
    /// As for `driftless train`.
    #[arg(long)]
    device: String,
    #[command(flatten)]
    of_rank: OfRank,
    /// As for `driftless train`.
    #[arg(long, value_name = "SECONDS", value_parser = numbers::deadline())]
    learner_deadline: u64,
    /// This one, from 1 on.
    rank: usize,
    /// Where the ranks meet.
    socket: PathBuf,
    /// Where the training checkpoints are.
    checkpoints: PathBuf,
}

/// What every rank of a run is told of libtorch.
#[derive(clap::Args)]
pub(crate) struct OfRank {
    /// As for `driftless train`.
    #[arg(long, value_parser = numbers::count::<usize>())]
    pub(crate) num_threads: usize,
    /// As for `driftless train`.
    #[arg(long)]
    pub(crate) deterministic: bool,
}

/// The command that starts ranks as this program, but for what differs between them.
/// Without `--die-with-parent`: that is the thread which starts a rank, and that ends before the rank has to. A rank
/// sees the end of its connections instead.
pub(crate) fn options(
    ranks: usize,
    device: &str,
    OfRank { num_threads, deterministic }: OfRank,
    learner_deadline: u64,
) -> Result<RankOptions> {
    let program = std::env::current_exe();
    let program = program.map_err(|source| Error::Io { path: PathBuf::from("/proc/self/exe"), source })?;
    let program = program.display().to_string().replace('\'', r"'\''");
    let deterministic = if deterministic { " --deterministic" } else { "" };
    let command = format!(
        "exec '{program}' train-rank --ranks {ranks} --device {device} \
         --num-threads {num_threads}{deterministic} --learner-deadline {learner_deadline}"
    );
    Ok(RankOptions::new(ranks, command).with_deadline(Duration::from_secs(learner_deadline)))
}

pub(crate) fn run(args: Args, _: Output) -> Result<()> {
    let Some(socket) = std::env::var_os(LOOP) else {
        return Err(Error::usage(
            "driftless train-rank",
            format!("to be started by `driftless train --actor-num-gpus-per-node`, which sets {LOOP}"),
            "none",
        ));
    };
    if args.of_rank.deterministic {
        set_deterministic();
    }
    let num_threads = args.of_rank.num_threads;
    let ranks = options(args.ranks, &args.device, args.of_rank, args.learner_deadline)?;
    // Rank 0 publishes, and says how they learn.
    let options = TorchOptions::new(LearnOptions::default()).with_num_threads(num_threads);
    let options = options.with_device(&args.device).with_ranks(ranks);
    Ok(serve_rank(&PathBuf::from(socket), &options, args.rank, &args.socket, &args.checkpoints)?)
}
