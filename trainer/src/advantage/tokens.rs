//! Advantages that differ from token to token: what a critic expects, distances to other policies, discounts.

use crate::options::{Estimator, LearnOptions};

/// What is known of the trained tokens of one answer, those of its samples one behind the other. A column that no option asks for is empty; the others have
/// a value for each token.
#[derive(Debug, Clone, Copy, Default)]
pub struct Columns<'a> {
    /// How many tokens there are.
    pub tokens: usize,
    /// Estimates of KL(policy ‖ reference), for [`LearnOptions::kl_coef`].
    pub kl: &'a [f32],
    /// Log-prob under the policy minus that under the teacher, for [`LearnOptions::use_opd`].
    pub reverse_kl: &'a [f32],
    /// What the critic expects from each token on, for [`Estimator::Ppo`].
    pub values: &'a [f32],
}

/// The advantages of an answer's trained tokens, not normalised, and the returns that a critic learns to expect.
///
/// `advantage` is that of [`super::advantages`]. With γ and λ of the options, and `kl` weighted by
/// `--kl-coef`:
/// - [`Estimator::Ppo`]: [`gae`] of the rewards `−kl`, to the last of which `advantage` is added;
/// - [`Estimator::ReinforcePlusPlus`]: these rewards, [`discounted`];
/// - the others: `advantage − kl`.
///
/// On-policy distillation then takes `--opd-kl-coef` times the distance to the teacher away from each.
#[must_use]
pub fn of_tokens(options: &LearnOptions, advantage: f32, columns: &Columns<'_>) -> (Vec<f32>, Vec<f32>) {
    let reward = f64::from(advantage);
    let mut advantages = vec![0.0; columns.tokens];
    take(&mut advantages, options.kl_coef, columns.kl);
    let mut returns = Vec::new();
    match options.advantage_estimator {
        Estimator::Ppo => {
            end(&mut advantages, reward);
            (advantages, returns) = gae(&advantages, columns.values, options.gamma, options.lambd);
        }
        Estimator::ReinforcePlusPlus => {
            end(&mut advantages, reward);
            advantages = discounted(&advantages, options.gamma);
        }
        _ => advantages.iter_mut().for_each(|value| *value += reward),
    }
    if options.use_opd {
        take(&mut advantages, options.opd_kl_coef, columns.reverse_kl);
    }
    let narrow = |values: Vec<f64>| values.into_iter().map(|value| value as f32).collect();
    (narrow(advantages), narrow(returns))
}

/// Generalised advantage estimation (Schulman et al. 2016): advantages and returns of an episode that ends after
/// its last token. `values[t]` is what was expected from token t on.
#[must_use]
pub fn gae(rewards: &[f64], values: &[f32], gamma: f64, lambd: f64) -> (Vec<f64>, Vec<f64>) {
    let value = |t: usize| values.get(t).map_or(0.0, |&value| f64::from(value));
    let deltas: Vec<f64> =
        rewards.iter().enumerate().map(|(t, reward)| reward + gamma * value(t + 1) - value(t)).collect();
    let advantages = discounted(&deltas, gamma * lambd);
    let returns = advantages.iter().enumerate().map(|(t, advantage)| advantage + value(t)).collect();
    (advantages, returns)
}

/// `Σ discount^k · rewards[t + k]` for each t.
#[must_use]
pub fn discounted(rewards: &[f64], discount: f64) -> Vec<f64> {
    let mut sums = rewards.to_vec();
    let mut after = 0.0;
    for sum in sums.iter_mut().rev() {
        *sum += discount * after;
        after = *sum;
    }
    sums
}

/// Adds the reward of a whole answer to its last token.
fn end(rewards: &mut [f64], reward: f64) {
    if let Some(last) = rewards.last_mut() {
        *last += reward;
    }
}

/// Takes `coef` times `distances` away.
fn take(values: &mut [f64], coef: f64, distances: &[f32]) {
    for (value, &distance) in values.iter_mut().zip(distances) {
        *value -= coef * f64::from(distance);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KL: [f32; 4] = [0.1, -0.2, 0.05, 0.3];
    const TEACHER: [f32; 4] = [-0.5, 0.25, 0.0, 1.5];
    const VALUES: [f32; 4] = [0.4, -0.1, 0.7, 0.2];
    const REWARD: f32 = 1.5;
    const COEF: f64 = 0.2;

    fn options(advantage_estimator: Estimator, gamma: f64, lambd: f64, opd: bool) -> LearnOptions {
        LearnOptions {
            advantage_estimator,
            gamma,
            lambd,
            kl_coef: COEF,
            use_opd: opd,
            opd_kl_coef: 0.7,
            ..LearnOptions::default()
        }
    }

    fn found(options: &LearnOptions) -> (Vec<f32>, Vec<f32>) {
        let columns = Columns { tokens: 4, kl: &KL, reverse_kl: &TEACHER, values: &VALUES };
        of_tokens(options, REWARD, &columns)
    }

    /// Reward of token t, without recursion.
    fn reward(t: usize) -> f64 {
        f64::from(u8::from(t == 3)) * f64::from(REWARD) - COEF * f64::from(KL[t])
    }

    /// `Σ discount^(u − t) · terms(u)` over the tokens from t on.
    fn sum(t: usize, discount: f64, terms: impl Fn(usize) -> f64) -> f64 {
        (t..4).map(|u| discount.powi((u - t) as i32) * terms(u)).sum()
    }

    fn close(found: &[f32], expected: impl Fn(usize) -> f64) {
        assert_eq!(found.len(), 4);
        for (t, found) in found.iter().enumerate() {
            assert!((f64::from(*found) - expected(t)).abs() < 1e-6, "token {t}: {found} {}", expected(t));
        }
    }

    #[test]
    fn tokens_advantages_are_their_sums() {
        for (gamma, lambd) in [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0)] {
            for opd in [false, true] {
                let distilled = |t: usize| if opd { 0.7 * f64::from(TEACHER[t]) } else { 0.0 };
                let value = |t: usize| if t < 4 { f64::from(VALUES[t]) } else { 0.0 };
                let delta = |t: usize| reward(t) + gamma * value(t + 1) - value(t);
                let (advantages, returns) = found(&options(Estimator::Ppo, gamma, lambd, opd));
                close(&advantages, |t| sum(t, gamma * lambd, delta) - distilled(t));
                close(&returns, |t| sum(t, gamma * lambd, delta) + value(t));
                let (advantages, returns) = found(&options(Estimator::ReinforcePlusPlus, gamma, lambd, opd));
                close(&advantages, |t| sum(t, gamma, reward) - distilled(t));
                assert!(returns.is_empty());
                let baseline = options(Estimator::ReinforcePlusPlusBaseline, gamma, lambd, opd);
                close(&found(&baseline).0, |t| f64::from(REWARD) - COEF * f64::from(KL[t]) - distilled(t));
            }
        }
    }

    #[test]
    fn gae_is_monte_carlo_at_one_and_one_step_at_zero() {
        let monte_carlo = found(&options(Estimator::Ppo, 1.0, 1.0, false)).0;
        close(&monte_carlo, |t| sum(t, 1.0, reward) - f64::from(VALUES[t]));
        let rewards = [0.0, 0.0, 0.0, 1.0];
        let (advantages, returns) = gae(&rewards, &VALUES, 1.0, 0.0);
        let next = [VALUES[1], VALUES[2], VALUES[3], 1.0].map(f64::from);
        for t in 0..4 {
            assert!((advantages[t] - (next[t] - f64::from(VALUES[t]))).abs() < 1e-12);
            assert!((returns[t] - next[t]).abs() < 1e-12);
        }
        assert_eq!(gae(&[], &[], 0.9, 0.9), (Vec::new(), Vec::new()));
    }
}
