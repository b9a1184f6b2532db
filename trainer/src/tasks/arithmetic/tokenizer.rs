//! The task's tokenizer, as files of a Hugging Face checkpoint.

use serde_json::{Value, json};

use super::{BOS, EOS, PAD};

/// The vocabulary, by id.
pub const VOCABULARY: [&str; 16] =
    ["<pad>", "<bos>", "<eos>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=", "<unk>"];

/// `tokenizer.json`: a word-level tokenizer whose words are single characters, in the format of the
/// `tokenizers` library.
#[must_use]
pub fn tokenizer() -> Value {
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

/// `tokenizer_config.json`.
#[must_use]
pub fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 64,
    })
}
