//! What `config.json` of a checkpoint directory says of its model.

use std::path::Path;

use driftless_store::os::regular;
use serde_json::Value;

use crate::error::{Error, Result, io};

/// Tokens that the model has.
///
/// # Errors
/// [`Error::Io`] and [`Error::Json`] for that file.
pub fn vocabulary(checkpoint: &Path) -> Result<Option<u64>> {
    number(checkpoint, "vocab_size")
}

/// Tokens that a prompt and its answer may have together.
///
/// # Errors
/// As [`vocabulary`].
pub fn context(checkpoint: &Path) -> Result<Option<usize>> {
    Ok(number(checkpoint, "max_position_embeddings")?.and_then(|tokens| usize::try_from(tokens).ok()))
}

fn number(checkpoint: &Path, name: &str) -> Result<Option<u64>> {
    let path = checkpoint.join("config.json");
    let bytes = regular::read(&path).map_err(io("read", &path))?;
    let config: Value =
        serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.clone(), source })?;
    // A model that takes images too says it of its language model.
    Ok(config["text_config"][name].as_u64().or_else(|| config[name].as_u64()))
}
