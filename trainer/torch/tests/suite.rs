//! libtorch as a learner passes the suite of all learners.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::sft::{SftOptions, SftTask, sft};
use driftless_torch::tasks::text::{Text, WINDOW};
use driftless_torch::tasks::tiny;
use driftless_torch::{Config, TorchLearner, TorchOptions};
use driftless_trainer::learner::{Batch, Learner, Sample, Stepped, Workspace, conformance};
use driftless_trainer::options::{CriticOptions, Estimator, Kl, LearnOptions};
use std::path::{Path, PathBuf};

/// Fresh weights of a small model, as a checkpoint.
fn checkpoint(dir: &Path) -> PathBuf {
    let config = Config { num_hidden_layers: 1, ..tiny::config() };
    let task = SftTask::Text(Text::new(vec![0; WINDOW]).unwrap());
    let options = SftOptions::new(task, config, dir.join("hf"), 0).with_seed(3).with_num_threads(1);
    sft(&options, |_, _| {}).unwrap();
    options.save_hf
}

fn learner(learn: LearnOptions) -> Box<dyn Learner> {
    // Several micro-batches, so that samples come in another order than they were given in.
    let learn = learn.with_lr(1e-2).with_max_tokens_per_gpu(16);
    Box::new(TorchLearner::new(TorchOptions::new(learn).with_num_threads(1)))
}

#[test]
fn libtorch_passes_the_suite_of_learners() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path());
    let critic = CriticOptions::default().with_critic_lr(1e-2).with_critic_save(dir.path().join("critic"));
    let ppo = LearnOptions::default()
        .with_advantage_estimator(Estimator::Ppo)
        .with_lambd(0.9)
        .with_kl_coef(0.1)
        .with_kl_loss_type(Kl::K3)
        .with_global_batch_size(2_usize)
        .with_critic(critic);
    let moving = LearnOptions::default()
        .with_use_kl_loss(true)
        .with_kl_loss_type(Kl::K3)
        .with_kl_loss_coef(0.5)
        .with_ref_update_interval(1_u64);
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
        model: "policy".into(),
        baseline: dir.path().join("baseline"),
        keep: 1,
        anchor_every: None,
        anchor_share: None,
    };
    // The loss overflows.
    let mut learner = learner(LearnOptions::default().with_entropy_coef(1e300));
    learner.load(&place).unwrap();
    let sample = Sample {
        position: driftless_buffer::Position(0),
        tokens: &[1, 2, 3, 4],
        prompt_len: 2,
        loss_mask: &[1, 1],
        stale: 0,
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
