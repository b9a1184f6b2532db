//! What can go wrong in a lane.

use std::path::PathBuf;
use std::time::Duration;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no place for downloads: set DRIFTLESS_CACHE or HOME")]
    NoCache,
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("cannot start `{program}`: is it installed?")]
    Start { program: String, source: std::io::Error },
    #[error("`{command}` ended with {status}{}", log.as_ref().map(|l| format!(", its output is in {}", l.display())).unwrap_or_default())]
    Failed { command: String, status: String, log: Option<PathBuf> },
    #[error("{what} {how} within {after:?}; the end of {}:\n{tail}", log.display())]
    NotReady { what: String, how: String, after: Duration, log: PathBuf, tail: String },
    #[error("{what}: expected {expected}, found {found}")]
    Check { what: String, expected: String, found: String },
    #[error("{0} of the lanes failed")]
    Lanes(usize),
}

impl Error {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Error::Io { path, source }
    }

    pub(crate) fn check(what: &str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Error::Check { what: what.to_owned(), expected: expected.into(), found: found.into() }
    }
}

/// Refuses what is wrong with `what`, if anything is.
pub(crate) fn expect_none(wrong: &[String], what: &str, expected: &str) -> Result<()> {
    if wrong.is_empty() { Ok(()) } else { Err(Error::check(what, expected, wrong.join("\n  "))) }
}
