//! From a rollout in the log to a batch, and what is said of it.

use driftless_buffer::{Group, Record};

use super::LearnOptions;
use crate::advantage;
use crate::error::Result;
use crate::learner::{Batch, Sample, StepStats};
use crate::metrics::StepMetrics;

/// The samples of a rollout with their advantages. Token ids, log-probs and masks are read where they lie in
/// the log's map.
pub(super) fn batch<'a>(rollout_id: u64, groups: &'a [Group], options: &LearnOptions) -> Batch<'a> {
    let records: Vec<&Record> = groups.iter().flat_map(|group| &group.records).collect();
    let rewards: Vec<f32> = records.iter().map(|record| record.scalars().reward).collect();
    let groups: Vec<u64> = records.iter().map(|record| record.scalars().group_id).collect();
    let mut samples: Vec<Sample<'_>> = records.iter().map(|record| Sample::of(record, 0.0)).collect();
    let trained: Vec<usize> = samples.iter().map(Sample::trained).collect();
    let advantages = advantage::advantages(
        options.advantage_estimator,
        &rewards,
        &groups,
        &trained,
        options.grpo_std_normalization,
        options.normalize_advantages,
    );
    for (sample, advantage) in samples.iter_mut().zip(advantages) {
        sample.advantage = advantage;
    }
    Batch { rollout_id, samples }
}

/// Describes a step. `staleness` gives, for a version, how many steps the weights that were trained are ahead
/// of it.
pub(super) fn metrics(
    groups: &[Group],
    stats: &StepStats,
    staleness: impl FnMut(u64) -> Result<u64>,
) -> Result<StepMetrics> {
    let records: Vec<&Record> = groups.iter().flat_map(|group| &group.records).collect();
    let (staleness_mean, staleness_max) = staleness_of(&records, staleness)?;
    Ok(StepMetrics {
        loss: stats.loss,
        grad_norm: stats.grad_norm,
        lr: stats.lr,
        kl_loss: stats.kl_loss,
        tis_clipfrac: stats.tis_clipfrac,
        pg_clipfrac: stats.pg_clipfrac,
        ppo_kl: stats.ppo_kl,
        mismatch_k3: stats.mismatch_k3,
        entropy: stats.entropy,
        log_prob_diff_mean: stats.log_prob_diff_mean,
        log_prob_diff_max: stats.log_prob_diff_max,
        staleness_mean,
        staleness_max,
        ..describe(groups)
    })
}

/// What can be said of a rollout without learning from it.
pub(super) fn describe(groups: &[Group]) -> StepMetrics {
    let records: Vec<&Record> = groups.iter().flat_map(|group| &group.records).collect();
    let mean =
        |of: fn(&Record) -> f64| records.iter().map(|r| of(r)).sum::<f64>() / records.len().max(1) as f64;
    StepMetrics {
        reward: mean(|record| f64::from(record.scalars().reward)),
        response_length: mean(|record| record.response().len() as f64),
        truncated: mean(|record| f64::from(u8::from(record.finish() == driftless_buffer::Finish::Length))),
        ..StepMetrics::default()
    }
}

/// Mean over tokens, and maximum.
fn staleness_of(records: &[&Record], mut staleness: impl FnMut(u64) -> Result<u64>) -> Result<(f64, u64)> {
    let (mut sum, mut tokens, mut longest) = (0, 0, 0);
    for span in records.iter().flat_map(|record| record.spans()) {
        let age = staleness(span.version)?;
        let length = u64::from(span.end.saturating_sub(span.start));
        sum += age * length;
        tokens += length;
        longest = longest.max(age);
    }
    Ok((sum as f64 / tokens.max(1) as f64, longest))
}
