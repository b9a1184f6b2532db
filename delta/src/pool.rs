//! Work on many blocks at once, on threads that the caller owns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Jobs at a time for each thread of a pool: bounds the memory for results that wait for those before them.
const JOBS_PER_THREAD: usize = 8;

/// Threads that the caller owns, or none. What comes out does not depend on it, bit for bit.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// struct Threads(usize);
///
/// impl driftless_delta::Pool for Threads {
///     fn threads(&self) -> usize {
///         self.0
///     }
///
///     fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
///         let next = AtomicUsize::new(0);
///         let take = || std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|at| *at < jobs);
///         std::thread::scope(|scope| {
///             (0..self.0.min(jobs)).for_each(|_| drop(scope.spawn(|| take().for_each(job))));
///         });
///     }
/// }
/// # use driftless_delta::{DigestTable, Element, Encoder, Profile, Serial, Source};
/// # let base = vec![0; 10 << 20];
/// # let mut new = base.clone();
/// # (0..new.len()).step_by(1001).for_each(|at| new[at] = 1);
/// # let digests = DigestTable::of(Element::Bf16, &base)?;
/// # let source = Source { element: Element::Bf16, bytes: &base, digests: &digests };
/// # let (mut one, mut two) = (Vec::new(), Vec::new());
/// # Encoder::new().encode(&Serial, source, &new, Profile::Wire, &mut one)?;
/// # Encoder::new().encode(&Threads(2), source, &new, Profile::Wire, &mut two)?;
/// # assert_eq!(one, two);
/// # Ok::<(), driftless_delta::Error>(())
/// ```
pub trait Pool {
    /// How many jobs may run at the same time; at least 1.
    fn threads(&self) -> usize;

    /// Calls `job` once with each number below `jobs`, in any order and on any threads, and returns when all
    /// calls have.
    ///
    /// Each is best given to the next thread that is free: there are few of them, so threads that take
    /// several at once wait for each other. Jobs that were left out are done by the caller of `run`; a number
    /// that is too large, or comes twice, does nothing.
    fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync));
}

/// No pool: one job after the other, on the thread that asks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Pool for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        (0..jobs).for_each(job);
    }
}

/// Results of jobs in order, and the scratch memory `S` of those that run; both are used again and again.
#[derive(Debug, Default)]
pub(crate) struct Jobs<S, T> {
    scratch: Mutex<Vec<S>>,
    results: Vec<Mutex<Slot<T>>>,
}

#[derive(Debug, Default)]
struct Slot<T> {
    done: bool,
    error: Option<Error>,
    result: T,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A job that panicked has left its scratch behind, which the next one does not read.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Default + Send, T: Default + Send> Jobs<S, T> {
    /// Does `work` for each number below `jobs` and hands the results to `take` in order, up to the first error.
    pub(crate) fn run(
        &mut self,
        pool: &dyn Pool,
        jobs: usize,
        work: impl Fn(usize, &mut S, &mut T) -> Result<()> + Sync,
        mut take: impl FnMut(&mut T),
    ) -> Result<()> {
        let wave = match pool.threads() {
            0 | 1 => 1,
            threads => threads.saturating_mul(JOBS_PER_THREAD).min(jobs),
        };
        for first in (0..jobs).step_by(wave.max(1)) {
            let count = wave.min(jobs - first);
            if self.results.len() < count {
                self.results.resize_with(count, Mutex::default);
            }
            let (scratch, slots) = (&self.scratch, &mut self.results[..count]);
            slots.iter_mut().for_each(|slot| slot_of(slot).done = false);
            let slots_now = &*slots;
            let job = |at: usize| {
                let Some(mut slot) = slots_now.get(at).map(lock) else { return };
                if !slot.done {
                    let mut own = lock(scratch).pop().unwrap_or_default();
                    let Slot { error, result, .. } = &mut *slot;
                    *error = work(first + at, &mut own, result).err();
                    slot.done = true;
                    lock(scratch).push(own);
                }
            };
            if count > 1 {
                pool.run(count, &job);
            }
            (0..count).for_each(job);
            for slot in slots.iter_mut().map(slot_of) {
                match slot.error.take() {
                    Some(error) => return Err(error),
                    None => take(&mut slot.result),
                }
            }
        }
        Ok(())
    }
}

fn slot_of<T>(slot: &mut Mutex<Slot<T>>) -> &mut Slot<T> {
    slot.get_mut().unwrap_or_else(PoisonError::into_inner)
}
