//! How engines fuse the tensors of a checkpoint, for the dense families of which that is known.
//!
//! It says which tensors a checkpoint has and what an engine makes of them, so that checksums of an engine can be
//! computed here. No engine is refused for a family that is not in this table.

use driftless_transport::Dtype;

use super::config::{FP8_BLOCKS, Fields, TIED};
use crate::error::Result;

/// Bound on the number of layers, so that a lying config cannot make a large table. Published dense models
/// have at most 126.
const LAYERS_MAX: u64 = 4096;
/// Engines pad the vocabulary's rows to a multiple of this, with zeros (`DEFAULT_VOCAB_PADDING_SIZE`).
const VOCABULARY_PADDING: u64 = 64;
/// Rows and columns of a block of [`FP8_BLOCKS`].
const FP8_BLOCK: u64 = 128;

/// The dense architectures whose tensors are known here. Adding one means its tensor table, below, and a run
/// against the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Qwen3,
    Qwen2,
    Llama,
}

/// What decides the tensors of a dense model of a known family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fusing {
    family: Family,
    pub(crate) hidden_size: u64,
    intermediate_size: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    pub(crate) vocabulary: u64,
    /// The output matrix is the embedding.
    pub(crate) tied: bool,
    /// Of every tensor that is not quantised.
    pub(crate) dtype: Dtype,
    in_fp8: bool,
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

impl Fusing {
    /// What follows from a config of this architecture, or why nothing does.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a field of a known family that no such model has.
    pub(super) fn of(
        file: &Fields<'_>,
        architecture: &str,
        dtype: Dtype,
        quantization: Option<&str>,
    ) -> Result<Result<Self, String>> {
        let Some(family) = family(architecture) else {
            return Ok(Err(format!("the fusing of {architecture} is not known here")));
        };
        for name in ["attention_bias", "mlp_bias"] {
            if file.flag(name)? && !(family == Family::Qwen2 && name == "attention_bias") {
                return Ok(Err(format!("the fusing of {architecture} with {name} is not known here")));
            }
        }
        let heads = file.positive("num_attention_heads")?;
        let hidden_size = file.positive("hidden_size")?;
        let or = |name, default| if file.absent(name) { Ok(default) } else { file.positive(name) };
        Ok(Ok(Self {
            family,
            hidden_size,
            intermediate_size: file.positive("intermediate_size")?,
            layers: file.at_most("num_hidden_layers", LAYERS_MAX)?,
            heads,
            kv_heads: or("num_key_value_heads", heads)?,
            head_dim: or("head_dim", hidden_size / heads)?,
            vocabulary: file.positive("vocab_size")?,
            tied: file.flag(TIED)?,
            dtype,
            in_fp8: quantization == Some(FP8_BLOCKS),
        }))
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
        if self.in_fp8 {
            let matrices = out.iter_mut().filter(|parameter| parameter.name.ends_with("_proj.weight"));
            let scales: Vec<_> = matrices.map(Parameter::quantize).collect();
            out.extend(scales);
        }
        out
    }

    fn layer(&self, prefix: &str, out: &mut Vec<Parameter>) {
        let family = self.family;
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
        if family == Family::Qwen2 {
            out.push(qkv("bias", &|rows| vec![rows]));
        }
        out.push(single(format!("{attention}o_proj.weight"), vec![hidden, q]));
        if family == Family::Qwen3 {
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::ModelConfig;
    use crate::error::Error;

    const QWEN3: &str = r#"{"architectures":["Qwen3ForCausalLM"],"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":6,"vocab_size":70,"tie_word_embeddings":true,"torch_dtype":"bfloat16"}"#;

    fn parse(text: &str) -> Result<ModelConfig> {
        ModelConfig::parse(Path::new("m/config.json"), text.as_bytes())
    }

    fn parameters(text: &str) -> Vec<Parameter> {
        parse(text).unwrap().fusing().unwrap().parameters()
    }

    #[test]
    fn qwen3_parameters() {
        let parameters = parameters(QWEN3);
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
        let parameters = config.fusing().unwrap().parameters();
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
            assert_eq!(config.fusing().unwrap().parameters().len(), 2 + 2 * 8);
        }
    }

    #[test]
    fn families_differ_in_norms_and_biases() {
        let qwen2 = parameters(&QWEN3.replace("Qwen3", "Qwen2").replace("true", "false"));
        assert!(
            qwen2.iter().any(|p| p.name.ends_with("qkv_proj.bias"))
                && qwen2.iter().any(|p| p.name == "lm_head.weight")
        );
        let llama = parameters(&QWEN3.replace("Qwen3", "Llama"));
        assert!(!llama.iter().any(|p| p.name.contains("bias") || p.name.contains("q_norm")));
    }

    #[test]
    fn bad_configs_name_the_field() {
        for (from, to, field) in [
            ("\"hidden_size\":8", "\"hidden_size\":0", "hidden_size"),
            ("\"vocab_size\":70", "\"vocab_size\":\"70\"", "vocab_size"),
            ("\"num_hidden_layers\":2", "\"num_hidden_layers\":99999", "num_hidden_layers"),
            ("\"head_dim\":6", "\"attention_bias\":7", "attention_bias"),
        ] {
            match parse(&QWEN3.replace(from, to)) {
                Err(Error::Config { what, .. }) => assert_eq!(what, field),
                other => panic!("{to}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_is_not_known_says_why() {
        for (from, to, why) in [
            ("Qwen3For", "Qwen3MoeFor", "the fusing of Qwen3MoeForCausalLM is not known here"),
            (
                "\"head_dim\":6",
                "\"mlp_bias\":true",
                "the fusing of Qwen3ForCausalLM with mlp_bias is not known here",
            ),
            (
                "ForCausalLM\"",
                "ForCausalLM\",\"Other\"",
                "the fusing of Qwen3ForCausalLM,Other is not known here",
            ),
        ] {
            assert_eq!(parse(&QWEN3.replace(from, to)).unwrap().fusing().unwrap_err(), why);
        }
    }

    #[test]
    fn absent_tie_of_a_known_family_is_none() {
        let tied = parse(QWEN3).unwrap();
        let silent = parse(&QWEN3.replace("\"tie_word_embeddings\":true,", "")).unwrap();
        let fields: Vec<_> =
            tied.differences(&silent).into_iter().map(|difference| difference.field).collect();
        assert_eq!(fields, [TIED]);
    }
}
