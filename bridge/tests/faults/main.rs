//! The bridge against an engine that hangs, lies, refuses and dies.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod activation;
mod behind;
mod calls;
mod changing;
mod colocate;
mod compare;
mod coordinate;
mod fleet;
mod group;
mod hostile;
#[path = "../common/inline.rs"]
mod inline;
mod patch;
mod proxy;
mod scene;
mod stream;
mod tls;
mod vllm;
mod vllm_patch;

use std::path::Path;
use std::sync::Arc;

use driftless_store::Memory;
use driftless_testkit::sglang::checkpoint;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::manifest::Manifest;
use driftless_transport::publish::{Mode, PublisherOptions, Start, Step};
use driftless_transport::{Checkpoint, Dtype, Publisher, Snapshot as _, Tensors};
use serde_json::{Value, json};

/// The checkpoint with a config that says that its layers are in fp8.
fn in_fp8(directory: &Path) -> Checkpoint {
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    std::fs::write(&path, config.to_string()).unwrap();
    Checkpoint::open(directory).unwrap()
}

/// A version whose output head is another matrix than its word embeddings, in a checkpoint whose config ties them. No
/// publisher makes one that is given this config.
fn parted(directory: &Path) -> (Checkpoint, Manifest) {
    let tied = Checkpoint::open(checkpoint(&directory.join("tied"), 2, 4)).unwrap();
    let with_head = |config: &[u8]| {
        let add = |tensors: Tensors<'static>, at: usize| {
            let (info, bytes) = (tied.tensors()[at].clone(), tied.bytes(at).unwrap().into_owned());
            tensors.tensor(info.name, info.dtype, info.shape, bytes).unwrap()
        };
        let tensors =
            (0..tied.tensors().len()).fold(Tensors::new(), add).file("config.json", config).unwrap();
        tensors.tensor("lm_head.weight", Dtype::Bf16, [10, 4], vec![7; 80]).unwrap()
    };
    let options = PublisherOptions::new("parted", Start::NewRun, directory.join("parted-baseline"));
    let mut publisher = Publisher::open(Arc::new(Memory::new()), options).unwrap();
    let published = publisher.publish(&with_head(b"{}"), Step::default(), Mode::Full).unwrap();
    let manifest = publisher.run().get("policy", published.version).unwrap().manifest;
    let config = std::fs::read(tied.dir().join("config.json")).unwrap();
    let parted = directory.join("parted");
    write_checkpoint(&parted, &with_head(&config), 1 << 20).unwrap();
    (Checkpoint::open(parted).unwrap(), manifest)
}

/// The version was refused for its head, which is the cause that is told.
fn refused_for_its_head(error: &driftless_bridge::Error) {
    let words = driftless_store::chain_text(error);
    assert!(matches!(error, driftless_bridge::Error::Open { .. }), "{words}");
    assert!(words.contains("lm_head.weight") && words.contains("tie_word_embeddings"), "{words}");
}
