//! How much of the objects that arrive is asked for at the same time: as much as keeps a long line busy, and what is needed first in
//! front.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::key::Key;

/// Ranges that are under way at the beginning, and at least: 8 MiB, more than three times what 200 Mb/s hold in 100 ms.
const RANGES_MIN: usize = 16;
/// Ranges that are under way at most.
const RANGES_MAX: usize = 256;
/// Lengths that requests have in turn. Were they all alike, they would all end together, and the line would be idle until the next
/// ones are answered.
const LENGTHS: [usize; 4] = [1, 2, 3, 4];
/// After a request that was over sooner, more is asked for at once: the line takes more.
const QUICK: Duration = Duration::from_millis(250);
/// After one that took longer, less.
const SLOW: Duration = Duration::from_secs(2);

/// Who may ask for ranges. All objects of one spool share it.
#[derive(Debug)]
pub(super) struct Window {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ranges_max: usize,
    under_way: usize,
    requests: u64,
    waiting: BTreeSet<(Key, u64)>,
}

/// The right to ask for `ranges` ranges, until it is dropped.
#[derive(Debug)]
pub(super) struct Request<'a> {
    window: &'a Window,
    since: Instant,
    pub(super) ranges: usize,
}

impl Default for Window {
    fn default() -> Self {
        let state = State { ranges_max: RANGES_MIN, under_way: 0, requests: 0, waiting: BTreeSet::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Window {
    /// Waits for the right to ask for ranges of an object, for up to `most` of them at once. It goes to objects in the order of their
    /// keys, which is that of versions, and of what is decoded in them.
    ///
    /// The wait ends with requests that are under way, each of which has the store's deadline.
    pub(super) fn enter(&self, key: &Key, most: usize) -> Request<'_> {
        let mut state = self.lock();
        state.requests += 1;
        let turn = (key.clone(), state.requests);
        state.waiting.insert(turn.clone());
        while state.waiting.first() != Some(&turn) || state.under_way >= state.ranges_max {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.remove(&turn);
        let length = LENGTHS[state.requests as usize % LENGTHS.len()] * state.ranges_max / RANGES_MIN;
        let ranges = length.clamp(1, most.max(1));
        state.under_way += ranges;
        // There may be room for the next one, too.
        self.changed.notify_all();
        Request { window: self, since: Instant::now(), ranges }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes note of a request that is over.
    fn leave(&mut self, ranges: usize, took: Duration) {
        self.under_way -= ranges;
        if took < QUICK {
            self.ranges_max = (self.ranges_max + ranges).min(RANGES_MAX);
        } else if took > SLOW {
            self.ranges_max = self.ranges_max.saturating_sub(ranges).max(RANGES_MIN);
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.window.lock().leave(self.ranges, self.since.elapsed());
        self.window.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    #[test]
    fn whoever_is_needed_first_goes_first_and_no_more_is_under_way_than_allowed() {
        let window = Window::default();
        let mut held: Vec<Request<'_>> = Vec::new();
        while held.iter().map(|request| request.ranges).sum::<usize>() < RANGES_MIN {
            held.push(window.enter(&key("a"), usize::MAX));
        }
        let lengths: Vec<usize> = held.iter().map(|request| request.ranges).collect();
        assert!(lengths.windows(2).all(|pair| pair[0] != pair[1]), "{lengths:?} end together");
        let (entered, order) = channel();
        std::thread::scope(|scope| {
            for name in ["c", "b", "d"] {
                let (window, entered) = (&window, entered.clone());
                scope.spawn(move || {
                    let request = window.enter(&key(name), 1);
                    entered.send((name, request)).unwrap();
                });
            }
            while window.lock().waiting.len() < 3 {
                std::thread::yield_now();
            }
            assert!(order.try_recv().is_err());
            // Each that ends, having taken its time, lets one in.
            let mut ending = held.pop().unwrap();
            assert_eq!(ending.ranges, 4, "the one that went over");
            for expected in ["b", "c", "d"] {
                ending.since -= QUICK;
                drop(ending);
                let (name, request) = order.recv().unwrap();
                assert_eq!(name, expected);
                ending = request;
            }
        });
    }

    #[test]
    fn quick_requests_widen_it_and_slow_ones_narrow_it_within_bounds() {
        let mut state = State { ranges_max: RANGES_MIN, under_way: 0, requests: 0, waiting: BTreeSet::new() };
        let mut leave = |took| {
            state.under_way += 4;
            state.leave(4, took);
            state.ranges_max
        };
        assert_eq!(leave(Duration::from_millis(500)), RANGES_MIN);
        assert_eq!(leave(Duration::from_millis(10)), RANGES_MIN + 4);
        assert_eq!((0..1000).map(|_| leave(Duration::from_millis(10))).last(), Some(RANGES_MAX));
        assert_eq!(leave(Duration::from_secs(3)), RANGES_MAX - 4);
        assert_eq!((0..1000).map(|_| leave(Duration::from_secs(3))).last(), Some(RANGES_MIN));
        assert_eq!(state.under_way, 0);
    }
}
