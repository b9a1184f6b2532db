//! From the queue to a step: the groups that it learns from, and the tokens of theirs that are too old for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use driftless_buffer::{Group, Reader, Record};

use super::session::Session;
use super::update::milliseconds;
use super::{LOOK_AFTER, learn};
use crate::error::{Error, Result};
use crate::learner::Sample;
use crate::ledger;
use crate::metrics::StepMetrics;
use crate::rollout::{self, PromptNote, Queue, Since};

/// Why a group is left out whose tokens are all too old.
pub(super) const ALL_TOO_OLD: &str = "all of its tokens are too old";

/// How far the weights that learn are ahead of those that generated.
#[derive(Debug, Default)]
pub(super) struct Ages {
    /// In optimiser steps, by version. Versions whose step is unknown are absent.
    pub(super) steps: BTreeMap<u64, u64>,
    /// Tokens of older weights, and those of a version whose step is unknown, are not trained on.
    pub(super) max: Option<u64>,
}

impl Ages {
    /// Those of groups, given that of a version, as far as it is known. Tokens that are older than `max` are too old.
    pub(super) fn of(groups: &[Group], max: Option<u64>, age: impl FnMut(u64) -> Option<u64>) -> Self {
        let mut age = age;
        let known = |version| Some((version, age(version)?));
        Ages { steps: learn::versions(groups).into_iter().filter_map(known).collect(), max }
    }

    /// The leading response tokens that are not trained on: those up to the last that is too old.
    pub(super) fn stale(&self, record: &Record) -> usize {
        let Some(max) = self.max else { return 0 };
        let too_old = |version| self.steps.get(version).is_none_or(|age| *age > max);
        let spans = record.spans().iter().filter(|span| too_old(&span.version));
        spans.map(|span| span.end as usize).max().unwrap_or_default()
    }

    /// The share of a group's response tokens that are not trained on because of their age.
    pub(super) fn stale_share(&self, group: &Group) -> f64 {
        let stale: usize = group.records.iter().map(|record| self.stale(record)).sum();
        let all: usize = group.records.iter().map(|record| record.response().len()).sum();
        stale as f64 / all.max(1) as f64
    }

    /// Whether all that there was to train on in a group is too old.
    pub(super) fn is_stale(&self, group: &Group) -> bool {
        let mut records = group.records.iter();
        records.clone().any(|record| self.stale(record) > 0)
            && records.all(|record| self.sample(record).trained() == 0)
    }

    /// A record without the tokens that are too old; its advantage is not known yet.
    pub(super) fn sample<'a>(&self, record: &'a Record) -> Sample<'a> {
        let sample = Sample::of(record, 0.0);
        Sample { stale: sample.stale.max(self.stale(record)), ..sample }
    }
}

/// What a step learns from.
pub(super) struct Taken {
    pub(super) groups: Vec<Group>,
    pub(super) ages: Ages,
    /// What their generation was like.
    pub(super) generated: StepMetrics,
}

impl Session<'_> {
    /// Waits until the log has enough groups for `step`, and gives them to it.
    pub(super) fn take(&mut self, step: u64) -> Result<Taken> {
        let wait = Instant::now();
        let (numbers, groups, ages) = loop {
            let numbers = self.wait_for_groups(step)?;
            let groups = groups(&self.log.reader(), step, &numbers, self.options.n_samples_per_prompt)?;
            let ages = self.ages(step, &groups);
            let stale = stale(self.queue()?, step, &groups, &ages);
            if stale.is_empty() {
                break (numbers, groups, ages);
            }
            self.leave_out(step, stale)?;
        };
        let samples = groups.iter().flat_map(|group| &group.records).map(ledger::digest).collect();
        let recipe = self.recipe();
        let ledger = self.ledger.as_mut().ok_or(Error::Bug { what: "rollouts train" })?;
        ledger.note(step, &numbers, samples, recipe)?;
        let too_old: Vec<f64> = groups.iter().map(|group| ages.stale_share(group)).collect();
        let since = self.queue()?.take(step, numbers, &too_old);
        let generated =
            StepMetrics { train_wait_ms: milliseconds(wait.elapsed()), ..generated(step, &since) };
        Ok(Taken { groups, ages, generated })
    }

    /// Leaves out groups that `step` was to take, of which all is too old.
    fn leave_out(&mut self, step: u64, stale: Vec<u64>) -> Result<()> {
        for group in &stale {
            tracing::warn!(step, group, "group left out: {ALL_TOO_OLD}");
            self.queue()?.leave_out(*group);
        }
        match &mut self.to_rollouts {
            Some(rollouts) => rollouts.tell(|line| line.too_old = stale),
            None => stale
                .into_iter()
                .try_for_each(|group| rollout::leave_out(self.log.own()?, group, ALL_TOO_OLD)),
        }
    }

    /// The numbers of the groups of `step`. Engines that come back meanwhile are brought to the newest version.
    fn wait_for_groups(&mut self, step: u64) -> Result<Vec<u64>> {
        if self.to_rollouts.is_some() {
            return self.wait_for_rollouts(step);
        }
        let mut refused = BTreeSet::new();
        let queue = self.queue()?.clone();
        loop {
            if let Some(groups) = queue.batch(step) {
                return Ok(groups);
            }
            let Some(generation) = &mut self.generation else {
                let (expected, found) = (self.options.rollout_batch_size, queue.finished());
                return Err(Error::IncompleteRollout { rollout: step, expected, found });
            };
            let ended = self.runtime.block_on(async {
                tokio::select! {
                    ended = generation => Some(ended),
                    () = queue.wait() => None,
                    () = tokio::time::sleep(LOOK_AFTER) => None,
                }
            });
            match ended {
                Some(ended) => {
                    self.generation = None;
                    rollout::finished(ended)??;
                }
                None => {
                    self.look_at_coming()?;
                    self.bring_back(&mut refused)?;
                }
            }
        }
    }

    /// What the prompt of each group is from: a file, or what made it up.
    pub(super) fn files(&self, groups: &[Group]) -> Result<Vec<String>> {
        let log = self.log.reader();
        let file = |group: &Group| {
            let source = log.prompt(group.group_id)?.and_then(|prompt| PromptNote::of(&prompt).source);
            Ok(source.map_or_else(String::new, |place| place.path.display().to_string()))
        };
        groups.iter().map(file).collect()
    }

    /// How old the weights were that generated these groups. Old versions may be neither in the run's directory nor in
    /// the store any more.
    fn ages(&mut self, step: u64, groups: &[Group]) -> Ages {
        let updates = &mut self.updates;
        Ages::of(groups, self.options.oldest(), |version| {
            match updates.as_mut().map(|updates| updates.step_of(version)) {
                None => Some(0),
                Some(Ok(made)) => Some(step.saturating_sub(made)),
                Some(Err(error)) => {
                    tracing::warn!(
                        version,
                        %error,
                        "staleness is measured without a version whose step is unknown"
                    );
                    None
                }
            }
        })
    }
}

/// What is known of the generation of the groups that `step` takes.
pub(super) fn generated(step: u64, since: &Since) -> StepMetrics {
    StepMetrics {
        rollout_id: step,
        groups_failed: since.dropped.failed,
        answers_failed: since.failures.by_name(),
        answers_made_again: since.failures.made_again,
        groups_filtered: since.dropped.filtered,
        groups_too_old: since.dropped.too_old,
        generate_ms: milliseconds(since.active),
        rollout_wait_ms: milliseconds(since.idle),
        ..StepMetrics::default()
    }
}

/// Those of the groups that `step` is to take of which all is too old.
pub(super) fn stale(queue: &Queue, step: u64, groups: &[Group], ages: &Ages) -> Vec<u64> {
    let stale = groups.iter().filter(|group| !queue.has_taken(step) && ages.is_stale(group));
    stale.map(|group| group.group_id).collect()
}

/// The groups of these numbers, of so many answers each, that `step` learns from.
pub(super) fn groups(log: &Reader, step: u64, numbers: &[u64], answers: u64) -> Result<Vec<Group>> {
    let groups: Vec<_> = numbers.iter().filter_map(|group| rollout::group(log, *group, answers)).collect();
    let (expected, found) = (numbers.len() as u64, groups.len() as u64);
    if found == expected {
        Ok(groups)
    } else {
        Err(Error::IncompleteRollout { rollout: step, expected, found })
    }
}
