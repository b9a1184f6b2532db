//! Small random checkpoints, and engines that serve them.

use std::path::Path;

use driftless_torch::engine::{Dialect, EngineOptions, Server, serve};
use driftless_torch::{Config, Family, Model, Parameter};
use driftless_transport::{Dtype, Tensors};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::client::Client;

/// Ids of the model.
pub(crate) const VOCABULARY: i64 = 64;

/// `config.json` of the model under test.
pub(crate) fn config() -> Value {
    config_of(Family::Qwen3)
}

/// The same shape in a family.
fn config_of(family: Family) -> Value {
    json!({
        "architectures": [family.architecture()], "model_type": family.model_type(), "vocab_size": VOCABULARY,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": true,
        "attention_bias": false, "initializer_range": 0.5, "torch_dtype": "float32", "eos_token_id": null,
    })
}

/// Writes a checkpoint with fresh f32 weights of a seed.
pub(crate) fn write_checkpoint(dir: &Path, config: &Value, seed: i64) {
    let scratch = tempfile::tempdir().unwrap();
    std::fs::write(scratch.path().join("config.json"), config.to_string()).unwrap();
    let model = Model::fresh(Config::open(scratch.path()).unwrap(), seed, Kind::Float, Device::Cpu).unwrap();
    let config = Tensors::new().file("config.json", config.to_string()).unwrap();
    let fresh = model.parameters().iter().fold(config, |fresh, Parameter { name, tensor, .. }| {
        let shape: Vec<u64> = tensor.size().iter().map(|size| *size as u64).collect();
        fresh.tensor(name.as_str(), Dtype::F32, shape, bytes(tensor)).unwrap()
    });
    driftless_transport::checkpoint::write_checkpoint(dir, &fresh, u64::MAX).unwrap();
}

/// Little-endian bytes of a tensor.
pub(crate) fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.contiguous().copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// Two checkpoints of one shape, and an engine that serves the first in f32.
pub(crate) struct Fixture {
    pub(crate) server: Server,
    pub(crate) client: Client,
    pub(crate) dir: TempDir,
}

impl Fixture {
    pub(crate) fn new() -> Fixture {
        Fixture::with(|_| {})
    }

    pub(crate) fn of(dialect: Dialect) -> Fixture {
        Fixture::with(|options| options.dialect = dialect)
    }

    pub(crate) fn of_family(family: Family) -> Fixture {
        Fixture::build(&config_of(family), |_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut EngineOptions)) -> Fixture {
        Fixture::build(&config(), change)
    }

    fn build(config: &Value, change: impl FnOnce(&mut EngineOptions)) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        for (name, seed) in [("a", 1), ("b", 2)] {
            write_checkpoint(&dir.path().join(name), config, seed);
        }
        let mut options = EngineOptions::new(dir.path().join("a"));
        options.kind = Kind::Float;
        options.threads = Some(1);
        options.weight_version = "a".to_owned();
        change(&mut options);
        let server = serve(options).unwrap();
        Fixture { client: Client::new(&server), server, dir }
    }

    /// Path of checkpoint `a` or `b`, as JSON wants it.
    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Body of an update to a checkpoint, labelled with its name.
    pub(crate) fn update(&self, name: &str) -> Value {
        json!({"model_path": self.path(name), "weight_version": name})
    }

    /// The checkpoint as a model, for reference results.
    pub(crate) fn reference(&self, name: &str) -> Model {
        Model::open(&self.dir.path().join(name), Kind::Float, Device::Cpu).unwrap()
    }
}

/// A greedy request that runs for exactly `length` tokens.
pub(crate) fn greedy(prompt: &[i64], length: usize) -> Value {
    json!({
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": true},
        "return_logprob": true,
    })
}

/// The sampled ids of a reply.
pub(crate) fn ids(reply: &Value) -> Vec<i64> {
    serde_json::from_value(reply["output_ids"].clone()).unwrap()
}

/// The log-probabilities of the sampled ids.
pub(crate) fn log_probs(reply: &Value) -> Vec<f64> {
    let entries = reply["meta_info"]["output_token_logprobs"].as_array().unwrap();
    entries.iter().map(|entry| entry[0].as_f64().unwrap()).collect()
}

/// The log-probabilities that a full forward pass gives `output` after `prompt` at a temperature.
pub(crate) fn expected(model: &Model, prompt: &[i64], output: &[i64], temperature: f64) -> Vec<f64> {
    let tokens: Vec<i64> = prompt.iter().chain(output).copied().collect();
    let input = Tensor::from_slice(&tokens[..tokens.len() - 1]).unsqueeze(0);
    let logits = tch::no_grad(|| model.forward(&input)).unwrap().squeeze_dim(0) / temperature;
    let chosen = logits
        .log_softmax(-1, Kind::Float)
        .narrow(0, prompt.len() as i64 - 1, output.len() as i64)
        .gather(-1, &Tensor::from_slice(output).unsqueeze(1), false);
    Vec::<f64>::try_from(chosen.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

/// Asserts that two lists of log-probabilities agree to rounding.
pub(crate) fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < 1e-4, "token {index}: {found} against {expected}");
    }
}
