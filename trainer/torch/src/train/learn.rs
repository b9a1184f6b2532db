//! One optimiser step on a rollout that lies in the log.

use driftless_buffer::{Group, Record};

use super::{Estimator, LearnOptions};
use crate::batch::{Batch, Reduction, Sample, micro_batches, token_weights};
use crate::error::Result;
use crate::loss::PolicyLoss;
use crate::policy::Policy;
use driftless_trainer::advantage;
use driftless_trainer::metrics::StepMetrics;

/// Learns from `groups` and describes the step. `staleness` gives, for a version, how many steps the weights that are being
/// trained are ahead of it.
///
/// Token ids, log-probs and masks are read where they lie in the log's map.
pub(super) fn learn(
    policy: &mut Policy,
    groups: &[Group],
    options: &LearnOptions,
    temperature: f64,
    staleness: impl FnMut(u64) -> Result<u64>,
) -> Result<StepMetrics> {
    let records: Vec<&Record> = groups.iter().flat_map(|group| &group.records).collect();
    let samples = samples(&records, options);
    let weights = token_weights(&samples, Reduction::PerRollout);
    let lengths: Vec<_> = samples.iter().map(|sample| sample.tokens.len()).collect();
    let (vocabulary, device) = (policy.model().config().vocab_size, policy.model().device());
    let batches = micro_batches(&lengths, options.max_tokens_per_gpu).into_iter().map(|chosen| {
        let pick = |index: &usize| samples[*index];
        let chosen_weights: Vec<_> = chosen.iter().map(|index| weights[*index]).collect();
        Batch::new(&chosen.iter().map(pick).collect::<Vec<_>>(), &chosen_weights, vocabulary, device)
    });
    let batches = batches.collect::<Result<Vec<_>>>()?;
    let loss = PolicyLoss {
        eps_clip: options.eps_clip,
        eps_clip_high: options.eps_clip_high,
        kl: None,
        entropy_coef: options.entropy_coef,
        temperature,
    };
    let stats = policy.policy_step(&batches, &loss, options.lr)?;
    let (staleness_mean, staleness_max) = staleness_of(&records, staleness)?;
    Ok(StepMetrics {
        loss: stats.loss,
        grad_norm: stats.grad_norm,
        entropy: stats.entropy,
        log_prob_diff_mean: stats.log_prob_difference,
        log_prob_diff_max: stats.log_prob_difference_max,
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

/// The records as training samples, with their advantages.
fn samples<'a>(records: &[&'a Record], options: &LearnOptions) -> Vec<Sample<'a>> {
    let rewards: Vec<f32> = records.iter().map(|record| record.scalars().reward).collect();
    let groups: Vec<u64> = records.iter().map(|record| record.scalars().group_id).collect();
    let lengths: Vec<usize> = records.iter().map(|record| record.response().len()).collect();
    let advantages = match options.advantage_estimator {
        Estimator::Grpo => advantage::grpo(&rewards, &groups, options.grpo_std_normalization),
        Estimator::ReinforcePlusPlusBaseline => {
            advantage::reinforce_plus_plus_baseline(&rewards, &groups, &lengths)
        }
    };
    let sample = |(record, advantage): (&&'a Record, f32)| Sample {
        tokens: record.tokens(),
        prompt_len: record.prompt_len(),
        loss_mask: record.loss_mask(),
        log_probs: record.log_probs(),
        rollout_id: record.scalars().sample_id,
        advantage,
    };
    records.iter().zip(advantages).map(sample).collect()
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
