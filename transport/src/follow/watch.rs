//! The loop of a follower that acts alone.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Follower;
use super::scrub::Scrubbing;
use crate::error::{Error, Result};

/// A switch that ends [`Follower::run_until`], from any thread.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<(Mutex<Switch>, Condvar)>);

#[derive(Debug, Default)]
struct Switch {
    /// Since when it is thrown.
    stopped: Option<Instant>,
    /// The wait under way, or the next one, ends at once.
    nudged: bool,
}

impl Stop {
    /// A switch that is not thrown.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Throws the switch. The loop ends after the step it is in.
    pub fn stop(&self) {
        self.change(|switch| _ = switch.stopped.get_or_insert_with(Instant::now));
    }

    /// Ends the wait that is under way, or else the next one, without throwing the switch.
    pub(super) fn nudge(&self) {
        self.change(|switch| switch.nudged = true);
    }

    fn change(&self, change: impl FnOnce(&mut Switch)) {
        let (switch, changed) = &*self.0;
        change(&mut switch.lock().unwrap_or_else(PoisonError::into_inner));
        changed.notify_all();
    }

    /// Whether the switch was thrown.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.since().is_some()
    }

    /// When the switch was thrown.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).stopped
    }

    /// Sleeps for `time` or until the switch is thrown; true if it was.
    #[must_use]
    pub fn wait(&self, time: Duration) -> bool {
        self.pause(time) == Ended::Stopped
    }

    /// [`Stop::wait`], with what ended it.
    pub(super) fn pause(&self, time: Duration) -> Ended {
        let (switch, changed) = &*self.0;
        let guard = switch.lock().unwrap_or_else(PoisonError::into_inner);
        let waited =
            changed.wait_timeout_while(guard, time, |switch| switch.stopped.is_none() && !switch.nudged);
        let mut switch = waited.unwrap_or_else(PoisonError::into_inner).0;
        match (switch.stopped, std::mem::take(&mut switch.nudged)) {
            (Some(_), _) => Ended::Stopped,
            (None, true) => Ended::Nudged,
            (None, false) => Ended::Over,
        }
    }
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The switch was thrown.
    Stopped,
    /// There is something to look at.
    Nudged,
    /// The time was over.
    Over,
}

/// Takes the loop's switch away from the follower again.
struct Watching<'a>(&'a Follower);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        *self.0.watching() = None;
    }
}

impl Follower {
    /// Has [`Follower::run_until`] look at the store at once: somebody says that there is a version. False if nobody runs it.
    /// One look serves all who ask before it begins.
    pub fn notify(&self) -> bool {
        let watching = self.watching();
        if let Some(stop) = &*watching {
            stop.nudge();
        }
        watching.is_some()
    }

    pub(super) fn watching(&self) -> MutexGuard<'_, Option<Stop>> {
        self.shared.watching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the run: polls for the newest version, prepares it, activates it, and activates again every
    /// engine that was restarted or failed, each at its own pace. Transient failures are retried, ever more
    /// slowly, and shown in [`Follower::status`]; the old version keeps serving meanwhile.
    ///
    /// With `once` it returns after the first round, with that round's error if there is one. With
    /// [`FollowerOptions::until`](super::FollowerOptions) it returns when that version is on disk and every engine serves it. It
    /// returns when the last version is durable in its place.
    ///
    /// # Errors
    ///
    /// Those that no retry mends: another run or model under the pinned name, a rewind, a damaged replica, an
    /// unknown format or feature; [`Error::Collected`] for a last version that was.
    pub fn run_until(&self, stop: &Stop, once: bool) -> Result<()> {
        *self.watching() = Some(stop.clone());
        let _watching = Watching(self);
        if once {
            self.prepare(None)?;
            self.activate()?;
            return self.settle();
        }
        let (mut failures, mut scrubbing) = (0, Scrubbing::default());
        while !stop.is_stopped() {
            let began = Instant::now();
            let prepared = if self.options().coordinated { self.check_durable() } else { self.look() };
            match prepared {
                // Before the trainer's first publication, or while a coordinator's request is under way,
                // nothing is wrong.
                Ok(()) | Err(Error::NoSuchRun { .. } | Error::NoSuchVersion { .. } | Error::Busy { .. }) => {
                    failures = 0
                }
                Err(error) if is_final(&error) => return Err(error),
                Err(error @ Error::Collected { .. }) if self.options().until.is_some() => return Err(error),
                Err(error) => {
                    failures += 1;
                    tracing::warn!(error = &error as &dyn std::error::Error, failures, "no progress");
                }
            }
            // Also after a failure: an engine that was restarted during an outage of the store still gets
            // what is here.
            if let Err(error) = self.activate_due() {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "not every engine is on the version"
                );
            }
            if self.is_done() {
                break;
            }
            // From one look to the next, so that the way to the store is not waited for besides; after a failure, in full.
            let spent = if failures == 0 { began.elapsed() } else { Duration::ZERO };
            let pause = backoff(self.options().poll, self.options().backoff_max, failures);
            if self.wait_scrubbing(stop, pause.saturating_sub(spent), &mut scrubbing) {
                break;
            }
        }
        match self.settle() {
            // Somebody else's request outlives this loop.
            Err(Error::Busy { .. }) => Ok(()),
            settled => settled,
        }
    }

    /// Whether the last version to follow is on disk and on every engine.
    fn is_done(&self) -> bool {
        let (Some(until), Some(applied)) = (self.options().until, self.status().applied) else {
            return false;
        };
        applied.version >= until
            && applied.engines.iter().all(|engine| engine.label.as_ref() == Some(&applied.label))
    }
}

/// Whether waiting and trying again cannot help.
fn is_final(error: &Error) -> bool {
    matches!(
        error,
        Error::ForeignRun { .. }
            | Error::ForeignModel { .. }
            | Error::Rewind { .. }
            | Error::DamagedReplica { .. }
            | Error::UnknownFeature { .. }
            | Error::Unsupported { .. }
            | Error::BadSetting { .. }
            | Error::BadName { .. }
    )
}

/// `base` doubled with every failure, up to `max`.
pub(crate) fn backoff(base: Duration, max: Duration, failures: u32) -> Duration {
    base.saturating_mul(2u32.saturating_pow(failures.min(16))).min(max.max(base))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_limit() {
        let [base, max] = [Duration::from_millis(100), Duration::from_secs(1)];
        let waits: Vec<_> = (0..6).map(|failures| backoff(base, max, failures).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff(max, base, 40), max, "a limit below the base does not make polling faster");
    }

    #[test]
    fn a_nudge_ends_one_wait_and_throws_nothing() {
        let stop = Stop::new();
        stop.nudge();
        stop.nudge();
        assert!(!stop.wait(Duration::from_secs(3600)), "the wait that follows ends");
        assert!(!stop.wait(Duration::ZERO) && !stop.is_stopped());
        let other = stop.clone();
        let waiter = std::thread::spawn(move || other.wait(Duration::from_secs(3600)));
        stop.nudge();
        assert!(!waiter.join().unwrap());
    }

    #[test]
    fn a_thrown_switch_ends_every_wait() {
        let stop = Stop::new();
        assert!(!stop.wait(Duration::ZERO));
        let other = stop.clone();
        let waiter = std::thread::spawn(move || other.wait(Duration::from_secs(3600)));
        stop.stop();
        assert!(waiter.join().unwrap());
        assert!(stop.is_stopped());
    }
}
