//! `DRIFTLESS_KILL_AT=<point>[:<n>]`: this process kills itself with SIGKILL at the n-th passage of a crash
//! point.

use crate::cli::shared::error::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};

const VARIABLE: &str = "DRIFTLESS_KILL_AT";

/// Arms the point named in the environment; it stays armed while the returned value lives.
pub(crate) fn arm() -> Result<fail::FailScenario<'static>> {
    let scenario = fail::FailScenario::setup();
    let Ok(text) = std::env::var(VARIABLE) else {
        return Ok(scenario);
    };
    let (point, passage) = match text.split_once(':') {
        None => (text.as_str(), 1),
        Some((point, count)) => {
            let count = count.parse().ok().filter(|count| *count > 0);
            (point, count.ok_or_else(|| usage(&text))?)
        }
    };
    let passed = AtomicU64::new(0);
    fail::cfg_callback(point, move || {
        if passed.fetch_add(1, Ordering::Relaxed) + 1 == passage {
            kill_self();
        }
    })
    .map_err(|_| usage(&text))?;
    Ok(scenario)
}

/// SIGKILL, as `kill -9` from outside would: no destructor, no flush, no exit handler runs.
fn kill_self() {
    let sent = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    debug_assert!(sent.is_ok(), "a process may always kill itself");
    // The signal is delivered before the system call returns to this thread.
    std::process::abort();
}

fn usage(found: &str) -> Error {
    Error::usage(VARIABLE, "<point> or <point>:<passage from 1>", found)
}
