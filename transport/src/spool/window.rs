//! How much of the objects that arrive is on its way at the same time: as much as keeps a long line busy, and what is needed first
//! in front.
//!
//! Bytes are counted, not requests: what has arrived of a request makes room for the next one before it is over. Were room made
//! only by requests that end, those that share a line would end together, and the line would be idle until the next ones are
//! answered.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::key::Key;
use crate::store::Arrived;

/// Bytes that are on their way at the beginning, and at least: more than three times what 200 Mb/s hold in 100 ms.
const BYTES_MIN: u64 = 8 << 20;
/// Bytes that are on their way at most.
const BYTES_MAX: u64 = 128 << 20;
/// Requests that share the bytes on their way when each has just begun.
const REQUESTS: u64 = 16;
/// After a request that was over sooner, more is asked for at once: the line takes more.
const QUICK: Duration = Duration::from_millis(250);
/// After one that took longer, less.
const SLOW: Duration = Duration::from_secs(2);

/// Who may ask for bytes. All objects of one spool share it.
#[derive(Debug, Default)]
pub(super) struct Window(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    bytes_max: u64,
    under_way: u64,
    requests: u64,
    waiting: BTreeSet<(Key, u64)>,
}

/// The right to ask for `bytes` bytes, until it is dropped.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    since: Instant,
    credit: Arc<Credit>,
}

/// Bytes of a request that are still on their way.
#[derive(Debug)]
struct Credit {
    shared: Arc<Shared>,
    left: Mutex<u64>,
}

impl Window {
    /// Waits for the right to ask for bytes of an object, a multiple of `unit` and at most `most` units. It goes to objects in the
    /// order of their keys, which is that of versions, and of what is decoded in them.
    ///
    /// The wait ends with bytes that arrive or requests that are over, each of which has the store's deadline.
    pub(super) fn enter(&self, key: &Key, unit: u64, most: u64) -> Request {
        let mut state = self.0.lock();
        state.requests += 1;
        let turn = (key.clone(), state.requests);
        state.waiting.insert(turn.clone());
        while state.waiting.first() != Some(&turn) || state.under_way >= state.bytes_max {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.remove(&turn);
        let bytes = unit.saturating_mul((state.bytes_max / REQUESTS / unit.max(1)).clamp(1, most.max(1)));
        state.under_way += bytes;
        // There may be room for the next one, too.
        self.0.changed.notify_all();
        let credit = Arc::new(Credit { shared: self.0.clone(), left: Mutex::new(bytes) });
        Request { bytes, since: Instant::now(), credit }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for State {
    fn default() -> Self {
        Self { bytes_max: BYTES_MIN, under_way: 0, requests: 0, waiting: BTreeSet::new() }
    }
}

impl State {
    /// Takes note of a request of so many bytes that is over.
    fn adjust(&mut self, bytes: u64, took: Duration) {
        if took < QUICK {
            self.bytes_max = (self.bytes_max + bytes).min(BYTES_MAX);
        } else if took > SLOW {
            self.bytes_max = self.bytes_max.saturating_sub(bytes).max(BYTES_MIN);
        }
    }
}

impl Credit {
    /// Takes bytes off what is on its way.
    fn arrived(&self, bytes: u64) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of a try that failed come again.
        let bytes = bytes.min(*left);
        *left -= bytes;
        drop(left);
        let mut state = self.shared.lock();
        state.under_way -= bytes;
        if state.under_way < state.bytes_max {
            self.shared.changed.notify_all();
        }
    }
}

impl Request {
    /// What is to be told of bytes that have arrived.
    pub(super) fn arrived(&self) -> Arrived {
        let credit = self.credit.clone();
        Arc::new(move |bytes| credit.arrived(bytes))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.credit.shared.lock().adjust(self.bytes, self.since.elapsed());
        self.credit.arrived(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const UNIT: u64 = 512 << 10;

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    fn full(window: &Window) -> Vec<Request> {
        (0..REQUESTS).map(|_| window.enter(&key("a"), UNIT, u64::MAX)).collect()
    }

    #[test]
    fn whoever_is_needed_first_goes_first_and_bytes_that_arrive_make_room() {
        let window = Window::default();
        let mut held = full(&window);
        assert_eq!(held.iter().map(|request| request.bytes).sum::<u64>(), BYTES_MIN);
        let (entered, order) = channel();
        std::thread::scope(|scope| {
            for name in ["c", "b", "d"] {
                let (window, entered) = (&window, entered.clone());
                scope.spawn(move || entered.send((name, window.enter(&key(name), UNIT, 1))).unwrap());
            }
            while window.0.lock().waiting.len() < 3 {
                std::thread::yield_now();
            }
            assert!(order.try_recv().is_err());
            // One byte of one request is room for the next one, which is in it with all of its bytes.
            let arrived = held[0].arrived();
            arrived(1);
            let (name, first) = order.recv().unwrap();
            assert_eq!(name, "b");
            arrived(UNIT - 1);
            // What arrives twice counts once.
            arrived(UNIT);
            assert_eq!(window.0.lock().under_way, BYTES_MIN);
            assert!(order.try_recv().is_err());
            // A request that is over, having taken its time, is room, too.
            let mut over = |expected| {
                let mut ending = held.pop().unwrap();
                ending.since -= QUICK;
                drop(ending);
                let (name, entered) = order.recv().unwrap();
                assert_eq!((name, window.0.lock().under_way), (expected, BYTES_MIN));
                entered
            };
            drop([first, over("c"), over("d")]);
        });
        drop(held);
        assert_eq!(window.0.lock().under_way, 0);
    }

    #[test]
    fn quick_requests_widen_it_and_slow_ones_narrow_it_within_bounds() {
        let mut state = State::default();
        let mut over = |took| {
            state.adjust(UNIT, took);
            state.bytes_max
        };
        assert_eq!(over(Duration::from_millis(500)), BYTES_MIN);
        assert_eq!(over(Duration::from_millis(10)), BYTES_MIN + UNIT);
        assert_eq!((0..1000).map(|_| over(Duration::from_millis(10))).last(), Some(BYTES_MAX));
        assert_eq!(over(Duration::from_secs(3)), BYTES_MAX - UNIT);
        assert_eq!((0..1000).map(|_| over(Duration::from_secs(3))).last(), Some(BYTES_MIN));
    }

    #[test]
    fn requests_are_whole_units_and_grow_with_the_window() {
        let window = Window::default();
        assert_eq!(window.enter(&key("a"), UNIT, u64::MAX).bytes, UNIT);
        assert_eq!(window.enter(&key("a"), 3 * UNIT, u64::MAX).bytes, 3 * UNIT);
        window.0.lock().bytes_max = BYTES_MAX;
        assert_eq!(window.enter(&key("a"), UNIT, u64::MAX).bytes, BYTES_MAX / REQUESTS);
        assert_eq!(window.enter(&key("a"), UNIT, 2).bytes, 2 * UNIT);
    }
}
