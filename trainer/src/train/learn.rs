//! From a rollout in the log to a batch, and what is said of it.

use std::collections::{BTreeMap, BTreeSet};

use driftless_buffer::learned::Column;
use driftless_buffer::{Group, Reader, Record, Scalars};

use super::take::Ages;
use crate::advantage;
use crate::error::Result;
use crate::learner::{Batch, Learner, Sample, Stepped};
use crate::metrics::{self, StepMetrics};
use crate::options::{Estimator, LearnOptions};
use crate::rollout::{Kept, raw_reward};

/// Names of means in a line of metrics: those that are made up for each answer would fill it.
const NAMES_MAX: usize = 256;

/// The optimiser step of a rollout: what the learner says of it, and which quantity was not finite, if one was. What it
/// tells of the tokens goes into `log`, if one is given.
pub(super) fn step(
    learner: &mut dyn Learner,
    rollout: u64,
    groups: &[Group],
    ages: &Ages,
    options: &LearnOptions,
    log: Option<&Reader>,
) -> Result<(StepMetrics, Option<String>)> {
    let batch = batch(rollout, groups, ages, options);
    let mut learnt = StepMetrics::default();
    match learner.step(&batch)? {
        Stepped::Done(stats) => learnt.stats = stats,
        Stepped::NotFinite(what) => return Ok((learnt, Some(what))),
    }
    if let (Some(log), Some(log_probs)) = (log, learner.take_log_probs()) {
        let columns = columns_of(&batch, &log_probs);
        log.write_learned(rollout, &columns)?;
        learnt.log_prob_diff_by_engine = by_engine(groups, &columns);
    }
    Ok((learnt, None))
}

/// Engines that are told of apart.
const ENGINES_MAX: usize = 64;

/// The mean difference of log-probs over the trained tokens of each engine: the largest of them.
fn by_engine(groups: &[Group], columns: &[Column<'_>]) -> BTreeMap<String, f64> {
    let engines: BTreeMap<_, _> =
        records(groups).map(|record| (record.position(), record.engine())).collect();
    let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for column in columns {
        let (sum, count) =
            sums.entry(engines.get(&column.position).copied().unwrap_or_default()).or_default();
        let pairs = column.log_probs.iter().zip(column.engine_log_probs);
        let apart = pairs.map(|(own, other)| f64::from((own - other).abs()));
        for apart in apart.filter(|apart| apart.is_finite()) {
            *sum += apart;
            *count += 1.0;
        }
    }
    let told = sums.into_iter().filter(|(engine, (_, count))| !engine.is_empty() && *count > 0.0);
    let mut means: Vec<_> = told.map(|(engine, (sum, count))| (engine.to_owned(), sum / count)).collect();
    means.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    means.truncate(ENGINES_MAX);
    means.into_iter().collect()
}

/// The learner's log-probs of all response tokens of a batch, beside those of the engines. A learner that tells too few of
/// them has none of the last samples.
fn columns_of<'a>(batch: &Batch<'a>, mut log_probs: &'a [f32]) -> Vec<Column<'a>> {
    let column = |sample: &Sample<'a>| {
        let (own, others) = log_probs.split_at_checked(sample.response_len())?;
        log_probs = others;
        Some(Column { position: sample.position, log_probs: own, engine_log_probs: sample.log_probs })
    };
    batch.samples.iter().map_while(column).collect()
}

/// The samples of a rollout with their advantages, without the tokens that are too old. Token ids, log-probs and masks are read where they lie in
/// the log's map.
fn batch<'a>(rollout_id: u64, groups: &'a [Group], ages: &Ages, options: &LearnOptions) -> Batch<'a> {
    let mut records: Vec<&Record> = groups.iter().flat_map(|group| &group.records).collect();
    if options.advantage_estimator == Estimator::RejectionSampling {
        let (rewards, groups, rollouts) = columns(&records);
        let mut best = advantage::best(&rewards, &groups, &rollouts).into_iter();
        records.retain(|_| best.next().unwrap_or_default());
    }
    let (rewards, groups, rollouts) = columns(&records);
    let mut samples: Vec<Sample<'_>> = records.iter().map(|record| ages.sample(record)).collect();
    let trained: Vec<usize> = samples.iter().map(Sample::trained).collect();
    let advantages = advantage::advantages(options, &rewards, &groups, &rollouts, &trained);
    for (sample, advantage) in samples.iter_mut().zip(advantages) {
        sample.advantage = advantage;
    }
    // Nothing was said in them: their rewards count, and there is nothing to compute.
    samples.retain(|sample| sample.response_len() > 0);
    Batch { rollout_id, samples }
}

/// Reward, group and rollout of each record.
fn columns(records: &[&Record]) -> (Vec<f32>, Vec<u64>, Vec<u64>) {
    let scalars = records.iter().map(|record| record.scalars());
    let rollouts = records.iter().map(|record| Sample::of(record, 0.0).answer);
    (
        scalars.clone().map(|scalars| scalars.reward).collect(),
        scalars.map(|scalars| scalars.group_id).collect(),
        rollouts.collect(),
    )
}

/// Older tokens count with those of this age in the histogram.
const STALENESS_MAX: usize = 1000;

/// The versions whose weights generated a rollout.
pub(super) fn versions(groups: &[Group]) -> BTreeSet<u64> {
    records(groups).flat_map(|record| record.spans().to_vec()).map(|span| span.version).collect()
}

/// Adds how old the weights were that generated a rollout, and how many of its tokens are too old to be trained on.
/// Tokens of a version whose step is unknown have no age.
pub(super) fn add_staleness(step: &mut StepMetrics, groups: &[Group], ages: &Ages) {
    let (mut sum, mut all) = (0, 0);
    for record in records(groups) {
        let stale = ages.stale(record);
        step.tokens_too_old += stale as u64;
        for span in record.spans() {
            let Some(&age) = ages.steps.get(&span.version) else { continue };
            let start = (span.start as usize).max(stale);
            let tokens = (span.end as usize).saturating_sub(start) as u64;
            if tokens == 0 {
                continue;
            }
            sum += age * tokens;
            all += tokens;
            let place = usize::try_from(age).unwrap_or(usize::MAX).min(STALENESS_MAX);
            step.staleness.resize(step.staleness.len().max(place + 1), 0);
            step.staleness[place] += tokens;
            step.staleness_max = step.staleness_max.max(age);
        }
    }
    step.staleness_mean = sum as f64 / all.max(1) as f64;
}

/// What can be said of a rollout without learning from it, beside how it was `generated`. `files` names what the prompt
/// of each group is from.
pub(super) fn describe(generated: StepMetrics, groups: &[Group], files: &[String]) -> StepMetrics {
    let count = records(groups).count().max(1) as f64;
    let mean = |of: fn(&Record) -> f64| records(groups).map(of).sum::<f64>() / count;
    let shared = |passes: fn(&Group) -> bool| groups.iter().filter(|group| passes(group)).count();
    let solved = shared(|group| group.records.iter().any(|record| reward(record) >= 1.0));
    let verdicts = records(groups).all(|record| metrics::is_verdict(raw_reward(record)));
    let level = shared(|group| group.records.windows(2).all(|pair| reward(&pair[0]) == reward(&pair[1])));
    let learned = |record: &Record| f64::from(record.scalars().reward);
    let is_other = records(groups).any(|record| learned(record) != reward(record));
    StepMetrics {
        reward: mean(reward),
        reward_learned: is_other.then(|| mean(learned)),
        rewards: by_name(groups, files),
        pass: verdicts.then(|| solved as f64 / groups.len().max(1) as f64),
        groups: groups.len() as u64,
        answers: records(groups).filter(|record| record.scalars().sample_id < Scalars::ANSWERS_MAX).count()
            as u64,
        groups_zero_std: level as u64,
        response_length: mean(|record| record.response().len() as f64),
        response_tokens: records(groups).map(|record| record.response().len() as u64).sum(),
        tokens: records(groups).map(|record| record.tokens().len() as u64).sum(),
        truncated: mean(|record| f64::from(u8::from(record.finish() == driftless_buffer::Finish::Length))),
        ..generated
    }
}

fn records(groups: &[Group]) -> impl Iterator<Item = &Record> {
    groups.iter().flat_map(|group| &group.records)
}

/// As it was given: a hook that makes it a z-score would tell nothing of the policy.
fn reward(record: &Record) -> f64 {
    f64::from(raw_reward(record))
}

/// Mean reward of each file, where there are several, and means of what rewards are made of.
fn by_name(groups: &[Group], files: &[String]) -> BTreeMap<String, f64> {
    let several = files.windows(2).any(|pair| pair[0] != pair[1]);
    let of_files = groups
        .iter()
        .zip(files)
        .filter(|_| several)
        .flat_map(|(group, file)| group.records.iter().map(|record| (file.clone(), reward(record))));
    let components = records(groups).flat_map(|record| Kept::of(record).components);
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for (name, value) in of_files.chain(components.map(|(name, value)| (name, value.into()))) {
        let (sum, count) = sums.entry(name).or_default();
        (*sum, *count) = (*sum + value, *count + 1.0);
    }
    let means = sums.into_iter().map(|(name, (sum, count))| (name, sum / count));
    means.take(NAMES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless_buffer::sample::{ColumnId, Element, Verdict};
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
        let batch = batch(3, &groups, &Ages::default(), options);
        let mut found: Vec<_> =
            batch.samples.iter().map(|sample| (sample.answer, sample.trained(), sample.advantage)).collect();
        found.sort_by_key(|&(rollout, ..)| rollout);
        found
    }

    /// A group for each row of rewards, whose responses have two tokens: the first of version 3, the second of 4.
    fn groups_of(rewards: &[&[f32]]) -> (tempfile::TempDir, Vec<Group>) {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path(), Options::new(identity)).unwrap();
        let rewards =
            rewards.iter().zip(0..).flat_map(|(row, group)| row.iter().map(move |reward| (group, *reward)));
        for ((group_id, reward), sample_id) in rewards.zip(0..) {
            let span = |start, version| driftless_buffer::VersionSpan { start, end: start + 1, version };
            let sample = driftless_buffer::Sample {
                scalars: Scalars { sample_id, group_id, rollout_id: 3, reward, ..Scalars::default() },
                prompt_len: 1,
                tokens: &[1, 2, 3],
                log_probs: &[-1.0; 2],
                loss_mask: &[1; 2],
                spans: &[span(0, 3), span(1, 4)],
                ..driftless_buffer::Sample::default()
            };
            log.append(&sample).unwrap().wait().unwrap();
        }
        let groups = log.reader().groups(3, 2);
        (dir, groups)
    }

    #[test]
    fn describe_says_what_a_rollout_was_like() {
        let (_dir, groups) = groups_of(&[&[1.0, 0.0], &[0.5, 0.5], &[0.0, 0.25]]);
        let files = ["a.jsonl", "b.jsonl", "a.jsonl"].map(String::from);
        let step = describe(StepMetrics::default(), &groups, &files);
        assert_eq!((step.reward, step.pass), (0.375, None));
        assert_eq!((step.groups, step.groups_zero_std), (3, 1));
        assert_eq!((step.response_length, step.response_tokens, step.tokens), (2.0, 12, 18));
        assert_eq!(step.rewards, [("a.jsonl".into(), 0.3125), ("b.jsonl".into(), 0.5)].into());
        assert!(
            describe(StepMetrics::default(), &groups, &["a.jsonl"; 3].map(String::from)).rewards.is_empty()
        );
        assert!(describe(StepMetrics::default(), &[], &[]).rewards.is_empty());
    }

    #[test]
    fn part_of_rewards_has_the_mean_of_the_answers_that_name_it() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path(), Options::new(identity)).unwrap();
        let notes = [
            r#"{"components":{"form":0.5,"right":1.0}}"#,
            r#"{"metadata":{"a":1},"components":{"form":1.0}}"#,
            "",
        ];
        for (sample_id, note) in (0..).zip(notes) {
            let sample = driftless_buffer::Sample {
                scalars: Scalars { sample_id, ..Scalars::default() },
                prompt_len: 1,
                tokens: &[1],
                metadata: note.as_bytes(),
                ..driftless_buffer::Sample::default()
            };
            log.append(&sample).unwrap().wait().unwrap();
        }
        let groups = log.reader().groups(0, 3);
        let step = describe(StepMetrics::default(), &groups, &["a.jsonl".to_owned()]);
        assert_eq!(step.rewards, [("form".into(), 0.75), ("right".into(), 1.0)].into());
    }

    #[test]
    fn differences_are_told_of_each_engine_and_rewards_as_learned() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path(), Options::new(identity)).unwrap();
        let engines = ["http://a", "http://b", "http://b", ""];
        for (engine, sample_id) in engines.into_iter().zip(0..) {
            let sample = driftless_buffer::Sample {
                scalars: Scalars { sample_id, reward: 0.5, ..Scalars::default() },
                prompt_len: 1,
                tokens: &[1, 2, 3],
                log_probs: &[-1.0; 2],
                loss_mask: &[1; 2],
                engine,
                extra: &[(ColumnId::REWARDS, Element::F32, &2.0_f32.to_le_bytes())],
                ..driftless_buffer::Sample::default()
            };
            log.append(&sample).unwrap().wait().unwrap();
        }
        let groups = log.reader().groups(0, 4);
        let batch = batch(0, &groups, &Ages::default(), &LearnOptions::default());
        let position = |at: usize| batch.samples[at].position;
        // Of what was not trained on, and of what an engine thinks impossible, there is no difference.
        let own: [&[f32]; 4] =
            [&[-1.5, f32::NAN], &[-1.0, -1.25], &[-1.75, f32::NEG_INFINITY], &[-9.0, -9.0]];
        let columns: Vec<_> = own
            .into_iter()
            .zip(0..)
            .map(|(log_probs, at)| Column { position: position(at), log_probs, engine_log_probs: &[-1.0; 2] })
            .collect();
        let found = by_engine(&groups, &columns);
        assert_eq!(found, [("http://a".to_owned(), 0.5), ("http://b".to_owned(), 1.0 / 3.0)].into());
        let step = describe(StepMetrics::default(), &groups, &[]);
        assert_eq!((step.reward, step.reward_learned), (2.0, Some(0.5)));
        let (_dir, same) = groups_of(&[&[1.0, 0.0]]);
        assert_eq!(describe(StepMetrics::default(), &same, &[]).reward_learned, None);
    }

    #[test]
    fn pass_is_told_of_right_and_wrong_answers_only() {
        let pass = |rewards: &[&[f32]]| describe(StepMetrics::default(), &groups_of(rewards).1, &[]).pass;
        assert_eq!(pass(&[&[1.0, 0.0], &[0.0, 0.0]]), Some(0.5));
        assert_eq!(pass(&[&[1.0, -1.0], &[1.0, 1.0]]), Some(1.0));
        assert_eq!(pass(&[&[0.998, 0.0], &[0.0, 0.0]]), None);
    }

    #[test]
    fn add_staleness_counts_tokens_by_age() {
        let (_dir, groups) = groups_of(&[&[1.0, 0.0]]);
        let mut step = StepMetrics::default();
        assert_eq!(versions(&groups), [3, 4].into());
        add_staleness(&mut step, &groups, &ages(&[(3, 3), (4, 2)], None));
        assert_eq!(step.staleness, [0, 0, 2, 2]);
        assert_eq!((step.staleness_mean, step.staleness_max), (2.5, 3));
    }

    fn ages(steps: &[(u64, u64)], max: Option<u64>) -> Ages {
        Ages { steps: steps.iter().copied().collect(), max }
    }

    #[test]
    fn tokens_that_are_too_old_are_neither_trained_on_nor_aged() {
        let (_dir, groups) = groups_of(&[&[1.0, 0.0]]);
        let trained = |ages: &Ages| {
            let batch = batch(6, &groups, ages, &LearnOptions::default());
            batch.samples.iter().map(|sample| (sample.stale, sample.trained())).collect::<Vec<_>>()
        };
        let bounded = |max| ages(&[(3, 3), (4, 2)], max);
        assert_eq!(trained(&bounded(None)), [(0, 2); 2]);
        assert_eq!(trained(&bounded(Some(3))), [(0, 2); 2]);
        assert_eq!(trained(&bounded(Some(2))), [(1, 1); 2]);
        assert_eq!(trained(&bounded(Some(1))), [(2, 0); 2]);
        assert_eq!(trained(&ages(&[(4, 2)], Some(2))), [(1, 1); 2], "the step of version 3 is unknown");
        let mut step = StepMetrics::default();
        add_staleness(&mut step, &groups, &bounded(Some(2)));
        assert_eq!((step.staleness, step.staleness_max, step.tokens_too_old), (vec![0, 0, 2], 2, 2));
    }

    #[test]
    fn answer_that_its_score_masks_counts_and_is_not_trained_on() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path(), Options::new(identity)).unwrap();
        for (sample_id, verdict) in [(0, Verdict::Kept), (1, Verdict::Masked)] {
            let scalars = Scalars { sample_id, parts: 1, score_follows: true, ..Scalars::default() };
            let span = driftless_buffer::VersionSpan { start: 0, end: 2, version: 3 + sample_id };
            let answer = driftless_buffer::Sample {
                scalars,
                prompt_len: 1,
                tokens: &[1, 2, 3],
                log_probs: &[-1.0; 2],
                loss_mask: &[1; 2],
                spans: &[span],
                ..driftless_buffer::Sample::default()
            };
            let scalars =
                Scalars { sample_id, reward: sample_id as f32, status: verdict.code(), ..Scalars::default() };
            let kind = driftless_buffer::Kind::Score;
            let score = driftless_buffer::Sample { kind, scalars, ..driftless_buffer::Sample::default() };
            log.append_all(&[answer, score]).unwrap();
        }
        let groups = log.reader().groups(0, 2);
        let options = LearnOptions { disable_grpo_std_normalization: true, ..LearnOptions::default() };
        let batch = batch(6, &groups, &Ages::default(), &options);
        let said = batch.samples.iter().map(|sample| (sample.stale, sample.trained(), sample.advantage));
        assert_eq!(said.collect::<Vec<_>>(), [(0, 2, -0.5), (2, 0, 0.5)]);
        let is_stale = |max| ages(&[(3, 3), (4, 2)], max).is_stale(&groups[0]);
        assert_eq!([None, Some(2)].map(is_stale), [false, true], "nothing is left beside the masked one");
    }

    #[test]
    fn group_is_stale_once_no_token_of_it_is_young_enough() {
        let (_dir, groups) = groups_of(&[&[1.0, 0.0]]);
        let is_stale = |max| ages(&[(3, 3), (4, 2)], max).is_stale(&groups[0]);
        assert_eq!([None, Some(3), Some(2), Some(1)].map(is_stale), [false, false, false, true]);
    }

    #[test]
    fn tokens_of_an_unknown_version_have_no_staleness() {
        let (_dir, groups) = groups_of(&[&[1.0, 0.0]]);
        let mut step = StepMetrics::default();
        add_staleness(&mut step, &groups, &ages(&[(4, 2)], None));
        assert_eq!((step.staleness, step.staleness_mean, step.staleness_max), (vec![0, 0, 2], 2.0, 2));
    }

    #[test]
    fn answer_without_a_token_counts_and_is_not_computed() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        let log = Log::open(dir.path(), Options::new(identity)).unwrap();
        for (sample_id, reward) in [(0, 1.0), (1, 0.0)] {
            let length = 1 - sample_id as usize;
            let sample = driftless_buffer::Sample {
                scalars: Scalars { sample_id, reward, ..Scalars::default() },
                prompt_len: 1,
                tokens: &[1, 2][..1 + length],
                log_probs: &[-1.0][..length],
                loss_mask: &[1][..length],
                ..driftless_buffer::Sample::default()
            };
            log.append(&sample).unwrap().wait().unwrap();
        }
        let options = LearnOptions { disable_grpo_std_normalization: true, ..LearnOptions::default() };
        let groups = log.reader().groups(0, 2);
        let batch = batch(0, &groups, &Ages::default(), &options);
        assert_eq!(batch.samples.len(), 1);
        assert_eq!((batch.samples[0].answer, batch.samples[0].advantage), (0, 0.5));
    }

    #[test]
    fn answer_of_several_samples_counts_once() {
        let options = LearnOptions { disable_grpo_std_normalization: true, ..LearnOptions::default() };
        assert_eq!(batch_of(1, &options), [(0, 2, 0.5), (1, 2, -0.5)]);
        assert_eq!(batch_of(3, &options), [(0, 2, 0.5), (0, 2, 0.5), (0, 2, 0.5), (1, 2, -0.5)]);
        let best = LearnOptions { advantage_estimator: Estimator::RejectionSampling, ..options };
        assert_eq!(batch_of(3, &best), [(0, 2, 1.0); 3]);
    }
}
