//! Every algorithm against the same formulas in f64, written out with loops: losses and gradients.
//!
//! The reference knows nothing of tensors: it computes samples one after the other, and differentiates by
//! differences.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::{Kl, PolicyLoss, Surrogate, Tis, Tokens, policy_loss};
use tch::{Kind, Tensor};

const CLOSE: f64 = 1e-6;
/// Of a central difference in f64; its own error is of this order squared.
const STEP: f64 = 1e-5;

/// A trained token.
#[derive(Clone, Copy, Debug)]
struct Token {
    sample: usize,
    new: f64,
    old: f64,
    reference: f64,
    advantage: f64,
    weight: f64,
}

/// Three samples whose ratios lie below, within and above the clip, with advantages of both signs.
fn tokens() -> Vec<Token> {
    let samples: [(&[f64], f64); 4] = [
        (&[-0.7, 0.05, 0.6, -0.02], 1.3),
        (&[0.9, -0.04, 0.3], -0.8),
        (&[-0.5, -0.9], -1.1),
        (&[1.7, 0.2, -0.3], -0.4),
    ];
    let mut tokens = Vec::new();
    for (sample, (log_ratios, advantage)) in samples.into_iter().enumerate() {
        for (place, log_ratio) in log_ratios.iter().enumerate() {
            let new = f64::from(-0.3_f32 - 0.45 * (sample + 2 * place) as f32);
            let old = f64::from((new - log_ratio) as f32);
            let reference = f64::from((new + 0.4 - 0.3 * place as f64) as f32);
            let weight = f64::from(1.0 / (4.0 * log_ratios.len() as f32));
            let advantage = f64::from(advantage as f32);
            tokens.push(Token { sample, new, old, reference, advantage, weight });
        }
    }
    tokens
}

/// Mean of new − old over a sample.
fn mean_log_ratio(tokens: &[Token], sample: usize) -> f64 {
    let of: Vec<_> = tokens.iter().filter(|token| token.sample == sample).collect();
    of.iter().map(|token| token.new - token.old).sum::<f64>() / of.len() as f64
}

/// The loss as the papers have it. `fixed` are the tokens at which what carries no gradient is taken.
fn reference(tokens: &[Token], fixed: &[Token], options: &PolicyLoss) -> f64 {
    let mut loss = 0.0;
    for (token, constant) in tokens.iter().zip(fixed) {
        let old = if options.tis.is_some() { constant.new } else { token.old };
        let log_ratio = match options.surrogate {
            Surrogate::Sequence => mean_log_ratio(tokens, token.sample),
            Surrogate::Token | Surrogate::Cispo => token.new - old,
        };
        let ratio = log_ratio.exp();
        let cut = ratio.max(1.0 - options.eps_clip).min(1.0 + options.eps_clip_high);
        let mut term = match options.surrogate {
            Surrogate::Cispo => {
                let ratio = (constant.new - old).exp();
                let cut = ratio.max(1.0 - options.eps_clip).min(1.0 + options.eps_clip_high);
                -cut * token.advantage * token.new
            }
            Surrogate::Token | Surrogate::Sequence => (-ratio * token.advantage).max(-cut * token.advantage),
        };
        if let Some(c) = options.eps_clip_c
            && token.advantage < 0.0
        {
            term = term.min(-c * token.advantage);
        }
        if let Some(Tis { low, high }) = options.tis {
            term *= (constant.new - token.old).exp().max(low).min(high);
        }
        if let Some((kind, coefficient)) = options.kl {
            let d = token.new - token.reference;
            let k3 = (-d).exp() - 1.0 + d;
            term += coefficient
                * match kind {
                    Kl::K1 => d,
                    Kl::K2 => d * d / 2.0,
                    Kl::K3 => k3,
                    Kl::LowVarKl => k3.clamp(-10.0, 10.0),
                };
        }
        loss += token.weight * term;
    }
    loss
}

/// The crate's loss and its gradient with respect to each log-prob.
fn computed(tokens: &[Token], options: &PolicyLoss) -> (f64, Vec<f64>) {
    let column = |of: fn(&Token) -> f64| {
        Tensor::from_slice(&tokens.iter().map(of).collect::<Vec<_>>()).to_kind(Kind::Float)
    };
    let means: Vec<f64> = tokens.iter().map(|token| mean_log_ratio(tokens, token.sample)).collect();
    let columns = Tokens {
        weights: column(|token| token.weight),
        old_log_probs: column(|token| token.old),
        advantages: column(|token| token.advantage),
        reference: Some(column(|token| token.reference)),
        sequence: Some(Tensor::from_slice(&means).to_kind(Kind::Float)),
    };
    let new = column(|token| token.new).set_requires_grad(true);
    let terms = policy_loss(&new, None, &columns, options).unwrap();
    terms.loss.backward();
    let gradient = Vec::<f64>::try_from(new.grad().to_kind(Kind::Double)).unwrap();
    (f64::try_from(terms.loss).unwrap(), gradient)
}

fn agrees(name: &str, options: &PolicyLoss) {
    let tokens = tokens();
    let (loss, gradient) = computed(&tokens, options);
    let expected = reference(&tokens, &tokens, options);
    assert!((loss - expected).abs() <= CLOSE, "{name}: loss {loss}, reference {expected}");
    for (index, found) in gradient.iter().enumerate() {
        let moved = |by: f64| {
            let mut moved = tokens.clone();
            moved[index].new += by;
            reference(&moved, &tokens, options)
        };
        let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        assert!((found - slope).abs() <= CLOSE, "{name}: token {index}: {found}, reference {slope}");
    }
}

#[test]
fn every_algorithm_is_its_formula() {
    let plain = PolicyLoss { eps_clip_high: 0.28, ..PolicyLoss::default() };
    let tis = Some(Tis { low: 0.6, high: 1.5 });
    let cases = [
        ("token ratios: grpo, reinforce_plus_plus", plain),
        ("gspo", PolicyLoss { surrogate: Surrogate::Sequence, ..plain }),
        ("cispo", PolicyLoss { surrogate: Surrogate::Cispo, ..plain }),
        ("eps-clip-c", PolicyLoss { eps_clip_c: Some(1.9), ..plain }),
        ("gspo, eps-clip-c", PolicyLoss { surrogate: Surrogate::Sequence, eps_clip_c: Some(1.2), ..plain }),
        ("tis", PolicyLoss { tis, ..plain }),
        ("cispo, tis", PolicyLoss { surrogate: Surrogate::Cispo, tis, ..plain }),
        ("k1", PolicyLoss { kl: Some((Kl::K1, 0.3)), ..plain }),
        ("k2", PolicyLoss { kl: Some((Kl::K2, 0.3)), ..plain }),
        ("k3", PolicyLoss { kl: Some((Kl::K3, 0.3)), ..plain }),
        ("low_var_kl", PolicyLoss { kl: Some((Kl::LowVarKl, 0.3)), ..plain }),
    ];
    for (name, options) in cases {
        agrees(name, &options);
    }
}
