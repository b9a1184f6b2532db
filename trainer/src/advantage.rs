//! Advantages from rewards: pure functions over slices, one value per sample.

use std::collections::BTreeMap;

/// Group-relative advantages (GRPO, Shao et al. 2024): the reward minus its group's mean, divided by the group's
/// standard deviation (of a sample, n − 1) plus 1e-6 if `divide_by_std`.
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

/// REINFORCE++ with a group baseline (Hu 2025): the reward minus its group's mean, then normalised to mean 0 and
/// standard deviation 1 over all *tokens* of the batch, `tokens[i]` of them in sample i.
#[must_use]
pub fn reinforce_plus_plus_baseline(rewards: &[f32], groups: &[u64], tokens: &[usize]) -> Vec<f32> {
    let centred = grpo(rewards, groups, false);
    let count: f64 = tokens.iter().map(|&n| n as f64).sum();
    let weighted = |f: &dyn Fn(f64) -> f64| -> f64 {
        centred.iter().zip(tokens).map(|(&a, &n)| f(f64::from(a)) * n as f64).sum::<f64>() / count.max(1.0)
    };
    let mean = weighted(&|a| a);
    let variance = weighted(&|a| (a - mean) * (a - mean));
    let scale = 1.0 / (variance + 1e-8).sqrt();
    centred.iter().map(|&a| ((f64::from(a) - mean) * scale) as f32).collect()
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
            assert!((a - b).abs() < 1e-5, "{found:?} {expected:?}");
        }
    }

    #[test]
    fn grpo_by_hand() {
        // Group 7: 1, 0, 0, 0: mean 1/4, variance (9 + 1 + 1 + 1)/16/3 = 1/4. Group 3: equal rewards.
        let rewards = [1.0, 2.0, 0.0, 0.0, 2.0, 0.0];
        let groups = [7, 3, 7, 7, 3, 7];
        close(&grpo(&rewards, &groups, false), &[0.75, 0.0, -0.25, -0.25, 0.0, -0.25]);
        close(&grpo(&rewards, &groups, true), &[1.5, 0.0, -0.5, -0.5, 0.0, -0.5]);
        close(&grpo(&[5.0], &[1], true), &[0.0]);
    }

    #[test]
    fn reinforce_plus_plus_baseline_by_hand() {
        // Centred ±1/2 in one group; tokens 3 and 1: mean 1/4, variance (3/16 + 9/16)/4 = 3/16.
        let root = (3.0_f32 / 16.0).sqrt();
        let found = reinforce_plus_plus_baseline(&[1.0, 0.0], &[0, 0], &[3, 1]);
        close(&found, &[0.25 / root, -0.75 / root]);
        close(&reinforce_plus_plus_baseline(&[1.0, 1.0], &[0, 0], &[3, 1]), &[0.0, 0.0]);
    }
}
