//! The bridge against an engine that hangs, lies, refuses and dies.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod activation;
mod behind;
mod calls;
mod colocate;
mod coordinate;
mod fleet;
mod group;
mod hostile;
#[path = "../common/inline.rs"]
mod inline;
mod patch;
mod proxy;
mod scene;
mod vllm;
mod vllm_patch;

use std::path::Path;

use driftless_transport::Checkpoint;
use serde_json::{Value, json};

/// The checkpoint with a config that says that its layers are in fp8.
fn in_fp8(directory: &Path) -> Checkpoint {
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    std::fs::write(&path, config.to_string()).unwrap();
    Checkpoint::open(directory).unwrap()
}
