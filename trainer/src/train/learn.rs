//! From a rollout in the log to a batch, and what is said of it.

use driftless_buffer::{Group, Record};

use super::LearnOptions;
use crate::advantage::{self, Estimator};
use crate::error::Result;
use crate::learner::{Batch, Sample, StepStats};
use crate::metrics::StepMetrics;

/// The samples of a rollout with their advantages. Token ids, log-probs and masks are read where they lie in
/// the log's map.
pub(super) fn batch<'a>(rollout_id: u64, groups: &'a [Group], options: &LearnOptions) -> Batch<'a> {
    let mut records: Vec<&Record> = groups.iter().flat_map(|group| &group.records).collect();
    if options.advantage_estimator == Estimator::RejectionSampling {
        let (rewards, groups, rollouts) = columns(&records);
        let mut best = advantage::best(&rewards, &groups, &rollouts).into_iter();
        records.retain(|_| best.next().unwrap_or_default());
    }
    let (rewards, groups, rollouts) = columns(&records);
    let mut samples: Vec<Sample<'_>> = records.iter().map(|record| Sample::of(record, 0.0)).collect();
    let trained: Vec<usize> = samples.iter().map(Sample::trained).collect();
    let advantages = advantage::advantages(options, &rewards, &groups, &rollouts, &trained);
    for (sample, advantage) in samples.iter_mut().zip(advantages) {
        sample.advantage = advantage;
    }
    Batch { rollout_id, samples }
}

/// Reward, group and rollout of each record.
fn columns(records: &[&Record]) -> (Vec<f32>, Vec<u64>, Vec<u64>) {
    let scalars = records.iter().map(|record| record.scalars());
    let rollouts = records.iter().map(|record| Sample::of(record, 0.0).rollout_id);
    (
        scalars.clone().map(|scalars| scalars.reward).collect(),
        scalars.map(|scalars| scalars.group_id).collect(),
        rollouts.collect(),
    )
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
    Ok(StepMetrics { stats: *stats, staleness_mean, staleness_max, ..describe(groups) })
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

#[cfg(test)]
mod tests {
    use super::*;
    use driftless_buffer::{Identity, Log, Options, Scalars};

    /// Two answers to a prompt with rewards 1 and 0, the first of which became `parts` samples.
    fn batch_of(parts: u64, options: &LearnOptions) -> Vec<(u64, usize, f32)> {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path(), Options::new(identity)).unwrap();
        let first = (0..parts).map(|part| (part << 48, 1.0));
        for (sample_id, reward) in first.chain([(1, 0.0)]) {
            let sample = driftless_buffer::Sample {
                scalars: Scalars { sample_id, group_id: 5, rollout_id: 3, reward, ..Scalars::default() },
                prompt_len: 1,
                tokens: &[1, 2, 3],
                log_probs: &[-1.0; 2],
                loss_mask: &[1; 2],
                ..driftless_buffer::Sample::default()
            };
            log.append(&sample).unwrap().wait().unwrap();
        }
        let groups = log.reader().groups(3, parts as usize + 1);
        let batch = batch(3, &groups, options);
        let mut found: Vec<_> = batch
            .samples
            .iter()
            .map(|sample| (sample.rollout_id, sample.trained(), sample.advantage))
            .collect();
        found.sort_by_key(|&(rollout, ..)| rollout);
        found
    }

    #[test]
    fn answer_of_several_samples_counts_once() {
        let options = LearnOptions { grpo_std_normalization: false, ..LearnOptions::default() };
        assert_eq!(batch_of(1, &options), [(0, 2, 0.5), (1, 2, -0.5)]);
        assert_eq!(batch_of(3, &options), [(0, 2, 0.5), (0, 2, 0.5), (0, 2, 0.5), (1, 2, -0.5)]);
        let best = LearnOptions { advantage_estimator: Estimator::RejectionSampling, ..options };
        assert_eq!(batch_of(3, &best), [(0, 2, 1.0); 3]);
    }
}
