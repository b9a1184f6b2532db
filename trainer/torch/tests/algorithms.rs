//! Every loss against the same formulas in f64, written out with loops: losses and gradients.
//!
//! The reference knows nothing of tensors: it computes samples one after the other, and differentiates by
//! differences.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_torch::loss::{Sequence, Tokens, policy_loss, value_loss};
use driftless_trainer::options::{Estimator, Kl, LearnOptions, Level, TisMode};
use tch::{Kind, Tensor};

const CLOSE: f64 = 1e-6;
/// Of a central difference in f64; its own error is of this order squared.
const STEP: f64 = 1e-5;

/// A trained token.
#[derive(Clone, Copy, Debug)]
struct Token {
    sample: usize,
    new: f64,
    /// Under the old policy.
    old: f64,
    /// Under the engine.
    rollout: f64,
    reference: f64,
    advantage: f64,
    weight: f64,
}

/// Samples whose ratios lie below, within and above every bound, with advantages of both signs.
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
            // Engine and trainer differ by less than a step, but for one token.
            let apart = 0.3 * (place as f64 - 1.0) - f64::from(u8::from((sample, place) == (3, 1)));
            let rollout = f64::from((old - apart) as f32);
            let reference = f64::from((new + 0.4 - 0.3 * place as f64) as f32);
            let weight = f64::from(1.0 / (4.0 * log_ratios.len() as f32));
            let advantage = f64::from(advantage as f32);
            tokens.push(Token { sample, new, old, rollout, reference, advantage, weight });
        }
    }
    tokens
}

/// What is the same for every token of a sample.
struct Whole {
    ratio: f64,
    sum: f64,
    mean: f64,
    least: f64,
}

/// Of the sample of each token. `old` is a token's log-prob under the old policy.
fn whole(tokens: &[Token], sample: usize, old: impl Fn(&Token) -> f64) -> Whole {
    let of: Vec<_> = tokens.iter().filter(|token| token.sample == sample).collect();
    let count = of.len() as f64;
    let sum = of.iter().map(|token| old(token) - token.rollout).sum::<f64>();
    Whole {
        ratio: of.iter().map(|token| token.new - old(token)).sum::<f64>() / count,
        sum,
        mean: sum / count,
        least: of.iter().map(|token| old(token) - token.rollout).fold(f64::INFINITY, f64::min),
    }
}

/// What a case is computed with.
#[derive(Clone)]
struct Case {
    options: LearnOptions,
    /// Whether the old policy is another than the policy.
    moved: bool,
}

/// The loss as the papers have it. `fixed` are the tokens at which what carries no gradient is taken.
fn reference(tokens: &[Token], fixed: &[Token], case: &Case) -> f64 {
    let Case { options, moved } = case;
    let (low, high) = (1.0 - options.eps_clip, 1.0 + options.eps_clip_high());
    let mut loss = 0.0;
    for (token, constant) in tokens.iter().zip(fixed) {
        let old = |token: &Token| match (options.use_rollout_logprobs, moved) {
            (true, _) => token.rollout,
            (false, true) => token.old,
            (false, false) => token.new,
        };
        let at_old = old(constant);
        let held = whole(fixed, token.sample, old);
        let sample: Vec<_> = tokens.iter().filter(|other| other.sample == token.sample).collect();
        let log_ratio = match options.advantage_estimator {
            Estimator::Gspo => {
                let moved = sample.iter().map(|token| token.new).sum::<f64>() / sample.len() as f64;
                let began = fixed.iter().filter(|other| other.sample == token.sample).map(&old).sum::<f64>();
                moved - began / sample.len() as f64
            }
            _ => token.new - at_old,
        };
        let ratio = log_ratio.exp();
        let mut term = match options.advantage_estimator {
            Estimator::Cispo => -(constant.new - at_old).exp().clamp(low, high) * token.advantage * token.new,
            Estimator::RejectionSampling => -token.advantage * token.new,
            _ => (-ratio * token.advantage).max(-ratio.clamp(low, high) * token.advantage),
        };
        if let Some(c) = options.eps_clip_c
            && token.advantage < 0.0
        {
            term = term.min(-c * token.advantage);
        }
        if options.use_opsm && token.advantage < 0.0 && -held.ratio > options.opsm_delta {
            term = 0.0;
        }
        let apart = at_old - constant.rollout;
        let at = |level| match level {
            Level::Token => apart.exp(),
            Level::Sequence => held.sum.exp(),
            Level::Geometric => held.mean.exp(),
        };
        if options.use_tis {
            let (low, high, level) = (options.tis_clip_low, options.tis_clip, options.tis_level);
            let within = (low..=high).contains(&at(level));
            term *= match options.tis_mode {
                TisMode::Clip => at(level).clamp(low, high),
                TisMode::Mask => f64::from(u8::from(within)) * at(level),
            };
        }
        if options.use_rs {
            let vetoed = options.rs_veto_threshold.is_some_and(|veto| held.least.exp() < veto);
            let bounds = options.rs_lower_bound..=options.rs_upper_bound;
            term *= f64::from(u8::from(bounds.contains(&at(options.rs_level)) && !vetoed));
        }
        if options.use_kl_loss {
            let d = token.new - token.reference;
            let k3 = (-d).exp() - 1.0 + d;
            let weight = if options.use_unbiased_kl { (token.new - at_old).exp() } else { 1.0 };
            term += options.kl_loss_coef
                * match options.kl_loss_type {
                    Kl::K1 => weight * d,
                    Kl::K2 => weight * d * d / 2.0,
                    Kl::K3 => weight * k3,
                    Kl::LowVarKl => (weight * k3).clamp(-10.0, 10.0),
                };
        }
        loss += token.weight * term;
    }
    loss
}

/// The crate's loss and its gradient with respect to each log-prob.
fn computed(tokens: &[Token], case: &Case) -> (f64, Vec<f64>) {
    let column = |of: &dyn Fn(&Token) -> f64| {
        Tensor::from_slice(&tokens.iter().map(of).collect::<Vec<_>>()).to_kind(Kind::Float)
    };
    let old = |token: &Token| match (case.options.use_rollout_logprobs, case.moved) {
        (true, _) => token.rollout,
        (false, true) => token.old,
        (false, false) => token.new,
    };
    let of_sample = |of: fn(Whole) -> f64| column(&|token| of(whole(tokens, token.sample, old)));
    let given = case.moved || case.options.use_rollout_logprobs;
    let columns = Tokens {
        weights: column(&|token| token.weight),
        rollout_log_probs: column(&|token| token.rollout),
        old_log_probs: given.then(|| column(&old)),
        advantages: column(&|token| token.advantage),
        reference: Some(column(&|token| token.reference)),
        sequence: Some(Sequence {
            ratio: of_sample(|whole| whole.ratio),
            sum: of_sample(|whole| whole.sum),
            mean: of_sample(|whole| whole.mean),
            least: of_sample(|whole| whole.least),
        }),
    };
    let new = column(&|token| token.new).set_requires_grad(true);
    let terms = policy_loss(&new, None, &columns, &case.options).unwrap();
    terms.loss.backward();
    let gradient = Vec::<f64>::try_from(new.grad().to_kind(Kind::Double)).unwrap();
    (f64::try_from(terms.loss).unwrap(), gradient)
}

fn agrees(name: &str, case: &Case) {
    let tokens = tokens();
    let (loss, gradient) = computed(&tokens, case);
    let expected = reference(&tokens, &tokens, case);
    assert!((loss - expected).abs() <= CLOSE, "{name}: loss {loss}, reference {expected}");
    for (index, found) in gradient.iter().enumerate() {
        let moved = |by: f64| {
            let mut moved = tokens.clone();
            moved[index].new += by;
            reference(&moved, &tokens, case)
        };
        let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        assert!((found - slope).abs() <= CLOSE, "{name}: token {index}: {found}, reference {slope}");
    }
}

#[test]
fn every_algorithm_is_its_formula() {
    let plain = LearnOptions::default().with_eps_clip_high(0.28);
    let of = |advantage_estimator| plain.clone().with_advantage_estimator(advantage_estimator);
    let tis = |options: &LearnOptions, level, mode| {
        let bounded = options.clone().with_use_tis(true).with_tis_clip_low(0.6).with_tis_clip(1.3);
        bounded.with_tis_level(level).with_tis_mode(mode)
    };
    let rs = |level| {
        let bounded = plain.clone().with_use_rs(true).with_rs_lower_bound(0.75).with_rs_upper_bound(1.3);
        bounded.with_rs_level(level)
    };
    let kl = |kind| plain.clone().with_use_kl_loss(true).with_kl_loss_coef(0.3).with_kl_loss_type(kind);
    let cases = [
        ("token ratios: grpo, reinforce_plus_plus, ppo", plain.clone()),
        ("gspo", of(Estimator::Gspo)),
        ("cispo", of(Estimator::Cispo)),
        ("rejection_sampling", of(Estimator::RejectionSampling)),
        ("use-rollout-logprobs", plain.clone().with_use_rollout_logprobs(true)),
        ("eps-clip-c", plain.clone().with_eps_clip_c(1.9)),
        ("gspo, eps-clip-c", of(Estimator::Gspo).with_eps_clip_c(1.2)),
        ("tis", tis(&plain, Level::Token, TisMode::Clip)),
        ("icepop", tis(&plain, Level::Token, TisMode::Mask)),
        ("mis, sequence", tis(&plain, Level::Sequence, TisMode::Mask)),
        ("tis, geometric", tis(&plain, Level::Geometric, TisMode::Clip)),
        ("cispo, tis", tis(&of(Estimator::Cispo), Level::Token, TisMode::Clip)),
        ("rs", rs(Level::Token)),
        ("rs, geometric, veto", rs(Level::Geometric).with_rs_veto_threshold(0.4)),
        ("opsm", plain.clone().with_use_opsm(true).with_opsm_delta(0.1)),
        ("k1", kl(Kl::K1)),
        ("k2", kl(Kl::K2)),
        ("k3", kl(Kl::K3)),
        ("low_var_kl", kl(Kl::LowVarKl)),
        ("unbiased k3", kl(Kl::K3).with_use_unbiased_kl(true)),
        ("unbiased low_var_kl", kl(Kl::LowVarKl).with_use_unbiased_kl(true)),
    ];
    for (name, options) in cases {
        // The old policy is the policy itself, then another.
        for moved in [false, true] {
            agrees(&format!("{name}, moved {moved}"), &Case { options: options.clone(), moved });
        }
    }
}

#[test]
fn value_loss_is_its_formula() {
    let (clip, weights) = (0.2, [0.1_f32, 0.25, 0.4, 0.05]);
    // Within the clip; beyond it towards the return, and away from it; beyond it on the other side.
    let (values, old, returns) =
        ([0.3_f32, 0.9, 0.9, -0.6], [0.2_f32, 0.4, 0.4, 0.1], [1.0_f32, 1.5, -0.5, -0.1]);
    let reference = |values: &[f64]| -> f64 {
        (0..4)
            .map(|t| {
                let [value, old, r] = [values[t], f64::from(old[t]), f64::from(returns[t])];
                let clipped = old + (value - old).clamp(-clip, clip);
                f64::from(weights[t]) * ((clipped - r).powi(2)).max((value - r).powi(2))
            })
            .sum()
    };
    let wide = values.map(f64::from);
    let leaf = Tensor::from_slice(&values).set_requires_grad(true);
    let column = Tensor::from_slice::<f32>;
    let (loss, clipped) =
        value_loss(&leaf, &column(&old), &column(&returns), &column(&weights), clip).unwrap();
    assert!((f64::try_from(&loss).unwrap() - reference(&wide)).abs() <= CLOSE);
    assert!((f64::try_from(clipped).unwrap() - f64::from(0.25_f32 + 0.4 + 0.05)).abs() <= CLOSE);
    loss.backward();
    for (t, found) in Vec::<f64>::try_from(leaf.grad().to_kind(Kind::Double)).unwrap().iter().enumerate() {
        let moved = |by: f64| {
            let mut moved = wide;
            moved[t] += by;
            reference(&moved)
        };
        let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        assert!((found - slope).abs() <= CLOSE, "token {t}: {found}, reference {slope}");
    }
}
