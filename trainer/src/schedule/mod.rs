//! Which groups are generated now, and which of the finished ones a step learns from: the whole scheduling
//! policy, as a function of what has happened.
//!
//! A group is generated for the log; a step takes the oldest groups that are finished. *Step weights* `s` are the
//! weights after `s` optimiser steps; a run starts with step weights 0. A group's *seat* is the step that takes it if
//! groups finish in the order in which they started.

use std::collections::{BTreeMap, BTreeSet};

use crate::options::Mode;

/// How far generation may be ahead of training.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Policy {
    /// Whether and how far.
    pub mode: Mode,
    /// Groups of a step; at least 1.
    pub batch: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Groups that are under way beyond those that a batch needs.
    pub surplus: u64,
    /// Whether those of them that are not finished with the batch go on while it trains. They are stopped otherwise, and
    /// begin again behind it.
    pub partial: bool,
}

impl Policy {
    /// Without a surplus.
    #[must_use]
    pub fn new(mode: Mode, batch: u64, steps: u64) -> Self {
        Policy { mode, batch, steps, surplus: 0, partial: false }
    }
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    /// A group is finished and durable.
    Accepted(u64),
    /// No step learns from a group: it failed, was filtered, or is too old.
    LeftOut(u64),
    /// No engine could generate a group, or it was stopped; it is to be tried again.
    Returned(u64),
    /// A step learns from these groups.
    Taken { step: u64, groups: Vec<u64> },
    /// So many optimiser steps are done; fewer than before where the learner was lost.
    Trained(u64),
    /// Engines are brought to these step weights.
    Published(u64),
}

/// A group to be generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) group: u64,
    pub(crate) seat: u64,
    /// Whether its prompt has not been taken from the source before.
    pub(crate) is_new: bool,
}

/// Everything that decides what is generated next.
#[derive(Debug)]
pub(crate) struct Schedule {
    policy: Policy,
    trained: u64,
    published: u64,
    /// The prompt that is taken next.
    next: u64,
    /// The groups that each step learned from. Steps behind the newest checkpoint may be done again.
    taken: BTreeMap<u64, Vec<u64>>,
    /// Finished groups that no step has taken.
    accepted: BTreeSet<u64>,
    /// Groups under way, with their seats.
    running: BTreeMap<u64, u64>,
    /// Those of them that are to be stopped.
    stopped: BTreeSet<u64>,
    /// Groups whose prompts are taken and that are not under way, with their seats.
    waiting: BTreeMap<u64, u64>,
}

impl Schedule {
    /// Of a run that has taken no prompt yet.
    pub(crate) fn new(policy: Policy) -> Self {
        Schedule {
            policy,
            trained: 0,
            published: 0,
            next: 0,
            taken: BTreeMap::new(),
            accepted: BTreeSet::new(),
            running: BTreeMap::new(),
            stopped: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// The same with the groups that a log has: the prompt after its last, those that are finished, and those that
    /// were under way when it was closed, with their seats.
    pub(crate) fn with_log(self, next: u64, accepted: BTreeSet<u64>, waiting: BTreeMap<u64, u64>) -> Self {
        Schedule { next, accepted, waiting, ..self }
    }

    /// Takes note of what has happened.
    pub(crate) fn see(&mut self, seen: Seen) {
        match seen {
            Seen::Accepted(group) => {
                self.end(group);
                self.accepted.insert(group);
            }
            Seen::LeftOut(group) => {
                self.end(group);
                self.accepted.remove(&group);
            }
            Seen::Returned(group) => {
                let seat = self.running.remove(&group).unwrap_or(self.trained);
                self.stopped.remove(&group);
                self.waiting.insert(group, seat);
            }
            Seen::Taken { step, groups } => {
                groups.iter().for_each(|group| {
                    self.accepted.remove(group);
                });
                self.taken.insert(step, groups);
                if self.policy.mode == Mode::Synchronous && !self.policy.partial {
                    self.stopped.extend(self.running.keys());
                }
            }
            Seen::Trained(step) => self.trained = step,
            Seen::Published(step) => self.published = step,
        }
    }

    fn end(&mut self, group: u64) {
        self.stopped.remove(&group);
        self.running.remove(&group);
        self.waiting.remove(&group);
    }

    /// The groups to start now, which count as under way from here on.
    pub(crate) fn start(&mut self) -> Vec<Start> {
        let mut starts = Vec::new();
        while let Some(seat) = self.seat() {
            let start = match self.waiting.pop_first() {
                Some((group, seat)) => Start { group, seat, is_new: false },
                None => {
                    self.next += 1;
                    Start { group: self.next - 1, seat, is_new: true }
                }
            };
            self.running.insert(start.group, start.seat);
            starts.push(start);
        }
        starts
    }

    /// The seat of the next group, if one may start.
    fn seat(&self) -> Option<u64> {
        let Policy { mode, batch, steps, .. } = self.policy;
        let ahead = match mode {
            Mode::Synchronous => 0,
            // The next batch begins once this one is whole, so that it is drawn after it.
            Mode::OneStepOff => u64::from(self.taken.contains_key(&self.trained)),
            Mode::Bounded { max_staleness } => max_staleness,
        };
        let behind: u64 = self.taken.range(self.trained..).map(|(_, groups)| groups.len() as u64).sum();
        let open = behind + self.accepted.len() as u64 + self.running.len() as u64;
        let surplus = match mode {
            Mode::Synchronous if self.has_taken(self.trained) => 0,
            _ => self.policy.surplus,
        };
        let seat = self.trained + open.saturating_sub(surplus) / batch.max(1);
        let in_time = match mode {
            Mode::Bounded { max_staleness } => seat <= self.published.saturating_add(max_staleness),
            Mode::Synchronous | Mode::OneStepOff => true,
        };
        (seat <= self.trained.saturating_add(ahead) && seat < steps && in_time).then_some(seat)
    }

    /// The groups under way that are to be stopped: a step took others, and the weights that it took them with are not to
    /// draw more.
    pub(crate) fn stopped(&self) -> impl Iterator<Item = u64> {
        self.stopped.iter().copied()
    }

    /// The groups that `step` learns from: those that it took before, or the oldest that are finished. `None` while
    /// there are too few.
    pub(crate) fn batch(&self, step: u64) -> Option<Vec<u64>> {
        if let Some(taken) = self.taken.get(&step) {
            return Some(taken.clone());
        }
        let batch = self.policy.batch;
        (self.accepted.len() as u64 >= batch)
            .then(|| self.accepted.iter().copied().take(batch as usize).collect())
    }

    /// Whether `step` has taken its groups already.
    pub(crate) fn has_taken(&self, step: u64) -> bool {
        self.taken.contains_key(&step)
    }

    /// Groups that are finished, up to those of a step.
    pub(crate) fn finished(&self) -> u64 {
        (self.accepted.len() as u64).min(self.policy.batch)
    }

    /// Optimiser steps that are done.
    pub(crate) fn trained(&self) -> u64 {
        self.trained
    }

    /// Whether a group is under way.
    pub(crate) fn is_active(&self) -> bool {
        !self.running.is_empty()
    }

    /// The first step from here on that has not taken its groups.
    pub(crate) fn next_step(&self) -> u64 {
        (self.trained..).find(|step| !self.taken.contains_key(step)).unwrap_or(self.trained)
    }

    /// Every group that some step from `step` on needs or may take, and no group that is only under way.
    pub(crate) fn kept(&self, step: u64) -> impl Iterator<Item = u64> {
        let taken = self.taken.range(step..).flat_map(|(_, groups)| groups);
        taken.chain(&self.accepted).copied()
    }
}

#[cfg(test)]
mod tests;
