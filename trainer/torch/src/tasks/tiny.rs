//! A Qwen3 of 1.2 M parameters for the tokens of [`driftless_trainer::tasks::tiny`]: it learns sums in minutes on two
//! cores.

use driftless_trainer::tasks::tiny::{BOS, EOS, PAD, VOCABULARY, tokenizer, tokenizer_config};
use driftless_transport::snapshot::AuxFile;

use crate::config::Config;
use crate::error::Result;
use crate::tasks::text;

/// Shape of the model.
#[must_use]
pub fn config() -> Config {
    Config {
        vocab_size: VOCABULARY.len() as i64,
        hidden_size: 128,
        intermediate_size: 384,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        head_dim: 32,
        max_position_embeddings: 64,
        initializer_range: 0.05,
        bos_token_id: Some(i64::from(BOS)),
        eos_token_ids: vec![i64::from(EOS)],
        pad_token_id: Some(i64::from(PAD)),
        ..text::config()
    }
}

/// `tokenizer.json` and `tokenizer_config.json`.
///
/// # Errors
/// [`crate::Error::Transport`] if a file is refused.
pub(crate) fn files() -> Result<[AuxFile; 2]> {
    let file = |name, value: serde_json::Value| AuxFile::new(name, format!("{value:#}\n").into_bytes());
    Ok([file("tokenizer.json", tokenizer())?, file("tokenizer_config.json", tokenizer_config())?])
}
