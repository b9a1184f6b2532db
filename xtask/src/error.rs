//! What can go wrong in a lane.

use std::path::{Path, PathBuf};

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no place for downloads: set DRIFTLESS_CACHE or HOME")]
    NoCache,
    #[error("{}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("cannot start `{program}`: is it installed?")]
    Start { program: String, source: std::io::Error },
    #[error("`{command}` ended with {status}{}", log.as_ref().map(|l| format!(", its output is in {}", l.display())).unwrap_or_default())]
    Failed { command: String, status: String, log: Option<PathBuf> },
    #[error("{what} is not ready after {seconds} s; its output is in {}", log.display())]
    NotReady { what: String, seconds: u64, log: PathBuf },
    #[error("{0}")]
    Sglang(#[from] crate::sglang::Error),
    #[error("{what}: expected {expected}, found {found}")]
    Check { what: String, expected: String, found: String },
    #[error("{0} of the lanes failed")]
    Lanes(usize),
}

impl Error {
    pub(crate) fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Error::Io { path: path.as_ref().to_path_buf(), source }
    }
}
