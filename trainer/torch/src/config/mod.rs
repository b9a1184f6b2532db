//! Shape and constants of a model: `config.json`, as Hugging Face writes it.

mod file;
#[cfg(test)]
mod tests;

use std::path::Path;

use driftless_transport::snapshot::AuxFile;
use serde::Serialize;
use serde_json::{Value, json};
use tch::Kind;

use crate::error::{Error, Result, input, io};
use crate::models::Family;

/// Upper bound of every size read from a config; larger numbers are taken as damage.
const SIZE_MAX: i64 = 1 << 24;

/// Shape and constants of a dense model.
///
/// Field names are those of Hugging Face's configs; all sizes are element counts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    /// What the layers are made of.
    #[serde(skip)]
    pub family: Family,
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
    /// How they are stretched, if they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Longest sequence; positions are `0..max_position_embeddings`.
    pub max_position_embeddings: i64,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Id put before every prompt, if the tokenizer has one.
    pub bos_token_id: Option<i64>,
    /// Ids that end a generation.
    #[serde(skip)]
    pub eos_token_ids: Vec<i64>,
    /// Id that fills unused places.
    pub pad_token_id: Option<i64>,
}

/// Llama 3's stretching of the rotary frequencies (`rope_type: llama3`), for contexts longer than those of
/// pretraining: long waves are divided by `factor`, short ones stay, and those between move from one to the
/// other.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename = "llama3")]
pub struct RopeScaling {
    /// What the frequencies of long waves are divided by; at least 1.
    pub factor: f64,
    /// Waves longer than `original_max_position_embeddings / low_freq_factor` positions are long.
    pub low_freq_factor: f64,
    /// Waves shorter than `original_max_position_embeddings / high_freq_factor` positions are short.
    pub high_freq_factor: f64,
    /// Positions of pretraining.
    pub original_max_position_embeddings: i64,
}

impl Config {
    /// Reads and checks `config.json` in a checkpoint directory.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::Family`], or [`Error::Config`] naming the field.
    pub fn open(checkpoint_dir: &Path) -> Result<Config> {
        Config::read(&checkpoint_dir.join("config.json"))
    }

    /// As [`Config::open`], also for a sequence classifier of a family, whose layers are the same.
    ///
    /// # Errors
    /// Those of [`Config::open`].
    pub(crate) fn open_critic(checkpoint_dir: &Path) -> Result<Config> {
        let path = checkpoint_dir.join("config.json");
        let mut value = read_json(&path)?;
        let classifier = |family: &Family| value.get("architectures") == Some(&json!([family.classifier()]));
        if Family::ALL.iter().any(classifier) {
            value["architectures"] = Value::Null;
        }
        Config::from_value(&value, &path)
    }

    /// Reads and checks a `config.json` of any name.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::Family`], or [`Error::Config`] naming the field.
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
        let config = file::parse(value, path)?;
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
        if let Some(scaling) = &self.rope_scaling {
            scaling.check()?;
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

    /// The `config.json` that `transformers` (4 and 5) and SGLang read, for weights of `kind` (`BFloat16` or
    /// `Float`).
    #[must_use]
    pub fn to_json(&self, kind: Kind) -> Value {
        let mut config = json!(self);
        config["architectures"] = json!([self.family.architecture()]);
        config["model_type"] = json!(self.family.model_type());
        config["hidden_act"] = json!("silu");
        for option in self.family.traits().off {
            config[option] = json!(false);
        }
        config["attention_dropout"] = json!(0.0);
        // As Hugging Face writes it: nothing, one number, or a list.
        config["eos_token_id"] = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        config["torch_dtype"] = json!(if kind == Kind::BFloat16 { "bfloat16" } else { "float32" });
        config
    }

    /// Every tensor of the model with its Hugging Face name and shape, sorted by name (byte order).
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        let mut layer = vec![
            ("input_layernorm.weight", vec![hidden]),
            ("mlp.down_proj.weight", vec![hidden, inner]),
            ("mlp.gate_proj.weight", vec![inner, hidden]),
            ("mlp.up_proj.weight", vec![inner, hidden]),
            ("post_attention_layernorm.weight", vec![hidden]),
            ("self_attn.k_proj.weight", vec![self.key_width(), hidden]),
            ("self_attn.o_proj.weight", vec![hidden, self.query_width()]),
            ("self_attn.q_proj.weight", vec![self.query_width(), hidden]),
            ("self_attn.v_proj.weight", vec![self.key_width(), hidden]),
        ];
        layer.extend((self.family.traits().tensors)(self));
        for index in 0..self.num_hidden_layers {
            for (name, shape) in &layer {
                tensors.push((format!("model.layers.{index}.{name}"), shape.clone()));
            }
        }
        tensors.sort();
        tensors
    }

    /// Width of all queries of a position.
    pub(crate) fn query_width(&self) -> i64 {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all keys, and of all values, of a position.
    pub(crate) fn key_width(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    /// Floating-point operations of a training step (Chowdhery et al. 2022): of each token, and of each pair of
    /// tokens of a sequence.
    pub(crate) fn operations(&self) -> [f64; 2] {
        let width = self.num_hidden_layers * self.num_attention_heads * self.head_dim;
        [6.0 * self.elements() as f64, 6.0 * width as f64]
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

/// The files of a model with another `config.json`.
pub(crate) fn edit_config(files: &[AuxFile], edit: impl Fn(&mut Value)) -> Result<Vec<AuxFile>> {
    let edited = |file: &AuxFile| {
        if file.name() != "config.json" {
            return Ok(file.clone());
        }
        let json = |source| Error::Json { path: file.name().into(), source };
        let mut config = serde_json::from_slice(file.bytes()).map_err(json)?;
        edit(&mut config);
        Ok(AuxFile::new(file.name(), serde_json::to_vec_pretty(&config).map_err(json)?)?)
    };
    files.iter().map(edited).collect()
}

impl RopeScaling {
    fn check(&self) -> Result<()> {
        let wrong = |expected: &str, found: f64| Err(unsupported("rope_scaling", expected, found));
        let bands = [self.low_freq_factor, self.high_freq_factor];
        if !(self.factor.is_finite() && self.factor >= 1.0) {
            return wrong("a factor of 1 or more", self.factor);
        }
        if !(bands[0] > 0.0 && bands[1].is_finite() && bands[1] > bands[0]) {
            return wrong("a high_freq_factor above low_freq_factor, both above 0", bands[1]);
        }
        match self.original_max_position_embeddings {
            1..=SIZE_MAX => Ok(()),
            other => wrong("original_max_position_embeddings of 1 or more", other as f64),
        }
    }
}

fn unsupported(field: &'static str, expected: impl ToString, found: impl ToString) -> Error {
    Error::Config { field, expected: expected.to_string(), found: found.to_string() }
}
