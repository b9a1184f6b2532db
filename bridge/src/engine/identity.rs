//! What an engine says it is, compared with what was expected.

use std::path::{Path, PathBuf};

use driftless_transport::Dtype;

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
    /// Whether it computes with quantised weights.
    pub(crate) quantized: bool,
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

impl Identity {
    /// Whether the flush of a patch is part of the call, where nothing can keep the cache from being flushed.
    pub(crate) fn flushes_with_patch(&self, mode: PauseMode) -> bool {
        self.flushes && mode == PauseMode::Retract
    }

    /// Whether the engine's checksums can be compared with [`checksums`](crate::sglang::checksums()): one rank, on
    /// the CPU. GPUs hash differently, every further rank holds a slice, and of quantised weights engines hash what they
    /// stand for.
    pub(crate) fn checksums_comparable(&self) -> bool {
        self.tp == 1 && self.device.as_deref() == Some("cpu") && !self.quantized
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

    /// The sizes that decide the tensors' shapes, and what they are quantised to.
    pub(crate) fn config(&self, expected: &Expected, local: &Expected) -> Result<()> {
        let (want, have) = (&expected.config, &local.config);
        for (what, want, have) in [
            ("hidden_size", want.hidden_size, have.hidden_size),
            ("num_hidden_layers", want.layers, have.layers),
            ("vocab_size", want.vocabulary, have.vocabulary),
            ("intermediate_size", want.intermediate_size, have.intermediate_size),
            ("num_attention_heads", want.heads, have.heads),
            ("num_key_value_heads", want.kv_heads, have.kv_heads),
            ("head_dim", want.head_dim, have.head_dim),
            ("tie_word_embeddings", want.tied.into(), have.tied.into()),
        ] {
            self.equal(what, &want.to_string(), &have.to_string())?;
        }
        let [want, have] = [want, have].map(|config| config.quantization.as_deref().unwrap_or("none"));
        self.equal("quantization", want, have)
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
