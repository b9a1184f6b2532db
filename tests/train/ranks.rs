//! Several ranks through the command, as processes of this host.

use crate::algorithms::copy;
use crate::common::{code, run};
use crate::stage::{Role, STEPS, Stage, cold_start};
use crate::steps;
use std::path::Path;
use std::process::Command;

/// Figures of the first step, which every number of ranks begins with the same weights, may be so far apart.
const CLOSE: f64 = 1e-6;
/// After that, roundings to bf16 may have gone different ways.
const NEAR: f64 = 2e-2;

fn rollouts(dir: &Path) -> Stage {
    let stage = Stage::new(&dir.join("rollouts"), &cold_start(dir));
    let engine = stage.start(Role::Engine, None);
    run(stage.command(Role::Trainer).arg("--debug-rollout-only"));
    drop(engine);
    stage
}

/// A run of its own on the same rollouts.
fn on_these(rollouts: &Stage, dir: &Path) -> Stage {
    let stage = Stage::new(dir, &rollouts.model);
    copy(&rollouts.dir.join("rl"), &stage.dir.join("rl"));
    std::fs::remove_file(stage.dir.join("rl/metrics.jsonl")).expect("the rollouts' lines");
    stage
}

fn trainer(stage: &Stage, ranks: usize) -> Command {
    let mut command = stage.command(Role::Trainer);
    command.args(["--debug-train-only", "--balance-data"]);
    command.args(["--actor-num-gpus-per-node", &ranks.to_string()]);
    command
}

fn weights(stage: &Stage) -> Vec<u8> {
    std::fs::read(stage.dir.join("final/model.safetensors")).expect("weights")
}

/// Every step of both has the same figures.
fn agree(alone: &Stage, others: &Stage) {
    let (alone, others) = (steps(alone), steps(others));
    assert_eq!(alone.len(), others.len());
    for (number, (one, all)) in alone.iter().zip(&others).enumerate() {
        for figure in ["loss", "grad_norm", "entropy", "log_prob_diff_mean", "log_prob_diff_max"] {
            let [one, all] = [one, all].map(|step| step[figure].as_f64().expect("a number"));
            let (apart, most) = ((one - all).abs(), if number == 0 { CLOSE } else { NEAR });
            assert!(apart <= most * one.abs().max(1.0), "step {number}: {figure}: {one}, {all}");
        }
    }
}

#[test]
fn ranks_train_as_one_does_whatever_happens_to_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let rollouts = rollouts(dir.path());
    let [alone, two, killed, handed] =
        ["alone", "two", "killed", "handed"].map(|name| on_these(&rollouts, &dir.path().join(name)));
    run(&mut trainer(&alone, 1));
    run(&mut trainer(&two, 2));
    agree(&alone, &two);

    // Rank 1 dies in its second step, and so does the one after it, in its own second.
    let words = run(trainer(&killed, 2).env("DRIFTLESS_KILL_AT", "train.rank:2"));
    assert!(weights(&killed) == weights(&two), "{words}");

    // What two have left, three go on with.
    let handed = Stage { steps: STEPS - 1, ..handed };
    run(&mut trainer(&handed, 2));
    let handed = Stage { steps: STEPS, ..handed };
    run(&mut trainer(&handed, 3));
    agree(&alone, &handed);
}

#[test]
fn impossible_numbers_of_ranks_are_refused_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    for (ranks, device, expected) in [
        (9, "cpu", "--actor-num-gpus-per-node: expected 1..=8, found 9"),
        (2, "cuda:0", "--device: expected cpu or cuda, for 2 ranks, found cuda:0"),
        (8, "cuda", ""),
    ] {
        let (status, words) = code(trainer(&stage, ranks).args(["--device", device]));
        if expected.is_empty() && status == Some(0) {
            println!("skipped: this machine has {ranks} GPUs");
            continue;
        }
        assert!(status != Some(0) && words.contains(expected), "{status:?}: {words}");
        assert!(!stage.dir.join("rl").exists(), "{words}");
    }
}
