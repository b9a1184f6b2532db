//! Long calls: without the interpreter's lock, ended by Ctrl-C and by the interpreter's end, refused in a
//! forked child.

use crate::error;
use driftless::store::wait::Stop;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Time between two looks for a signal.
const LOOK: Duration = Duration::from_millis(50);

/// The calls under way, by number, each with its process: a forked child has the list too, and not the calls.
static UNDER_WAY: (Mutex<Calls>, Condvar) =
    (Mutex::new(Calls { next: 0, calls: BTreeMap::new() }), Condvar::new());

struct Calls {
    next: u64,
    calls: BTreeMap<u64, (u32, Stop)>,
}

fn calls() -> MutexGuard<'static, Calls> {
    UNDER_WAY.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call in the list.
struct Listed(u64);

impl Listed {
    fn new(stop: &Stop) -> Self {
        let mut list = calls();
        let number = list.next;
        list.next += 1;
        list.calls.insert(number, (std::process::id(), stop.clone()));
        Self(number)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        calls().calls.remove(&self.0);
        UNDER_WAY.1.notify_all();
    }
}

/// Stops the calls under way, and waits for their end, `seconds` at most. True if all have ended. The
/// interpreter calls it before it takes the memory away that they read.
#[pyfunction]
pub(crate) fn end(py: Python<'_>, seconds: f64) -> bool {
    let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    py.detach(|| {
        let here = std::process::id();
        let list = calls();
        list.calls.values().filter(|(process, _)| *process == here).for_each(|(_, stop)| stop.stop());
        let busy = |list: &mut Calls| list.calls.values().any(|(process, _)| *process == here);
        let waited = UNDER_WAY.1.wait_timeout_while(list, time, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    })
}

/// Runs `work` on a thread of its own, without the interpreter's lock. A signal whose handler raises (Ctrl-C)
/// throws `stop`, and is raised once `work` has ended.
pub(crate) fn run<T: Send>(py: Python<'_>, stop: &Stop, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let _listed = Listed::new(stop);
    py.detach(|| {
        std::thread::scope(|scope| {
            let (done, ended) = sync_channel(1);
            let worker =
                std::thread::Builder::new().name("driftless".to_owned()).spawn_scoped(scope, move || {
                    let result = work();
                    // Nobody listens any more only if this thread's owner has panicked.
                    let _ = done.send(());
                    result
                })?;
            let mut raised = None;
            while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if raised.is_none() {
                    raised = Python::attach(|py| py.check_signals()).err();
                    raised.iter().for_each(|_| stop.stop());
                }
            }
            let result = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            raised.map_or(Ok(result), Err)
        })
    })
}

/// Runs `work`, some seconds of it, on a thread that only the interpreter's end waits for.
pub(crate) fn beside(work: impl FnOnce() + Send + 'static) {
    let listed = Listed::new(&Stop::new());
    let spawned = std::thread::Builder::new().name("driftless".to_owned()).spawn(move || {
        let _listed = listed;
        work();
    });
    // Without the thread it is done when it is needed.
    drop(spawned);
}

/// Something with threads, locks and connections, which are those of one process. Its calls use it one at a
/// time ([`Held::with`]), or each a handle of it ([`Held::get`]); a value is used in one of the two ways,
/// because the second waits for the first.
pub(crate) struct Held<T: Send> {
    what: &'static str,
    process: u32,
    value: ManuallyDrop<Mutex<Option<T>>>,
}

impl<T: Send> Held<T> {
    pub(crate) fn new(what: &'static str, value: T) -> Self {
        Self { what, process: std::process::id(), value: ManuallyDrop::new(Mutex::new(Some(value))) }
    }

    /// Does something with the value.
    ///
    /// # Errors
    /// `ForkedError` in another process, `BusyError` during another call, `ClosedError` after
    /// [`Held::close`].
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> PyResult<R>) -> PyResult<R> {
        self.check()?;
        let mut guard = match self.value.try_lock() {
            Ok(guard) => guard,
            // What it holds is as sound as after a crash, which all of it is made for.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(error::own(
                    "BusyError",
                    format!("this {} is busy with another call; wait for its end", self.what),
                ));
            }
        };
        match &mut *guard {
            Some(value) => work(value),
            None => Err(self.closed()),
        }
    }

    /// A handle of the value, for values of which calls may use several at a time.
    ///
    /// # Errors
    /// As [`Held::with`], save `BusyError`.
    pub(crate) fn get(&self) -> PyResult<T>
    where
        T: Clone,
    {
        self.check()?;
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).clone();
        value.ok_or_else(|| self.closed())
    }

    fn closed(&self) -> PyErr {
        error::own("ClosedError", format!("this {} was closed", self.what))
    }

    /// Drops the value, which may wait for its threads.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.check()?;
        py.detach(|| {
            let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(value);
        });
        Ok(())
    }

    /// Whether this is the process that it belongs to, and it was not closed. Never waits for a call.
    pub(crate) fn check_open(&self) -> PyResult<()> {
        self.check()?;
        match self.value.try_lock() {
            Ok(value) if value.is_none() => Err(self.closed()),
            _ => Ok(()),
        }
    }

    /// Whether this is the process that it belongs to.
    pub(crate) fn check(&self) -> PyResult<()> {
        let here = std::process::id();
        if here == self.process {
            return Ok(());
        }
        let (what, home) = (self.what, self.process);
        Err(error::own(
            "ForkedError",
            format!(
                "this {what} belongs to process {home}, and this is process {here}, forked from it; open one here"
            ),
        ))
    }
}

impl<T: Send> Drop for Held<T> {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // Its threads are not here, and its locks are the parent's.
            return;
        }
        let value = self.value.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The interpreter drops it, and need not stand still meanwhile; where it has ended already, it has
        // nothing to stand still for.
        let _ = Python::try_attach(|py| py.detach(|| drop(value)));
    }
}
