//! What a checkpoint's `config.json` says about the tensors an engine holds: names, shapes, and how the
//! engine fuses them.

use std::path::{Path, PathBuf};

use driftless_transport::snapshot::AuxFile;
use driftless_transport::{Dtype, Snapshot};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Bound on a `config.json`; real ones have a few KiB.
const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// Bound on one tokenizer file; real ones reach 35 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Bound on the number of layers, so that a lying config cannot make a large table. Published dense models
/// have at most 126.
const LAYERS_MAX: u64 = 4096;
/// Engines pad the vocabulary's rows to a multiple of this, with zeros (`DEFAULT_VOCAB_PADDING_SIZE`).
const VOCABULARY_PADDING: u64 = 64;
/// The quantisation whose tensors are known: e4m3 in blocks of so many rows and columns, with f32 scales.
pub(crate) const FP8_BLOCKS: &str = "fp8 [128,128]";
const FP8_BLOCK: u64 = 128;
/// The files that decide which text a token id stands for, in the order that the digest takes them.
const TOKENIZER_FILES: [&str; 5] =
    ["added_tokens.json", "merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json"];

/// The dense architectures whose tensors are known here. Adding one means its tensor table, below, and a run
/// against the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Qwen3,
    Qwen2,
    Llama,
}

/// The part of a Hugging Face `config.json` that decides a dense model's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The one entry of `architectures`, such as `Qwen3ForCausalLM`.
    pub architecture: String,
    /// `hidden_size`.
    pub hidden_size: u64,
    /// `intermediate_size`.
    pub intermediate_size: u64,
    /// `num_hidden_layers`.
    pub layers: u64,
    /// `num_attention_heads`.
    pub heads: u64,
    /// `num_key_value_heads`, or `num_attention_heads` where absent.
    pub kv_heads: u64,
    /// `head_dim`, or `hidden_size / num_attention_heads` where absent.
    pub head_dim: u64,
    /// `vocab_size`.
    pub vocabulary: u64,
    /// `tie_word_embeddings`: the output matrix is the embedding.
    pub tied: bool,
    /// `torch_dtype`, or `dtype` in newer files.
    pub dtype: Dtype,
    /// `quantization_config.quant_method`, and behind it `weight_block_size`, where there is one: `fp8 [128,128]`.
    pub quantization: Option<String>,
}

/// Who an engine should be: what its model's config and tokenizer say.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expected {
    /// The model.
    pub config: ModelConfig,
    /// SHA-256, in hex, over names and contents of the tokenizer's files; `None` where there are none.
    pub tokenizer: Option<String>,
}

impl Expected {
    /// Reads `config.json` and the tokenizer's files of a checkpoint directory; no weights.
    ///
    /// # Errors
    /// [`Error::Read`] for files that cannot be read, [`Error::Config`] for a config that is malformed or of
    /// an unknown architecture.
    pub fn from_checkpoint(directory: &Path) -> Result<Self> {
        let config = directory.join("config.json");
        let bytes = read(&config, CONFIG_BYTES_MAX)?;
        let bytes = bytes.ok_or_else(|| Error::Read {
            path: config.clone(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Self::build(&config, &bytes, |name| read(&directory.join(name), TOKENIZER_BYTES_MAX))
    }

    /// The same from a snapshot's auxiliary files. `place` names the snapshot in errors.
    ///
    /// # Errors
    /// As [`Expected::from_checkpoint`].
    pub fn from_snapshot(snapshot: &dyn Snapshot, place: &Path) -> Result<Self> {
        let find = |name: &str| snapshot.files().iter().find(|file| file.name() == name).map(AuxFile::bytes);
        let config = place.join("config.json");
        let bytes = find("config.json").ok_or_else(|| Error::Read {
            path: config.clone(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Self::build(&config, bytes, |name| Ok(find(name).map(<[u8]>::to_vec)))
    }

    fn build(
        path: &Path,
        config: &[u8],
        mut file: impl FnMut(&str) -> Result<Option<Vec<u8>>>,
    ) -> Result<Self> {
        let mut hash = Sha256::new();
        let mut any = false;
        for name in TOKENIZER_FILES {
            if let Some(bytes) = file(name)? {
                any = true;
                hash.update(name.as_bytes());
                hash.update((bytes.len() as u64).to_le_bytes());
                hash.update(&bytes);
            }
        }
        Ok(Self { config: ModelConfig::parse(path, config)?, tokenizer: any.then(|| hex(&hash.finalize())) })
    }
}

/// One parameter as the engine holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parameter {
    /// The engine's name.
    pub(crate) name: String,
    /// The checkpoint's tensors that it consists of, one after the other.
    pub(crate) parts: Vec<(String, Vec<u64>)>,
    /// Rows of zeros after the last part.
    pub(crate) padding_rows: u64,
    /// The parts' dtype, where it is not the model's: of what is quantised, and of scales.
    pub(crate) dtype: Option<Dtype>,
}

impl Parameter {
    /// Makes a matrix one in fp8, and returns its scales.
    fn quantize(&mut self) -> Parameter {
        self.dtype = Some(Dtype::F8E4M3);
        let scales = |(name, shape): &(String, Vec<u64>)| {
            let blocks = shape.iter().map(|extent| extent.div_ceil(FP8_BLOCK)).collect();
            (format!("{name}_scale_inv"), blocks)
        };
        Parameter {
            name: format!("{}_scale_inv", self.name),
            parts: self.parts.iter().map(scales).collect(),
            padding_rows: 0,
            dtype: Some(Dtype::F32),
        }
    }
}

impl ModelConfig {
    /// Reads a `config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// [`Error::Config`] with the field, what would do and what it holds.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let file = Fields {
            path,
            value: serde_json::from_slice(bytes)
                .map_err(|error| Fields::error(path, "the file", "JSON", error.to_string()))?,
        };
        let architecture = file.architecture()?;
        let family = family(&architecture).ok_or_else(|| {
            Fields::error(
                path,
                "architectures",
                "Qwen3ForCausalLM, Qwen2ForCausalLM or LlamaForCausalLM",
                architecture.clone(),
            )
        })?;
        file.no_biases(family)?;
        let heads = file.positive("num_attention_heads")?;
        let hidden_size = file.positive("hidden_size")?;
        let config = Self {
            hidden_size,
            intermediate_size: file.positive("intermediate_size")?,
            layers: file.positive("num_hidden_layers")?,
            heads,
            kv_heads: if file.absent("num_key_value_heads") {
                heads
            } else {
                file.positive("num_key_value_heads")?
            },
            head_dim: if file.absent("head_dim") { hidden_size / heads } else { file.positive("head_dim")? },
            vocabulary: file.positive("vocab_size")?,
            tied: file.flag("tie_word_embeddings")?,
            dtype: file.dtype()?,
            quantization: file.quantization(),
            architecture,
        };
        if config.layers > LAYERS_MAX {
            return Err(Fields::error(path, "num_hidden_layers", "at most 4096", config.layers.to_string()));
        }
        Ok(config)
    }

    /// The engine's parameters, as SGLang's loaders for these architectures fuse the checkpoint's tensors
    /// with one rank.
    pub(crate) fn parameters(&self) -> Vec<Parameter> {
        let mut out = vec![self.vocabulary_rows("model.embed_tokens.weight")];
        for layer in 0..self.layers {
            self.layer(&format!("model.layers.{layer}."), &mut out);
        }
        out.push(single("model.norm.weight".into(), vec![self.hidden_size]));
        if !self.tied {
            out.push(self.vocabulary_rows("lm_head.weight"));
        }
        if self.quantization.as_deref() == Some(FP8_BLOCKS) {
            let matrices = out.iter_mut().filter(|parameter| parameter.name.ends_with("_proj.weight"));
            let scales: Vec<_> = matrices.map(Parameter::quantize).collect();
            out.extend(scales);
        }
        out
    }

    fn layer(&self, prefix: &str, out: &mut Vec<Parameter>) {
        let family = family(&self.architecture);
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        // Saturating: absurd sizes then match no tensor, which is what they should do.
        let (q, kv) = (self.heads.saturating_mul(self.head_dim), self.kv_heads.saturating_mul(self.head_dim));
        let attention = format!("{prefix}self_attn.");
        let qkv = |kind: &str, shape: &dyn Fn(u64) -> Vec<u64>| {
            let part = |name: &str, rows: u64| (format!("{attention}{name}_proj.{kind}"), shape(rows));
            Parameter {
                name: format!("{attention}qkv_proj.{kind}"),
                parts: vec![part("q", q), part("k", kv), part("v", kv)],
                padding_rows: 0,
                dtype: None,
            }
        };
        out.push(qkv("weight", &|rows| vec![rows, hidden]));
        if family == Some(Family::Qwen2) {
            out.push(qkv("bias", &|rows| vec![rows]));
        }
        out.push(single(format!("{attention}o_proj.weight"), vec![hidden, q]));
        if family == Some(Family::Qwen3) {
            out.push(single(format!("{attention}q_norm.weight"), vec![self.head_dim]));
            out.push(single(format!("{attention}k_norm.weight"), vec![self.head_dim]));
        }
        let mlp = |name: &str| (format!("{prefix}mlp.{name}_proj.weight"), vec![inner, hidden]);
        out.push(Parameter {
            name: format!("{prefix}mlp.gate_up_proj.weight"),
            parts: vec![mlp("gate"), mlp("up")],
            padding_rows: 0,
            dtype: None,
        });
        out.push(single(format!("{prefix}mlp.down_proj.weight"), vec![hidden, inner]));
        out.push(single(format!("{prefix}input_layernorm.weight"), vec![hidden]));
        out.push(single(format!("{prefix}post_attention_layernorm.weight"), vec![hidden]));
    }

    fn vocabulary_rows(&self, name: &str) -> Parameter {
        let padded = self.vocabulary.div_ceil(VOCABULARY_PADDING).saturating_mul(VOCABULARY_PADDING);
        let parts = vec![(name.to_owned(), vec![self.vocabulary, self.hidden_size])];
        Parameter { name: name.to_owned(), parts, padding_rows: padded - self.vocabulary, dtype: None }
    }
}

fn family(architecture: &str) -> Option<Family> {
    match architecture {
        "Qwen3ForCausalLM" => Some(Family::Qwen3),
        "Qwen2ForCausalLM" => Some(Family::Qwen2),
        "LlamaForCausalLM" => Some(Family::Llama),
        _ => None,
    }
}

fn single(name: String, shape: Vec<u64>) -> Parameter {
    Parameter { parts: vec![(name.clone(), shape)], name, padding_rows: 0, dtype: None }
}

/// A config file's fields, with errors that name it.
struct Fields<'a> {
    path: &'a Path,
    value: Value,
}

impl Fields<'_> {
    fn error(path: &Path, what: &str, expected: &str, found: String) -> Error {
        Error::Config { path: PathBuf::from(path), what: what.into(), expected: expected.into(), found }
    }

    fn absent(&self, name: &str) -> bool {
        self.value.get(name).is_none_or(Value::is_null)
    }

    fn found(&self, name: &str) -> String {
        self.value.get(name).map_or_else(|| "absent".into(), text)
    }

    fn positive(&self, name: &str) -> Result<u64> {
        let number =
            self.value.get(name).and_then(Value::as_u64).filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        number.ok_or_else(|| {
            Self::error(self.path, name, "a whole number from 1 to 2^32 - 1", self.found(name))
        })
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match self.value.get(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(Self::error(self.path, name, "true or false", text(other))),
        }
    }

    fn architecture(&self) -> Result<String> {
        match self.value.get("architectures").and_then(Value::as_array).map(Vec::as_slice) {
            Some([Value::String(name)]) => Ok(name.clone()),
            _ => Err(Self::error(
                self.path,
                "architectures",
                "a list of one name",
                self.found("architectures"),
            )),
        }
    }

    fn dtype(&self) -> Result<Dtype> {
        let name = if self.absent("torch_dtype") { "dtype" } else { "torch_dtype" };
        let dtype = self.value.get(name).and_then(Value::as_str).and_then(torch_dtype);
        dtype.ok_or_else(|| Self::error(self.path, name, "bfloat16, float16 or float32", self.found(name)))
    }

    fn quantization(&self) -> Option<String> {
        let config = self.value.get("quantization_config")?;
        let method = config.get("quant_method").map(text)?;
        let block = config.get("weight_block_size").filter(|size| !size.is_null());
        Some(block.map_or_else(|| method.clone(), |size| format!("{method} {size}")))
    }

    /// Biases that the tensor table does not have.
    fn no_biases(&self, family: Family) -> Result<()> {
        for name in ["attention_bias", "mlp_bias"] {
            if self.flag(name)? && !(family == Family::Qwen2 && name == "attention_bias") {
                return Err(Self::error(self.path, name, "false", "true".into()));
            }
        }
        Ok(())
    }
}

/// The dtypes an engine can hold, by torch's names and their short forms.
pub(crate) fn torch_dtype(name: &str) -> Option<Dtype> {
    match name.trim_start_matches("torch.") {
        "bfloat16" => Some(Dtype::Bf16),
        "float16" | "half" => Some(Dtype::F16),
        "float32" | "float" => Some(Dtype::F32),
        _ => None,
    }
}

/// torch's name of a dtype, as numpy and `ml_dtypes` have it too.
pub fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bool => "bool",
        Dtype::U8 => "uint8",
        Dtype::I8 => "int8",
        Dtype::F8E4M3 => "float8_e4m3fn",
        Dtype::F8E5M2 => "float8_e5m2",
        Dtype::F8E8M0 => "float8_e8m0fnu",
        Dtype::I16 => "int16",
        Dtype::U16 => "uint16",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
        Dtype::I32 => "int32",
        Dtype::U32 => "uint32",
        Dtype::F32 => "float32",
        Dtype::I64 => "int64",
        Dtype::U64 => "uint64",
        Dtype::F64 => "float64",
        Dtype::C64 => "complex64",
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string().chars().take(200).collect(), str::to_owned)
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file's content, or `None` where there is none.
fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let fail = |source| Error::Read { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fail(error)),
        Ok(found) if found.len() > limit => Err(Error::Config {
            path: path.to_owned(),
            what: "the file".into(),
            expected: format!("at most {limit} bytes"),
            found: format!("{}", found.len()),
        }),
        Ok(found) if !found.is_file() => Err(Error::Config {
            path: path.to_owned(),
            what: "what lies there".into(),
            expected: "a regular file".into(),
            found: "a FIFO, a device or a directory".into(),
        }),
        Ok(_) => std::fs::read(path).map(Some).map_err(fail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) const QWEN3: &str = r#"{"architectures":["Qwen3ForCausalLM"],"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":6,"vocab_size":70,"tie_word_embeddings":true,"torch_dtype":"bfloat16"}"#;

    fn parse(text: &str) -> Result<ModelConfig> {
        ModelConfig::parse(Path::new("m/config.json"), text.as_bytes())
    }

    #[test]
    fn qwen3_parameters() {
        let parameters = parse(QWEN3).unwrap().parameters();
        let find = |name: &str| parameters.iter().find(|p| p.name == name).unwrap();
        let qkv = find("model.layers.1.self_attn.qkv_proj.weight");
        assert_eq!(qkv.parts[0], ("model.layers.1.self_attn.q_proj.weight".into(), vec![12, 8]));
        assert_eq!(qkv.parts[2], ("model.layers.1.self_attn.v_proj.weight".into(), vec![6, 8]));
        assert_eq!(find("model.embed_tokens.weight").padding_rows, 58);
        assert_eq!(find("model.layers.0.self_attn.q_norm.weight").parts[0].1, [6]);
        assert!(!parameters.iter().any(|p| p.name == "lm_head.weight"));
        assert_eq!(parameters.len(), 2 + 2 * 8);
    }

    #[test]
    fn fp8_matrices_of_layers_have_scales_and_others_stay() {
        let fp8 = |config: &str| {
            QWEN3.replace("\"torch_dtype\"", &format!("\"quantization_config\":{config},\"torch_dtype\""))
        };
        let blocks = fp8(r#"{"quant_method":"fp8","weight_block_size":[128,128]}"#).replace(":12,", ":130,");
        let config = parse(&blocks).unwrap();
        assert_eq!(config.quantization.as_deref(), Some(FP8_BLOCKS));
        let parameters = config.parameters();
        let find =
            |name: &str| parameters.iter().find(|p| p.name == format!("model.layers.1.{name}")).unwrap();
        let scales = find("mlp.gate_up_proj.weight_scale_inv");
        assert_eq!(scales.dtype, Some(Dtype::F32));
        assert_eq!(scales.parts[1], ("model.layers.1.mlp.up_proj.weight_scale_inv".into(), vec![2, 1]));
        assert_eq!(find("self_attn.qkv_proj.weight").dtype, Some(Dtype::F8E4M3));
        assert_eq!(find("self_attn.q_norm.weight").dtype, None);
        assert_eq!(parameters.len(), 2 + 2 * (8 + 4));

        let others = [r#"{"quant_method":"fp8"}"#, r#"{"quant_method":"awq","weight_block_size":[1,64]}"#];
        for (config, name) in others.into_iter().zip(["fp8", "awq [1,64]"]) {
            let config = parse(&fp8(config)).unwrap();
            assert_eq!(config.quantization.as_deref(), Some(name));
            assert_eq!(config.parameters().len(), 2 + 2 * 8);
        }
    }

    #[test]
    fn families_differ_in_norms_and_biases() {
        let qwen2 = parse(&QWEN3.replace("Qwen3", "Qwen2").replace("true", "false")).unwrap().parameters();
        assert!(
            qwen2.iter().any(|p| p.name.ends_with("qkv_proj.bias"))
                && qwen2.iter().any(|p| p.name == "lm_head.weight")
        );
        let llama = parse(&QWEN3.replace("Qwen3", "Llama")).unwrap().parameters();
        assert!(!llama.iter().any(|p| p.name.contains("bias") || p.name.contains("q_norm")));
    }

    #[test]
    fn bad_configs_name_the_field() {
        for (from, to, field) in [
            ("\"hidden_size\":8", "\"hidden_size\":0", "hidden_size"),
            ("\"vocab_size\":70", "\"vocab_size\":\"70\"", "vocab_size"),
            ("[\"Qwen3ForCausalLM\"]", "[\"Qwen3MoeForCausalLM\"]", "architectures"),
            ("[\"Qwen3ForCausalLM\"]", "[]", "architectures"),
            ("bfloat16", "int8", "torch_dtype"),
            ("\"num_hidden_layers\":2", "\"num_hidden_layers\":99999", "num_hidden_layers"),
            ("\"head_dim\":6", "\"attention_bias\":true", "attention_bias"),
        ] {
            match parse(&QWEN3.replace(from, to)) {
                Err(Error::Config { what, .. }) => assert_eq!(what, field),
                other => panic!("{to}: {other:?}"),
            }
        }
        assert!(matches!(parse("{"), Err(Error::Config { .. })));
    }

    #[test]
    fn the_tokenizer_digest_covers_names_and_contents() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), QWEN3).unwrap();
        let digest = || Expected::from_checkpoint(dir.path()).unwrap().tokenizer;
        assert_eq!(digest(), None);
        std::fs::write(dir.path().join("vocab.json"), "{}").unwrap();
        let first = digest().unwrap();
        std::fs::rename(dir.path().join("vocab.json"), dir.path().join("tokenizer.json")).unwrap();
        assert_ne!(digest().unwrap(), first);
    }
}
