//! Losses of single tokens against numbers worked out by hand; whole algorithms are in `tests/algorithms.rs`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::Error;
use driftless_torch::loss::{PolicyTerms, Tokens, Watched, kl, policy_loss};
use driftless_trainer::options::{Estimator, Kl, LearnOptions};
use tch::{Kind, Tensor};

fn plain() -> LearnOptions {
    LearnOptions::default().with_eps_clip_high(0.3)
}

fn penalised(coef: f64) -> LearnOptions {
    plain().with_use_kl_loss(true).with_kl_loss_type(Kl::K2).with_kl_loss_coef(coef)
}

/// The log-probs that the policy gives two tokens.
const NEW: [f64; 2] = [0.5, 0.25];

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
}

fn number(tensor: &Tensor) -> f64 {
    f64::try_from(tensor).unwrap()
}

fn column(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Float)
}

/// Two tokens that weigh 1/2 each, sampled with these probabilities.
fn tokens(old: [f64; 2], advantage: f64) -> Tokens {
    Tokens {
        weights: column(&[0.5, 0.5]),
        rollout_log_probs: column(&old.map(f64::ln)),
        old_log_probs: Some(column(&old.map(f64::ln))),
        advantages: column(&[advantage; 2]),
        reference: None,
        sequence: None,
    }
}

fn loss(tokens: &Tokens, options: &LearnOptions) -> PolicyTerms {
    policy_loss(&column(&NEW.map(f64::ln)), None, tokens, options).unwrap()
}

#[test]
fn surrogate_is_clipped_on_the_side_of_the_advantage() {
    // Ratios 2 and 1: the first is clipped to 1.3 where the advantage is positive, counts in full where it is
    // negative.
    let terms = loss(&tokens([0.25, 0.25], 1.0), &plain());
    close(number(&terms.loss), -(1.3 + 1.0) / 2.0);
    close(terms.mean(Watched::Clipped), 0.5);
    let terms = loss(&tokens([0.25, 0.25], -1.0), &plain());
    close(number(&terms.loss), (2.0 + 1.0) / 2.0);
    close(terms.mean(Watched::Clipped), 0.0);
    // A second clip bounds that too.
    let dual = plain().with_eps_clip_c(1.5);
    close(number(&loss(&tokens([0.25, 0.25], -1.0), &dual).loss), (1.5 + 1.0) / 2.0);
    // Ratios 1/2 and 1: clipped to 0.8 where the advantage is negative.
    let terms = loss(&tokens([1.0, 0.25], -1.0), &plain());
    close(number(&terms.loss), (0.8 + 1.0) / 2.0);
    // The trainer's old policy is the engine's.
    close(terms.mean(Watched::Difference), 0.0);
    let engines = plain().with_use_rollout_logprobs(true);
    let terms = loss(&tokens([1.0, 0.25], -1.0), &engines);
    close(terms.mean(Watched::Difference), 2_f64.ln() / 2.0);
    // k3 with d = log old − log new = ln 2: 1/2 + ln 2 − 1, over two tokens; and k1.
    close(terms.mean(Watched::K3), (2_f64.ln() - 0.5) / 2.0);
    close(terms.mean(Watched::PpoKl), 2_f64.ln() / 2.0);
}

#[test]
fn kl_estimators_by_hand() {
    let (policy, reference) = (column(&[0.5_f64.ln()]), column(&[0.25_f64.ln()]));
    let d = 2_f64.ln();
    for (kind, expected) in
        [(Kl::K1, d), (Kl::K2, d * d / 2.0), (Kl::K3, 0.5 + d - 1.0), (Kl::LowVarKl, 0.5 + d - 1.0)]
    {
        close(number(&kl(kind, &policy, &reference, None).unwrap()), expected);
    }
    close(number(&kl(Kl::K3, &policy, &policy, None).unwrap()), 0.0);
    // The bound of low_var_kl is on the estimate, and k3 has none.
    let zero = column(&[0.0]);
    let k3 = number(&kl(Kl::K3, &column(&[-12.0]), &zero, None).unwrap());
    assert!((k3 - 162_741.791).abs() < 0.1, "{k3}");
    for d in [-1e4, -12.0, 12.0, 1e4] {
        let policy = column(&[d]).set_requires_grad(true);
        let kl = kl(Kl::LowVarKl, &policy, &zero, None).unwrap();
        close(number(&kl), 10.0);
        kl.sum(Kind::Float).backward();
        close(number(&policy.grad()), 0.0);
    }
}

#[test]
fn a_column_that_the_loss_needs_is_asked_for() {
    let policy = column(&NEW.map(f64::ln));
    for options in [
        penalised(1.0),
        plain().with_entropy_coef(0.1),
        plain().with_advantage_estimator(Estimator::Gspo),
        plain().with_use_opsm(true).with_opsm_delta(0.1),
    ] {
        let result = policy_loss(&policy, None, &tokens(NEW, 1.0), &options);
        assert!(matches!(result, Err(Error::Input { .. })), "{options:?}");
    }
}

#[test]
fn kl_and_entropy_enter_the_loss() {
    let mut tokens = tokens(NEW, 0.0);
    let options = penalised(10.0).with_entropy_coef(0.1);
    tokens.reference = Some(&tokens.rollout_log_probs - 1.0);
    let entropy = column(&[3.0, 5.0]);
    let policy = column(&NEW.map(f64::ln));
    let loss = policy_loss(&policy, Some(&entropy), &tokens, &options).unwrap().loss;
    close(number(&loss), 10.0 * 0.5 - 0.1 * 4.0);
}

#[test]
fn log_ratios_that_no_two_policies_have_stay_finite() {
    let engines = plain().with_use_rollout_logprobs(true);
    let terms = loss(&tokens([0.0, 0.25], -1.0), &engines);
    assert!(number(&terms.loss).is_finite() && terms.mean(Watched::K3).is_finite());
}
