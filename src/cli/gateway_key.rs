//! `driftless gateway-key`.

use super::gateway::{KeyMaker, is_name, now};
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::{keys, numbers};
use serde_json::json;
use std::path::PathBuf;

const EXAMPLES: &str = "\
The gateway keeps no list of keys: another token ends all of them, and one alone ends with its time.

Example:
  driftless gateway-key task-1 --token-file token --ttl 600";

/// Print a key of one session of a gateway, for a client that must not have the gateway's token.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the session; it need not have begun.
    #[arg(value_name = "SESSION")]
    session: String,
    /// File holding the token of the gateway [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Seconds from now on that the key opens the session, by the gateway's clock.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = numbers::deadline())]
    ttl: u64,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    if !is_name(&args.session) {
        return Err(Error::usage("SESSION", "1 to 128 letters, digits, `.`, `_` and `-`", args.session));
    }
    let token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    let token =
        token.ok_or_else(|| Error::usage("--token-file", "a file with the gateway's token", "none"))?;
    let expiry = now().saturating_add(args.ttl);
    let key = KeyMaker::new(&token).make(&args.session, expiry);
    output.print(&json!({ "session": args.session, "key": key, "expiry": expiry }), |_| key.clone())
}
