//! Checkpoints as small as engines check them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::Memory;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::manifest::Manifest;
use driftless_transport::publish::{PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Dtype, Publisher, Tensors};
use serde_json::{Value, json};

/// A checkpoint in `directory/b`, with other weights than seed 1 gives, and its manifest as a version of a
/// run.
pub fn version(directory: &Path) -> (Checkpoint, Manifest) {
    version_of(directory, &checkpoint(&directory.join("b"), 2, 4))
}

/// The same of a family that nothing here knows.
pub fn odd_version(directory: &Path) -> (Checkpoint, Manifest) {
    version_of(directory, &odd_checkpoint(&directory.join("b"), 2))
}

fn version_of(directory: &Path, next: &Path) -> (Checkpoint, Manifest) {
    let next = Checkpoint::open(next).unwrap();
    let run = PublisherOptions::new("test", Start::NewRun, directory.join("baseline"));
    let mut publisher = Publisher::open(Arc::new(Memory::new()), run).unwrap();
    let published = publisher.publish_reference(next.dir(), Step::default()).unwrap();
    let manifest = publisher.run().get("policy", published.version).unwrap().manifest;
    (next, manifest)
}

/// A Qwen3 checkpoint of a few hundred bytes; another seed gives other weights, another size other shapes.
pub fn checkpoint(directory: &Path, seed: u8, hidden: u64) -> PathBuf {
    let config = json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16"});
    write(directory, seed, hidden, &config)
}

/// A checkpoint of a family that nothing here knows, as some of its fields have it.
pub fn odd_checkpoint(directory: &Path, seed: u8) -> PathBuf {
    let config = json!({"architectures": ["OddMoeForCausalLM"], "num_experts": 4, "rope_parameters": {"rope_theta": 1e6},
        "vocab_size": 10, "dtype": "bfloat16"});
    write(directory, seed, 4, &config)
}

/// The same, with a config that need not fit.
pub fn write(directory: &Path, seed: u8, hidden: u64, config: &Value) -> PathBuf {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes = [
        ("model.embed_tokens.weight".to_owned(), vec![10, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        (layer("input_layernorm"), vec![hidden]),
        (layer("post_attention_layernorm"), vec![hidden]),
        (layer("self_attn.q_proj"), vec![4, hidden]),
        (layer("self_attn.k_proj"), vec![2, hidden]),
        (layer("self_attn.v_proj"), vec![2, hidden]),
        (layer("self_attn.o_proj"), vec![hidden, 4]),
        (layer("self_attn.q_norm"), vec![2]),
        (layer("self_attn.k_norm"), vec![2]),
        (layer("mlp.gate_proj"), vec![6, hidden]),
        (layer("mlp.up_proj"), vec![6, hidden]),
        (layer("mlp.down_proj"), vec![hidden, 6]),
    ];
    let config = Tensors::new().file("config.json", config.to_string()).unwrap();
    let tensors = shapes.into_iter().fold(config, |tensors, (name, shape)| {
        let bytes = vec![seed; 2 * shape.iter().product::<u64>() as usize];
        tensors.tensor(name, Dtype::Bf16, shape, bytes).unwrap()
    });
    write_checkpoint(directory, &tensors, 1 << 20).unwrap();
    std::fs::canonicalize(directory).unwrap()
}
