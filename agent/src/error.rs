//! The crate's one error type.

use std::path::PathBuf;

/// Everything that can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// What was attempted, as a verb: `read`, `open` …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A JSON file does not parse.
    #[error("{path} is not the JSON expected of it")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The checkpoint's chat template cannot be used.
    #[error("chat template of {path}: {reason}")]
    Template {
        /// Where it was looked for or read.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The journal of sessions cannot be used.
    #[error("journal {path}: {reason}")]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The checkpoint's tokenizer cannot be used.
    #[error("tokenizer {path}: {reason}")]
    Tokenizer {
        /// `tokenizer.json`.
        path: PathBuf,
        /// The library's answer.
        reason: String,
    },
    /// The gateway cannot listen.
    #[error(transparent)]
    Http(#[from] driftless_http::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the path and the verb to an I/O error.
pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { action, path, source }
}

/// Enough of a text to recognise it by, in one line and without what a terminal would obey.
pub(crate) fn short(text: &str) -> String {
    const LETTERS: usize = 120;
    let mut start = text.chars();
    let line = start.by_ref().take(LETTERS).map(|letter| if letter.is_control() { ' ' } else { letter });
    let line: String = line.collect();
    if start.next().is_none() { line } else { line + "…" }
}
