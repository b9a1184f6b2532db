//! `driftless man`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use clap::CommandFactory as _;
use std::path::PathBuf;

const HELP: &str = "\
Example:
  driftless man ~/.local/share/man/man1
  man driftless-train";

/// Write a manual page for each command.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Directory that gets them; it is made if absent.
    dir: PathBuf,
}

pub(crate) fn run(args: Args, _: Output) -> Result<()> {
    let Args { dir } = args;
    std::fs::create_dir_all(&dir)
        .and_then(|()| clap_mangen::generate_to(crate::cli::Cli::command(), &dir))
        .map_err(|source| Error::Io { path: dir, source })
}
