//! Advantages from rewards: pure functions over slices, one value per sample.

use std::collections::BTreeMap;

use serde::Serialize;

/// How rewards become advantages, and what the loss then does with the probability ratio
/// (`--advantage-estimator`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// The reward against its group's; each token's ratio is clipped.
    Grpo,
    /// The same; the ratio of whole samples is clipped.
    Gspo,
    /// The same; the clipped ratio is a constant weight of the log-prob.
    Cispo,
    /// The reward itself, normalised over the trained tokens of the step.
    ReinforcePlusPlus,
    /// The reward minus its group's mean, normalised over the trained tokens of the step.
    ReinforcePlusPlusBaseline,
}

/// The advantage of each sample: `groups[i]` is the group of `rewards[i]`, of which `trained[i]` tokens are
/// trained on.
///
/// `divide_by_std` is for the three that compare with a group ([`grpo`]). With `normalized` the result is
/// normalised ([`normalize`]), as it always is for the two of REINFORCE++.
#[must_use]
pub fn advantages(
    estimator: Estimator,
    rewards: &[f32],
    groups: &[u64],
    trained: &[usize],
    divide_by_std: bool,
    normalized: bool,
) -> Vec<f32> {
    match estimator {
        Estimator::Grpo | Estimator::Gspo | Estimator::Cispo => {
            let advantages = grpo(rewards, groups, divide_by_std);
            if normalized { normalize(&advantages, trained) } else { advantages }
        }
        Estimator::ReinforcePlusPlus => normalize(rewards, trained),
        Estimator::ReinforcePlusPlusBaseline => normalize(&grpo(rewards, groups, false), trained),
    }
}

/// Group-relative advantages (GRPO, Shao et al. 2024): the reward minus its group's mean, divided by the
/// group's standard deviation (of a sample, n − 1) plus 1e-6 if `divide_by_std`.
///
/// `groups[i]` is the group of `rewards[i]`. A group whose rewards are all equal gets zeros.
#[must_use]
pub fn grpo(rewards: &[f32], groups: &[u64], divide_by_std: bool) -> Vec<f32> {
    let moments = group_moments(rewards, groups);
    let advantage = |(&reward, group): (&f32, &u64)| {
        let (mean, std) = moments[group];
        let centred = f64::from(reward) - mean;
        (if divide_by_std { centred / (std + 1e-6) } else { centred }) as f32
    };
    rewards.iter().zip(groups).map(advantage).collect()
}

/// Advantages with mean 0 and standard deviation 1 over the trained tokens of the batch, `trained[i]` of them
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

/// Mean and standard deviation (n − 1; 0 for a single sample) of each group's rewards.
fn group_moments(rewards: &[f32], groups: &[u64]) -> BTreeMap<u64, (f64, f64)> {
    let mut members: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (&reward, &group) in rewards.iter().zip(groups) {
        members.entry(group).or_default().push(f64::from(reward));
    }
    let moments = |rewards: &Vec<f64>| {
        let n = rewards.len() as f64;
        let mean = rewards.iter().sum::<f64>() / n;
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        (mean, if n > 1.0 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
    };
    members.iter().map(|(&group, rewards)| (group, moments(rewards))).collect()
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

    #[test]
    fn grpo_by_hand() {
        // Group 7: 1, 0, 0, 0: mean 1/4, variance (9 + 1 + 1 + 1)/16/3 = 1/4. Group 3: equal rewards.
        let rewards = [1.0, 2.0, 0.0, 0.0, 2.0, 0.0];
        let groups = [7, 3, 7, 7, 3, 7];
        close(&grpo(&rewards, &groups, false), &[0.75, 0.0, -0.25, -0.25, 0.0, -0.25]);
        let divided = [1.5, 0.0, -0.5, -0.5, 0.0, -0.5].map(|a: f32| a * 0.5 / (0.5 + 1e-6));
        close(&grpo(&rewards, &groups, true), &divided);
        close(&grpo(&[5.0], &[1], true), &[0.0]);
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
        let of = |estimator, normalized| advantages(estimator, &rewards, &groups, &trained, true, normalized);
        for estimator in [Estimator::Grpo, Estimator::Gspo, Estimator::Cispo] {
            let expected = grpo(&rewards, &groups, true);
            close(&of(estimator, false), &expected);
            close(&of(estimator, true), &normalize(&expected, &trained));
        }
        // Over 8 tokens: mean 11/8, squares 2 + 9 + 12 = 23, variance (23 − 121/8)/7 = 9/8.
        let raw = rewards.map(|reward: f32| (reward - 11.0 / 8.0) / (9.0_f32 / 8.0).sqrt());
        close(&of(Estimator::ReinforcePlusPlus, false), &raw);
        // ±1/2: mean (1 − 1 + 1/2 − 3/2)/8 = −1/8, variance (8/4 − 1/8)/7 = 15/56.
        let centred = [0.5, -0.5, 0.5, -0.5].map(|a: f32| (a + 0.125) / (15.0_f32 / 56.0).sqrt());
        close(&of(Estimator::ReinforcePlusPlusBaseline, false), &centred);
    }
}
