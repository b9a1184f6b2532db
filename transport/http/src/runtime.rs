//! The threads that drive this process's connections to stores, relays and engines (feature `client`).
//!
//! Clients share one runtime. A server has threads of its own, which end with it.

use std::io;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use tokio::runtime::{Builder, Handle, RuntimeFlavor};

use crate::error::{Error, Result};

/// Fewest and most threads of a runtime that is made here, which otherwise has one a core.
const THREADS: [usize; 2] = [2, 8];

/// The runtime, and the process that it belongs to: a forked child has none of its parent's threads.
static SHARED: Mutex<Option<(u32, Handle)>> = Mutex::new(None);

/// The runtime that [`provide`] was given. Without one it is made at the first call, and lasts as long as the
/// process.
///
/// # Errors
/// The operating system's, if its threads cannot be started.
pub fn handle() -> io::Result<Handle> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((process, handle)) = &*shared
        && *process == std::process::id()
    {
        return Ok(handle.clone());
    }
    let cores = thread::available_parallelism().map_or(THREADS[0], usize::from);
    let threads = cores.clamp(THREADS[0], THREADS[1]);
    let mut builder = Builder::new_multi_thread();
    let made = builder.worker_threads(threads).thread_name("driftless-io").enable_all().build()?;
    let handle = made.handle().clone();
    // It lasts as long as the process. A parent's would wait for its threads, which are not here.
    std::mem::forget(made);
    std::mem::forget(shared.replace((std::process::id(), handle.clone())));
    Ok(handle)
}

/// Has connections driven by the caller's runtime, which has to outlive every store and client. Called before
/// the first of them is made.
///
/// # Errors
/// [`Error::BadSetting`] for a runtime of one thread, which drives nothing while that thread waits, and when
/// this process has a runtime for its connections already.
pub fn provide(handle: Handle) -> Result<()> {
    let refuse = |expected: &str, found: &str| {
        Err(Error::BadSetting { name: "runtime", expected: expected.into(), found: found.into() })
    };
    if handle.runtime_flavor() == RuntimeFlavor::CurrentThread {
        return refuse("a multi-threaded one", "a runtime of the current thread");
    }
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.as_ref().is_some_and(|(process, _)| *process == std::process::id()) {
        return refuse("given before the first connection, once", "given when there was one");
    }
    std::mem::forget(shared.replace((std::process::id(), handle)));
    Ok(())
}

/// Has `runtime` carry out a call, and waits for what it gives; `None` if it panicked. The caller's thread is none of
/// that runtime's.
pub fn run<T: Send + 'static>(runtime: &Handle, call: impl Future<Output = T> + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    runtime.spawn(async move {
        // The receiver waits below.
        let _ = sender.send(call.await);
    });
    receiver.recv().ok()
}

/// Waits for a future while `runtime` drives its connections. The caller's thread may be one of a runtime, if
/// that is another one.
pub fn wait<T: Send>(runtime: &Handle, future: impl Future<Output = T> + Send) -> T {
    if Handle::try_current().is_err() {
        return runtime.block_on(future);
    }
    // A runtime's thread may not wait for another runtime's work itself.
    thread::scope(|scope| match scope.spawn(|| runtime.block_on(future)).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    async fn timer() -> u8 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        7
    }

    #[test]
    fn wait_from_any_thread_ends() {
        let runtime = handle().unwrap();
        assert_eq!(wait(&runtime, timer()), 7);
        let other = Builder::new_current_thread().build().unwrap();
        assert_eq!(other.block_on(async { wait(&runtime, timer()) }), 7);
        assert_eq!(runtime.id(), handle().unwrap().id(), "one runtime for all");
    }

    #[test]
    fn provide_a_runtime_that_cannot_serve_is_refused() {
        let one = Builder::new_current_thread().build().unwrap();
        let refused = provide(one.handle().clone()).unwrap_err().to_string();
        assert!(refused.contains("multi-threaded"), "{refused}");
        let (made, two) = (handle().unwrap(), Builder::new_multi_thread().worker_threads(1).build().unwrap());
        let refused = provide(two.handle().clone()).unwrap_err().to_string();
        assert!(refused.contains("once"), "{refused}");
        assert_eq!(made.id(), handle().unwrap().id());
    }
}
