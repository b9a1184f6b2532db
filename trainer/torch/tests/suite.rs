//! libtorch as a learner passes the suite of all learners.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::sft::{SftOptions, SftTask, sft};
use driftless_torch::tasks::arithmetic::Recipe;
use driftless_torch::{Config, TorchLearner, TorchOptions};
use driftless_trainer::learner::{Batch, Learner, Sample, Stepped, Workspace, conformance};
use driftless_trainer::options::{CriticOptions, Estimator, Kl, KlPenalty, LearnOptions};
use std::path::{Path, PathBuf};

/// Fresh weights of a small model, as a checkpoint.
fn checkpoint(dir: &Path) -> PathBuf {
    let options = SftOptions {
        task: SftTask::Arithmetic,
        config: Config { num_hidden_layers: 1, ..Recipe::default().config },
        hf_checkpoint: None,
        load: None,
        save: None,
        save_hf: dir.join("hf"),
        dtype: None,
        steps: 1,
        stop_loss: None,
        batch_size: 4,
        lr: 1e-3,
        seed: 3,
        num_threads: 1,
        device: "cpu".into(),
    };
    sft(&options, |_, _| {}).unwrap();
    options.save_hf
}

fn learner(learn: LearnOptions) -> Box<dyn Learner> {
    // Several micro-batches, so that samples come in another order than they were given in.
    let learn = LearnOptions { lr: 1e-2, max_tokens_per_gpu: 16, ..learn };
    Box::new(TorchLearner::new(TorchOptions {
        learn,
        temperature: 1.0,
        num_threads: 1,
        device: "cpu".into(),
        fp8: false,
        ranks: None,
    }))
}

#[test]
fn libtorch_passes_the_suite_of_learners() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path());
    let penalty = |coef| Some(KlPenalty { kind: Kl::K3, coef, ref_load: None });
    let critic = CriticOptions {
        lr: 1e-2,
        lr_warmup_iters: 0,
        value_clip: 0.2,
        num_critic_only_steps: 0,
        load: None,
        save: Some(dir.path().join("critic")),
    };
    let ppo = LearnOptions {
        advantage_estimator: Estimator::Ppo,
        lambd: 0.9,
        kl_reward: penalty(0.1),
        global_batch_size: Some(2),
        critic: Some(critic),
        ..LearnOptions::default()
    };
    let moving =
        LearnOptions { kl_loss: penalty(0.5), ref_update_interval: Some(1), ..LearnOptions::default() };
    for learn in [LearnOptions::default(), ppo, moving] {
        conformance::suite(&checkpoint, || learner(learn.clone()));
    }
    assert!(dir.path().join("critic/model.safetensors").exists());
}

#[test]
fn step_that_is_not_finite_is_said_and_leaves_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    let place = Workspace {
        save: dir.path().join("rl"),
        hf_checkpoint: checkpoint(dir.path()),
        log: dir.path().join("log"),
        store: "memory:".into(),
        run: "test".into(),
        run_id: "01".repeat(16),
        model: "policy",
        baseline: dir.path().join("baseline"),
        keep: 1,
    };
    // The loss overflows.
    let mut learner = learner(LearnOptions { entropy_coef: 1e300, ..LearnOptions::default() });
    learner.load(&place).unwrap();
    let sample = Sample {
        position: driftless_buffer::Position(0),
        tokens: &[1, 2, 3, 4],
        prompt_len: 2,
        loss_mask: &[1, 1],
        log_probs: &[-1.0, -1.0],
        teacher_log_probs: &[],
        answer: 0,
        advantage: 1.0,
    };
    let batch = Batch { rollout_id: 0, samples: vec![sample] };
    let before = learner.log_probs(&batch).unwrap();
    let stepped = learner.step(&batch).unwrap();
    assert!(matches!(&stepped, Stepped::NotFinite(what) if what.contains("loss")), "{stepped:?}");
    assert_eq!(learner.log_probs(&batch).unwrap(), before);
}
