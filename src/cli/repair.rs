//! `driftless repair`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::progress;
use driftless::transport::Replica;
use driftless::transport::replica::Repaired;
use std::path::PathBuf;

const HELP: &str = "\
It needs neither a store nor a follower: an interrupted apply is finished from its journal, or what it had begun is removed. Then
all bytes are read and compared with their digests. It ends with 0 only if the directory holds a version whole. A directory that is
damaged loses its config.json, so that no engine starts from it; `driftless follow` builds it anew from the store.
While a follower or a publisher has the directory, it ends with 1 and does nothing: they repair it themselves.

Example, before an engine starts after a loss of power:
  driftless repair /var/lib/policy && python -m sglang.launch_server --model-path /var/lib/policy …";

/// Finish or undo what a crash left in a checkpoint directory, and check every byte of it.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Directory of a follower's checkpoint, or of a publisher's baseline.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    if !args.dir.join(".driftless").is_dir() {
        let expected = "a directory that `driftless follow` or `driftless publish` keeps";
        let found = if args.dir.exists() { "no .driftless in it" } else { "no such directory" };
        return Err(Error::usage(format!("`{}`", args.dir.display()), expected, found));
    }
    let repaired = progress::during("repair", "", |_| Replica::repair(&args.dir))?;
    output.print(&repaired, text)
}

fn text(repaired: &Repaired) -> String {
    let version = repaired.applied.version;
    let done = match (repaired.interrupted, repaired.before == Some(version)) {
        (false, _) => "nothing was interrupted",
        (true, true) => "what an interrupted apply had left is gone",
        (true, false) => "an interrupted apply was finished",
    };
    format!("{}: version {version}, every byte checked; {done}", repaired.applied.label())
}
