//! Advantages from rewards: pure functions over slices. Formulas and sources: `docs/algorithms.md`.

mod tokens;

use std::collections::BTreeMap;

use crate::options::{Estimator, LearnOptions};

pub use tokens::{Columns, discounted, gae, of_tokens};

/// The advantage of each sample: `groups[i]` is the group of `rewards[i]`, `rollouts[i]` the rollout that it is
/// a part of, and `trained[i]` how many of its tokens are trained on.
///
/// Where tokens of a sample differ in their advantages ([`LearnOptions::per_token`]), this is what
/// [`of_tokens`] begins with; it is then not normalised.
#[must_use]
pub fn advantages(
    options: &LearnOptions,
    rewards: &[f32],
    groups: &[u64],
    rollouts: &[u64],
    trained: &[usize],
) -> Vec<f32> {
    let estimator = options.advantage_estimator;
    let compared = match estimator {
        Estimator::Grpo | Estimator::Gspo | Estimator::Cispo => {
            grpo(rewards, groups, rollouts, !options.disable_grpo_std_normalization)
        }
        Estimator::ReinforcePlusPlusBaseline => grpo(rewards, groups, rollouts, false),
        Estimator::ReinforcePlusPlus | Estimator::Ppo => rewards.to_vec(),
        Estimator::RejectionSampling => vec![1.0; rewards.len()],
    };
    match options.per_token() || !options.normalizes() {
        true => compared,
        false => normalize(&compared, trained),
    }
}

/// Group-relative advantages (GRPO, Shao et al. 2024): the reward minus its group's mean, divided by the
/// group's standard deviation (of a sample, n − 1) plus 1e-6 if `divide_by_std`.
///
/// `groups[i]` is the group of `rewards[i]`. Samples of one rollout count once, with the mean of their rewards.
/// A group whose rewards are all equal gets zeros.
#[must_use]
pub fn grpo(rewards: &[f32], groups: &[u64], rollouts: &[u64], divide_by_std: bool) -> Vec<f32> {
    let moments = group_moments(rewards, groups, rollouts);
    let advantage = |(&reward, group): (&f32, &u64)| {
        let (mean, std) = moments[group];
        let centred = f64::from(reward) - mean;
        (if divide_by_std { centred / (std + 1e-6) } else { centred }) as f32
    };
    rewards.iter().zip(groups).map(advantage).collect()
}

/// Whether each sample is of the best rollout of its group, the first of several: what rejection sampling keeps
/// (RAFT, Dong et al. 2023). A rollout is worth the mean of its samples' rewards.
#[must_use]
pub fn best(rewards: &[f32], groups: &[u64], rollouts: &[u64]) -> Vec<bool> {
    let mut best: BTreeMap<u64, (f64, u64)> = BTreeMap::new();
    for (&group, members) in &rollout_rewards(rewards, groups, rollouts) {
        for (&rollout, &reward) in members {
            let found = best.entry(group).or_insert((reward, rollout));
            if reward > found.0 {
                *found = (reward, rollout);
            }
        }
    }
    groups.iter().zip(rollouts).map(|(group, rollout)| best[group].1 == *rollout).collect()
}

/// Advantages with mean 0 and standard deviation 1 over the trained tokens of a rollout, `trained[i]` of them
/// in sample i (`--normalize-advantages`).
///
/// The variance is that of a sample (n − 1), plus 1e-8. A sample without a trained token has no say in it.
#[must_use]
pub fn normalize(advantages: &[f32], trained: &[usize]) -> Vec<f32> {
    let count: f64 = trained.iter().map(|&n| n as f64).sum();
    let sum = |f: &dyn Fn(f64) -> f64| -> f64 {
        advantages.iter().zip(trained).map(|(&a, &n)| f(f64::from(a)) * n as f64).sum()
    };
    let mean = sum(&|a| a) / count.max(1.0);
    let variance = sum(&|a| (a - mean) * (a - mean)) / (count - 1.0).max(1.0);
    let scale = 1.0 / (variance + 1e-8).sqrt();
    advantages.iter().map(|&a| ((f64::from(a) - mean) * scale) as f32).collect()
}

/// Mean and standard deviation (n − 1; 0 for a single rollout) of each group's rewards.
fn group_moments(rewards: &[f32], groups: &[u64], rollouts: &[u64]) -> BTreeMap<u64, (f64, f64)> {
    let moments = |members: &BTreeMap<u64, f64>| {
        let n = members.len() as f64;
        let mean = members.values().sum::<f64>() / n;
        let squares: f64 = members.values().map(|reward| (reward - mean).powi(2)).sum();
        (mean, if n > 1.0 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
    };
    let groups = rollout_rewards(rewards, groups, rollouts);
    groups.iter().map(|(&group, members)| (group, moments(members))).collect()
}

/// The reward of each rollout of each group: the mean over its samples.
fn rollout_rewards(rewards: &[f32], groups: &[u64], rollouts: &[u64]) -> BTreeMap<u64, BTreeMap<u64, f64>> {
    let mut sums: BTreeMap<u64, BTreeMap<u64, (f64, f64)>> = BTreeMap::new();
    for ((&reward, &group), &rollout) in rewards.iter().zip(groups).zip(rollouts) {
        let (sum, samples) = sums.entry(group).or_default().entry(rollout).or_default();
        *sum += f64::from(reward);
        *samples += 1.0;
    }
    let mean = |(&rollout, (sum, samples)): (&u64, &(f64, f64))| (rollout, sum / samples);
    sums.iter().map(|(&group, members)| (group, members.iter().map(mean).collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() < 1e-6, "{found:?} {expected:?}");
        }
    }

    /// As many ids, all different.
    fn apart(samples: usize) -> Vec<u64> {
        (0..samples as u64).collect()
    }

    #[test]
    fn grpo_by_hand() {
        // Group 7: 1, 0, 0, 0: mean 1/4, variance (9 + 1 + 1 + 1)/16/3 = 1/4. Group 3: equal rewards.
        let rewards = [1.0, 2.0, 0.0, 0.0, 2.0, 0.0];
        let groups = [7, 3, 7, 7, 3, 7];
        close(&grpo(&rewards, &groups, &apart(6), false), &[0.75, 0.0, -0.25, -0.25, 0.0, -0.25]);
        let divided = [1.5, 0.0, -0.5, -0.5, 0.0, -0.5].map(|a: f32| a * 0.5 / (0.5 + 1e-6));
        close(&grpo(&rewards, &groups, &apart(6), true), &divided);
        close(&grpo(&[5.0], &[1], &[0], true), &[0.0]);
    }

    #[test]
    fn normalize_counts_trained_tokens_only() {
        // ±1/2 of 3 tokens and 1: mean 1/4, variance (3/16 + 9/16)/3 = 1/4.
        close(&normalize(&[0.5, -0.5], &[3, 1]), &[0.5, -1.5]);
        // A third sample, all of whose tokens are masked, changes nothing for the others.
        close(&normalize(&[0.5, -0.5, 90.0], &[3, 1, 0])[..2], &[0.5, -1.5]);
        close(&normalize(&[0.0, 0.0], &[3, 1]), &[0.0, 0.0]);
    }

    #[test]
    fn estimators_differ_in_what_they_compare_with() {
        let (rewards, groups, trained) = ([1.0, 0.0, 3.0, 2.0], [0, 0, 1, 1], [2, 2, 1, 3]);
        let of = |advantage_estimator, normalize_advantages| {
            let options =
                LearnOptions { advantage_estimator, normalize_advantages, ..LearnOptions::default() };
            advantages(&options, &rewards, &groups, &apart(4), &trained)
        };
        for estimator in [Estimator::Grpo, Estimator::Gspo, Estimator::Cispo] {
            let expected = grpo(&rewards, &groups, &apart(4), true);
            close(&of(estimator, false), &expected);
            close(&of(estimator, true), &normalize(&expected, &trained));
        }
        // Over 8 tokens: mean 11/8, squares 2 + 9 + 12 = 23, variance (23 − 121/8)/7 = 9/8.
        let raw = rewards.map(|reward: f32| (reward - 11.0 / 8.0) / (9.0_f32 / 8.0).sqrt());
        close(&of(Estimator::ReinforcePlusPlus, false), &raw);
        // ±1/2: mean (1 − 1 + 1/2 − 3/2)/8 = −1/8, variance (8/4 − 1/8)/7 = 15/56.
        let centred = [0.5, -0.5, 0.5, -0.5].map(|a: f32| (a + 0.125) / (15.0_f32 / 56.0).sqrt());
        close(&of(Estimator::ReinforcePlusPlusBaseline, false), &centred);
        // What the learner goes on with is not normalised here.
        close(&of(Estimator::Ppo, true), &rewards);
    }

    #[test]
    fn rollouts_of_several_samples_count_once() {
        let whole = ([1.0, 0.0, 0.25], [4, 4, 4], [10, 11, 12]);
        // The first rollout is three samples, the last two.
        let split = ([1.0, 1.0, 0.0, 1.0, 0.25, 0.25], [4; 6], [10, 10, 11, 10, 12, 12]);
        for divide_by_std in [true, false] {
            let expected = grpo(&whole.0, &whole.1, &whole.2, divide_by_std);
            let found = grpo(&split.0, &split.1, &split.2, divide_by_std);
            close(&found, &[0, 0, 1, 0, 2, 2].map(|rollout: usize| expected[rollout]));
        }
        // Tokens are what is normalised over, however they are dealt to samples.
        let expected = normalize(&whole.0, &[6, 2, 5]);
        let found = normalize(&split.0, &[1, 2, 2, 3, 4, 1]);
        close(&found, &[0, 0, 1, 0, 2, 2].map(|rollout: usize| expected[rollout]));
    }

    #[test]
    fn best_rollouts_are_kept_whole() {
        let (groups, rollouts) = ([0, 0, 0, 0, 1, 1], [1, 2, 2, 3, 4, 5]);
        assert_eq!(
            best(&[0.5, 0.0, 2.0, 0.9, 1.0, 1.0], &groups, &rollouts),
            [false, true, true, false, true, false]
        );
    }
}
