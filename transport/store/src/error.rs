//! What a store, or a file system, can answer.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::os::regular::NotRegular;
use crate::{ContentDigest, Key};

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error that comes from outside these crates, such as an engine's or an object store's.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Everything that can go wrong in this crate, by meaning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // What was asked for, or given, that cannot be.
    /// A text that is not a valid [`Key`].
    #[error("`{text}` is not a key: {reason}")]
    BadKey {
        /// The text as given.
        text: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A text that does not parse as the identity it should be.
    #[error("`{text}` is not a {what}, expected {expected}")]
    BadText {
        /// What it should have been.
        what: &'static str,
        /// The text as given.
        text: String,
        /// The form that is accepted.
        expected: &'static str,
    },
    /// A setting that cannot work.
    #[error("the setting `{name}` is {found}, expected {expected}")]
    BadSetting {
        /// The setting's name.
        name: &'static str,
        /// What it has to be.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Something is larger than this crate accepts.
    #[error("{what} is larger than {max} bytes")]
    TooLarge {
        /// What is too large.
        what: String,
        /// The limit in bytes.
        max: u64,
    },
    /// Something this build, this store or this version of the format cannot do.
    #[error("{what} is not supported: {hint}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What to do instead.
        hint: String,
    },

    // Stores.
    /// The store holds no object under this key.
    #[error("no object `{key}` in {store}")]
    NotFound {
        /// The key asked for.
        key: Key,
        /// The store, as it displays itself.
        store: String,
    },
    /// A put with [`PutMode::Create`](crate::PutMode::Create) met an existing object.
    #[error("`{key}` exists already in {store}")]
    AlreadyExists {
        /// The key that is taken.
        key: Key,
        /// The store, as it displays itself.
        store: String,
    },
    /// A ranged get began past the end of the object.
    #[error("range starts at byte {start} of `{key}`, which has {size} bytes")]
    RangeOutside {
        /// The object.
        key: Key,
        /// First byte asked for.
        start: u64,
        /// Size of the object in bytes.
        size: u64,
    },
    /// A store accepted two creates of one key, so that its publications could overwrite one another.
    #[error(
        "{store} ignores create-if-absent (If-None-Match on a put): two publishers would overwrite each other; \
         use a server that honours it, or a directory that all hosts share"
    )]
    ConditionalPutIgnored {
        /// The store, as it displays itself.
        store: String,
    },
    /// An object store did not do what it was asked before the deadline, however often it was asked.
    #[error("{store} did not {action} `{key}` within {waited:.1?}, tried {attempts} times")]
    Unreachable {
        /// The store, as it displays itself.
        store: String,
        /// What it was asked to do.
        action: &'static str,
        /// With which key.
        key: Key,
        /// How long it was asked.
        waited: Duration,
        /// How often.
        attempts: u32,
        /// What the last try ended with.
        source: BoxError,
    },
    /// An object store said no, and would say it again.
    #[error("{store} refuses to {action} `{key}`")]
    Refused {
        /// The store, as it displays itself.
        store: String,
        /// What it was asked to do.
        action: &'static str,
        /// With which key.
        key: Key,
        /// What it said.
        source: BoxError,
    },
    /// A store call that [`Fault`](crate::wrap::Fault) was told to fail.
    #[error("injected fault in store call {call} ({operation} `{key}`)")]
    Injected {
        /// Number of the call, from 0.
        call: u64,
        /// Which operation.
        operation: &'static str,
        /// The key it was called with.
        key: Key,
    },

    // File systems.
    /// The file system is full.
    #[error("no space left for `{path}` while trying to {action}", path = path.display())]
    NoSpace {
        /// What could not be written.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
    /// The operating system denied access.
    #[error("no permission to {action} `{path}`", path = path.display())]
    PermissionDenied {
        /// What could not be touched.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
    /// Any other failure of the file system.
    #[error("cannot {action} `{path}`", path = path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
    /// Something else lies where a file has to be.
    #[error("`{path}` must be a regular file, found {found}; remove it, or put the file in its place", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What lies there.
        found: &'static str,
    },
    /// Another process, or another value in this one, holds a lock.
    #[error("`{path}` is held by {holder}; it has one writer at a time", path = path.display(), holder = holding(*holder))]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The process that says in the file that it holds the lock; it may be one of another host.
        holder: Option<u32>,
    },
    /// An object of another size than the one on record.
    #[error("{subject} has the wrong size: {found} bytes, expected {expected}")]
    WrongSize {
        /// The object.
        subject: String,
        /// The size on record.
        expected: u64,
        /// The size found; `more` for one that was not read to its end.
        found: String,
    },
    /// Content that differs from the digest that names it.
    #[error("{subject} has the wrong content: digest is {found}, expected {expected}")]
    DigestMismatch {
        /// The object, file or manifest.
        subject: String,
        /// The digest on record.
        expected: ContentDigest,
        /// The digest of the bytes found.
        found: ContentDigest,
    },
    /// Something is in use and cannot be changed now; the same call may succeed later.
    #[error("{what} is busy with {with}")]
    Busy {
        /// What is in use.
        what: String,
        /// What uses it.
        with: String,
    },
    /// A thread ended without a result: it panicked, which is a mistake of this program.
    #[error("{what} ended without a result, a mistake of driftless: please report it with its log")]
    Internal {
        /// The work.
        what: &'static str,
    },
}

impl Error {
    /// Wraps an I/O error of the file system, keeping the path and telling apart what an operator treats
    /// differently.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        if let Some(NotRegular(found)) = source.get_ref().and_then(|source| source.downcast_ref()) {
            return Self::NotAFile { path, found };
        }
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::NoSpace { path, action, source }
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::PermissionDenied { path, action, source }
            }
            _ => Self::Io { path, action, source },
        }
    }

    /// True if the same call may succeed later with the same arguments.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Io { .. }
                | Self::NoSpace { .. }
                | Self::Injected { .. }
                | Self::Unreachable { .. }
                | Self::Busy { .. }
        )
    }

    /// True if the object asked for is not there.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

/// The process that holds a lock, in words.
fn holding(process: Option<u32>) -> String {
    match process {
        Some(process) if process == std::process::id() => "another value in this process".to_owned(),
        Some(process) => format!("process {process}"),
        None => "another process".to_owned(),
    }
}

/// `None` where the store has no such object.
///
/// # Errors
/// Every other one of `done`.
pub fn if_found<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Err(Error::NotFound { .. }) => Ok(None),
        done => done.map(Some),
    }
}

/// An error and its sources in one line.
#[must_use]
pub fn chain_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_errors_are_told_apart_and_keep_the_path() {
        let full = Error::io("write", "/data/x", io::Error::from_raw_os_error(28));
        assert!(matches!(&full, Error::NoSpace { path, .. } if path == Path::new("/data/x")), "{full:?}");
        let denied = Error::io("open", "/data/x", io::Error::from_raw_os_error(13));
        assert!(matches!(denied, Error::PermissionDenied { .. }));
        let read_only = Error::io("open", "/data/x", io::Error::from_raw_os_error(30));
        assert!(matches!(read_only, Error::PermissionDenied { .. }));
        let other = Error::io("open", "/data/x", io::Error::from_raw_os_error(5));
        assert!(matches!(other, Error::Io { .. }));
        assert_eq!(full.to_string(), "no space left for `/data/x` while trying to write");
    }
}
