//! The crate's error type.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::position::Position;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong with a rollout log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call on the file system failed.
    #[error("could not {action} {path}", path = path.display())]
    Io {
        /// What was attempted, as a verb phrase.
        action: &'static str,
        /// The file or directory concerned.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The log in the directory belongs to another run, model or tokenizer.
    #[error("{path} holds a log with another {what}: expected {expected}, found {found}; open it with its own identity or use another directory", path = path.display())]
    Identity {
        /// The segment that disagrees.
        path: PathBuf,
        /// Which part of the identity differs.
        what: &'static str,
        /// What the caller asked for.
        expected: String,
        /// What the segment says.
        found: String,
    },
    /// Another process (or another handle of this one) has the log open for writing.
    #[error("{path} is being written by {}; a log has one owner: read it with `Reader::open`, write through the owner as a `Producer`, or stop the owner first", owner(*holder), path = path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The process that wrote its number into it.
        holder: Option<u32>,
    },
    /// The lock's file was removed or replaced while this process owned the log, so that another process can
    /// own it, too. Nothing more is acknowledged.
    #[error("{path} no longer leads to the file that this process has locked; another process may own the log: open it again, and leave its `lock` alone", path = path.display())]
    LockLost {
        /// The lock file.
        path: PathBuf,
    },
    /// There is nothing to read.
    #[error("there is no log at {path}: no such directory", path = path.display())]
    NoLog {
        /// The directory.
        path: PathBuf,
    },
    /// Bytes of the log are not what was written. Other records are unaffected.
    #[error("damaged {what} at {path}:{offset}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Byte offset in it.
        offset: u64,
        /// What is damaged, and how.
        what: &'static str,
    },
    /// The file was written by a newer program or for another purpose.
    #[error("{path} needs {what} {found}, this build knows {known}; use a newer release", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Which capability is missing.
        what: &'static str,
        /// What the file asks for.
        found: String,
        /// What this build offers.
        known: String,
    },
    /// A record does not fit into one segment.
    #[error("a record of {bytes} bytes does not fit a segment, which takes {max}; raise `segment_bytes`")]
    TooLarge {
        /// Size of the framed record.
        bytes: u64,
        /// Largest frame that a segment of this log takes.
        max: u64,
    },
    /// An argument contradicts itself or the format.
    #[error("invalid {what}: expected {expected}, found {found}")]
    Invalid {
        /// Which argument.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// An earlier sync failed; what is on stable storage is unknown until the log is opened again.
    #[error("the log at {path} stopped taking records after a failed write ({cause}); open it again to recover", path = path.display())]
    Poisoned {
        /// The log's directory.
        path: PathBuf,
        /// The failure that poisoned the handle.
        cause: String,
    },
    /// The process that owns the log does not answer, or is gone. What it had not acknowledged is in the log
    /// or not.
    #[error("the process that owns the log at {path}: {cause}; connect again when one serves it", path = path.display())]
    Owner {
        /// The log's directory.
        path: PathBuf,
        /// What happened.
        cause: String,
    },
    /// A reservation was held longer than its deadline and has been given up.
    #[error("the reservation of record {position} was reclaimed after {held:?}; reserve again")]
    Expired {
        /// The position that stays empty.
        position: Position,
        /// How long the reservation may be held.
        held: Duration,
    },
    /// There was no room for more unsynced or unconsumed bytes before the deadline.
    #[error("no room for {bytes} bytes after {waited:?}: {reason}")]
    Full {
        /// Bytes asked for.
        bytes: u64,
        /// How long the caller waited.
        waited: Duration,
        /// What holds the room, and what would free it.
        reason: &'static str,
    },
    /// An export could not be written.
    #[cfg(feature = "arrow")]
    #[error("could not write {format}: {cause}")]
    Export {
        /// The file format.
        format: &'static str,
        /// Its crate's answer.
        cause: String,
    },
    /// The position was removed by retention.
    #[error("position {position} was removed by retention; the oldest one kept is {oldest}")]
    Retired {
        /// The position asked for.
        position: Position,
        /// The oldest one still there.
        oldest: Position,
    },
}

/// The holder of a lock, in words.
fn owner(holder: Option<u32>) -> String {
    match holder {
        None => "a process that left no pid".to_owned(),
        Some(pid) if pid == std::process::id() => "another handle of this process".to_owned(),
        Some(pid) => format!("process {pid}"),
    }
}

impl Error {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn invalid(what: &'static str, expected: impl Into<String>, found: impl ToString) -> Self {
        Self::Invalid { what, expected: expected.into(), found: found.to_string() }
    }
}
