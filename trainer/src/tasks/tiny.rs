//! The tokenizer of a model of fresh weights: 16 tokens, a character each.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::data::{DataOptions, RowReader, Tokenizer};
use crate::error::Result;
use driftless_agent::chat::ChatTemplate;

/// The kind of problems that is written in these tokens.
pub const KIND: &str = "arithmetic";

/// Fills unused places.
pub const PAD: i32 = 0;
/// Begins a text, where a template says so.
pub const BOS: i32 = 1;
/// Ends every answer.
pub const EOS: i32 = 2;

/// The vocabulary, by id.
pub const VOCABULARY: [&str; 16] =
    ["<pad>", "<bos>", "<eos>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=", "<unk>"];

/// Questions and answers one after the other; answers end with `<eos>`.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'assistant' %}\
     {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}";

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
        "post_processor": null,
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
        "chat_template": CHAT_TEMPLATE,
    })
}

/// Reads rows as a checkpoint with these files would.
///
/// # Errors
/// [`Error::Input`](crate::Error::Input) for variables of the template that are no JSON object.
pub fn reader(options: DataOptions) -> Result<RowReader> {
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", tokenizer().to_string().as_bytes())?;
    let template = ChatTemplate::from_source(CHAT_TEMPLATE, &[("eos_token", VOCABULARY[EOS as usize])])?;
    RowReader::new(options, Arc::new(tokenizer), Some(template))
}
