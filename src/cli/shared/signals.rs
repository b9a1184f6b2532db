//! SIGINT, SIGTERM and SIGHUP (a closed terminal), for commands that have something to put in order first.
//! They end all other commands at once, as they end any program.

use crate::cli::shared::error::{Error, Result, signal_name};
use crate::cli::shared::output::fail;
use driftless::http::runtime;
use driftless::store::wait::Stop;
use driftless::transport::Error as Transport;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time in which a command that holds no engine has to end by itself. What it leaves then is what a crash
/// leaves.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The first signal that came, or 0.
static CAME: AtomicI32 = AtomicI32::new(0);

/// The first signal throws the switch: the command ends after the step it is in. A second one, or `patience`
/// without an end, ends the process.
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
    let runtime = runtime::handle().map_err(start)?;
    // From here on none of them ends the process by itself, whenever the thread gets to run.
    let mut signals = {
        let _inside = runtime.enter();
        Signals {
            interrupted: signal(SignalKind::interrupt()).map_err(start)?,
            terminated: signal(SignalKind::terminate()).map_err(start)?,
            hung_up: if hangup_ignored() { None } else { Some(signal(SignalKind::hangup()).map_err(start)?) },
        }
    };
    let stop = stop.clone();
    let watch = move || {
        runtime.block_on(async {
            CAME.store(signals.next().await, Relaxed);
            stop.stop();
            tracing::info!("{} came: ends after the step that is under way", signal_name(CAME.load(Relaxed)));
            // Either way the process ends.
            let _ = tokio::time::timeout(patience, signals.next()).await;
        });
        let error = tell(interruption("what was under way"));
        fail(&error);
        std::process::exit(error.exit_code().into());
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(start)?;
    Ok(())
}

struct Signals {
    interrupted: Signal,
    terminated: Signal,
    /// `None` under `nohup`.
    hung_up: Option<Signal>,
}

impl Signals {
    /// The number of the next signal.
    async fn next(&mut self) -> i32 {
        let hung_up = async {
            match &mut self.hung_up {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupted.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminated.recv() => SignalKind::terminate().as_raw_value(),
            _ = hung_up => SignalKind::hangup().as_raw_value(),
        }
    }
}

/// Whether the process was started with SIGHUP ignored, as `nohup` does: a handler would undo that.
fn hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit n - 1 of the mask is signal n.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
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
