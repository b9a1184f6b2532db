//! `driftless completions`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use clap_complete::Shell;
use std::io::Write as _;

const HELP: &str = "\
Example:
  driftless completions bash > ~/.local/share/bash-completion/completions/driftless";

/// Print what a shell completes `driftless` with.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// The shell.
    shell: Shell,
}

pub(crate) fn run(args: Args, _: Output) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::cli::command(), "driftless", &mut script);
    std::io::stdout().lock().write_all(&script).map_err(Error::Output)
}
