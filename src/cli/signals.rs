//! SIGINT and SIGTERM, for commands that have something to put in order first. They end all other commands at once, as they
//! end any program.

use crate::cli::error::{Error, Result, signal_name};
use crate::cli::fail;
use driftless::transport::{Error as Transport, Stop};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time in which a command that holds no engine has to end by itself. What it leaves then is what a crash leaves.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The first signal that came, or 0.
static CAME: AtomicI32 = AtomicI32::new(0);

/// The first signal throws the switch: the command ends after the step it is in. A second one, or `patience` without an end,
/// ends the process.
pub(crate) fn stop_on_signals(stop: &Stop, patience: Duration) -> Result<()> {
    stop_on_signals_or(stop, patience, |interrupted| interrupted)
}

/// [`stop_on_signals`], with more to tell than the interruption where the process is ended.
pub(crate) fn stop_on_signals_or(
    stop: &Stop,
    patience: Duration,
    tell: impl FnOnce(Error) -> Error + Send + 'static,
) -> Result<()> {
    let start = |source| Error::Io { path: PathBuf::from("signal handler"), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(start)?;
    // From here on neither ends the process by itself, whenever the thread gets to run.
    let (mut interrupted, mut terminated) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt()).map_err(start)?, signal(SignalKind::terminate()).map_err(start)?)
    };
    let stop = stop.clone();
    let watch = move || {
        let signals = (&mut interrupted, &mut terminated);
        runtime.block_on(async move {
            let (interrupted, terminated) = signals;
            CAME.store(next(interrupted, terminated).await, Relaxed);
            stop.stop();
            tracing::info!("{} came: ends after the step that is under way", signal_name(CAME.load(Relaxed)));
            // Either way the process ends.
            let _ = tokio::time::timeout(patience, next(interrupted, terminated)).await;
        });
        let error = tell(interruption("what was under way"));
        fail(&error);
        std::process::exit(error.exit_code().into());
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(start)?;
    Ok(())
}

/// The number of the next signal.
async fn next(interrupted: &mut Signal, terminated: &mut Signal) -> i32 {
    tokio::select! {
        _ = interrupted.recv() => SignalKind::interrupt().as_raw_value(),
        _ = terminated.recv() => SignalKind::terminate().as_raw_value(),
    }
}

/// How `what` ended: by the signal that came.
pub(crate) fn interruption(what: &'static str) -> Error {
    Error::Interrupted { what, signal: CAME.load(Relaxed) }
}

/// Names the signal as the cause of work that was given up for it.
pub(crate) fn caused(error: Error) -> Error {
    match error {
        Error::Transport(Transport::Cancelled { what }) if CAME.load(Relaxed) != 0 => interruption(what),
        error => error,
    }
}
