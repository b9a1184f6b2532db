//! What SGLang says of itself, and whether that is what was expected.

use driftless_transport::Dtype;

use super::{ModelInfo, ServerInfo};
use crate::engine::config::{FP8_BLOCKS, torch_dtype};
use crate::engine::{Check, Expected, Identity};
use crate::error::Result;

/// The load formats whose engines can reload a safetensors directory.
const LOAD_FORMATS: [&str; 6] =
    ["auto", "safetensors", "fastsafetensors", "instanttensor", "layered", "dummy"];

/// Architectures that SGLang gives another name, by the checkpoint's: backbones whose head the engine supplies, and one
/// that another one's class serves.
const RENAMED: [(&str, &str); 3] = [
    ("Qwen3_5Model", "Qwen3_5ForConditionalGeneration"),
    ("Qwen3_5TextModel", "Qwen3_5ForCausalLM"),
    ("Olmo3ForCausalLM", "Olmo2ForCausalLM"),
];

/// Compares an engine's answers, and the config and tokenizer under its paths where they can be read here,
/// with what is expected.
///
/// # Errors
/// [`Error::Refused`] for the first property that does not fit.
pub(crate) fn compare(
    engine: &str,
    expected: &Expected,
    model: &ModelInfo,
    server: &ServerInfo,
    local: Option<&Expected>,
) -> Result<Identity> {
    let check = Check { engine };
    check.set_up(model, server)?;
    check.architectures(expected, model)?;
    check.server_quantization(expected, server)?;
    if let Some(local) = local {
        check.config(expected, local)?;
    }
    let dtype = check.dtype(expected, server, local)?;
    Ok(Identity {
        version: server.version.clone(),
        device: server.device.clone(),
        tp: server.tp_size.unwrap_or(1),
        dtype,
        config_compared: local.is_some(),
        tokenizer: check.tokenizer(expected, local)?,
        spans: false,
        incremental: server.incremental_streaming_output.unwrap_or(false),
        no_checksums: no_checksums(expected, server),
        load_format: (server.load_format.as_deref() == Some("dummy")).then(|| "auto".to_owned()),
        loads_only: None,
        flushes: false,
        sessions: false,
        labels_with_patch: true,
        saves_memory: server.enable_memory_saver.unwrap_or(false),
    })
}

/// Why `/weights_checker` of an engine does not report what can be computed here, if it does not. GPUs hash differently,
/// every further rank holds a slice, and of quantised weights engines hash what they stand for.
fn no_checksums(expected: &Expected, server: &ServerInfo) -> Option<String> {
    let of = |what: String| Some(format!("checksums are known for one rank on the CPU, and not {what}"));
    match (server.tp_size.unwrap_or(1), server.device.as_deref()) {
        (1, Some("cpu")) if expected.config.quantization.is_some() => of("of quantised weights".into()),
        (1, Some("cpu")) => expected.config.fusing().err().map(str::to_owned),
        (1, device) => of(format!("on {}", device.unwrap_or("an unknown device"))),
        (ranks, _) => of(format!("for {ranks} ranks")),
    }
}

/// What SGLang alone says, compared with what can be updated.
impl Check<'_> {
    /// The combinations that cannot be updated from disk as a whole, or that were never run here.
    fn set_up(&self, model: &ModelInfo, server: &ServerInfo) -> Result<()> {
        self.equal("frontend", "python", server.frontend.as_deref().unwrap_or("python"))?;
        self.equal("is_generation", "true", &model.is_generation.unwrap_or(true).to_string())?;
        for (what, size) in [("pp_size", server.pp_size), ("dp_size", server.dp_size)] {
            self.equal(what, "1", &size.unwrap_or(1).to_string())?;
        }
        let role =
            server.disaggregation_mode.as_deref().or(model.disaggregation_mode.as_deref()).unwrap_or("null");
        self.equal("disaggregation_mode", "null", role)?;
        self.equal("weight_cache_mode", "off", server.weight_cache_mode.as_deref().unwrap_or("off"))?;
        let draft =
            server.speculative_draft_model_path.as_deref().or(server.speculative_algorithm.as_deref());
        self.equal("speculative_algorithm and its draft model", "none", draft.unwrap_or("none"))?;
        let overrides = server.json_model_override_args.as_deref().filter(|set| !set.trim().is_empty());
        self.equal("json_model_override_args", "{}", overrides.unwrap_or("{}"))?;
        match server.load_format.as_deref().unwrap_or("auto") {
            format if LOAD_FORMATS.contains(&format) => Ok(()),
            format => self.equal("load_format", &LOAD_FORMATS.join(" or "), format),
        }
    }

    /// What it says it runs, under the name that it gave the model or the checkpoint's.
    fn architectures(&self, expected: &Expected, model: &ModelInfo) -> Result<()> {
        let (expected, found) =
            (&expected.config.architecture, model.architectures.clone().unwrap_or_default().join(","));
        if RENAMED.contains(&(expected, &found)) {
            return Ok(());
        }
        self.equal("architectures", expected, &found)
    }

    /// What `--quantization` says, if the server was given it: without, the checkpoint's config does.
    fn server_quantization(&self, expected: &Expected, server: &ServerInfo) -> Result<()> {
        self.quantization(expected, &["none", FP8_BLOCKS])?;
        let Some(found) = &server.quantization else { return Ok(()) };
        let quantized = expected.config.quantization.is_some();
        self.equal("quantization", if quantized { "fp8" } else { "none" }, found)
    }

    /// The dtype of the engine's weights must be the checkpoint's: engines cast silently, and the cast would
    /// not be our bytes.
    fn dtype(&self, expected: &Expected, server: &ServerInfo, local: Option<&Expected>) -> Result<Dtype> {
        let configured = local.map_or(expected.config.dtype, |local| local.config.dtype);
        let name = server.dtype.as_deref().unwrap_or("auto");
        let dtype = match name {
            // SGLang's rule: a float32 config is loaded as float16 unless --dtype says otherwise.
            "auto" if configured == Dtype::F32 => Some(Dtype::F16),
            "auto" => Some(configured),
            other => torch_dtype(other),
        };
        let found = match dtype {
            Some(dtype) if dtype == expected.config.dtype => return Ok(dtype),
            Some(dtype) => format!("{} (dtype {name})", dtype.name()),
            None => name.to_owned(),
        };
        self.equal("dtype", expected.config.dtype.name(), &found).map(|()| expected.config.dtype)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use std::path::Path;

    use super::*;
    use crate::engine::ModelConfig;
    use crate::error::Error;

    fn expected(dtype: &str) -> Expected {
        of(json!({ "torch_dtype": dtype }))
    }

    /// What is expected of a model with these fields.
    fn of(fields: Value) -> Expected {
        let mut config = json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 70, "torch_dtype": "bfloat16"});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Expected {
            config: ModelConfig::parse(Path::new("c"), config.to_string().as_bytes()).unwrap(),
            tokenizer: Some("t".into()),
        }
    }

    fn run(server: Value, model: Value, dtype: &str) -> Result<Identity> {
        let mut base = json!({"model_path": "/m", "frontend": "python", "tp_size": 1, "pp_size": 1, "dp_size": 1, "dtype": "auto",
            "disaggregation_mode": "null", "weight_cache_mode": "off", "load_format": "auto", "json_model_override_args": "{}", "device": "cpu"});
        let mut info =
            json!({"model_path": "/m", "architectures": ["Qwen3ForCausalLM"], "is_generation": true});
        base.as_object_mut().unwrap().extend(server.as_object().unwrap().clone());
        info.as_object_mut().unwrap().extend(model.as_object().unwrap().clone());
        let want = expected(dtype);
        compare(
            "http://e:1",
            &want,
            &serde_json::from_value(info).unwrap(),
            &serde_json::from_value(base).unwrap(),
            Some(&expected(dtype)),
        )
    }

    #[test]
    fn a_fitting_engine_is_accepted() {
        let identity = run(json!({}), json!({}), "bfloat16").unwrap();
        assert!(identity.no_checksums.is_none() && identity.config_compared);
        assert_eq!(identity.tokenizer.as_deref(), Some("t"));
        assert!(run(json!({"tp_size": 2}), json!({}), "bfloat16").unwrap().no_checksums.is_some());
    }

    #[test]
    fn any_architecture_is_accepted_and_its_checksums_are_not_known() {
        let server = serde_json::from_value(json!({"model_path": "/m", "device": "cpu"})).unwrap();
        for (config, engine) in RENAMED.into_iter().chain([("Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM")]) {
            let want = of(json!({ "architectures": [config] }));
            let model =
                serde_json::from_value(json!({"model_path": "/m", "architectures": [engine]})).unwrap();
            let identity = compare("e", &want, &model, &server, Some(&want)).unwrap();
            assert!(identity.no_checksums.unwrap().contains(config));
            let want = of(json!({"architectures": ["MistralForCausalLM"]}));
            let other = compare("e", &want, &model, &server, Some(&want));
            assert!(matches!(other, Err(Error::Refused { what, .. }) if what == "architectures"));
        }
    }

    #[test]
    fn every_unsupported_combination_is_refused_by_name() {
        for (server, what) in [
            (json!({"frontend": "rust"}), "frontend"),
            (json!({"pp_size": 2}), "pp_size"),
            (json!({"dp_size": 2}), "dp_size"),
            (json!({"disaggregation_mode": "prefill"}), "disaggregation_mode"),
            (json!({"weight_cache_mode": "client"}), "weight_cache_mode"),
            (json!({"speculative_algorithm": "EAGLE"}), "speculative_algorithm and its draft model"),
            (json!({"json_model_override_args": "{\"x\": 1}"}), "json_model_override_args"),
            (json!({"load_format": "gguf"}), "load_format"),
            (json!({"quantization": "fp8"}), "quantization"),
            (json!({"dtype": "float16"}), "dtype"),
        ] {
            match run(server.clone(), json!({}), "bfloat16") {
                Err(Error::Refused { what: found, .. }) => assert_eq!(found, what),
                other => panic!("{server}: {other:?}"),
            }
        }
        let other = run(json!({}), json!({"architectures": ["LlamaForCausalLM"]}), "bfloat16");
        assert!(matches!(other, Err(Error::Refused { what, .. }) if what == "architectures"));
    }

    #[test]
    fn quantised_engine_takes_a_checkpoint_quantised_likewise() {
        let model = json!({"model_path": "/m", "architectures": ["Qwen3ForCausalLM"]});
        let server = |quantization: Value| json!({"model_path": "/m", "quantization": quantization});
        let of = |quantization: Option<&str>| {
            let mut expected = expected("bfloat16");
            expected.config.quantization = quantization.map(str::to_owned);
            expected
        };
        let run = |want: &Expected, quantization: Value, local: Option<&Expected>| {
            let model = serde_json::from_value(model.clone()).unwrap();
            compare("e", want, &model, &serde_json::from_value(server(quantization)).unwrap(), local)
        };
        let (fp8, plain, other) = (of(Some(FP8_BLOCKS)), of(None), of(Some("awq")));
        assert!(run(&fp8, Value::Null, Some(&fp8)).unwrap().no_checksums.is_some());
        run(&fp8, json!("fp8"), None).unwrap();
        for (want, quantization, local) in [
            (&fp8, Value::Null, Some(&plain)),
            (&plain, Value::Null, Some(&fp8)),
            (&plain, json!("fp8"), None),
            (&fp8, json!("awq"), None),
            (&other, Value::Null, Some(&other)),
        ] {
            let refused = run(want, quantization, local);
            assert!(
                matches!(&refused, Err(Error::Refused { what, .. }) if what.starts_with("quantization")),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn a_float32_model_needs_the_flag() {
        let refused = run(json!({}), json!({}), "float32").unwrap_err().to_string();
        assert!(refused.contains("F16 (dtype auto)"), "{refused}");
        assert_eq!(run(json!({"dtype": "float32"}), json!({}), "float32").unwrap().dtype, Dtype::F32);
    }

    #[test]
    fn another_size_or_tokenizer_is_refused() {
        let (model, server) =
            (json!({"model_path": "/m", "architectures": ["Qwen3ForCausalLM"]}), json!({"model_path": "/m"}));
        let (model, server) =
            (serde_json::from_value(model).unwrap(), serde_json::from_value(server).unwrap());
        let want = expected("bfloat16");
        let local = of(json!({"hidden_size": 10, "head_dim": 4}));
        let refused = compare("e", &want, &model, &server, Some(&local));
        assert!(matches!(refused, Err(Error::Refused { what, expected, found, .. })
            if (&*what, &*expected, &*found) == ("hidden_size", "8", "10")));
        let local = Expected { tokenizer: Some("u".into()), ..want.clone() };
        let refused = compare("e", &want, &model, &server, Some(&local));
        assert!(matches!(refused, Err(Error::Refused { what, .. }) if what == "tokenizer digest"));
    }
}
