//! What a step promises: it happens whole, or it leaves no trace.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::optimizer::AdamWOptions;
use driftless_torch::tasks::tiny;
use driftless_torch::{Batch, Config, Error, Model, Policy, Sample};
use driftless_trainer::options::{Estimator, Kl, LearnOptions};
use tch::{Device, Kind, Tensor};

const SEED: i64 = 7;
const LR: f64 = 1e-3;

fn config() -> Config {
    Config {
        vocab_size: 24,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        head_dim: 16,
        initializer_range: 0.2,
        ..tiny::config()
    }
}

/// The old policy is the engine's, so that ratios say something.
fn engines() -> LearnOptions {
    LearnOptions::default().with_use_rollout_logprobs(true)
}

fn penalised(kind: Kl) -> LearnOptions {
    engines().with_use_kl_loss(true).with_kl_loss_type(kind).with_kl_loss_coef(0.1)
}

fn policy_of(config: Config, kind: Kind, clip_grad: f64) -> Policy {
    // So small a model is no work for two.
    tch::set_num_threads(1);
    let model = Model::fresh(config, SEED, kind, Device::Cpu).unwrap();
    Policy::new(model, kind, AdamWOptions::default().with_clip_grad(clip_grad)).unwrap()
}

fn policy_with(clip_grad: f64) -> Policy {
    policy_of(config(), Kind::Float, clip_grad)
}

/// Sequences of several lengths, two of them alike, with masked tokens.
const ROWS: [&[i32]; 5] = [
    &[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20],
    &[9, 8, 7, 6, 5, 4],
    &[2, 3, 5, 7, 11, 13],
    &[20, 21, 22],
    &[4, 4, 4, 4, 5],
];

/// The rows as one packed batch.
fn mixed(rows: &[&[i32]]) -> Batch {
    let columns: Vec<(Vec<f32>, Vec<u8>)> = rows
        .iter()
        .map(|row| {
            let log_probs = (2..row.len()).map(|i| -2.5 - 0.1 * i as f32).collect();
            (log_probs, (2..row.len()).map(|i| u8::from(i % 4 != 0)).collect())
        })
        .collect();
    let samples: Vec<Sample<'_>> = rows
        .iter()
        .zip(&columns)
        .zip(0..)
        .map(|((row, (log_probs, loss_mask)), index)| Sample {
            tokens: row,
            prompt_len: 2,
            loss_mask,
            log_probs,
            answer: index,
            advantage: if index % 2 == 0 { 1.0 } else { -0.7 },
            ..Sample::default()
        })
        .collect();
    Batch::new(&samples, &vec![0.1; rows.len()], 24, Device::Cpu).unwrap()
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn log_probs(policy: &Policy, batch: &Batch) -> Vec<f32> {
    Vec::try_from(policy.log_probs(batch, 0.9).unwrap()).unwrap()
}

fn batch(tokens: &[i32]) -> Batch {
    let log_probs = vec![-2.0; tokens.len() - 2];
    let sample = Sample { tokens, prompt_len: 2, log_probs: &log_probs, advantage: 1.0, ..Sample::default() };
    Batch::new(&[sample], &[0.1], 24, Device::Cpu).unwrap()
}

/// A batch that libtorch refuses once the model has computed: a label is no token.
fn broken() -> Batch {
    let mut broken = batch(&[5, 6, 7, 8]);
    broken.labels = Tensor::full_like(&broken.labels, 99);
    broken
}

fn weights(policy: &Policy) -> Vec<f32> {
    let flat = |parameter: &driftless_torch::Parameter| {
        Vec::<f32>::try_from(parameter.tensor.detach().flatten(0, -1)).unwrap()
    };
    policy.model().parameters().iter().flat_map(flat).collect()
}

#[test]
fn an_error_between_micro_batches_leaves_no_partial_sums() {
    let (mut straight, mut retried) = (policy_with(1.0), policy_with(1.0));
    let whole = [batch(&[3, 4, 5, 6, 7]), batch(&[9, 8, 7, 6])];
    let expected = straight.policy_step(&whole, &engines(), 1.0, LR).unwrap();

    let failed = retried.policy_step(&[batch(&[3, 4, 5, 6, 7]), broken()], &engines(), 1.0, LR);
    assert!(matches!(failed, Err(Error::Torch(_))), "{failed:?}");
    assert_eq!(retried.optimizer().steps(), 0);
    assert_eq!(retried.policy_step(&whole, &engines(), 1.0, LR).unwrap(), expected);
    assert_eq!(weights(&retried), weights(&straight));
}

#[test]
fn a_step_that_is_not_finite_reports_itself_and_changes_nothing() {
    let (mut straight, mut struck) = (policy_with(1.0), policy_with(1.0));
    let before = weights(&struck);
    let mut poisoned = batch(&[3, 4, 5, 6]);
    poisoned.advantages = Tensor::full_like(&poisoned.advantages, f64::NAN);
    let failed = struck.policy_step(&[batch(&[9, 8, 7, 6]), poisoned], &engines(), 1.0, LR);
    assert!(matches!(failed, Err(Error::NotFinite { step: 0, .. })), "{failed:?}");
    assert_eq!((weights(&struck), struck.optimizer().steps()), (before, 0));

    let whole = [batch(&[3, 4, 5, 6, 7])];
    let expected = straight.policy_step(&whole, &engines(), 1.0, LR).unwrap();
    assert_eq!(struck.policy_step(&whole, &engines(), 1.0, LR).unwrap(), expected);
    assert_eq!(weights(&struck), weights(&straight));
}

#[test]
fn clip_grad_zero_is_no_clipping() {
    let far_above_any_norm = 1e9;
    let (mut off, mut loose, mut tight) =
        (policy_with(0.0), policy_with(far_above_any_norm), policy_with(1e-9));
    for policy in [&mut off, &mut loose, &mut tight] {
        // AdamW's first step does not depend on the size of gradients; later ones do.
        policy.policy_step(&[batch(&[3, 4, 5, 6, 7])], &engines(), 1.0, LR).unwrap();
        let stats = policy.policy_step(&[batch(&[9, 8, 2, 6])], &engines(), 1.0, LR).unwrap();
        assert!(stats.grad_norm > 1e-3);
    }
    assert_eq!(weights(&off), weights(&loose));
    assert_ne!(weights(&off), weights(&tight));
}

#[test]
fn masked_tokens_never_reach_the_gradient() {
    // What an engine may log for a token that it did not draw, such as SGLang's log(0).
    let step = |masked: f32, advantage: f32| {
        let mut policy = policy_with(0.0);
        let sample = Sample {
            tokens: &[3, 4, 5, 6],
            prompt_len: 2,
            loss_mask: &[1, 0],
            log_probs: &[-3.0, masked],
            advantage,
            ..Sample::default()
        };
        let batch = Batch::new(&[sample], &[1.0], 24, Device::Cpu).unwrap();
        let stats = policy.policy_step(&[batch], &engines(), 1.0, LR).unwrap();
        (stats, weights(&policy))
    };
    for advantage in [1.0, -1.0] {
        for masked in [-100.0, -3.4e38, 3.4e38] {
            assert_eq!(step(masked, advantage), step(-1.0, advantage), "{masked} {advantage}");
        }
    }
}

#[test]
fn a_batch_without_a_trained_token_is_passed_over() {
    let sample = Sample { tokens: &[3, 4, 5, 6], prompt_len: 2, loss_mask: &[0, 0], ..Sample::default() };
    let none = || Batch::new(&[sample], &[1.0], 24, Device::Cpu).unwrap();
    let (mut alone, mut beside) = (policy_with(1.0), policy_with(1.0));
    let expected = alone.policy_step(&[batch(&[3, 4, 5])], &engines(), 1.0, LR).unwrap();
    let found = beside.policy_step(&[none(), batch(&[3, 4, 5])], &engines(), 1.0, LR).unwrap();
    assert_eq!((found, weights(&beside)), (expected, weights(&alone)));
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 0.0)] {
        let policy = policy_of(config(), kind, 1.0);
        let alone: Vec<f32> = ROWS.iter().flat_map(|row| log_probs(&policy, &mixed(&[row]))).collect();
        let found = furthest(&log_probs(&policy, &mixed(&ROWS)), &alone);
        println!("{kind:?}: {found:e}");
        assert!(found <= bound, "{kind:?}: {found:e}");
    }
}

#[test]
fn chunks_and_recomputation_change_nothing() {
    let token = penalised(Kl::LowVarKl).with_entropy_coef(0.05);
    let sequence = engines().with_advantage_estimator(Estimator::Gspo);
    for (tied, loss) in [(true, &token), (false, &token), (true, &sequence)] {
        let config = Config { tie_word_embeddings: tied, ..config() };
        let steps = |change: fn(Policy) -> Policy| {
            let reference = Model::fresh(config.clone(), SEED + 1, Kind::Float, Device::Cpu).unwrap();
            let policy =
                policy_of(config.clone(), Kind::Float, 0.0).with_reference(reference, false).unwrap();
            let mut policy = change(policy);
            let stats = (0..3).map(|_| policy.policy_step(&[mixed(&ROWS)], loss, 0.8, LR).unwrap());
            (stats.last().unwrap(), weights(&policy))
        };
        let (whole, expected) = steps(|policy| policy);
        let chunked = |policy: Policy| policy.with_log_probs_chunk_size(Some(3));
        let (stats, found) = steps(chunked);
        assert!((stats.loss - whole.loss).abs() < 1e-6 && (stats.entropy - whole.entropy).abs() < 1e-6);
        assert!(furthest(&found, &expected) < 2e-5, "{}", furthest(&found, &expected));
        // The same operations on the same numbers, so to the bit.
        let (stats, found) = steps(|policy| policy.with_recompute(true));
        assert_eq!((stats, found == expected), (whole, true));
    }
}

#[test]
fn bf16_steps_stay_near_those_in_f32() {
    let losses = |kind| {
        // Both begin with weights that bf16 can hold.
        let mut policy = policy_of(config(), Kind::BFloat16, 1.0);
        if kind == Kind::Float {
            let model = Model::fresh(config(), SEED, Kind::BFloat16, Device::Cpu).unwrap();
            let wide = Model::fresh(config(), SEED, Kind::Float, Device::Cpu).unwrap();
            for (wide, narrow) in wide.parameters().iter().zip(model.parameters()) {
                wide.tensor.shallow_clone().copy_(&narrow.tensor);
            }
            policy = Policy::new(wide, Kind::BFloat16, AdamWOptions::default()).unwrap();
        }
        (0..6).map(|_| policy.sft_step(&[mixed(&ROWS)], 3e-3).unwrap().loss).collect::<Vec<_>>()
    };
    let (wide, narrow) = (losses(Kind::Float), losses(Kind::BFloat16));
    println!("f32 {wide:?}, bf16 {narrow:?}");
    assert!(narrow[5] < 0.9 * narrow[0]);
    for (wide, narrow) in wide.iter().zip(&narrow) {
        assert!((wide - narrow).abs() < 0.02 * wide, "f32 {wide}, bf16 {narrow}");
    }
}

#[test]
fn a_kl_term_needs_a_reference_of_the_same_vocabulary() {
    let loss = penalised(Kl::K3);
    let result = policy_with(1.0).policy_step(&[mixed(&ROWS)], &loss, 1.0, LR);
    assert!(matches!(result, Err(Error::Input { .. })));
    let other = Config { vocab_size: 25, ..config() };
    let other = Model::fresh(other, SEED, Kind::Float, Device::Cpu).unwrap();
    assert!(matches!(policy_with(1.0).with_reference(other, false), Err(Error::Input { .. })));
}
