//! The log that rollouts and evaluations are kept in.

use std::path::Path;
use std::time::Duration;

use driftless_buffer::{Identity, Log, Options, SyncPolicy};
use driftless_store::os::regular;
use driftless_transport::RunId;

use crate::error::{Error, Result};
use crate::learner::MODEL;

/// Opens the log of a run in a directory, or begins it. Its tokens are those of the checkpoint's tokenizer.
///
/// # Errors
/// [`Error::Io`] for that tokenizer, and what the log says: [`Error::Buffer`].
pub fn open_log(dir: &Path, hf_checkpoint: &Path, run_id: RunId) -> Result<Log> {
    let tokenizer = hf_checkpoint.join("tokenizer.json");
    let tokenizer = match regular::read(&tokenizer) {
        Ok(bytes) => bytes,
        // A model without a tokenizer is used with token ids alone.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(Error::Io { action: "read", path: tokenizer, source }),
    };
    let identity = Identity {
        run_id: *run_id.as_bytes(),
        model: MODEL.to_owned(),
        tokenizer_digest: *blake3::hash(&tokenizer).as_bytes(),
    };
    let mut options = Options::new(identity);
    options.sync = SyncPolicy::Manual;
    options.wait_deadline = Duration::from_secs(60);
    Ok(Log::open(dir, options)?)
}
