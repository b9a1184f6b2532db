//! The files that make the task's model a complete Hugging Face checkpoint.

use driftless_trainer::tasks::arithmetic::{tokenizer, tokenizer_config};
use driftless_transport::snapshot::AuxFile;
use serde_json::{Value, json};
use tch::Kind;

use crate::config::Config;
use crate::error::Result;

/// `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json` of a model of the
/// task whose weights are of `kind`; sorted by name.
///
/// # Errors
/// [`crate::Error::Transport`] if a file is refused.
pub fn files(config: &Config, kind: Kind) -> Result<Vec<AuxFile>> {
    let files = [
        ("config.json", config.to_json(kind)),
        ("generation_config.json", generation_config(config)),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config()),
    ];
    let file = |(name, value): (&str, Value)| Ok(AuxFile::new(name, format!("{value:#}\n").into_bytes())?);
    files.into_iter().map(file).collect()
}

fn generation_config(config: &Config) -> Value {
    json!({
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_json(),
        "pad_token_id": config.pad_token_id,
        "do_sample": true,
        "temperature": 1.0,
    })
}
