//! A trainer that publishes out of its own memory, and a host that follows it through a directory that both
//! reach. A driver for the engine is all that a rollout host adds.
//!
//! `cargo run --example publish_follow`

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use driftless::store::{BoxError, Disk, Store};
use driftless::transport::activate::{Activate, Activated, Target};
use driftless::transport::follow::FollowerOptions;
use driftless::transport::publish::{Mode, PublisherOptions, Start, Step};
use driftless::transport::{Dtype, Follower, Publisher, Result, Tensors};

const ELEMENTS: u64 = 1 << 16;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("publish-follow-example-{}", std::process::id()));
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));

    let options = PublisherOptions::new("my-run", Start::NewRun, dir.join("baseline")).with_anchor_every(8);
    let mut publisher = Publisher::open(store.clone(), options)?;
    let follower = follow(store, &dir)?;

    let mut weights: Vec<u16> = (0..ELEMENTS).map(|n| 0x3c00 | (n % 509) as u16).collect();
    for step in 0..4 {
        // An optimiser step moves few elements, each by very little.
        weights.iter_mut().skip(step as usize).step_by(50).for_each(|weight| *weight += 1);
        let published = publisher.publish(&snapshot(&weights)?, at(step), Mode::Delta)?;
        let (bytes, full) = (published.publication_bytes, published.full_bytes);
        println!("published {}: {bytes} of {full} bytes", published.label);

        // A service calls `follower.run_until` instead, and polls.
        follower.prepare(None)?;
        follower.activate()?;
    }
    assert_eq!(follower.status().applied.map(|applied| applied.version), publisher.version());
    // Both finish behind their last call what needs no caller: the baseline moves, the checkpoint is synced.
    drop((publisher, follower));
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

/// The step that a version belongs to.
fn at(trainer_step: u64) -> Step {
    Step { trainer_step, checkpoint: None }
}

/// The trainer's tensors, with the files that an engine needs beside them.
fn snapshot(weights: &[u16]) -> Result<Tensors<'static>> {
    let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    Tensors::new()
        .tensor("model.embed_tokens.weight", Dtype::Bf16, [ELEMENTS / 64, 64], bytes)?
        .file("config.json", r#"{"architectures": ["Qwen3ForCausalLM"]}"#)
}

fn follow(store: Arc<dyn Store>, dir: &Path) -> Result<Follower> {
    let options = FollowerOptions::new("my-run", dir.join("checkpoint"), "host-0");
    Follower::open(store, options, vec![Box::new(Engine { label: None })])
}

/// Stands for an engine's client. `driftless::bridge` has those of SGLang and vLLM.
struct Engine {
    label: Option<String>,
}

impl Activate for Engine {
    fn name(&self) -> String {
        "http://127.0.0.1:30000".into()
    }

    fn serving(&mut self) -> std::result::Result<Option<String>, BoxError> {
        Ok(self.label.clone())
    }

    fn activate(&mut self, target: &Target<'_>) -> std::result::Result<Activated, BoxError> {
        println!("an engine loads {} as {}", target.checkpoint.dir().display(), target.label);
        self.label = Some(target.label.to_owned());
        Ok(Activated::default())
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn example_runs() {
        super::main().unwrap();
    }
}
