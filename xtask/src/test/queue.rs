//! Two lanes run at a time, and a third one beside them if it mostly waits. Each begins as soon as what it needs is done.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Lanes that run at once, and how many of these have to be such as mostly wait. Two that compute keep two cores busy; a
/// third one that computes makes the others slower.
const AT_ONCE: usize = 3;
const WAITING: usize = 1;

/// One thing to do, and the names of those that come before it.
pub(super) struct Job<T> {
    pub(super) name: &'static str,
    pub(super) after: Vec<&'static str>,
    /// Whether it mostly waits: for processes, deadlines and disks.
    pub(super) waits: bool,
    pub(super) what: T,
}

struct State<T> {
    waiting: Vec<Job<T>>,
    running: BTreeSet<&'static str>,
}

impl<T> State<T> {
    /// Takes the first whose predecessors are neither waiting nor running: one that computes before one that waits, or
    /// one that waits alone. Predecessors that were not asked for at all are not waited for.
    fn take(&mut self, only_waits: bool) -> Option<Job<T>> {
        let found =
            if only_waits { self.ready(true) } else { self.ready(false).or_else(|| self.ready(true)) }?;
        let job = self.waiting.remove(found);
        self.running.insert(job.name);
        Some(job)
    }

    /// The first that may begin, of those that wait or of those that compute.
    fn ready(&self, waits: bool) -> Option<usize> {
        let names: BTreeSet<_> = self.waiting.iter().map(|job| job.name).collect();
        let open = |name: &&str| names.contains(*name) || self.running.contains(*name);
        self.waiting.iter().position(|job| job.waits == waits && !job.after.iter().any(&open))
    }

    /// Whether nothing runs and nothing may begin: jobs that wait for each other would wait for ever.
    fn is_stuck(&self) -> bool {
        self.running.is_empty() && self.ready(false).or_else(|| self.ready(true)).is_none()
    }
}

/// Runs all jobs and returns what they made, in the order in which they ended.
pub(super) fn run<T: Send, R: Send>(jobs: Vec<Job<T>>, one: impl Fn(T) -> R + Sync) -> Vec<R> {
    let state = Mutex::new(State { waiting: jobs, running: BTreeSet::new() });
    let (ended, results) = (Condvar::new(), Mutex::new(Vec::new()));
    let work = |only_waits: bool| {
        while let Some(job) = next(&state, &ended, only_waits) {
            let _end = End { name: job.name, state: &state, ended: &ended };
            let result = one(job.what);
            lock(&results).push(result);
        }
    };
    std::thread::scope(|scope| {
        let work = &work;
        for worker in 0..AT_ONCE {
            scope.spawn(move || work(worker < WAITING));
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Says that a job has ended, when this is dropped: also by a panic, behind which no other job begins.
struct End<'a, T> {
    name: &'static str,
    state: &'a Mutex<State<T>>,
    ended: &'a Condvar,
}

impl<T> Drop for End<'_, T> {
    fn drop(&mut self) {
        let mut state = lock(self.state);
        state.running.remove(self.name);
        if std::thread::panicking() {
            state.waiting.clear();
        }
        drop(state);
        self.ended.notify_all();
    }
}

/// The next job, once there is one that may begin; none when none is left.
fn next<T>(state: &Mutex<State<T>>, ended: &Condvar, only_waits: bool) -> Option<Job<T>> {
    let mut state = lock(state);
    loop {
        if let Some(job) = state.take(only_waits) {
            return Some(job);
        }
        if state.waiting.is_empty() || state.is_stuck() {
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
        Job { name, after: after.to_vec(), waits: name.starts_with("wait"), what: name }
    }

    #[test]
    fn jobs_begin_when_what_they_need_is_done() {
        let jobs = vec![job("last", &["middle", "absent"]), job("middle", &["first"]), job("first", &[])];
        assert_eq!(run(jobs, |name| name), ["first", "middle", "last"]);
    }

    #[test]
    fn jobs_run_at_once_beside_one_that_waits() {
        let all = std::sync::Barrier::new(AT_ONCE);
        let names = ["a", "b", "wait"];
        let ended = run(names.map(|name| job(name, &[])).into(), |_| all.wait());
        assert_eq!(ended.len(), AT_ONCE);
    }

    #[test]
    fn jobs_that_compute_come_before_those_that_wait() {
        let jobs = vec![job("wait", &[]), job("wait too", &[]), job("a", &[])];
        let mut state = State { waiting: jobs, running: BTreeSet::new() };
        let mut take = |only_waits| state.take(only_waits).map(|job| job.name);
        assert_eq!(
            [take(false), take(true), take(false), take(true)],
            [Some("a"), Some("wait"), Some("wait too"), None]
        );
    }

    #[test]
    fn only_jobs_that_wait_for_each_other_are_stuck() {
        let stuck = |jobs, running| State { waiting: jobs, running: BTreeSet::from_iter(running) }.is_stuck();
        let round = || vec![job("a", &["b"]), job("b", &["a"])];
        assert!(stuck(round(), None) && !stuck(round(), Some("c")));
        // Before the first job has begun, a worker that takes none of these has more to wait for.
        assert!(!stuck(vec![job("a", &[]), job("wait", &["a"])], None));
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn job_that_panics_holds_nothing_up() {
        run(vec![job("a", &[]), job("b", &["a"])], |name| assert_ne!(name, "a"));
    }
}
