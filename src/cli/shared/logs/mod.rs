//! The log, on standard error: as text or as JSON, with a warning that repeats printed once and then counted.
//!
//! | File | Is |
//! |---|---|
//! | `repeats` | which lines are printed, and which are only counted |
//! | `line` | how a line looks |

mod line;
mod repeats;

use crate::cli::shared::output::has_colours;
use line::Json;
use repeats::{Moment, Repeats, Told};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::{Instant, SystemTime};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

pub(crate) use line::LogFormat;

/// Whether lines are JSON: what is said beside the log has to know, too.
static JSON: AtomicBool = AtomicBool::new(false);
static LOG: OnceLock<Log> = OnceLock::new();

/// Looks for what the arguments say of the format. They may be refused before anything has parsed them.
pub(crate) fn foresee(args: &[OsString]) {
    const FLAG: &str = "--log-format";
    let is_json = args.windows(2).any(|pair| pair == [FLAG, "json"])
        || args.iter().any(|arg| *arg == *format!("{FLAG}=json"));
    JSON.store(is_json, Relaxed);
}

/// Takes over the log of the process.
pub(crate) fn begin(format: LogFormat) {
    JSON.store(format == LogFormat::Json, Relaxed);
    let is_coloured = format == LogFormat::Text && io::stderr().is_terminal() && has_colours();
    let log = LOG.get_or_init(|| Log::new(format, is_coloured));
    let lines = fmt::layer()
        // It would be told of standard error that is closed on standard error.
        .log_internal_errors(false)
        .with_ansi(is_coloured)
        .with_writer(Writers(log));
    let lines = match format {
        LogFormat::Text => lines.without_time().boxed(),
        LogFormat::Json => lines.event_format(Json).boxed(),
    };
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::registry().with(filter).with(lines).init();
}

/// Whether lines on standard error are JSON.
pub(crate) fn is_json() -> bool {
    JSON.load(Relaxed)
}

/// What is said beside the log, as a line of JSON.
pub(crate) fn object(level: Level, message: &str, fields: &Map<String, Value>) -> String {
    let told = Told { line: line::said(level, message, fields), at: SystemTime::now(), more: 0 };
    LogFormat::Json.line(&told, false)
}

/// Tells of what was only counted: the process may end now.
pub(crate) fn flush() {
    if let Some(log) = LOG.get() {
        let mut repeats = log.lock();
        let told = repeats.rest(log.now());
        // Nobody can be told that nobody listens.
        let _ = log.print(&told);
    }
}

/// What is printed and what is known.
struct Log {
    format: LogFormat,
    is_coloured: bool,
    begun: Instant,
    repeats: Mutex<Repeats>,
    /// There is something to tell of in a while.
    counted: Condvar,
    /// What tells of it is begun when it is needed first.
    teller: Once,
}

impl Log {
    fn new(format: LogFormat, is_coloured: bool) -> Log {
        let (repeats, counted) = (Mutex::default(), Condvar::new());
        Log { format, is_coloured, begun: Instant::now(), repeats, counted, teller: Once::new() }
    }

    fn now(&self) -> Moment {
        Moment { since: self.begun.elapsed(), at: SystemTime::now() }
    }

    fn lock(&self) -> MutexGuard<'_, Repeats> {
        self.repeats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&'static self, line: &str, is_warning: bool) -> io::Result<()> {
        let mut repeats = self.lock();
        let told = repeats.take(line, is_warning, self.now());
        let printed = self.print(&told);
        if repeats.next().is_some() {
            self.teller.call_once(|| {
                let thread = std::thread::Builder::new().name("log".to_owned());
                // Without the thread, counts are told when something else is.
                let _ = thread.spawn(|| self.tell_in_time());
            });
            self.counted.notify_one();
        }
        printed
    }

    /// Prints in one call, between whose lines nothing else comes.
    fn print(&self, told: &[Told]) -> io::Result<()> {
        let lines: String = told.iter().map(|told| self.format.line(told, self.is_coloured)).collect();
        io::stderr().write_all(lines.as_bytes())
    }

    /// Tells of what was only counted when its time is over, for as long as the process is there.
    fn tell_in_time(&self) {
        let mut repeats = self.lock();
        loop {
            repeats = match repeats.next() {
                None => self.counted.wait(repeats).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let left = next.saturating_sub(self.now().since);
                    let woken = self.counted.wait_timeout(repeats, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            let told = repeats.due(self.now());
            // Nobody can be told that nobody listens.
            let _ = self.print(&told);
        }
    }
}

/// Where the lines of events go.
struct Writers(&'static Log);

impl<'a> MakeWriter<'a> for Writers {
    type Writer = Lines;

    fn make_writer(&'a self) -> Lines {
        Lines { log: self.0, is_warning: false }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Lines {
        Lines { log: self.0, is_warning: *metadata.level() <= Level::WARN }
    }
}

/// Takes the line of an event, which is written at once.
struct Lines {
    log: &'static Log,
    is_warning: bool,
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.log.take(&String::from_utf8_lossy(bytes), self.is_warning)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
