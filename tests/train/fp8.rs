//! Engines in fp8 beside a trainer in bf16: what is published is the quantised version, and what cannot be is refused
//! before anything is trained.

use super::common::{self, Process, code, driftless, run};
use super::stage::{Role, Stage};
use super::steps;
use driftless::transport::snapshot::AuxFile;
use driftless::transport::{Checkpoint, Dtype, Snapshot};
use driftless_testkit::sglang::Fake;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A model of which engines can take blocks, and the same in fp8.
fn models(dir: &Path) -> [PathBuf; 2] {
    let model = common::cold_start_of(dir, &common::fp8_config(), 5, "bfloat16");
    let fp8 = dir.join("model-fp8");
    quantize(&model, &fp8);
    [model, fp8]
}

fn quantize(from: &Path, to: &Path) {
    run(driftless().arg("quantize").arg(from).arg(to));
}

/// A tensor: name, dtype, bytes.
type Whole = (String, Dtype, Vec<u8>);

fn contents(dir: &Path) -> (Vec<Whole>, Vec<AuxFile>) {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let bytes = |index| checkpoint.bytes(index).expect("its bytes").into_owned();
    let tensors = checkpoint.tensors().iter().enumerate();
    let tensors = tensors.map(|(index, info)| (info.name.clone(), info.dtype, bytes(index))).collect();
    (tensors, checkpoint.files().to_vec())
}

/// A trainer in bf16 whose engines start from `fp8`, with checksums that cannot be compared left out.
fn trainer(stage: &Stage, fp8: &Path) -> Command {
    let (bf16, mut command) = (stage.command(Role::Trainer), driftless());
    command.args(bf16.get_args().filter(|arg| *arg != "--check-weight-update-equal"));
    command.args(["--rollout-dtype", "fp8", "--rollout-hf-checkpoint"]).arg(fp8);
    command
}

#[test]
fn deltas_rebuild_the_quantised_version_that_engines_load() {
    let dir = tempfile::tempdir().expect("a directory");
    let [model, fp8] = models(dir.path());
    let engine = Fake::start(&fp8);
    engine.engine().tokens = (3..13).collect();
    let mut stage = Stage::new(dir.path(), &model);
    (stage.port, stage.steps) = (engine.address.port(), 2);
    let follower = Stage { port: stage.port, ..Stage::new(dir.path(), &fp8) };
    let _follower = follower.start(Role::Follower, None);
    Process::start("trainer", dir.path(), &mut trainer(&stage, &fp8)).succeed();
    let host = dir.path().join("host").canonicalize().expect("a checkpoint");
    assert!(engine.engine().label().ends_with(":2"));
    assert_eq!(engine.engine().weights.as_deref(), Some(&*host));

    // What `--save-hf` has is the policy as it is trained.
    let last = dir.path().join("last-fp8");
    quantize(&dir.path().join("final"), &last);
    let (tensors, files) = contents(&last);
    assert!((tensors.clone(), files) == contents(&dir.path().join("host")));
    let fp8_of = |tensors: Vec<Whole>| {
        tensors.into_iter().filter(|(_, dtype, _)| *dtype == Dtype::F8E4M3).collect::<Vec<_>>()
    };
    let (first, last) = (fp8_of(contents(&fp8).0), fp8_of(tensors));
    assert_eq!(last.len(), 2 * 7, "seven matrices a layer");
    assert!(first.iter().zip(&last).any(|(first, last)| first != last), "training changed e4m3");
    for step in steps(&stage) {
        let publication = &step["publication"];
        assert!(
            publication["publication_bytes"].as_u64() < publication["full_bytes"].as_u64(),
            "{publication}"
        );
    }
    let replayed = run(driftless().arg("replay").arg(dir.path().join("rl")));
    assert!(replayed.contains("version 2 is the same"), "{replayed}");
}

#[test]
fn start_that_is_not_the_policy_in_fp8_is_refused_by_the_tensor() {
    let dir = tempfile::tempdir().expect("a directory");
    let [model, fp8] = models(dir.path());
    let stage = Stage::new(dir.path(), &model);
    let weights = fp8.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&weights, bytes).expect("weights");
    let (status, error) = code(&mut trainer(&stage, &fp8));
    assert_eq!(status, Some(1), "{error}");
    assert!(
        error.contains("expected the learner's values, found others") && error.contains("quantize"),
        "{error}"
    );
    let (_, error) = code(&mut trainer(&stage, &model));
    assert!(error.contains("expected F8_E4M3 [128, 128], found BF16 [128, 128]"), "{error}");
}

#[test]
fn what_has_no_fp8_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let [model, fp8] = models(dir.path());
    let to = dir.path().join("to");
    let again = |from: &Path| code(driftless().arg("quantize").arg(from).arg(&to)).1;
    let error = again(&fp8);
    assert!(error.contains("quantization_config"), "{error}");
    let narrow = common::cold_start(&dir.path().join("narrow"), 1, "bfloat16");
    let error = again(&narrow);
    assert!(error.contains("num_key_value_heads") && error.contains("found 64"), "{error}");
    assert!(!to.exists());

    // The embedded engine computes no fp8: neither of its own, nor as what a trainer in fp8 expects.
    let (_, error) = code(driftless().args(["serve", "--port", "0", "--model-path"]).arg(&fp8));
    assert!(error.contains("quantization_config"), "{error}");
    let stage = Stage::new(dir.path(), &model);
    let _engine = stage.start(Role::Engine, None);
    let (_, error) = code(&mut trainer(&stage, &fp8));
    assert!(error.contains("quantization should be fp8 [128,128], found none"), "{error}");

    for flags in [&["--rollout-dtype", "fp8"][..], &["--rollout-hf-checkpoint", "to"]] {
        let (status, error) = code(stage.command(Role::Trainer).args(flags));
        assert_eq!(status, Some(2), "{error}");
    }
    for flags in [&["--learner", "true"][..], &["--check-weight-update-equal"]] {
        let (status, error) = code(trainer(&stage, &fp8).args(flags));
        assert_eq!(status, Some(2), "{error}");
        assert!(error.contains(flags[0]), "{error}");
    }
}
