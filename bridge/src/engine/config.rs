//! What a checkpoint's `config.json` says of a model, and how two of them are compared.
//!
//! Nothing here knows an architecture. Both files are JSON, so they are compared as JSON: what both sides say has to
//! be the same, and what decides neither tensors nor what an engine computes from them is left out.

use std::path::{Path, PathBuf};

use driftless_transport::Dtype;
use serde_json::{Map, Number, Value};

use super::fusing::Fusing;
use crate::error::{Error, Result};
use crate::http::excerpt;

/// The quantisation that engines were updated with: e4m3 in blocks of so many rows and columns, with f32 scales.
pub(crate) const FP8_BLOCKS: &str = "fp8 [128,128]";
/// The language model's part of a model that takes images or sound too.
const TEXT_CONFIG: &str = "text_config";
/// Whether the output head is the word embeddings.
pub(super) const TIED: &str = "tie_word_embeddings";
/// Where a checkpoint says how it is quantised.
const QUANTIZATION: [&str; 2] = ["quantization_config", "compression_config"];
/// Fields in which two files of one model differ: who wrote the file and what a trainer does. Dtype and quantisation
/// are compared by themselves, since each is spelled in several ways.
const LEFT_OUT: [&str; 19] = [
    "attn_implementation",
    "bos_token_id",
    "compression_config",
    "dtype",
    "eos_token_id",
    "gradient_checkpointing",
    "initializer_range",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "auto_map",
];
/// Ends of further such names.
const LEFT_OUT_ENDS: [&str; 3] = ["_dropout", "_drop", "_pdrop"];
/// Most differences that an error shows.
const SHOWN: usize = 4;

/// A Hugging Face `config.json`: all of it, and what every model's says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The entries of `architectures`, such as `Qwen3ForCausalLM`, with commas between them.
    pub architecture: String,
    /// `vocab_size`; as many as there can be where the file does not say.
    pub vocabulary: u64,
    /// `torch_dtype`, or `dtype` in newer files; the language model's, where it has its own.
    pub dtype: Dtype,
    /// `quantization_config.quant_method`, and behind it `weight_block_size`, where there is one: `fp8 [128,128]`.
    pub quantization: Option<String>,
    /// Whether the checkpoint brings model code of its own (`auto_map`), which may make anything of the file.
    pub custom_code: bool,
    fusing: Result<Fusing, String>,
    fields: Map<String, Value>,
}

/// What two files say of a field.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The field, with those that it lies in: `text_config.hidden_size`.
    pub(crate) field: String,
    pub(crate) expected: String,
    pub(crate) found: String,
}

impl ModelConfig {
    /// Reads a `config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// [`Error::Config`] with the field, what would do and what it holds.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| Fields::error(path, "the file", "JSON", error.to_string()))?;
        let Value::Object(fields) = value else {
            return Err(Fields::error(path, "the file", "a JSON object", text(&value)));
        };
        let file = Fields { path, fields: &fields };
        let language = fields.get(TEXT_CONFIG).and_then(Value::as_object);
        let language = Fields { path, fields: language.unwrap_or(&fields) };
        let (architecture, quantization) = (file.architecture()?, file.quantization(&language));
        let size = [&language, &file].into_iter().find(|part| !part.absent("vocab_size"));
        let (dtype, custom_code) = (file.dtype(&language)?, !file.absent("auto_map"));
        Ok(Self {
            vocabulary: size.map_or(Ok(i32::MAX as u64), |part| part.positive("vocab_size"))?,
            fusing: Fusing::of(&file, &architecture, dtype, quantization.as_deref())?,
            architecture,
            dtype,
            quantization,
            custom_code,
            fields,
        })
    }

    /// How engines fuse the model's tensors.
    ///
    /// # Errors
    /// Why that is not known.
    pub fn fusing(&self) -> Result<&Fusing, &str> {
        self.fusing.as_ref().map_err(String::as_str)
    }

    /// The fields in which another file is not of the same model.
    ///
    /// - What both files say has to be the same; a number is the same however it is written.
    /// - A switch that one side alone turns on is a difference. Other fields that one side alone has are none: a newer
    ///   release of a library writes more of them, under newer names, and leaves others to their defaults.
    /// - Sizes that follow from others where they are absent are filled in (`complete`).
    /// - `null` is absent. Families differ in what an absent `tie_word_embeddings` means, so that is none either.
    pub(crate) fn differences(&self, other: &Self) -> Vec<Difference> {
        let mut out = Vec::new();
        compare("", &self.fields, &other.fields, &mut out);
        let [expected, found] =
            [self, other].map(|config| config.quantization.as_deref().unwrap_or("none").to_owned());
        if expected != found {
            out.push(Difference { field: "quantization".into(), expected, found });
        }
        // Where the family is known, so is what it takes for an absent field.
        if let (Ok(want), Ok(have)) = (&self.fusing, &other.fusing)
            && want.tied != have.tied
            && out.iter().all(|difference| difference.field != TIED)
        {
            let [expected, found] = [want, have].map(|fusing| fusing.tied.to_string());
            out.push(Difference { field: TIED.into(), expected, found });
        }
        out
    }
}

/// The first differences as an error has them: fields, expected and found.
pub(crate) fn shown(differences: &[Difference]) -> (String, String, String) {
    let list = |of: fn(&Difference) -> &str| {
        let mut texts: Vec<_> = differences.iter().take(SHOWN).map(|each| of(each).to_owned()).collect();
        if let Some(more) = differences.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            texts.push(format!("{more} more"));
        }
        texts.join(", ")
    };
    (list(|each| &each.field), list(|each| &each.expected), list(|each| &each.found))
}

/// Adds the differences of two objects at `place`. serde_json reads at most 128 objects within each other.
fn compare(
    place: &str,
    expected: &Map<String, Value>,
    found: &Map<String, Value>,
    out: &mut Vec<Difference>,
) {
    let names: std::collections::BTreeSet<_> = expected.keys().chain(found.keys()).collect();
    for name in names.into_iter().filter(|name| !is_left_out(name)) {
        let [want, have] = [expected, found].map(|side| complete(side, name));
        let field = || excerpt(format!("{place}{name}").as_bytes());
        match (&want, &have) {
            (Value::Object(want), Value::Object(have)) => {
                compare(&format!("{place}{name}."), want, have, out);
            }
            (Value::Null, one) | (one, Value::Null) if *one != Value::Bool(true) || name == TIED => {}
            (want, have) if same(want, have) => {}
            (want, have) => {
                let [expected, found] = [want, have].map(|value| match value {
                    Value::Null => "absent".to_owned(),
                    value => text(value),
                });
                out.push(Difference { field: field(), expected, found });
            }
        }
    }
}

fn is_left_out(name: &str) -> bool {
    name.starts_with('_') || LEFT_OUT.contains(&name) || LEFT_OUT_ENDS.iter().any(|end| name.ends_with(end))
}

/// A field, or what every library takes for it where it is absent: one key head for each query head, and heads that
/// share the hidden size.
fn complete(fields: &Map<String, Value>, name: &str) -> Value {
    let number = |name: &str| fields.get(name).and_then(Value::as_u64);
    match fields.get(name).filter(|value| !value.is_null()) {
        Some(value) => value.clone(),
        None if name == "num_key_value_heads" => number("num_attention_heads").into(),
        None if name == "head_dim" => {
            let heads = number("num_attention_heads").filter(|heads| *heads > 0);
            number("hidden_size").zip(heads).map(|(hidden, heads)| hidden / heads).into()
        }
        None => Value::Null,
    }
}

/// Whether two values are equal, where 10000 and 10000.0 are.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            a == b || ((a.is_f64() || b.is_f64()) && Number::as_f64(a) == Number::as_f64(b))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| same(a, b)))
        }
        (a, b) => a == b,
    }
}

/// A config file's fields, with errors that name it.
pub(super) struct Fields<'a> {
    path: &'a Path,
    fields: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn error(path: &Path, what: &str, expected: &str, found: String) -> Error {
        Error::Config { path: PathBuf::from(path), what: what.into(), expected: expected.into(), found }
    }

    pub(super) fn absent(&self, name: &str) -> bool {
        self.fields.get(name).is_none_or(Value::is_null)
    }

    fn found(&self, name: &str) -> String {
        self.fields.get(name).map_or_else(|| "absent".into(), text)
    }

    pub(super) fn positive(&self, name: &str) -> Result<u64> {
        let number =
            self.fields.get(name).and_then(Value::as_u64).filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        number.ok_or_else(|| {
            Self::error(self.path, name, "a whole number from 1 to 2^32 - 1", self.found(name))
        })
    }

    pub(super) fn at_most(&self, name: &str, most: u64) -> Result<u64> {
        match self.positive(name)? {
            found if found <= most => Ok(found),
            found => Err(Self::error(self.path, name, &format!("at most {most}"), found.to_string())),
        }
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(Self::error(self.path, name, "true or false", text(other))),
        }
    }

    fn architecture(&self) -> Result<String> {
        let names =
            self.fields.get("architectures").and_then(Value::as_array).filter(|names| !names.is_empty());
        let names: Option<Vec<_>> = names.and_then(|names| names.iter().map(Value::as_str).collect());
        let expected = "a list of names";
        names
            .map(|names| names.join(","))
            .ok_or_else(|| Self::error(self.path, "architectures", expected, self.found("architectures")))
    }

    fn dtype(&self, language: &Self) -> Result<Dtype> {
        let places = [(language, "torch_dtype"), (language, "dtype"), (self, "torch_dtype"), (self, "dtype")];
        let said = places.into_iter().find(|(part, name)| !part.absent(name));
        let (part, name) = said.unwrap_or((self, "torch_dtype"));
        let dtype = part.fields.get(name).and_then(Value::as_str).and_then(torch_dtype);
        dtype.ok_or_else(|| Self::error(self.path, name, "bfloat16, float16 or float32", part.found(name)))
    }

    fn quantization(&self, language: &Self) -> Option<String> {
        let parts = [self, language].into_iter();
        let mut configs =
            parts.flat_map(|part| QUANTIZATION.iter().filter_map(|name| part.fields.get(*name)));
        let config = configs
            .find(|config| !config.is_null() && config.as_object().is_none_or(|fields| !fields.is_empty()))?;
        let method = config.get("quant_method").map_or_else(|| "of no quant_method".to_owned(), text);
        let block = config.get("weight_block_size").filter(|size| !size.is_null());
        Some(block.map_or_else(|| method.clone(), |size| format!("{method} {size}")))
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
    value.as_str().map_or_else(|| value.to_string(), str::to_owned).chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(config: &Value) -> Result<ModelConfig> {
        ModelConfig::parse(Path::new("m/config.json"), config.to_string().as_bytes())
    }

    /// A model of an unknown family, with these fields besides.
    fn with(more: Value) -> Value {
        let mut config = json!({"architectures": ["OddMoeForCausalLM"], "hidden_size": 8, "num_attention_heads": 2,
            "rope_theta": 1e6, "torch_dtype": "bfloat16"});
        for (name, value) in more.as_object().unwrap() {
            config[name] = value.clone();
        }
        config
    }

    /// The fields in which the two differ.
    fn differ(a: Value, b: Value) -> Vec<String> {
        let [a, b] = [a, b].map(|config| parse(&with(config)).unwrap());
        let [there, back] = [a.differences(&b), b.differences(&a)];
        assert_eq!(there.len(), back.len(), "either way");
        there.into_iter().map(|difference| difference.field).collect()
    }

    #[test]
    fn what_decides_no_tensor_is_no_difference() {
        for (a, b) in [
            (json!({}), json!({"_name_or_path": "x", "transformers_version": "5.0", "use_cache": true})),
            (json!({"eos_token_id": 1}), json!({"eos_token_id": [1, 2], "attention_dropout": 0.1})),
            (json!({}), json!({"torch_dtype": null, "dtype": "bfloat16"})),
            (json!({"rope_theta": 1_000_000}), json!({"rope_theta": 1e6})),
            (json!({"rope_theta": null}), json!({"rope_parameters": {"rope_theta": 1e6}})),
            (json!({"sliding_window": null}), json!({"layer_types": ["full_attention"]})),
            (json!({"tie_word_embeddings": false}), json!({})),
            (json!({"tie_word_embeddings": true}), json!({})),
            (json!({"num_key_value_heads": 2}), json!({"head_dim": 4})),
        ] {
            assert_eq!(differ(a.clone(), b.clone()), Vec::<String>::new(), "{a} {b}");
        }
    }

    #[test]
    fn what_decides_tensors_is_named() {
        for (a, b, fields) in [
            (json!({"hidden_size": 16}), json!({"head_dim": 4}), &["head_dim", "hidden_size"][..]),
            (json!({"num_key_value_heads": 1}), json!({}), &["num_key_value_heads"]),
            (json!({"head_dim": 8}), json!({}), &["head_dim"]),
            (json!({"attention_bias": true}), json!({}), &["attention_bias"]),
            (json!({"attention_bias": true}), json!({"attention_bias": null}), &["attention_bias"]),
            (json!({"rope_theta": 1e4}), json!({}), &["rope_theta"]),
            (json!({"layers": [1, 2]}), json!({"layers": [1, 2, 3]}), &["layers"]),
            (json!({"architectures": ["Other"]}), json!({}), &["architectures"]),
            (
                json!({"tie_word_embeddings": true}),
                json!({"tie_word_embeddings": false}),
                &["tie_word_embeddings"],
            ),
            (json!({"text_config": {"n": 1, "m": 2}}), json!({"text_config": {"n": 2}}), &["text_config.n"]),
            (json!({"quantization_config": {"quant_method": "awq"}}), json!({}), &["quantization"]),
            (json!({"compression_config": {"a": 1}}), json!({"quantization_config": {}}), &["quantization"]),
            (json!({"experts": 18_446_744_073_709_551_615_u64}), json!({"experts": 1e300}), &["experts"]),
            (json!({"experts": "8"}), json!({"experts": 8}), &["experts"]),
        ] {
            assert_eq!(differ(a.clone(), b.clone()), fields, "{a} {b}");
        }
    }

    #[test]
    fn an_error_shows_the_first_differences_and_counts_the_rest() {
        let config = |n: u64| {
            let fields = (0..7).map(|at| (format!("n{at}"), json!(n))).collect::<Map<_, _>>();
            parse(&with(Value::Object(fields))).unwrap()
        };
        let (fields, expected, found) = shown(&config(1).differences(&config(2)));
        assert_eq!(fields, "n0, n1, n2, n3, 3 more");
        assert_eq!((&*expected, &*found), ("1, 1, 1, 1, 3 more", "2, 2, 2, 2, 3 more"));
    }

    #[test]
    fn bad_configs_name_the_field() {
        for (more, field) in [
            (json!({"architectures": []}), "architectures"),
            (json!({"architectures": "Odd"}), "architectures"),
            (json!({"architectures": [7]}), "architectures"),
            (json!({"torch_dtype": "int8"}), "torch_dtype"),
            (json!({"torch_dtype": null}), "torch_dtype"),
            (json!({"text_config": {"dtype": 7}}), "dtype"),
            (json!({"vocab_size": "70"}), "vocab_size"),
        ] {
            match parse(&with(more.clone())) {
                Err(Error::Config { what, .. }) => assert_eq!(what, field),
                other => panic!("{more}: {other:?}"),
            }
        }
        let deep = format!("{}1{}", "{\"a\":".repeat(10_000), "}".repeat(10_000));
        for text in ["{", "[]", "null", "{\"a\": 1e999}", deep.as_str()] {
            let refused = ModelConfig::parse(Path::new("c"), text.as_bytes());
            assert!(matches!(&refused, Err(Error::Config { what, .. }) if what == "the file"), "{refused:?}");
        }
    }

    #[test]
    fn language_model_of_a_model_with_images_says_its_dtype() {
        let config = parse(
            &json!({"architectures": ["OddForConditionalGeneration"], "auto_map": {"AutoConfig": "x.Y"},
            "vision_config": {"hidden_size": 4}, "dtype": "float32", "text_config": {"dtype": "bfloat16", "vocab_size": 70}}),
        );
        let config = config.unwrap();
        assert_eq!((config.dtype, config.vocabulary, config.custom_code), (Dtype::Bf16, 70, true));
        assert!(
            config.fusing().unwrap_err().contains("OddForConditionalGeneration"),
            "{:?}",
            config.fusing()
        );
        assert_eq!(parse(&with(json!({}))).unwrap().vocabulary, i32::MAX as u64);
    }

    /// JSON of any form, not deep.
    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z_]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[a-z_]{1,6}", inner, 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_config_is_itself_and_another_size_is_seen(extra in any_json(), size in 0_u64..1000, other in 0_u64..1000) {
            let config = |size: u64| parse(&with(json!({"extra": extra.clone(), "size": {"n": size}}))).unwrap();
            let (a, b) = (config(size), config(other));
            prop_assert_eq!(a.differences(&a), vec![]);
            let fields: Vec<_> = a.differences(&b).into_iter().map(|difference| difference.field).collect();
            prop_assert_eq!(fields, if size == other { vec![] } else { vec!["size.n".to_owned()] });
        }
    }
}
