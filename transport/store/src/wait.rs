//! Threads that wait: a switch that ends waits, pauses between tries, and locks that a panic leaves usable.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Locks what no panic leaves in halves.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `base` doubled with every failure, up to `max`.
#[must_use]
pub fn backoff(base: Duration, max: Duration, failures: u32) -> Duration {
    base.saturating_mul(2u32.saturating_pow(failures.min(16))).min(max.max(base))
}

/// A switch that ends loops and waits, from any thread.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<(Mutex<Switch>, Condvar)>);

#[derive(Debug, Default)]
struct Switch {
    /// Since when it is thrown.
    stopped: Option<Instant>,
    /// The wait under way, or the next one, ends at once.
    woken: bool,
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
    pub fn wake(&self) {
        self.change(|switch| switch.woken = true);
    }

    fn change(&self, change: impl FnOnce(&mut Switch)) {
        let (switch, changed) = &*self.0;
        change(&mut lock(switch));
        changed.notify_all();
    }

    /// Whether the switch was thrown.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.since().is_some()
    }

    /// When the switch was thrown.
    #[must_use]
    pub fn since(&self) -> Option<Instant> {
        lock(&self.0.0).stopped
    }

    /// Sleeps for `time` or until the switch is thrown; true if it was.
    #[must_use]
    pub fn wait(&self, time: Duration) -> bool {
        self.pause(time) == Ended::Stopped
    }

    /// [`Stop::wait`], with what ended it.
    #[must_use]
    pub fn pause(&self, time: Duration) -> Ended {
        let (switch, changed) = &*self.0;
        let guard = lock(switch);
        let waited =
            changed.wait_timeout_while(guard, time, |switch| switch.stopped.is_none() && !switch.woken);
        let mut switch = waited.unwrap_or_else(PoisonError::into_inner).0;
        match (switch.stopped, std::mem::take(&mut switch.woken)) {
            (Some(_), _) => Ended::Stopped,
            (None, true) => Ended::Woken,
            (None, false) => Ended::Over,
        }
    }
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The switch was thrown.
    Stopped,
    /// It was woken.
    Woken,
    /// The time was over.
    Over,
}

/// Work under way, as those see it who wait for it.
#[derive(Clone, Debug, Default)]
pub struct Awaited(Arc<(Mutex<Progress>, Condvar)>);

#[derive(Debug, Default)]
struct Progress {
    /// Whether anybody wants it done now.
    wanted: bool,
    /// None before it ended; then whether that went well.
    outcome: Option<bool>,
}

impl Awaited {
    /// Whether it went well; `None` before its end.
    #[must_use]
    pub fn outcome(&self) -> Option<bool> {
        lock(&self.0.0).outcome
    }

    /// Has it done now, if it waits for a reason.
    pub fn want(&self) {
        self.change(|progress| progress.wanted = true);
    }

    /// Wants it, and waits for its end; `None` if that has not come after `limit`.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> Option<bool> {
        self.want();
        self.wait_while(limit, |progress| progress.outcome.is_none());
        self.outcome()
    }

    fn wait_while(&self, limit: Duration, waits: impl Fn(&Progress) -> bool) {
        let waited = self.0.1.wait_timeout_while(lock(&self.0.0), limit, |progress| waits(progress));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut lock(&self.0.0));
        self.0.1.notify_all();
    }
}

/// The same, for whoever does it. Dropped before [`Doing::end`], it did not go well.
#[derive(Debug, Default)]
pub struct Doing(Awaited);

impl Doing {
    /// What others wait on.
    #[must_use]
    pub fn awaited(&self) -> Awaited {
        self.0.clone()
    }

    /// Waits until somebody wants it, for `limit` at most.
    pub fn hold(&self, limit: Duration) {
        self.0.wait_while(limit, |progress| !progress.wanted);
    }

    /// It is done.
    pub fn end(self) {
        self.0.change(|progress| progress.outcome = Some(true));
    }
}

impl Drop for Doing {
    fn drop(&mut self) {
        self.0.change(|progress| _ = progress.outcome.get_or_insert(false));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn work_is_held_until_it_is_wanted_or_the_limit_passes() {
        let doing = Doing::default();
        doing.hold(Duration::ZERO);
        let awaited = doing.awaited();
        assert_eq!(awaited.outcome(), None);
        let (tell, told) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                doing.hold(Duration::from_secs(600));
                tell.send(()).unwrap();
            });
            assert!(told.try_recv().is_err());
            awaited.want();
            told.recv_timeout(Duration::from_secs(60)).unwrap();
        });
        // What was wanted once is not held again.
        doing.hold(Duration::from_secs(600));
    }

    #[test]
    fn who_waits_hears_the_end_or_that_there_will_be_none() {
        for well in [true, false] {
            let doing = Doing::default();
            let awaited = doing.awaited();
            assert_eq!(awaited.wait(Duration::ZERO), None);
            let waiter = thread::spawn(move || awaited.wait(Duration::from_secs(600)));
            if well {
                doing.end()
            } else {
                drop(doing)
            }
            assert_eq!(waiter.join().unwrap(), Some(well));
        }
    }

    #[test]
    fn backoff_doubles_up_to_its_limit() {
        let [base, max] = [Duration::from_millis(100), Duration::from_secs(1)];
        let waits: Vec<_> = (0..6).map(|failures| backoff(base, max, failures).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff(max, base, 40), max, "a limit below the base does not make polling faster");
    }

    #[test]
    fn wake_ends_one_wait_and_throws_nothing() {
        let stop = Stop::new();
        stop.wake();
        stop.wake();
        assert!(!stop.wait(Duration::from_secs(3600)), "the wait that follows ends");
        assert!(!stop.wait(Duration::ZERO) && !stop.is_stopped());
        let other = stop.clone();
        let waiter = std::thread::spawn(move || other.wait(Duration::from_secs(3600)));
        stop.wake();
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
