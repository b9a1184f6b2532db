//! Two lanes run at a time. Each begins as soon as what it needs is done.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Lanes that run at once. Two keep two cores busy from begin to end; a third one makes the others slower.
const AT_ONCE: usize = 2;

/// One thing to do, and the names of those that come before it.
pub(super) struct Job<T> {
    pub(super) name: &'static str,
    pub(super) after: Vec<&'static str>,
    pub(super) what: T,
}

struct State<T> {
    waiting: Vec<Job<T>>,
    running: BTreeSet<&'static str>,
}

impl<T> State<T> {
    /// Takes the first whose predecessors are neither waiting nor running. Those that were not asked for at all are
    /// not waited for.
    fn take(&mut self) -> Option<Job<T>> {
        let names: BTreeSet<_> = self.waiting.iter().map(|job| job.name).collect();
        let open = |name: &&str| names.contains(*name) || self.running.contains(*name);
        let ready = self.waiting.iter().position(|job| !job.after.iter().any(&open))?;
        let job = self.waiting.remove(ready);
        self.running.insert(job.name);
        Some(job)
    }
}

/// Runs all jobs and returns what they made, in the order in which they ended.
pub(super) fn run<T: Send, R: Send>(jobs: Vec<Job<T>>, one: impl Fn(T) -> R + Sync) -> Vec<R> {
    let state = Mutex::new(State { waiting: jobs, running: BTreeSet::new() });
    let (ended, results) = (Condvar::new(), Mutex::new(Vec::new()));
    let work = || {
        while let Some(job) = next(&state, &ended) {
            let _end = End { name: job.name, state: &state, ended: &ended };
            let result = one(job.what);
            lock(&results).push(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(work);
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Says that a job has ended, when this is dropped: also by a panic.
struct End<'a, T> {
    name: &'static str,
    state: &'a Mutex<State<T>>,
    ended: &'a Condvar,
}

impl<T> Drop for End<'_, T> {
    fn drop(&mut self) {
        lock(self.state).running.remove(self.name);
        self.ended.notify_all();
    }
}

/// The next job, once there is one that may begin; none when none is left.
fn next<T>(state: &Mutex<State<T>>, ended: &Condvar) -> Option<Job<T>> {
    let mut state = lock(state);
    loop {
        if let Some(job) = state.take() {
            return Some(job);
        }
        // Jobs that wait for each other would wait for ever.
        if state.waiting.is_empty() || state.running.is_empty() {
            return None;
        }
        state = ended.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &'static str, after: &[&'static str]) -> Job<&'static str> {
        Job { name, after: after.to_vec(), what: name }
    }

    #[test]
    fn jobs_begin_when_what_they_need_is_done() {
        let jobs = vec![job("last", &["middle", "absent"]), job("middle", &["first"]), job("first", &[])];
        assert_eq!(run(jobs, |name| name), ["first", "middle", "last"]);
    }

    #[test]
    fn jobs_run_at_once() {
        let all = std::sync::Barrier::new(AT_ONCE);
        let names = ["a", "b"];
        let ended = run(names.map(|name| job(name, &[])).into(), |_| all.wait());
        assert_eq!(ended.len(), AT_ONCE);
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn job_that_panics_holds_nothing_up() {
        run(vec![job("a", &[]), job("b", &["a"])], |name| assert_ne!(name, "a"));
    }
}
