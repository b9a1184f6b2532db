//! Runs work on several threads and returns the results in order, with a bound on what is in flight.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::error::{Error, Result};
use crate::wait::lock;

/// Values that are used again, with the memory that they hold.
pub struct Reused<T> {
    bytes_max: usize,
    free: Mutex<Free<T>>,
}

/// Each with its bytes, and those of all.
#[derive(Default)]
struct Free<T> {
    values: Vec<(T, usize)>,
    bytes: usize,
}

impl<T> fmt::Debug for Reused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reused").field("bytes_max", &self.bytes_max).finish_non_exhaustive()
    }
}

impl<T: Default> Reused<T> {
    /// None yet. Of those that nobody uses, so many bytes are kept.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, free: Mutex::default() }
    }

    /// One that was given, or a new one.
    pub fn take(&self) -> T {
        let mut free = lock(&self.free);
        let Some((value, bytes)) = free.values.pop() else { return T::default() };
        free.bytes -= bytes;
        value
    }

    /// Keeps a value, which holds so many bytes, unless that is too much.
    pub fn give(&self, value: T, bytes: usize) {
        let mut free = lock(&self.free);
        if free.bytes.saturating_add(bytes) <= self.bytes_max {
            free.bytes += bytes;
            free.values.push((value, bytes));
        }
    }

    /// Gives the memory of all back.
    pub fn clear(&self) {
        let free = std::mem::take(&mut *lock(&self.free));
        drop(free);
    }
}

/// How much may be under way at once.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Threads that work, beside the caller's.
    pub threads: usize,
    /// Sum of the weights of the items that were fed and not yet taken. One item alone may weigh more.
    pub weight: u64,
}

/// The threads that this machine gives, at most `max`.
#[must_use]
pub fn threads(max: usize) -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(max)
}

/// Items go to a thread together until they weigh so much: handing one over takes as long as working on a few
/// KiB.
const TOGETHER: u64 = 4 << 20;

/// Takes the items `weights` stands for through `feed` (on this thread, in order), `work` (on
/// `bounds.threads` others) and `take` (on this thread, in order).
///
/// # Errors
/// The first error of any of the three, in the order of the items. [`Error::Internal`] for work that
/// panicked, before the panic goes on.
pub fn in_order<J: Send, T: Send, E: From<Error> + Send>(
    weights: &[u64],
    bounds: Bounds,
    feed: impl FnMut(usize) -> Result<J, E>,
    work: impl Fn(J) -> Result<T, E> + Sync,
    take: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    // Every thread gets several lots, however little there is.
    let total = weights.iter().fold(0u64, |sum, weight| sum.saturating_add(*weight));
    let together = TOGETHER.min(bounds.weight).min(total / (8 * bounds.threads.max(1) as u64));
    run(weights, bounds, Some(together), feed, work, take)
}

/// As [`in_order`], but results are taken as they come: no result waits for a slower thread.
///
/// # Errors
/// As [`in_order`], the first one that comes.
pub fn as_they_come<T: Send, E: From<Error> + Send>(
    weights: &[u64],
    bounds: Bounds,
    work: impl Fn(usize) -> Result<T, E> + Sync,
    take: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    run(weights, bounds, None, Ok, work, take)
}

/// With `together`, results are taken in order, and items go to a thread in lots of up to that weight.
fn run<J: Send, T: Send, E: From<Error> + Send>(
    weights: &[u64],
    bounds: Bounds,
    together: Option<u64>,
    mut feed: impl FnMut(usize) -> Result<J, E>,
    work: impl Fn(J) -> Result<T, E> + Sync,
    mut take: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    let lots = lots(weights, together);
    let (jobs, inbox) = channel::<Vec<(usize, J)>>();
    let (outbox, results) = channel();
    let (inbox, over) = (Mutex::new(inbox), AtomicBool::new(false));
    thread::scope(|scope| {
        let (inbox, work) = (&inbox, &work);
        let _over = Over(&over);
        for _ in 0..bounds.threads.clamp(1, lots.len().max(1)) {
            let outbox = outbox.clone();
            let over = &over;
            scope.spawn(move || serve(inbox, &outbox, work, over));
        }
        drop(outbox);
        let mut waiting = BTreeMap::new();
        let (mut fed, mut in_flight) = (lots.iter().peekable(), 0u64);
        for taken in 0..weights.len() {
            while let Some((lot, more)) = fed
                .next_if(|(lot, more)| lot.start == taken || in_flight.saturating_add(*more) <= bounds.weight)
            {
                let jobs_of_lot = lot.clone().map(|index| Ok((index, feed(index)?)));
                in_flight = in_flight.saturating_add(*more);
                // The threads end with the sender, which this closure owns.
                jobs.send(jobs_of_lot.collect::<Result<_, E>>()?).map_err(|_| PANICKED)?;
            }
            while waiting.is_empty() || together.is_some() && !waiting.contains_key(&taken) {
                waiting.extend(results.recv().map_err(|_| PANICKED)?);
            }
            if let Some((index, result)) = waiting.pop_first() {
                take(index, result?)?;
                in_flight = in_flight.saturating_sub(weights[index]);
            }
        }
        drop(jobs);
        Ok(())
    })
}

/// Items that follow each other, in lots of up to `most` or of one, each with its weight; all alone without
/// `most`.
fn lots(weights: &[u64], most: Option<u64>) -> Vec<(Range<usize>, u64)> {
    let mut lots: Vec<(Range<usize>, u64)> = Vec::new();
    for (index, weight) in weights.iter().enumerate() {
        match lots.last_mut() {
            Some((lot, sum)) if most.is_some_and(|most| sum.saturating_add(*weight) <= most) => {
                (lot.end, *sum) = (index + 1, *sum + weight);
            }
            _ => lots.push((index..index + 1, *weight)),
        }
    }
    lots
}

const PANICKED: Error = Error::Internal { what: "the work on other threads" };

/// Has what was fed and not begun be left, once the caller's thread wants no more results.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends the results of a lot also when the work panics, so that the caller does not wait for ever.
struct Reply<'a, T, E: From<Error>> {
    /// Items of the lot that have no result yet.
    missing: Range<usize>,
    results: Vec<(usize, Result<T, E>)>,
    outbox: &'a Sender<Vec<(usize, Result<T, E>)>>,
}

impl<T, E: From<Error>> Drop for Reply<'_, T, E> {
    fn drop(&mut self) {
        self.results.extend(self.missing.clone().map(|index| (index, Err(PANICKED.into()))));
        // A receiver that is gone has an error already.
        let _ = self.outbox.send(std::mem::take(&mut self.results));
    }
}

fn serve<J, T, E: From<Error>>(
    inbox: &Mutex<Receiver<Vec<(usize, J)>>>,
    outbox: &Sender<Vec<(usize, Result<T, E>)>>,
    work: &(impl Fn(J) -> Result<T, E> + Sync),
    over: &AtomicBool,
) {
    loop {
        let received = lock(inbox).recv();
        let Ok(lot) = received else { return };
        let Some((first, _)) = lot.first() else { continue };
        if over.load(Relaxed) {
            return;
        }
        let missing = *first..first + lot.len();
        let mut reply = Reply { missing, results: Vec::with_capacity(lot.len()), outbox };
        for (index, job) in lot {
            if over.load(Relaxed) {
                return;
            }
            let result = work(job);
            reply.missing.start = index + 1;
            reply.results.push((index, result));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    use super::*;

    #[test]
    fn reused_memory_comes_back_unless_it_is_too_much() {
        let reused = Reused::<Vec<u8>>::new(2000);
        for bytes in [1000, 1001, 1000] {
            reused.give(Vec::with_capacity(bytes), bytes);
        }
        let capacities = || [(); 3].map(|()| reused.take().capacity());
        assert_eq!(capacities(), [1000, 1000, 0]);
        reused.give(Vec::with_capacity(2000), 2000);
        assert_eq!(capacities(), [2000, 0, 0], "what was taken makes room");
        reused.give(Vec::with_capacity(10), 10);
        reused.clear();
        reused.give(Vec::with_capacity(2000), 2000);
        assert_eq!(capacities(), [2000, 0, 0]);
    }

    const BOUNDS: Bounds = Bounds { threads: 3, weight: 10 };

    #[test]
    fn lots_cover_all_items_in_order_and_weigh_no_more_than_allowed() {
        let weights = [3, 3, 3, 9, 20, 0, 0, 10, 1];
        let found = lots(&weights, Some(10));
        assert_eq!(found, [(0..3, 9), (3..4, 9), (4..5, 20), (5..8, 10), (8..9, 1)]);
        assert_eq!(lots(&[1, 0, 0], None), [(0..1, 1), (1..2, 0), (2..3, 0)]);
        assert!(lots(&[], Some(5)).is_empty());
    }

    #[test]
    fn results_come_in_order_and_no_more_is_under_way_than_allowed() {
        let weights: Vec<u64> = (0..200).map(|i| if i == 50 { 99 } else { i % 7 }).collect();
        let (in_flight, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut taken = Vec::new();
        in_order(
            &weights,
            BOUNDS,
            |index| {
                let now = in_flight.fetch_add(weights[index], SeqCst) + weights[index];
                if index != 50 {
                    most.fetch_max(now, SeqCst);
                }
                Ok::<_, Error>(index)
            },
            |index| Ok(index * 2),
            |index, result| {
                assert_eq!(result, index * 2);
                in_flight.fetch_sub(weights[index], SeqCst);
                taken.push(index);
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(taken, (0..200).collect::<Vec<_>>());
        // An item is weighed until it was taken, the one being taken included.
        assert!(most.load(SeqCst) <= 10 + 99, "{most:?}");
    }

    #[test]
    fn the_first_error_in_order_ends_the_work() {
        let bad = |index: usize| Error::BadText { what: "item", text: index.to_string(), expected: "none" };
        let run = |feed: Option<usize>, work: Option<usize>, take: Option<usize>| {
            let check =
                |at: Option<usize>, index| if at == Some(index) { Err(bad(index)) } else { Ok(index) };
            let outcome = in_order(
                &[1; 40],
                BOUNDS,
                |index| check(feed, index),
                |index| check(work, index),
                |index, _| check(take, index).map(drop),
            );
            match outcome {
                Err(Error::BadText { text, .. }) => text.parse::<usize>().ok(),
                Ok(()) => None,
                Err(error) => panic!("{error:?}"),
            }
        };
        assert_eq!(run(None, None, None), None);
        assert_eq!(run(None, Some(7), Some(9)), Some(7));
        assert_eq!(run(None, Some(9), Some(7)), Some(7));
        assert_eq!(run(Some(0), None, None), Some(0));
    }

    #[test]
    fn as_they_come_slow_item_delays_no_other() {
        // The first item ends when all others have been taken.
        let (all, held) = channel();
        let held = Mutex::new(held);
        let mut taken = Vec::new();
        let work = |index: usize| {
            if index == 0 {
                held.lock().unwrap().recv().unwrap();
            }
            Ok::<_, Error>(index)
        };
        as_they_come(&[1; 40], Bounds { threads: 3, weight: 4 }, work, |index, result| {
            assert_eq!(index, result);
            taken.push(index);
            if taken.len() == 39 {
                all.send(()).unwrap();
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(taken.pop(), Some(0));
        taken.sort_unstable();
        assert_eq!(taken, (1..40).collect::<Vec<_>>());
    }

    #[test]
    fn an_error_ends_work_whose_order_does_not_matter() {
        let bad = || Error::BadText { what: "item", text: "7".to_owned(), expected: "none" };
        let work = |index: usize| if index == 7 { Err(bad()) } else { Ok(index) };
        let outcome = as_they_come(&[1; 40], BOUNDS, work, |_, _| Ok(()));
        assert!(matches!(outcome, Err(Error::BadText { .. })), "{outcome:?}");
    }

    #[test]
    fn work_that_was_fed_is_left_when_the_caller_wants_no_more() {
        let (jobs, inbox) = channel();
        let (outbox, results) = channel();
        jobs.send(vec![(0, 0)]).unwrap();
        serve(&Mutex::new(inbox), &outbox, &Ok::<usize, Error>, &AtomicBool::new(true));
        assert!(results.try_recv().is_err());
    }

    #[test]
    fn in_order_without_items_is_done() {
        in_order(&[], BOUNDS, Ok::<_, Error>, Ok, |_, _: usize| Ok(())).unwrap();
    }

    #[test]
    fn in_order_panic_is_passed_on_at_once() {
        let outcome = std::panic::catch_unwind(|| {
            in_order(
                &[1; 9],
                BOUNDS,
                Ok::<_, Error>,
                |i: usize| if i == 4 { panic!("work") } else { Ok(i) },
                |_, _| Ok(()),
            )
        });
        assert!(outcome.is_err());
    }
}
