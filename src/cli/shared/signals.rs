//! SIGINT, SIGTERM and SIGHUP (a closed terminal), for commands that have something to put in order or to say first.
//! They end all other commands at once, as they end any program.

use crate::cli::shared::error::{Error, Result, signal_name};
use crate::cli::shared::output::fail;
use driftless::http::runtime;
use driftless::store::wait::Stop;
use driftless::transport::Error as Transport;
use driftless::transport::activate::STOP_GRACE;
use driftless::transport::follow::LEAVE_DEADLINE;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time in which a command that holds no engine has to end by itself. What it leaves then is what a crash
/// leaves.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Within which, after a signal, an engine's pause is ended or reported: what is under way and its end have their
/// deadlines, and this process some time to tell of it.
pub(crate) const PAUSE_ENDS: Duration =
    STOP_GRACE.saturating_add(LEAVE_DEADLINE).saturating_add(Duration::from_secs(10));

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
    let stop = stop.clone();
    on_signals(&[SignalKind::hangup()], move |runtime, mut signals| {
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
    })
}

/// A signal ends the process at once, by that signal, once it has said that `what` was interrupted. One that it was
/// started with ignored stays so: a shell does that to SIGINT for what it runs in the background.
#[expect(unsafe_code, reason = "the signal ends the process as it does without a handler")]
pub(crate) fn end_on_signals(what: impl FnOnce() -> String + Send + 'static) -> Result<()> {
    on_signals(&kinds(), |runtime, mut signals| {
        let signal = runtime.block_on(signals.next());
        fail(&Error::Interrupted { what: what().into(), signal });
        // SAFETY: both may be called from any thread. Nothing of this program depends on how the signal is handled,
        // as it ends here.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    })
}

/// Those that a command may handle.
fn kinds() -> [SignalKind; 3] {
    [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
}

/// Runs `watch` on a thread of its own, with the signals, which do not end the process by themselves from here on,
/// whenever that thread gets to run. One of `spared` that the process was started with ignored, as `nohup` does to
/// SIGHUP, is not among them: a handler would undo that.
fn on_signals(spared: &[SignalKind], watch: impl FnOnce(Handle, Signals) + Send + 'static) -> Result<()> {
    let start = |source| Error::Io { path: PathBuf::from("signal handler"), source };
    let runtime = runtime::handle().map_err(start)?;
    let handled = kinds().into_iter().filter(|kind| !spared.contains(kind) || !is_ignored(*kind));
    let signals = {
        let _inside = runtime.enter();
        handled.map(|kind| Ok((kind, signal(kind)?))).collect::<std::io::Result<_>>().map_err(start)?
    };
    let watch = move || watch(runtime, Signals(signals));
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map(drop).map_err(start)
}

/// Those that are handled.
struct Signals(Vec<(SignalKind, Signal)>);

impl Signals {
    /// The number of the next signal.
    async fn next(&mut self) -> i32 {
        poll_fn(|context| {
            for (kind, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return Poll::Ready(kind.as_raw_value());
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Whether the process was started with the signal ignored.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    // Bit n - 1 of the mask is signal n.
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}

/// How `what` ended: by the signal that came.
pub(crate) fn interruption(what: &'static str) -> Error {
    Error::Interrupted { what: what.into(), signal: CAME.load(Relaxed) }
}

/// Names the signal as the cause of work that was given up for it.
pub(crate) fn caused(error: Error) -> Error {
    match error {
        Error::Transport(Transport::Cancelled { what }) if CAME.load(Relaxed) != 0 => interruption(what),
        error => error,
    }
}
