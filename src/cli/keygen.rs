//! `driftless keygen`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use driftless::transport::sign::SignKey;
use serde_json::json;
use std::path::PathBuf;

/// Make a key for `publish --sign-key`: FILE, which only its owner may read, and FILE.pub for `follow
/// --trust-key`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where the secret key goes; refused if the file is there.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let public = SignKey::create(&args.file)?.public().to_string();
    let mut name = args.file.into_os_string();
    name.push(".pub");
    let path = PathBuf::from(name);
    std::fs::write(&path, format!("{public}\n"))
        .map_err(|source| Error::Io { path: path.clone(), source })?;
    let value = json!({ "public_key": public, "public_key_file": path.display().to_string() });
    output.print(&value, |_| format!("{public}\n(also in {})", path.display()))
}
