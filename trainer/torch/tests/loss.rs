//! Losses against numbers worked out by hand, and gradients against differences.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::{
    Batch, Error, Kl, PolicyLoss, Reduction, Sample, entropy, kl, log_probs, policy_loss, sft_loss,
    token_weights,
};
use tch::{Device, Kind, Tensor};

const PLAIN: PolicyLoss =
    PolicyLoss { eps_clip: 0.2, eps_clip_high: 0.3, kl: None, entropy_coef: 0.0, temperature: 1.0 };

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
}

fn number(tensor: &Tensor) -> f64 {
    f64::try_from(tensor).unwrap()
}

/// Logits `[1, 2, 3]` whose probabilities are 1/2, 1/4, 1/4 at both places.
fn logits() -> Tensor {
    let row = [0.5_f32.ln(), 0.25_f32.ln(), 0.25_f32.ln()];
    Tensor::from_slice(&[row, row].concat()).view([1, 2, 3])
}

/// Prompt `0`, response `0 1`, so that the labels' probabilities are 1/2 and 1/4.
fn batch(log_probs: [f64; 2], advantage: f32) -> Batch {
    let log_probs = log_probs.map(|p| p as f32);
    let sample = Sample {
        tokens: &[0, 0, 1],
        prompt_len: 1,
        loss_mask: &[],
        log_probs: &log_probs,
        rollout_id: 0,
        advantage,
    };
    let weights = token_weights(&[sample], Reduction::PerRollout);
    Batch::new(&[sample], &weights, 3, Device::Cpu).unwrap()
}

#[test]
fn cross_entropy_by_hand() {
    let loss = sft_loss(&logits(), &batch([0.0, 0.0], 0.0)).unwrap();
    close(number(&loss), (2_f64.ln() + 4_f64.ln()) / 2.0);
}

#[test]
fn log_probs_and_entropy_by_hand() {
    let labels = Tensor::from_slice(&[0_i64, 1]).view([1, 2]);
    let found = Vec::<f64>::try_from(log_probs(&logits(), &labels, 1.0).unwrap().flatten(0, -1)).unwrap();
    close(found[0], 0.5_f64.ln());
    close(found[1], 0.25_f64.ln());
    // At temperature 1/2 probabilities are squared: 4/6, 1/6, 1/6.
    let found = Vec::<f64>::try_from(log_probs(&logits(), &labels, 0.5).unwrap().flatten(0, -1)).unwrap();
    close(found[0], (4.0_f64 / 6.0).ln());
    close(number(&entropy(&logits(), 1.0).unwrap().get(0).get(0)), 1.5 * 2_f64.ln());
}

#[test]
fn the_surrogate_is_clipped_on_the_side_that_the_advantage_pays_for() {
    // Ratios 2 and 1: the first is clipped to 1.3 where the advantage is positive, counts in full where it is negative.
    let old = [0.25_f64.ln(), 0.25_f64.ln()];
    let terms = policy_loss(&logits(), &batch(old, 1.0), &PLAIN).unwrap();
    close(number(&terms.loss), -(1.3 + 1.0) / 2.0);
    close(terms.clipped, 0.5);
    let terms = policy_loss(&logits(), &batch(old, -1.0), &PLAIN).unwrap();
    close(number(&terms.loss), (2.0 + 1.0) / 2.0);
    close(terms.clipped, 0.0);
    // Ratios 1/2 and 1: clipped to 0.8 where the advantage is negative.
    let old = [1.0_f64.ln(), 0.25_f64.ln()];
    let terms = policy_loss(&logits(), &batch(old, -1.0), &PLAIN).unwrap();
    close(number(&terms.loss), (0.8 + 1.0) / 2.0);
    close(terms.log_prob_difference, 2_f64.ln() / 2.0);
    close(terms.log_prob_difference_max, 2_f64.ln());
    close(terms.entropy, 1.5 * 2_f64.ln());
    // k3 with d = log old − log new = ln 2: 1/2 + ln 2 − 1, over two tokens.
    close(terms.behaviour_kl, (2_f64.ln() - 0.5) / 2.0);
}

#[test]
fn kl_estimators_by_hand() {
    let (policy, reference) = (Tensor::from_slice(&[0.5_f32.ln()]), Tensor::from_slice(&[0.25_f32.ln()]));
    let d = 2_f64.ln();
    for (kind, expected) in [(Kl::K1, d), (Kl::K2, d * d / 2.0), (Kl::K3, 0.5 + d - 1.0)] {
        close(number(&kl(kind, &policy, &reference).unwrap()), expected);
    }
    close(number(&kl(Kl::K3, &policy, &policy).unwrap()), 0.0);
    // A reference that rules the token out stays finite.
    let never = Tensor::from_slice(&[-1e4_f32]);
    assert!(number(&kl(Kl::K3, &never, &policy).unwrap()).is_finite());
}

#[test]
fn kl_and_entropy_enter_the_loss() {
    let old = [0.5_f64.ln(), 0.25_f64.ln()];
    let mut batch = batch(old, 0.0);
    let options = PolicyLoss { kl: Some((Kl::K2, 10.0)), entropy_coef: 0.1, ..PLAIN };
    assert!(matches!(policy_loss(&logits(), &batch, &options), Err(Error::Input { .. })));
    batch.reference_log_probs = Some(&batch.old_log_probs - 1.0);
    let loss = policy_loss(&logits(), &batch, &options).unwrap().loss;
    close(number(&loss), 10.0 * 0.5 - 0.1 * 1.5 * 2_f64.ln());
}

#[test]
fn gradients_are_those_of_the_loss() {
    let old = [0.4_f64.ln(), 0.26_f64.ln()];
    let options = PolicyLoss { entropy_coef: 0.05, temperature: 0.7, ..PLAIN };
    let loss_at = |logits: &Tensor| policy_loss(logits, &batch(old, 0.8), &options).unwrap().loss;
    let point = logits().set_requires_grad(true);
    loss_at(&point).backward();
    let gradient = point.grad().flatten(0, -1);
    for index in 0..6 {
        let step = Tensor::zeros([6], (Kind::Float, Device::Cpu));
        let _ = step.get(index).fill_(1e-2);
        let step = step.view([1, 2, 3]);
        let slope = (number(&loss_at(&(logits() + &step))) - number(&loss_at(&(logits() - &step)))) / 2e-2;
        assert!(
            (slope - gradient.double_value(&[index])).abs() < 1e-3,
            "logit {index}: {slope} {gradient:?}"
        );
    }
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let rows = [[0, 0, 1, 2], [0, 1, 1, 0], [0, 2, 0, 1]];
    let lengths = [2, 4, 3];
    let samples: Vec<_> =
        rows.iter().zip(lengths).map(|(row, n)| Sample::supervised(&row[..n], 1, n as u64)).collect();
    let weights = token_weights(&samples, Reduction::PerRollout);
    let loss = |chosen: &[usize]| {
        let chosen_samples: Vec<_> = chosen.iter().map(|&index| samples[index]).collect();
        let chosen_weights: Vec<_> = chosen.iter().map(|&index| weights[index]).collect();
        let batch = Batch::new(&chosen_samples, &chosen_weights, 3, Device::Cpu).unwrap();
        // The same distribution everywhere but for the position.
        let (rows, width) = batch.tokens.size2().unwrap();
        let logits = Tensor::arange(width * 3, (Kind::Float, Device::Cpu)).view([1, width, 3]).sin();
        number(&sft_loss(&logits.expand([rows, width, 3], false), &batch).unwrap())
    };
    close(loss(&[0, 1, 2]), loss(&[1]) + loss(&[2, 0]));
}
