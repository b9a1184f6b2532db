//! The loop of a follower that acts alone.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use driftless_store::wait::{Stop, backoff};

use super::Follower;
use super::scrub::Scrubbing;
use crate::error::{Error, Result};

/// Takes the loop's switch away from the follower again.
struct Watching<'a>(&'a Follower);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        *self.0.watching() = None;
    }
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
        self.shared.watching.lock().unwrap_or_else(PoisonError::into_inner)
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
        let (mut failures, mut scrubbing) = (0, Scrubbing::default());
        while !stop.is_stopped() {
            let began = Instant::now();
            let prepared = if self.options().coordinated { self.check_durable() } else { self.poll() };
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
            // From one look to the next, so that the way to the store is not waited for besides; after a
            // failure, in full.
            let spent = if failures == 0 { began.elapsed() } else { Duration::ZERO };
            let pause = backoff(self.options().poll, self.options().backoff_max, failures);
            if self.wait_scrubbing(stop, pause.saturating_sub(spent), &mut scrubbing) {
                break;
            }
        }
        match self.sync() {
            // Another request outlives this loop.
            Err(Error::Busy { .. }) => Ok(()),
            synced => synced,
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
