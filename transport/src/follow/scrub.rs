//! A follower reads its checkpoint in the background, and rebuilds it where bytes are not as it left them.

use std::time::{Duration, Instant};

use driftless_store::wait::{Ended, Stop};

use super::{Follower, record_applied};
use crate::error::Error;
use crate::replica::Scrub;

/// Bytes that are read at a time; other requests for the replica wait for them.
const SLICE_BYTES: u64 = 4 << 20;
/// Until the next try where there is nothing to read, or where it cannot be repaired.
const AGAIN: Duration = Duration::from_secs(5);

/// A follower's scrub: how far it is, and when it goes on.
#[derive(Default)]
pub(super) struct Scrubbing {
    scrub: Scrub,
    due: Option<Instant>,
}

impl Follower {
    /// Waits for `time`, until it is woken, or until the switch is thrown. Meanwhile the checkpoint is read at
    /// the rate that was asked for. Where the directory has to be built anew, it ends as if woken.
    pub(super) fn wait_scrubbing(&self, stop: &Stop, time: Duration, scrubbing: &mut Scrubbing) -> Ended {
        let rate = self.options().scrub_bytes_per_hour;
        let begin = Instant::now();
        loop {
            let left = time.saturating_sub(begin.elapsed());
            let due =
                scrubbing.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()));
            if rate == 0 || due >= left {
                return stop.pause(left);
            }
            let ended = stop.pause(due);
            if ended != Ended::Over {
                return ended;
            }
            let Some(read) = self.scrub_slice(&mut scrubbing.scrub) else { return Ended::Woken };
            let pause = match read {
                0 => AGAIN,
                // A year at most, which no clock minds.
                read => Duration::from_secs_f64((read as f64 * 3600.0 / rate as f64).min(3.2e7)),
            };
            scrubbing.due = Some(Instant::now() + pause);
        }
    }

    /// Reads a little; `None` if that showed damage, and the directory is to be built anew.
    fn scrub_slice(&self, scrub: &mut Scrub) -> Option<u64> {
        // Another request has the replica.
        let Ok(mut core) = self.core() else { return Some(0) };
        let core = &mut *core;
        let damage = match core.replica.scrub(scrub, SLICE_BYTES) {
            Ok(read) => {
                self.counters_mut().scrubbed(read);
                return Some(read);
            }
            Err(damage @ Error::DamagedReplica { .. }) => damage,
            Err(error) => return self.put_off(error),
        };
        // An engine that loads the damaged bytes is done with them first.
        if core.engines.iter_mut().any(|slot| slot.worker.is_busy()) {
            return Some(0);
        }
        self.counters_mut().scrub_mismatch();
        if let Err(error) = core.replica.quarantine(damage) {
            return self.put_off(error);
        }
        // Whatever their label, what they loaded may have been damaged.
        core.engines.iter_mut().for_each(|slot| slot.reload = true);
        record_applied(&mut self.status_mut(), &core.replica, &core.engines, Duration::ZERO, 0);
        None
    }

    /// Shows an error that a later look may not meet any more.
    fn put_off(&self, error: Error) -> Option<u64> {
        tracing::warn!(error = &error as &dyn std::error::Error, "the checkpoint cannot be scrubbed");
        drop(self.note::<()>(Err(error)));
        Some(0)
    }
}
