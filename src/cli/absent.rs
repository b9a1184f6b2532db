//! `driftless serve`, `quantize` and `replay`, in a build without libtorch.

use crate::cli::shared::error::{Result, absent};
use crate::cli::shared::output::Output;

/// What is asked of a command that this build does not have.
#[derive(clap::Args)]
#[command(hide = true, disable_help_flag = true)]
pub(crate) struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _ignored: Vec<std::ffi::OsString>,
}

pub(crate) fn run(_: Args, _: Output) -> Result<()> {
    Err(absent("this command", ""))
}
