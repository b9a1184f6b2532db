//! The loop of a follower that acts alone.

use std::sync::MutexGuard;
use std::time::Instant;

use driftless_store::wait::{Ended, Stop, backoff, lock};

use super::Follower;
use super::scrub::Scrubbing;
use crate::error::{Error, Result};

/// Takes the loop's switch away from the follower again. What engines' plugins were offered goes with the loop.
struct Watching<'a>(&'a Follower);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        *self.0.watching() = None;
        // Another request that outlives the loop may still need it.
        if let Ok(mut core) = self.0.core() {
            core.replica.end_offer();
        }
    }
}

/// When the loop looks at what.
struct Rounds {
    store_at: Instant,
    engines_at: Instant,
    /// Looks at the store in a row that failed.
    failures: u32,
    /// Versions in a row that engines were offered and that could not be kept.
    unkept: u32,
    scrubbing: Scrubbing,
}

impl Default for Rounds {
    fn default() -> Self {
        let now = Instant::now();
        Self { store_at: now, engines_at: now, failures: 0, unkept: 0, scrubbing: Scrubbing::default() }
    }
}

/// Whether a failure is told of that is the `count`th in a row: ever more seldom.
pub(super) fn is_told(count: u32) -> bool {
    count.is_power_of_two()
}

impl Follower {
    /// Has [`Follower::run_until`] poll at once. False if it is not running. One poll serves all calls before
    /// it begins.
    pub fn notify(&self) -> bool {
        let watching = self.watching();
        if let Some(stop) = &*watching {
            stop.wake();
        }
        watching.is_some()
    }

    pub(super) fn watching(&self) -> MutexGuard<'_, Option<Stop>> {
        lock(&self.shared.watching)
    }

    /// Follows the run: polls for the newest version, prepares it, activates it, and activates again every
    /// engine that was restarted or failed, each at its own pace. Transient failures are retried, ever more
    /// slowly, and shown in [`Follower::status`]; the old version keeps serving meanwhile.
    ///
    /// With `once` it returns after the first round, with that round's error if there is one. With
    /// [`FollowerOptions::until`](super::FollowerOptions) it returns when that version is on disk and every
    /// engine serves it. It returns when the last version is durable in its place.
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
            return self.sync();
        }
        let mut rounds = Rounds::default();
        while !stop.is_stopped() {
            let begin = Instant::now();
            let changed = if rounds.store_at <= begin { self.look(&mut rounds)? } else { false };
            // Also after a failure: an engine that was restarted during an outage of the store still gets
            // what is here.
            if changed || rounds.engines_at <= begin {
                rounds.engines_at = begin + self.options().engine_poll;
                if let Err(error) = self.activate_due() {
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(error, "not every engine is on the version");
                }
            }
            if changed {
                self.keep_offered(&mut rounds);
            }
            if self.is_done() {
                break;
            }
            let next = rounds.store_at.min(rounds.engines_at).saturating_duration_since(Instant::now());
            match self.wait_scrubbing(stop, next, &mut rounds.scrubbing) {
                Ended::Stopped => break,
                Ended::Woken => (rounds.store_at, rounds.engines_at) = (Instant::now(), Instant::now()),
                Ended::Over => {}
            }
        }
        match self.sync() {
            // Another request outlives this loop.
            Err(Error::Busy { .. }) => Ok(()),
            synced => synced,
        }
    }

    /// Looks for a newer version and prepares it. Whether engines have to be looked at.
    fn look(&self, rounds: &mut Rounds) -> Result<bool> {
        let begin = Instant::now();
        let prepared =
            if self.options().coordinated { self.check_durable().map(|()| false) } else { self.poll() };
        let changed = match prepared {
            Ok(changed) => changed,
            // Before the trainer's first publication, or while a coordinator's request is under way, nothing is wrong.
            Err(Error::NoSuchRun { .. } | Error::NoSuchVersion { .. } | Error::Busy { .. }) => false,
            Err(error) if is_final(&error) => return Err(error),
            Err(error @ Error::Collected { .. }) if self.options().until.is_some() => return Err(error),
            Err(error) => {
                rounds.failures += 1;
                let failures = rounds.failures;
                if is_told(failures) {
                    tracing::warn!(error = &error as &dyn std::error::Error, failures, "no progress");
                }
                let pause = backoff(self.options().poll, self.options().backoff_max, failures);
                rounds.store_at = Instant::now() + pause;
                return Ok(true);
            }
        };
        // From one look to the next, so that the way to the store is not waited for besides.
        (rounds.failures, rounds.store_at) = (0, begin + self.options().poll);
        Ok(changed)
    }

    /// Waits until the version that engines have taken is kept. One that is not is looked for again, ever more slowly.
    fn keep_offered(&self, rounds: &mut Rounds) {
        match self.keep() {
            Ok(true) => rounds.unkept = 0,
            // Another request has the version, and keeps it.
            Ok(false) | Err(Error::Busy { .. }) => {}
            Err(error) => {
                rounds.unkept += 1;
                let (error, unkept) = (&error as &dyn std::error::Error, rounds.unkept);
                if is_told(unkept) {
                    tracing::warn!(error, unkept, "engines may be ahead of the directory");
                }
                let pause = backoff(self.options().poll, self.options().backoff_max, unkept);
                rounds.store_at = Instant::now() + pause;
            }
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
