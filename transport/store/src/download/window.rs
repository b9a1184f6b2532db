//! Bounds the bytes of objects under way: enough to keep a long line busy, with what is needed first in
//! front.
//!
//! Bytes are counted, not requests: what has arrived of a request makes room for the next one. If only the
//! end of a request made room, requests that share a line would end together, and the line would be idle for
//! a round trip.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::wait::lock;
use crate::{Key, OnBytes};

/// Bytes that are on their way at the beginning, and at least: more than three times what 200 Mb/s hold in
/// 100 ms.
const BYTES_MIN: u64 = 8 << 20;
/// Bytes that are on their way at most.
const BYTES_MAX: u64 = 128 << 20;
/// Requests that share the bytes on their way when each has just begun.
const REQUESTS: u64 = 16;
/// After a request that was over sooner, more is asked for at once: the line takes more.
const QUICK: Duration = Duration::from_millis(250);
/// After one that took longer, less.
const SLOW: Duration = Duration::from_secs(2);

/// The requests that may be under way. All objects of one cache share it.
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
    /// Whether what was asked for has come.
    done: bool,
    credit: Arc<Credit>,
}

/// Bytes of a request that are still on their way.
#[derive(Debug)]
struct Credit {
    shared: Arc<Shared>,
    left: Mutex<u64>,
}

impl Window {
    /// Waits for the right to ask for bytes of an object, a multiple of `unit` and at most `most` units, or
    /// the `left` bytes of it. It goes to objects in the order of their keys, which is that of versions, and
    /// of what is decoded in them.
    ///
    /// The wait ends with bytes that arrive or requests that are over, each of which has the store's
    /// deadline.
    pub(super) fn enter(&self, key: &Key, unit: u64, most: u64, left: u64) -> Request {
        let mut state = self.0.lock();
        state.requests += 1;
        let turn = (key.clone(), state.requests);
        state.waiting.insert(turn.clone());
        while state.waiting.first() != Some(&turn) || state.under_way >= state.bytes_max {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.remove(&turn);
        let units = (state.bytes_max / REQUESTS / unit.max(1)).clamp(1, most.max(1));
        let bytes = unit.saturating_mul(units).min(left.max(1));
        state.under_way = state.under_way.saturating_add(bytes);
        // There may be room for the next one, too.
        self.0.changed.notify_all();
        let credit = Arc::new(Credit { shared: self.0.clone(), left: Mutex::new(bytes) });
        Request { bytes, since: Instant::now(), done: false, credit }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
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
            self.bytes_max = self.bytes_max.saturating_add(bytes).min(BYTES_MAX);
        } else if took > SLOW {
            self.bytes_max = self.bytes_max.saturating_sub(bytes).max(BYTES_MIN);
        }
    }
}

impl Credit {
    /// Takes bytes off what is on its way.
    fn arrived(&self, bytes: u64) {
        let mut left = lock(&self.left);
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
    pub(super) fn arrived(&self) -> OnBytes {
        let credit = self.credit.clone();
        Arc::new(move |bytes| credit.arrived(bytes))
    }

    /// What was asked for has come: the time that it took tells how much the line takes.
    pub(super) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.done {
            self.credit.shared.lock().adjust(self.bytes, self.since.elapsed());
        }
        self.credit.arrived(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const UNIT: u64 = 512 << 10;
    /// After this a test that hangs ends.
    const LONG: Duration = Duration::from_secs(60);

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    fn full(window: &Window) -> Vec<Request> {
        (0..REQUESTS).map(|_| window.enter(&key("a"), UNIT, u64::MAX, u64::MAX)).collect()
    }

    #[test]
    fn window_smallest_key_goes_first_and_arrived_bytes_make_room() {
        let window = Window::default();
        let mut held = full(&window);
        assert_eq!(held.iter().map(|request| request.bytes).sum::<u64>(), BYTES_MIN);
        let (entered, order) = channel();
        std::thread::scope(|scope| {
            for name in ["c", "b", "d"] {
                let (window, entered) = (&window, entered.clone());
                scope.spawn(move || {
                    entered.send((name, window.enter(&key(name), UNIT, 1, u64::MAX))).unwrap()
                });
            }
            let begun = Instant::now();
            while window.0.lock().waiting.len() < 3 {
                assert!(begun.elapsed() < LONG, "all three wait");
                std::thread::yield_now();
            }
            assert!(order.try_recv().is_err());
            // One byte of one request is room for the next one, which is in it with all of its bytes.
            let arrived = held[0].arrived();
            arrived(1);
            let (name, first) = order.recv_timeout(LONG).unwrap();
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
                ending.done();
                let (name, entered) = order.recv_timeout(LONG).unwrap();
                assert_eq!((name, window.0.lock().under_way), (expected, BYTES_MIN));
                entered
            };
            drop([first, over("c"), over("d")]);
        });
        drop(held);
        assert_eq!(window.0.lock().under_way, 0);
    }

    #[test]
    fn window_quick_requests_widen_it_and_slow_ones_narrow_it() {
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
        let asked = |unit, most, left| window.enter(&key("a"), unit, most, left).bytes;
        assert_eq!(asked(UNIT, u64::MAX, u64::MAX), UNIT);
        assert_eq!(asked(3 * UNIT, u64::MAX, u64::MAX), 3 * UNIT);
        window.0.lock().bytes_max = BYTES_MAX;
        assert_eq!(asked(UNIT, u64::MAX, u64::MAX), BYTES_MAX / REQUESTS);
        assert_eq!(asked(UNIT, 2, u64::MAX), 2 * UNIT);
        assert_eq!(asked(UNIT, u64::MAX, 3), 3, "of a short object, what there is of it");
        assert_eq!(asked(u64::MAX, 1, u64::MAX), u64::MAX);
    }

    #[test]
    fn short_objects_do_not_take_the_room_of_long_ones() {
        let window = Window::default();
        let held: Vec<_> = (0..80).map(|_| window.enter(&key("a"), BYTES_MIN, 1, 100 << 10)).collect();
        assert_eq!(held.iter().map(|request| request.bytes).sum::<u64>(), 80 * (100 << 10));
    }

    #[test]
    fn window_failed_request_keeps_the_bound() {
        let window = Window::default();
        drop(window.enter(&key("a"), UNIT, u64::MAX, u64::MAX));
        assert_eq!(window.0.lock().bytes_max, BYTES_MIN);
        window.enter(&key("a"), UNIT, u64::MAX, u64::MAX).done();
        assert_eq!(window.0.lock().bytes_max, BYTES_MIN + UNIT);
    }
}
