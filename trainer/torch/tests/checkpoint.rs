//! A run that was interrupted goes on bit for bit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use driftless_torch::checkpoint::{self, Progress};
use driftless_torch::optimizer::AdamWOptions;
use driftless_torch::tasks::tiny;
use driftless_torch::{Batch, Config, Error, Model, Policy, Sample};
use tch::{Device, Kind, Tensor};

const SEED: i64 = 5;

fn config() -> Config {
    Config {
        vocab_size: 16,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        max_position_embeddings: 32,
        initializer_range: 0.1,
        ..tiny::config()
    }
}

fn policy(config: Config, seed: i64) -> Policy {
    let model = Model::fresh(config, seed, Kind::Float, Device::Cpu).unwrap();
    Policy::new(model, Kind::BFloat16, AdamWOptions::default().with_weight_decay(0.1)).unwrap()
}

/// One step on data that depends on the step's number alone.
fn train(policy: &mut Policy, step: i32) {
    let rows: Vec<Vec<i32>> =
        (0..4).map(|row| (0..6 + row).map(|i| (i * 3 + row + step) % 16).collect()).collect();
    let sample = |tokens| Sample { tokens, prompt_len: 2, ..Sample::default() };
    let samples: Vec<_> = rows.iter().map(Vec::as_slice).map(sample).collect();
    let batch = Batch::new(&samples, &[0.05; 4], 16, Device::Cpu).unwrap();
    policy.sft_step(&[batch], 1e-3).unwrap();
}

fn progress(step: u64) -> Progress {
    Progress { step, seed: SEED as u64, ..Progress::default() }
}

/// Every bit of the trainer's state, as a checkpoint holds it.
fn state(policy: &Policy, dir: &Path) -> Vec<u8> {
    checkpoint::save(dir, policy, None, &progress(99), 1).unwrap();
    std::fs::read(dir.join("step-00000099/model.safetensors")).unwrap()
}

fn weights(policy: &Policy) -> Vec<f32> {
    let flat = |parameter: &driftless_torch::Parameter| {
        Vec::<f32>::try_from(parameter.tensor.detach().flatten(0, -1)).unwrap()
    };
    policy.model().parameters().iter().flat_map(flat).collect()
}

#[test]
fn two_steps_a_restart_and_two_steps_are_four_steps() {
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let mut straight = policy(config(), SEED);
    (0..4).for_each(|step| train(&mut straight, step));

    let mut first = policy(config(), SEED);
    (0..2).for_each(|step| train(&mut first, step));
    checkpoint::save(&dir.path().join("run"), &first, None, &progress(2), 2).unwrap();
    drop(first);
    // Other weights, all of which must be replaced.
    let mut second = policy(config(), SEED + 1);
    assert_eq!(checkpoint::load(&dir.path().join("run"), &mut second, None).unwrap(), Some(progress(2)));
    assert_eq!(second.optimizer().steps(), 2);
    (2..4).for_each(|step| train(&mut second, step));

    assert_eq!(state(&second, &dir.path().join("a")), state(&straight, &dir.path().join("b")));
    assert_eq!(weights(&second), weights(&straight));
    assert_ne!(weights(&straight), weights(&policy(config(), SEED)));
}

#[test]
fn the_newest_is_loaded_and_the_oldest_are_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let mut policy = policy(config(), SEED);
    assert_eq!(checkpoint::load(dir.path(), &mut policy, None).unwrap(), None);
    for step in [1, 2, 10] {
        checkpoint::save(dir.path(), &policy, None, &progress(step), 2).unwrap();
    }
    // What a crash in the middle of saving leaves.
    std::fs::create_dir(dir.path().join("partial-step-00000011")).unwrap();
    let mut names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["partial-step-00000011", "step-00000002", "step-00000010"]);
    assert_eq!(checkpoint::load(dir.path(), &mut policy, None).unwrap(), Some(progress(10)));
}

#[test]
fn foreign_and_damaged_checkpoints_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint::save(dir.path(), &policy(config(), SEED), None, &progress(1), 1).unwrap();
    let mut other = policy(Config { num_hidden_layers: 1, ..config() }, SEED);
    let before = weights(&other);
    assert!(matches!(
        checkpoint::load(dir.path(), &mut other, None),
        Err(Error::Resume { what: "model", .. })
    ));
    assert_eq!(weights(&other), before);

    let file = dir.path().join("step-00000001/model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    let mut same = policy(config(), SEED);
    assert!(matches!(checkpoint::load(dir.path(), &mut same, None), Err(Error::Transport(_))));
}

#[test]
fn set_deterministic_refuses_operations_in_any_order() {
    driftless_torch::libtorch::set_deterministic();
    let [mut to, index, from] = [
        Tensor::zeros([2], (Kind::Float, Device::Cpu)),
        Tensor::from_slice(&[0_i64, 0]),
        Tensor::from_slice(&[1.0_f32, 2.0]),
    ];
    let refused = to.f_put_(&index, &from, false).unwrap_err();
    assert!(refused.to_string().contains("deterministic"), "{refused}");
}
