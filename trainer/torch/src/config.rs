//! `config.json` of a Qwen3 dense model, as Hugging Face writes it.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::Kind;

use crate::error::{Error, Result, input, io};

/// Upper bound of every size read from a config; larger numbers are taken as damage.
const SIZE_MAX: i64 = 1 << 24;

/// Shape and constants of a Qwen3 dense model.
///
/// Field names are those of Hugging Face's `Qwen3Config`; all sizes are element counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Number of token ids.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width of the SwiGLU.
    pub intermediate_size: i64,
    /// Transformer blocks.
    pub num_hidden_layers: i64,
    /// Query heads.
    pub num_attention_heads: i64,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: i64,
    /// Width of one head; even.
    pub head_dim: i64,
    /// Added to the mean square in every RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest sequence; positions are `0..max_position_embeddings`.
    pub max_position_embeddings: i64,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Id put before every prompt, if the tokenizer has one.
    pub bos_token_id: Option<i64>,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<i64>,
    /// Id that fills unused places.
    pub pad_token_id: Option<i64>,
}

/// The keys that are read; all others are ignored unless [`refuse_unsupported`] names them.
#[derive(Deserialize)]
struct File {
    model_type: String,
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: i64,
    num_attention_heads: i64,
    num_key_value_heads: i64,
    head_dim: i64,
    rms_norm_eps: f64,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    rope_parameters: Option<RopeParameters>,
    max_position_embeddings: i64,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "default_initializer_range")]
    initializer_range: f64,
    #[serde(default)]
    bos_token_id: Option<i64>,
    #[serde(default)]
    eos_token_id: Option<OneOrMany>,
    #[serde(default)]
    pad_token_id: Option<i64>,
}

/// transformers 5 moved `rope_theta` in here.
#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
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

impl Config {
    /// Reads and checks `config.json` in a checkpoint directory.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], or [`Error::Config`] naming the field.
    pub fn open(checkpoint_dir: &Path) -> Result<Config> {
        Config::read(&checkpoint_dir.join("config.json"))
    }

    /// Reads and checks a `config.json` of any name.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], or [`Error::Config`] naming the field.
    pub fn read(path: &Path) -> Result<Config> {
        Config::from_value(&read_json(path)?, path)
    }

    /// The kind of the weights that a checkpoint directory says it holds: `BFloat16` or `Float`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], or [`Error::Config`] for another dtype.
    pub fn published_kind(checkpoint_dir: &Path) -> Result<Kind> {
        let value = read_json(&checkpoint_dir.join("config.json"))?;
        // transformers 5 writes `dtype`, 4 wrote `torch_dtype`.
        match value.get("dtype").or(value.get("torch_dtype")) {
            Some(Value::String(name)) if name == "bfloat16" => Ok(Kind::BFloat16),
            Some(Value::String(name)) if name == "float32" => Ok(Kind::Float),
            other => {
                let found = other.map_or("nothing".to_owned(), Value::to_string);
                Err(unsupported("torch_dtype", "bfloat16 or float32", found))
            }
        }
    }

    fn from_value(value: &Value, path: &Path) -> Result<Config> {
        refuse_unsupported(value)?;
        let file =
            File::deserialize(value).map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
        if file.model_type != "qwen3" {
            return Err(unsupported("model_type", "qwen3", &file.model_type));
        }
        let nested = file.rope_parameters.as_ref();
        if let Some(kind) = nested.and_then(|rope| rope.rope_type.as_deref())
            && kind != "default"
        {
            return Err(unsupported("rope_parameters.rope_type", "default", kind));
        }
        let rope_theta = nested.and_then(|rope| rope.rope_theta).or(file.rope_theta);
        let config = Config {
            vocab_size: file.vocab_size,
            hidden_size: file.hidden_size,
            intermediate_size: file.intermediate_size,
            num_hidden_layers: file.num_hidden_layers,
            num_attention_heads: file.num_attention_heads,
            num_key_value_heads: file.num_key_value_heads,
            head_dim: file.head_dim,
            rms_norm_eps: file.rms_norm_eps,
            rope_theta: rope_theta.ok_or_else(|| unsupported("rope_theta", "a number", "nothing"))?,
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
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first field that is out of range.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (field, size) in sizes {
            if !(1..=SIZE_MAX).contains(&size) {
                return Err(unsupported(field, format!("1..={SIZE_MAX}"), size));
            }
        }
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            let expected = format!("a divisor of num_attention_heads = {}", self.num_attention_heads);
            return Err(unsupported("num_key_value_heads", expected, self.num_key_value_heads));
        }
        if self.head_dim % 2 != 0 {
            return Err(unsupported("head_dim", "an even number", self.head_dim));
        }
        for (field, number) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            if !(number.is_finite() && number > 0.0) {
                return Err(unsupported(field, "a positive number", number));
            }
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            return Err(unsupported("initializer_range", "0 or more", self.initializer_range));
        }
        for id in self.bos_token_id.iter().chain(&self.eos_token_ids).chain(&self.pad_token_id) {
            if !(0..self.vocab_size).contains(id) {
                let expected = format!("0..{}", self.vocab_size);
                return Err(unsupported("bos, eos or pad token id", expected, id));
            }
        }
        Ok(())
    }

    /// The `config.json` that `transformers` (4 and 5) and SGLang read, for weights of `kind` (`BFloat16` or `Float`).
    #[must_use]
    pub fn to_json(&self, kind: Kind) -> Value {
        let mut object = Map::new();
        let mut set = |key: &str, value: Value| object.insert(key.to_owned(), value);
        set("architectures", json!(["Qwen3ForCausalLM"]));
        set("model_type", json!("qwen3"));
        set("vocab_size", json!(self.vocab_size));
        set("hidden_size", json!(self.hidden_size));
        set("intermediate_size", json!(self.intermediate_size));
        set("num_hidden_layers", json!(self.num_hidden_layers));
        set("num_attention_heads", json!(self.num_attention_heads));
        set("num_key_value_heads", json!(self.num_key_value_heads));
        set("head_dim", json!(self.head_dim));
        set("hidden_act", json!("silu"));
        set("rms_norm_eps", json!(self.rms_norm_eps));
        set("rope_theta", json!(self.rope_theta));
        set("max_position_embeddings", json!(self.max_position_embeddings));
        set("tie_word_embeddings", json!(self.tie_word_embeddings));
        set("initializer_range", json!(self.initializer_range));
        set("attention_bias", json!(false));
        set("attention_dropout", json!(0.0));
        set("use_sliding_window", json!(false));
        set("bos_token_id", json!(self.bos_token_id));
        set("eos_token_id", self.eos_json());
        set("pad_token_id", json!(self.pad_token_id));
        set("torch_dtype", json!(if kind == Kind::BFloat16 { "bfloat16" } else { "float32" }));
        Value::Object(object)
    }

    /// `eos_token_id` as Hugging Face writes it: nothing, one number, or a list.
    pub(crate) fn eos_json(&self) -> Value {
        match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        }
    }

    /// Every tensor of the model with its Hugging Face name and shape, sorted by name (byte order).
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        let layer = [
            ("input_layernorm", vec![hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.k_norm", vec![self.head_dim]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("self_attn.q_norm", vec![self.head_dim]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
        ];
        for index in 0..self.num_hidden_layers {
            for (name, shape) in &layer {
                tensors.push((format!("model.layers.{index}.{name}.weight"), shape.clone()));
            }
        }
        tensors.sort();
        tensors
    }

    /// Number of weights.
    #[must_use]
    pub fn elements(&self) -> i64 {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum()
    }
}

fn read_json(path: &Path) -> Result<Value> {
    // A pipe or a device would be read for ever.
    if !std::fs::metadata(path).map_err(io("read", path))?.is_file() {
        return Err(input("config.json", "a file", path.display()));
    }
    let text = std::fs::read(path).map_err(io("read", path))?;
    serde_json::from_slice(&text).map_err(|source| Error::Json { path: path.to_path_buf(), source })
}

/// Refuses the options of `Qwen3Config` that would change the computation and are not implemented.
fn refuse_unsupported(value: &Value) -> Result<()> {
    let is = |field: &str, wrong: &dyn Fn(&Value) -> bool| value.get(field).filter(|v| wrong(v)).cloned();
    let refused = [
        ("attention_bias", "false", is("attention_bias", &|v| v != &json!(false))),
        ("hidden_act", "silu", is("hidden_act", &|v| v != &json!("silu"))),
        ("rope_scaling", "null", is("rope_scaling", &|v| !plain_rope(v))),
        ("use_sliding_window", "false", is("use_sliding_window", &|v| v != &json!(false))),
        ("quantization_config", "null", is("quantization_config", &|v| !v.is_null())),
        ("layer_types", "full_attention only", is("layer_types", &|v| !full_attention(v))),
    ];
    match refused.into_iter().find_map(|(field, expected, found)| Some((field, expected, found?))) {
        Some((field, expected, found)) => Err(unsupported(field, expected, found)),
        None => Ok(()),
    }
}

/// `rope_scaling: null`, or transformers 5's echo of the default type.
fn plain_rope(value: &Value) -> bool {
    value.is_null() || value.get("rope_type") == Some(&json!("default"))
}

fn full_attention(value: &Value) -> bool {
    let all = |types: &Vec<Value>| types.iter().all(|kind| kind == "full_attention");
    value.is_null() || value.as_array().is_some_and(all)
}

fn unsupported(field: &'static str, expected: impl ToString, found: impl ToString) -> Error {
    Error::Config { field, expected: expected.to_string(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Config {
        Config {
            vocab_size: 16,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 4,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            max_position_embeddings: 32,
            tie_word_embeddings: true,
            initializer_range: 0.02,
            bos_token_id: None,
            eos_token_ids: vec![1],
            pad_token_id: Some(0),
        }
    }

    fn read(value: &Value) -> Result<Config> {
        Config::from_value(value, Path::new("config.json"))
    }

    #[test]
    fn json_round_trip() {
        let config = tiny();
        assert_eq!(read(&config.to_json(Kind::BFloat16)).unwrap(), config);
    }

    #[test]
    fn transformers_5_spelling() {
        let mut value = tiny().to_json(Kind::BFloat16);
        let object = value.as_object_mut().unwrap();
        object.remove("rope_theta");
        object.insert("rope_parameters".into(), json!({"rope_theta": 5e5, "rope_type": "default"}));
        assert_eq!(read(&value).unwrap().rope_theta, 5e5);
    }

    #[test]
    fn refusals_name_the_field() {
        let cases = [
            ("attention_bias", json!(true)),
            ("hidden_act", json!("gelu")),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
            ("use_sliding_window", json!(true)),
            ("quantization_config", json!({"quant_method": "fp8"})),
            ("layer_types", json!(["full_attention", "sliding_attention"])),
            ("model_type", json!("llama")),
            ("num_key_value_heads", json!(3)),
            ("head_dim", json!(5)),
            ("hidden_size", json!(0)),
            ("vocab_size", json!(1_i64 << 40)),
            ("rms_norm_eps", json!(-1.0)),
        ];
        for (name, wrong) in cases {
            let mut value = tiny().to_json(Kind::BFloat16);
            value[name] = wrong;
            match read(&value) {
                Err(Error::Config { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        let mut value = tiny().to_json(Kind::BFloat16);
        value["eos_token_id"] = json!([1, 99]);
        assert!(matches!(read(&value), Err(Error::Config { .. })));
    }

    #[test]
    fn tensors_are_sorted_and_counted() {
        let config = tiny();
        let tensors = config.tensors();
        assert_eq!(tensors.len(), 2 + 2 * 11);
        assert!(tensors.is_sorted());
        // embed 128 + norm 8; a layer: norms 8+8+4+4, mlp 3*96, q and o 2*128, k and v 2*64.
        assert_eq!(config.elements(), 136 + 2 * (24 + 288 + 256 + 128));
    }
}
