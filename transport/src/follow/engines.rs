//! What a follower does with its engines: which it asks when, and what it notes of the answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_store::chain_text;
use driftless_store::os::crash_point;
use driftless_store::wait::backoff;

use super::watch::is_told;
use super::worker::{Answer, Job, Order, Worker};
use super::{Core, Follower, millis};
use crate::activate::{Activate, Activated, Limit};
use crate::error::{Error, Result};
use crate::ids::Version;

/// What an engine is asked first, as errors name it.
pub(super) const POLL: &str = "report its version";

/// How its weights are looked at, as errors name it.
pub(super) const SAMPLE: &str = "compare a sample of its weights";

/// What the status says of an engine that has a later version than the directory: a follower before this one ended, or
/// failed, before it had kept what it had offered.
const AHEAD: &str = "it serves a later version than the directory, which is brought there first";

/// What the status says of an engine that has the version and does not generate.
const PAUSED: &str = "it is paused, and not by this follower: send it POST /continue_generation";

/// An engine, and when it is asked again.
pub(super) struct Slot {
    pub(super) worker: Worker,
    /// How often in a row it did not say what it serves, and when it is asked again.
    failures: u32,
    poll_at: Instant,
    /// How often in a row it did not take the version although it was there, and when that is tried again.
    refusals: u32,
    pub(super) load_at: Instant,
    /// What it loaded may have been damaged, or another program wrote it.
    pub(super) reload: bool,
    /// Samples that were compared, and when the next one is.
    sampled: u64,
    sample_at: Instant,
}

impl Slot {
    pub(super) fn new(engine: Box<dyn Activate>) -> Result<Self> {
        let now = Instant::now();
        let worker = Worker::start(engine)?;
        let (failures, refusals, sampled, reload) = (0, 0, 0, false);
        Ok(Self { worker, failures, poll_at: now, refusals, load_at: now, reload, sampled, sample_at: now })
    }
}

impl Follower {
    /// Asks the engines whose time has come by `due`, or all of them, and activates the version on those that
    /// serve another one.
    pub(super) fn activate_in(&self, core: &mut Core, due: Option<Instant>) -> Result<()> {
        let options = &self.shared.options;
        let Core { replica, engines, released, is_new, .. } = core;
        let ordered = !options.coordinated || *released == replica.applied().map(|applied| applied.version);
        let checkpoint = replica.share()?;
        let manifest = Arc::new(replica.held()?.1.clone());
        let label = manifest.label();
        let stop = self.watching().clone().unwrap_or_default();
        let is_due = |at: Instant| due.is_none_or(|now| at <= now);

        let chosen: Vec<bool> = engines.iter().map(|slot| is_due(slot.poll_at)).collect();
        let limit = Limit::new(options.serving_deadline, stop.clone());
        let served = ask_all(engines, &chosen, POLL, &limit, options.leave_deadline, |_| Job::Serving);
        let order = Order { checkpoint: checkpoint.clone(), manifest, limit };
        self.sample(engines, &served, &order);
        let last = options.last(self.status().newest).or(options.until);
        // Whoever asks for a version gets it, and a coordinator decides for itself.
        let goes_there = |served: Option<&Result<Answer>>| {
            let alone = due.is_some() && !options.coordinated;
            alone
                && matches!(served, Some(Ok(Answer::Serving(Some(serving)))) if is_ahead(serving, &label, last))
        };
        let stale = |(slot, served): (&Slot, &Option<Result<Answer>>)| {
            let reload = slot.reload && matches!(served, Some(Ok(_)));
            let is_other = serves_another(served.as_ref(), &label) && !goes_there(served.as_ref());
            ordered && (reload || is_other) && is_due(slot.load_at)
        };
        let stale: Vec<bool> = engines.iter().zip(&served).map(stale).collect();
        if stale.contains(&true) {
            crash_point("follow.activate")?;
        }
        self.note_paused(engines, |index| stale[index]);
        let order = Order { limit: Limit::new(options.activate_deadline, stop), ..order };
        let limit = &order.limit;
        if engines.iter().zip(&stale).any(|(slot, stale)| *stale && !slot.worker.waits()) {
            checkpoint.wait(limit.left())?;
        }
        let leave = options.leave_deadline;
        let activated = ask_all(engines, &stale, "activate", limit, leave, |_| Job::Activate(order.clone()));
        if ordered {
            checkpoint.want();
            if std::mem::take(is_new) {
                self.end_phases(&activated);
            }
        }

        let mut first_failure = None;
        for (index, (slot, (served, activated))) in
            engines.iter_mut().zip(served.into_iter().zip(activated)).enumerate()
        {
            let Some(outcome) = activated.or(served) else { continue };
            if let Err(error) = self.record(index, slot, &label, outcome) {
                // A caller that asked for the round is given the first one.
                let (failures, refusals) = (slot.failures, slot.refusals);
                if (due.is_some() && is_told(failures + refusals)) || first_failure.is_some() {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, failures, refusals, "engine is not on {label}");
                }
                first_failure.get_or_insert(error);
            }
        }
        self.note_paused(engines, |_| false);
        first_failure.map_or(Ok(()), Err)
    }

    /// Adds what the first round of engines was to the phases of the version on disk.
    fn end_phases(&self, activated: &[Option<Result<Answer>>]) {
        let mut status = self.status_mut();
        let Some(phases) = status.applied.as_mut().and_then(|ack| ack.phases.last_mut()) else { return };
        for answer in activated {
            if let Some(Ok(Answer::Activated(Activated { copy: Some(copy), patch: Some(patch), .. }))) =
                answer
            {
                phases.served(millis(*copy), millis(*patch));
            }
        }
        self.counters_mut().phased(phases.of_engine());
    }

    /// Compares a sample of the weights of each engine that says that it serves the version, where it is time for one.
    /// Those that another program has written are loaded again.
    fn sample(&self, engines: &mut [Slot], served: &[Option<Result<Answer>>], order: &Order) {
        let (options, now) = (self.options(), Instant::now());
        if options.sample_poll.is_zero() || order.checkpoint.is_written() != Some(true) {
            return;
        }
        let label = order.manifest.label();
        let is_due = |(slot, served): (&Slot, &Option<Result<Answer>>)| {
            let serves =
                matches!(served, Some(Ok(Answer::Serving(serving))) if serving.as_ref() == Some(&label));
            serves && !slot.reload && !slot.worker.is_paused() && slot.sample_at <= now
        };
        let due: Vec<bool> = engines.iter().zip(served).map(is_due).collect();
        let job = |slot: &Slot| Job::Sample(order.clone(), slot.sampled);
        let found = ask_all(engines, &due, SAMPLE, &order.limit, options.leave_deadline, job);
        for (slot, found) in engines.iter_mut().zip(found) {
            let Some(found) = found else { continue };
            slot.sample_at = now + options.sample_poll;
            let engine = slot.worker.name();
            match found {
                Ok(Answer::Sampled(Some(differs))) => {
                    tracing::warn!(
                        engine,
                        label,
                        differs,
                        "another program wrote its weights; it is brought back"
                    );
                    self.counters_mut().foreign_write(engine);
                    slot.reload = true;
                }
                Ok(_) => slot.sampled += 1,
                Err(error) => tracing::debug!(engine, label, error = chain_text(&error), "no sample"),
            }
        }
    }

    /// Notes which engines may be paused: those of which an activation begins or has not answered yet, and
    /// those that were paused.
    fn note_paused(&self, engines: &mut [Slot], begins: impl Fn(usize) -> bool) {
        let mut names = self.maybe_paused_mut();
        let before = std::mem::take(&mut *names);
        for (index, Slot { worker, .. }) in engines.iter_mut().enumerate() {
            let still_inside = worker.is_busy() && before.iter().any(|name| name == worker.name());
            if begins(index) || still_inside || worker.is_paused() {
                names.push(worker.name().to_owned());
            }
        }
    }

    /// Notes what became of one engine, and when to ask it again if it failed.
    fn record(&self, index: usize, slot: &mut Slot, label: &str, outcome: Result<Answer>) -> Result<()> {
        let paused = slot.worker.is_paused();
        slot.reload &= !matches!(outcome, Ok(Answer::Activated(_)));
        let counted = match &outcome {
            Ok(Answer::Serving(_) | Answer::Sampled(_)) => Ok(None),
            Ok(Answer::Activated(activated)) => Ok(Some(activated)),
            Err(_) => Err(()),
        };
        self.counters_mut().activated(slot.worker.name(), counted, Instant::now());
        let activated = counted.ok().flatten();
        if let Some(Activated { pause, how, compared, .. }) = activated {
            let (engine, pause_ms) = (slot.worker.name(), millis(*pause));
            tracing::info!(engine, label, pause_ms, ?how, ?compared, "activated");
        }
        if let Some(entry) = self.status_mut().applied.as_mut().and_then(|ack| ack.engines.get_mut(index)) {
            entry.up = !matches!(&outcome, Err(error) if is_away(error));
            entry.paused = entry.up && paused;
            if let Some(Activated { pause, how, compared, .. }) = activated {
                entry.pause_ms = Some(millis(*pause));
                (entry.how, entry.compared) = (how.clone(), compared.clone());
            }
            entry.label = None;
            match &outcome {
                Ok(Answer::Serving(Some(serving))) if is_ahead(serving, label, None) => {
                    entry.error = Some(AHEAD.into());
                }
                Ok(Answer::Serving(serving)) if slot.reload || serving.as_deref() != Some(label) => {}
                Ok(_) if paused => entry.error = Some(PAUSED.into()),
                Ok(_) => (entry.label, entry.error) = (Some(label.to_owned()), None),
                Err(error) => entry.error = Some(chain_text(error)),
            }
        }
        self.schedule(slot, label, &outcome);
        outcome.map(drop)
    }

    /// Decides when an engine is asked again. One that is away is asked soon. One that is there and does not
    /// take the version is asked ever later, until it was away or there is another version.
    fn schedule(&self, slot: &mut Slot, label: &str, outcome: &Result<Answer>) {
        let (options, now) = (self.options(), Instant::now());
        match outcome {
            Err(error) if is_away(error) => {
                slot.failures += 1;
                slot.poll_at = now + backoff(options.engine_poll, options.backoff_max, slot.failures);
                (slot.refusals, slot.load_at) = (0, now);
            }
            Err(_) => {
                (slot.failures, slot.poll_at) = (0, now);
                slot.refusals += 1;
                slot.load_at = now + backoff(options.engine_poll, options.refusal_backoff_max, slot.refusals);
            }
            Ok(Answer::Serving(serving)) if slot.reload || serving.as_deref() != Some(label) => {
                slot.failures = 0;
            }
            Ok(answer) => {
                (slot.failures, slot.refusals) = (0, 0);
                if matches!(answer, Answer::Activated(_)) {
                    // What it loads is compared then, and what is patched is a change of what was.
                    slot.sample_at = now + options.sample_poll;
                }
            }
        }
    }
}

/// Whether an error says that an engine does not answer.
fn is_away(error: &Error) -> bool {
    matches!(error, Error::Engine { action: POLL, .. } | Error::EngineTimeout { action: POLL, .. })
}

/// Whether an engine answered that it serves anything but `label`.
fn serves_another(answer: Option<&Result<Answer>>, label: &str) -> bool {
    matches!(answer, Some(Ok(Answer::Serving(serving))) if serving.as_deref() != Some(label))
}

/// Whether the label `serving` is of a later version of the run than `label` is, of one that is followed: up to `last`.
fn is_ahead(serving: &str, label: &str, last: Option<Version>) -> bool {
    let parts = |label: &str| {
        let (run, version) = label.rsplit_once(':')?;
        Some((run.to_owned(), version.parse::<Version>().ok()?))
    };
    let Some(((run, served), (own, here))) = parts(serving).zip(parts(label)) else { return false };
    run == own && here < served && last.is_none_or(|last| served <= last)
}

/// Asks the chosen engines at once and waits for each up to the common limit, and then for as long as it may
/// take to leave; `None` for those that were not asked.
fn ask_all(
    engines: &mut [Slot],
    chosen: &[bool],
    action: &'static str,
    limit: &Limit,
    leave: Duration,
    job: impl Fn(&Slot) -> Job,
) -> Vec<Option<Result<Answer>>> {
    let asked: Vec<Option<Result<()>>> = engines
        .iter_mut()
        .zip(chosen)
        .map(|(slot, chosen)| {
            let job = chosen.then(|| job(slot))?;
            Some(slot.worker.ask(action, job))
        })
        .collect();
    engines
        .iter_mut()
        .zip(asked)
        .map(|(slot, asked)| asked.map(|asked| asked.and_then(|()| slot.worker.wait(action, limit, leave))))
        .collect()
}
