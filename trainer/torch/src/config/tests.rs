//! Reading, refusing and writing.

use super::*;

fn tiny() -> Config {
    Config {
        family: Family::Qwen3,
        vocab_size: 16,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position_embeddings: 32,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        bos_token_id: None,
        eos_token_ids: vec![1],
        pad_token_id: Some(0),
    }
}

/// The same as a model of a family, with or without stretched frequencies.
fn of(family: Family, rope_scaling: Option<RopeScaling>) -> Config {
    Config { family, rope_scaling, ..tiny() }
}

fn llama3() -> RopeScaling {
    RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 16,
    }
}

fn read(value: &Value) -> Result<Config> {
    Config::from_value(value, Path::new("config.json"))
}

#[test]
fn json_round_trip() {
    for family in Family::ALL {
        for scaling in [None, Some(llama3())] {
            let config = of(family, scaling);
            assert_eq!(read(&config.to_json(Kind::BFloat16)).unwrap(), config);
        }
    }
}

#[test]
fn transformers_5_spelling() {
    let mut value = tiny().to_json(Kind::BFloat16);
    let object = value.as_object_mut().unwrap();
    object.remove("rope_theta");
    object.insert("rope_parameters".into(), json!({"rope_theta": 5e5, "rope_type": "default"}));
    assert_eq!(read(&value).unwrap().rope_theta, 5e5);
    let mut rope = serde_json::json!(llama3());
    rope["rope_theta"] = json!(5e5);
    value["rope_parameters"] = rope;
    let config = read(&value).unwrap();
    assert_eq!((config.rope_theta, config.rope_scaling), (5e5, Some(llama3())));
}

#[test]
fn keys_that_older_files_lack_have_the_values_of_transformers() {
    let mut value = of(Family::Llama, None).to_json(Kind::BFloat16);
    let object = value.as_object_mut().unwrap();
    for key in ["num_key_value_heads", "head_dim", "rope_theta", "initializer_range"] {
        object.remove(key);
    }
    let config = read(&value).unwrap();
    assert_eq!((config.num_key_value_heads, config.head_dim), (4, 2));
    assert_eq!((config.rope_theta, config.initializer_range), (10_000.0, 0.02));
    value["num_attention_heads"] = json!(3);
    assert!(matches!(read(&value), Err(Error::Config { field: "num_attention_heads", .. })));
}

#[test]
fn other_families_are_refused_by_name_with_where_to_go() {
    let cases = [
        ("model_type", json!("mistral"), "mistral"),
        ("model_type", json!("qwen3_moe"), "qwen3_moe"),
        ("model_type", json!(7), "7"),
        ("model_type", Value::Null, "nothing"),
        ("architectures", json!(["LlamaForSequenceClassification"]), "SequenceClassification"),
        ("model_type", json!("llama"), "Qwen3ForCausalLM"),
    ];
    for (key, wrong, named) in cases {
        let mut value = tiny().to_json(Kind::BFloat16);
        value[key] = wrong;
        // What other families lack is not what is complained of.
        value.as_object_mut().unwrap().remove("hidden_size");
        let error = read(&value).unwrap_err();
        assert!(matches!(error, Error::Family { .. }), "{error:?}");
        let error = error.to_string();
        for part in [named, "config.json", "llama, qwen2, qwen3", "driftless publish"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn options_of_a_family_are_refused_in_that_family() {
    let cases = [
        (Family::Llama, "attention_bias", false),
        (Family::Llama, "mlp_bias", false),
        (Family::Qwen2, "use_sliding_window", false),
        // Not a key of Qwen2: its queries, keys and values have a bias whatever it says.
        (Family::Qwen2, "attention_bias", true),
        (Family::Qwen3, "attention_bias", false),
    ];
    for (family, field, taken) in cases {
        let mut value = of(family, None).to_json(Kind::BFloat16);
        value[field] = json!(true);
        assert_eq!(read(&value).is_ok(), taken, "{family:?} {field}");
    }
}

#[test]
fn stretched_frequencies_that_make_no_sense_are_refused() {
    let changes: [(&str, Value); 8] = [
        ("factor", json!(0.5)),
        ("factor", Value::Null),
        ("low_freq_factor", json!(0.0)),
        ("low_freq_factor", json!(4.0)),
        ("high_freq_factor", Value::Null),
        ("original_max_position_embeddings", json!(0)),
        ("rope_type", json!("yarn")),
        ("partial_rotary_factor", json!(0.5)),
    ];
    for (key, wrong) in changes {
        let mut value = of(Family::Llama, Some(llama3())).to_json(Kind::BFloat16);
        value["rope_scaling"][key] = wrong;
        let error = read(&value).unwrap_err();
        assert!(matches!(error, Error::Config { field: "rope_scaling", .. }), "{key}: {error:?}");
    }
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
    // Without the norms of queries and keys; then with the biases of 16 queries, 8 keys and 8 values.
    assert_eq!(of(Family::Llama, None).elements(), config.elements() - 2 * 8);
    assert_eq!(of(Family::Qwen2, None).elements(), config.elements() - 2 * 8 + 2 * 32);
}
