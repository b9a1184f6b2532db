//! The files that make the task's model a complete Hugging Face checkpoint.

use driftless_transport::AuxFile;
use serde_json::{Value, json};
use tch::Kind;

use super::{BOS, EOS, PAD};
use crate::config::Config;
use crate::error::Result;

/// The vocabulary, by id.
pub(super) const VOCABULARY: [&str; 16] =
    ["<pad>", "<bos>", "<eos>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=", "<unk>"];

/// `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json` of a model of the task whose
/// weights are of `kind`; sorted by name.
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

/// A word-level tokenizer whose words are single characters, in the format of the `tokenizers` library.
fn tokenizer() -> Value {
    let special = |id: i32| {
        json!({
            "id": id, "content": VOCABULARY[id as usize], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let ids: serde_json::Map<String, Value> =
        VOCABULARY.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(PAD), special(BOS), special(EOS)],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Split", "pattern": { "Regex": "." }, "behavior": "Isolated", "invert": false,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<bos>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<bos>": { "id": "<bos>", "ids": [BOS], "tokens": ["<bos>"] } },
        },
        "decoder": { "type": "Fuse" },
        "model": { "type": "WordLevel", "vocab": ids, "unk_token": "<unk>" },
    })
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 64,
    })
}
