//! `config.json` as Hugging Face writes it: what is read, and what is refused because it would be computed
//! wrongly.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Config, RopeScaling, unsupported};
use crate::error::{Error, Result};
use crate::models::Family;

/// What transformers takes where a config names no base.
const ROPE_THETA_DEFAULT: f64 = 10_000.0;

/// The keys that are read; all others are ignored unless [`refuse_unsupported`] names them.
#[derive(Deserialize)]
struct File {
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: i64,
    num_attention_heads: i64,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    /// Since transformers 5: base and scaling together.
    rope_parameters: Option<Rope>,
    /// Until transformers 4: the scaling alone.
    rope_scaling: Option<Rope>,
    max_position_embeddings: i64,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "default_initializer_range")]
    initializer_range: f64,
    bos_token_id: Option<i64>,
    eos_token_id: Option<OneOrMany>,
    pad_token_id: Option<i64>,
}

#[derive(Deserialize)]
struct Rope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<i64>,
    partial_rotary_factor: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

fn default_initializer_range() -> f64 {
    0.02
}

/// The model that a `config.json` describes; not yet checked for sizes that do not fit together.
pub(super) fn parse(value: &Value, path: &Path) -> Result<Config> {
    let family = family(value, path)?;
    refuse_unsupported(value, family)?;
    let file = File::deserialize(value).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
    let (rope_theta, rope_scaling) = rope(&file)?;
    Ok(Config {
        family,
        vocab_size: file.vocab_size,
        hidden_size: file.hidden_size,
        intermediate_size: file.intermediate_size,
        num_hidden_layers: file.num_hidden_layers,
        num_attention_heads: file.num_attention_heads,
        num_key_value_heads: file.num_key_value_heads.unwrap_or(file.num_attention_heads),
        head_dim: match file.head_dim {
            Some(size) => size,
            None => shared_width(&file)?,
        },
        rms_norm_eps: file.rms_norm_eps,
        rope_theta,
        rope_scaling,
        max_position_embeddings: file.max_position_embeddings,
        tie_word_embeddings: file.tie_word_embeddings,
        initializer_range: file.initializer_range,
        bos_token_id: file.bos_token_id,
        eos_token_ids: match file.eos_token_id {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
        },
        pad_token_id: file.pad_token_id,
    })
}

/// By `model_type`; `architectures`, where it is given, has to say the same.
fn family(value: &Value, path: &Path) -> Result<Family> {
    let known = |found: &str| Family::ALL.into_iter().find(|family| family.model_type() == found);
    let found = value.get("model_type").filter(|name| !name.is_null());
    let found =
        found.map_or("nothing".to_owned(), |name| name.as_str().map_or(name.to_string(), str::to_owned));
    let refused = |found: String| Error::Family {
        path: path.to_path_buf(),
        found,
        known: Family::ALL.map(Family::model_type).join(", "),
    };
    let family = known(&found).ok_or_else(|| refused(found))?;
    match value.get("architectures") {
        None | Some(Value::Null) => Ok(family),
        Some(names) if names == &json!([family.architecture()]) => Ok(family),
        // A classifier or a reward model over the same layers.
        Some(names) => Err(refused(names.to_string())),
    }
}

/// `head_dim` where the file has none: the heads share the residual stream's width.
fn shared_width(file: &File) -> Result<i64> {
    match file.hidden_size.checked_rem(file.num_attention_heads) {
        Some(0) => Ok(file.hidden_size / file.num_attention_heads),
        _ => {
            let expected = format!("a divisor of hidden_size = {}, or head_dim", file.hidden_size);
            Err(unsupported("num_attention_heads", expected, file.num_attention_heads))
        }
    }
}

/// Base and scaling of the rotary positions. As in transformers, the old key goes before the new one.
fn rope(file: &File) -> Result<(f64, Option<RopeScaling>)> {
    let (field, rope) = match (&file.rope_scaling, &file.rope_parameters) {
        (Some(rope), _) => ("rope_scaling", rope),
        (None, Some(rope)) => ("rope_parameters", rope),
        (None, None) => return Ok((file.rope_theta.unwrap_or(ROPE_THETA_DEFAULT), None)),
    };
    let theta = rope.rope_theta.or(file.rope_theta).unwrap_or(ROPE_THETA_DEFAULT);
    if rope.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        return Err(unsupported(field, "partial_rotary_factor 1", "another"));
    }
    let needed = |key: &str, value: Option<f64>| {
        value.ok_or_else(|| unsupported(field, format!("{key} beside rope_type llama3"), "nothing"))
    };
    match rope.rope_type.as_deref() {
        None | Some("default") => Ok((theta, None)),
        Some("llama3") => {
            let original = rope.original_max_position_embeddings;
            let scaling = RopeScaling {
                factor: needed("factor", rope.factor)?,
                low_freq_factor: needed("low_freq_factor", rope.low_freq_factor)?,
                high_freq_factor: needed("high_freq_factor", rope.high_freq_factor)?,
                original_max_position_embeddings: original.unwrap_or(file.max_position_embeddings),
            };
            Ok((theta, Some(scaling)))
        }
        Some(other) => Err(unsupported(field, "rope_type default or llama3", other)),
    }
}

/// Refuses what would change the computation and is not implemented.
fn refuse_unsupported(value: &Value, family: Family) -> Result<()> {
    let is = |field: &str, wrong: &dyn Fn(&Value) -> bool| value.get(field).filter(|v| wrong(v)).cloned();
    let on = |v: &Value| !v.is_null() && v != &json!(false);
    let refused = [
        ("hidden_act", "silu", is("hidden_act", &|v| v != &json!("silu"))),
        ("quantization_config", "null", is("quantization_config", &|v| !v.is_null())),
        ("layer_types", "full_attention only", is("layer_types", &|v| !full_attention(v))),
        ("dual_chunk_attention_config", "null", is("dual_chunk_attention_config", &|v| !v.is_null())),
    ];
    let options = family.traits().off.iter().map(|&field| (field, "false", is(field, &on)));
    let mut refused = refused.into_iter().chain(options);
    match refused.find_map(|(field, expected, found)| Some((field, expected, found?))) {
        Some((field, expected, found)) => Err(unsupported(field, expected, found)),
        None => Ok(()),
    }
}

fn full_attention(value: &Value) -> bool {
    let all = |types: &Vec<Value>| types.iter().all(|kind| kind == "full_attention");
    value.is_null() || value.as_array().is_some_and(all)
}
