//! What an engine says it is, compared with what was expected.

use std::path::{Path, PathBuf};

use driftless_transport::Dtype;

use crate::engine::config::shown;
use crate::engine::{Expected, PauseMode};
use crate::error::{Error, Result};
use crate::http::excerpt;

/// What an engine said about itself, after it was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// Its release, for people.
    pub version: Option<String>,
    /// `cpu`, `cuda` …, where its kind tells.
    pub device: Option<String>,
    /// Its tensor-parallel ranks; 1 where its kind does not tell.
    pub tp: u32,
    /// The dtype it holds weights in.
    pub dtype: Dtype,
    /// Whether the config under the engine's own model path could be read here and was compared; otherwise
    /// only architecture, dtype and set-up were, as far as its kind tells them.
    pub config_compared: bool,
    /// The tokenizer's digest, where both sides have a tokenizer that could be read here; it was equal.
    pub tokenizer: Option<String>,
    /// Whether replies say which output tokens came from which weights.
    pub spans: bool,
    /// Whether a piece of a stream has new tokens only; otherwise each has all tokens so far.
    pub incremental: bool,
    /// Why its checksums cannot be compared with those that are computed here, if they cannot.
    pub(crate) no_checksums: Option<String>,
    /// The load format that an update has to name: an engine started with `dummy` keeps that as its default,
    /// and cannot update with it.
    pub(crate) load_format: Option<String>,
    /// The one directory that it can load, for kinds that load what they were started with.
    pub(crate) loads_only: Option<PathBuf>,
    /// Whether a load may be asked to flush: an engine that cannot then says so, and does not end.
    pub(crate) flushes: bool,
    /// Whether a patch changes weights and label in one call, so that no label is ever of other weights.
    pub(crate) labels_with_patch: bool,
    /// Whether pushes want `begin_weight_update` and `end_weight_update` around them.
    pub(crate) sessions: bool,
    /// Whether it can give memory back and take it again.
    pub(crate) saves_memory: bool,
}

#[cfg(test)]
impl Identity {
    /// Of an engine that a test makes up.
    pub(crate) fn made_up() -> Self {
        Self {
            version: None,
            device: None,
            tp: 1,
            dtype: Dtype::Bf16,
            config_compared: true,
            tokenizer: None,
            spans: false,
            incremental: true,
            no_checksums: None,
            load_format: None,
            loads_only: None,
            flushes: false,
            labels_with_patch: true,
            sessions: false,
            saves_memory: false,
        }
    }
}

/// What an engine says of itself to whoever expects nothing of it yet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct About {
    /// Its release, for people.
    pub release: Option<String>,
    /// The model that it was started with, as it names it: a directory of its own host, or a name of a hub.
    pub model: String,
}

impl Identity {
    /// Whether the flush of a patch is part of the call, where nothing can keep the cache from being flushed.
    pub(crate) fn flushes_with_patch(&self, mode: PauseMode) -> bool {
        self.flushes && mode == PauseMode::Retract
    }
}

/// Config and tokenizer of an engine, read under the paths it names; `None` where they are not on this
/// machine.
pub(crate) fn local(model: &Path, tokenizer: Option<&Path>) -> Result<Option<Expected>> {
    if !model.join("config.json").is_file() {
        return Ok(None);
    }
    let mut found = Expected::from_checkpoint(model)?;
    match tokenizer {
        Some(path) if path != model && path.join("config.json").is_file() => {
            found.tokenizer = Expected::from_checkpoint(path)?.tokenizer
        }
        _ => {}
    }
    Ok(Some(found))
}

/// Compares an engine's answers with what is expected, and refuses the first that does not fit.
pub(crate) struct Check<'a> {
    /// URL of the engine.
    pub(crate) engine: &'a str,
}

impl Check<'_> {
    pub(crate) fn equal(&self, what: &str, expected: &str, found: &str) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::refused(self.engine, what, expected, excerpt(found.as_bytes())))
    }

    /// The config of the checkpoint, and that under the engine's model path.
    pub(crate) fn config(&self, expected: &Expected, local: &Expected) -> Result<()> {
        let differences = expected.config.differences(&local.config);
        if differences.is_empty() {
            return Ok(());
        }
        let (what, expected, found) = shown(&differences);
        Err(Error::refused(self.engine, what, expected, found))
    }

    /// Refuses weights in another representation than those that such engines were updated with.
    pub(crate) fn quantization(&self, expected: &Expected, known: &[&str]) -> Result<()> {
        match expected.config.quantization.as_deref().unwrap_or("none") {
            quantization if known.contains(&quantization) => Ok(()),
            other => self.equal("quantization of the checkpoint", &known.join(" or "), other),
        }
    }

    /// The digest of the tokenizer, where both sides have one.
    pub(crate) fn tokenizer(&self, expected: &Expected, local: Option<&Expected>) -> Result<Option<String>> {
        let Some((expected, found)) =
            expected.tokenizer.as_ref().zip(local.and_then(|l| l.tokenizer.as_ref()))
        else {
            return Ok(None);
        };
        self.equal("tokenizer digest", expected, found)?;
        Ok(Some(found.clone()))
    }
}
