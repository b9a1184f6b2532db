//! The groups of a run between what generates them for the log and the steps that take them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use driftless_bridge::Label;
use driftless_bridge::engine::Meter;
use driftless_buffer::{PromptState, Reader};
use tokio::sync::Notify;

use super::fates::{FAILED, Fates, TOO_OLD};
use super::record::{FILTERED, PromptNote};
use super::{now, parts};
use crate::failure::Failure;
use crate::goodput::Kept;
use crate::options::Mode;
use crate::schedule::{Policy, Schedule, Seen, Start};

/// What became of the groups since a step took some, besides those in the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Groups of which too few answers were generated, or that got no reward.
    pub failed: u64,
    /// Groups that the task's filter left out.
    pub filtered: u64,
    /// Groups of which every token is older than it may be.
    pub too_old: u64,
}

/// Attempts at answers that failed, by why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Failures {
    counts: [u64; Failure::ALL.len()],
    /// How many of them were followed by another attempt.
    pub made_again: u64,
}

impl Failures {
    /// Those that there were.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<Failure, u64> {
        Failure::ALL.into_iter().zip(self.counts).filter(|(_, count)| *count > 0).collect()
    }

    fn count(&mut self, failure: Failure) {
        self.counts[failure as usize] += 1;
    }
}

/// What generation was like since a step took groups.
#[derive(Debug, Clone, Copy, Default)]
pub struct Since {
    /// Groups that were finished and kept.
    pub kept: u64,
    /// Groups that were left out.
    pub dropped: Dropped,
    /// Attempts at answers that failed.
    pub failures: Failures,
    /// Time for which some group was under way.
    pub active: Duration,
    /// Time between two groups for which none was.
    pub idle: Duration,
}

/// Shared by [`Rollouts::run`](super::Rollouts::run) and the loop.
#[derive(Debug)]
pub struct Queue {
    mode: Mode,
    state: Mutex<State>,
    for_generation: Notify,
    for_training: Notify,
}

#[derive(Debug)]
struct State {
    schedule: Schedule,
    /// The versions that engines have been brought to, with their step weights; the newest is last.
    published: Vec<(u64, Label)>,
    since: Since,
    fates: Fates,
    /// When groups began or ceased to be under way; absent before the first.
    turned: Option<Instant>,
}

/// A group to be generated, on weights of `minimum` or later.
#[derive(Debug, Clone)]
pub(super) struct Order {
    pub(super) start: Start,
    pub(super) minimum: Option<Label>,
}

impl Queue {
    /// The groups that a log has, with `answers` answers each, in a run of which `step` steps are done and `taken` says
    /// what each learned from. A log of a release without a ledger says by itself which step its groups are of, before
    /// the first that `taken` names.
    #[must_use]
    pub fn open(
        policy: Policy,
        log: &Reader,
        answers: u64,
        step: u64,
        mut taken: BTreeMap<u64, Vec<u64>>,
    ) -> Self {
        let seat_of =
            |record: &driftless_buffer::Record| (record.scalars().sample_id, record.scalars().rollout_id);
        let done = log.prompts(PromptState::Done).into_iter();
        let kept = done.filter(|record| PromptNote::of(record).dropped.is_none());
        let mut accepted: BTreeMap<u64, u64> = kept.map(|record| seat_of(&record)).collect();
        let first = taken.keys().next().copied().unwrap_or(step);
        for (group, seat) in accepted.iter().filter(|(_, seat)| **seat < first) {
            taken.entry(*seat).or_default().push(*group);
        }
        let is_whole = |group: &u64| parts::group(log, *group, answers).is_some();
        // What the log has lost is not learned from again; other groups take its place.
        taken.retain(|made, groups| *made < step || groups.iter().all(is_whole));
        taken.values().flatten().for_each(|group| {
            accepted.remove(group);
        });
        let accepted: BTreeSet<u64> = accepted.into_keys().filter(is_whole).collect();
        let waiting = log.prompts(PromptState::InFlight).iter().map(seat_of).collect();
        let mode = policy.mode;
        let mut schedule = Schedule::new(policy).with_log(log.next_prompt(), accepted, waiting);
        taken.into_iter().for_each(|(step, groups)| schedule.see(Seen::Taken { step, groups }));
        schedule.see(Seen::Trained(step));
        let state = State {
            schedule,
            published: Vec::new(),
            since: Since::default(),
            fates: Fates::new(SystemTime::now()),
            turned: None,
        };
        Queue { mode, state: Mutex::new(state), for_generation: Notify::new(), for_training: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here can be left half-changed by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note that engines are brought to a version, of so many steps. Without a version any weights will do, now and
    /// later.
    pub fn published(&self, step: u64, label: Option<Label>) {
        let mut state = self.state();
        state.schedule.see(Seen::Published(if label.is_some() { step } else { u64::MAX }));
        // No seat is before the step that is next.
        let oldest = state.schedule.trained().saturating_sub(self.mode.max_staleness());
        state.published.retain(|(made, known)| *made >= oldest && Some(known) != label.as_ref());
        state.published.extend(label.map(|label| (step, label)));
        self.for_generation.notify_one();
    }

    /// Takes note that so many steps are done; fewer than before, where the learner goes back to its checkpoint.
    pub fn trained(&self, step: u64) {
        self.state().schedule.see(Seen::Trained(step));
        self.for_generation.notify_one();
    }

    /// The groups that `step` learns from, if enough are finished: those that it took before, or the oldest.
    #[must_use]
    pub fn batch(&self, step: u64) -> Option<Vec<u64>> {
        self.state().schedule.batch(step)
    }

    /// Whether `step` has taken its groups.
    #[must_use]
    pub fn has_taken(&self, step: u64) -> bool {
        self.state().schedule.has_taken(step)
    }

    /// Groups that are finished and not taken, up to those of a step.
    #[must_use]
    pub fn finished(&self) -> u64 {
        self.state().schedule.finished()
    }

    /// Whether a group is under way.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state().schedule.is_active()
    }

    /// Returns once a group was finished after the call before.
    pub async fn wait(&self) {
        self.for_training.notified().await;
    }

    /// Gives `step` its groups, and tells what generation was like since the step before. `too_old` is the share of each
    /// group's tokens that it does not learn from; 0 where it ends.
    #[must_use]
    pub fn take(&self, step: u64, groups: Vec<u64>, too_old: &[f64]) -> Since {
        let mut state = self.state();
        for (at, group) in groups.iter().enumerate() {
            state.fates.take(*group, too_old.get(at).copied().unwrap_or_default());
        }
        state.schedule.see(Seen::Taken { step, groups });
        state.turn(now());
        self.for_generation.notify_one();
        std::mem::take(&mut state.since)
    }

    /// Takes note of a group that another process has finished, from the record that its prompt is done.
    pub(crate) fn logged(&self, group: u64, note: &PromptNote) {
        let mut dropped = Dropped::default();
        let seen = match &note.dropped {
            None => Seen::Accepted(group),
            Some(why) => {
                let is_filtered = why.starts_with(FILTERED);
                (dropped.filtered, dropped.failed) = (is_filtered.into(), (!is_filtered).into());
                Seen::LeftOut(group)
            }
        };
        self.end(seen, dropped, now());
    }

    /// Leaves out a finished group that is too old to be learned from.
    pub fn leave_out(&self, group: u64) {
        let mut state = self.state();
        state.schedule.see(Seen::LeftOut(group));
        state.fates.leave_out(group, TOO_OLD);
        state.since.dropped.too_old += 1;
        self.for_generation.notify_one();
    }

    /// Every group of the log that a step from `step` on needs or may take.
    #[must_use]
    pub fn kept(&self, step: u64) -> Vec<u64> {
        self.state().schedule.kept(step).collect()
    }

    /// The groups to start now.
    pub(super) fn start(&self, now: Instant) -> Vec<Order> {
        let mut state = self.state();
        state.turn(now);
        let starts = state.schedule.start();
        if !starts.is_empty() {
            state.turned.get_or_insert(now);
        }
        let minimum = |start: &Start| state.minimum(self.mode, start.seat);
        starts.iter().map(|start| Order { start: *start, minimum: minimum(start) }).collect()
    }

    /// The groups to stop now.
    pub(super) fn stopped(&self) -> Vec<u64> {
        self.state().schedule.stopped().collect()
    }

    /// Returns once something has changed for what is to be started or stopped.
    pub(super) async fn changed(&self) {
        self.for_generation.notified().await;
    }

    /// Takes note of what became of a group, and returns what generation is like since a step took groups.
    pub(super) fn end(&self, seen: Seen, dropped: Dropped, now: Instant) -> Since {
        let mut state = self.state();
        state.turn(now);
        state.since.kept += u64::from(matches!(seen, Seen::Accepted(_)));
        state.since.dropped.failed += dropped.failed;
        state.since.dropped.filtered += dropped.filtered;
        if let Seen::LeftOut(group) = seen {
            state.fates.leave_out(group, if dropped.filtered > 0 { "filtered" } else { FAILED });
        }
        state.schedule.see(seen);
        self.for_training.notify_one();
        state.since
    }

    /// Counts an attempt at an answer that failed, and whether another follows.
    pub(super) fn failed(&self, failure: Failure, is_made_again: bool) {
        let failures = &mut self.state().since.failures;
        failures.made_again += u64::from(is_made_again);
        failures.count(failure);
    }

    /// What became of the time in which engines drew tokens for this run, since it was opened.
    pub(crate) fn fates(&self) -> Kept {
        self.state().fates.kept()
    }

    /// Counts what an attempt at an answer of a group drew as lost.
    pub(super) fn lost(&self, group: u64, attempt: &Meter) {
        self.state().fates.fail(group, attempt);
    }

    /// The meter of an attempt at an answer of a group, or of those that are measured only.
    pub(super) fn meter(&self, group: Option<u64>) -> Meter {
        self.state().fates.meter(group)
    }

    /// The step that takes groups next.
    pub(super) fn next_step(&self) -> u64 {
        self.state().schedule.next_step()
    }
}

impl State {
    /// Counts the time since the last call, before groups begin or cease to be under way. Nothing is idle before the
    /// first group.
    fn turn(&mut self, now: Instant) {
        let Some(last) = self.turned else { return };
        let is_active = self.schedule.is_active();
        let time = if is_active { &mut self.since.active } else { &mut self.since.idle };
        *time += now.saturating_duration_since(last);
        self.turned = Some(now);
    }

    /// The oldest weights that may generate a group of this seat.
    fn minimum(&self, mode: Mode, seat: u64) -> Option<Label> {
        let newest = self.published.last();
        let found = match mode {
            Mode::Bounded { max_staleness } => {
                let oldest = seat.saturating_sub(max_staleness);
                self.published.iter().find(|(step, _)| *step >= oldest).or(newest)
            }
            Mode::Synchronous | Mode::OneStepOff => newest,
        };
        found.map(|(_, label)| label.clone())
    }
}
