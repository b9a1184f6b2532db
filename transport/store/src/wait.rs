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
