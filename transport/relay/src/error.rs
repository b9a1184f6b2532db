//! What can go wrong with relays and links.

use std::time::Duration;

use driftless_store::BoxError;

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in this crate, by meaning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What the crates below said: a cache that another relay has, or a setting that cannot be.
    #[error(transparent)]
    Transport(#[from] driftless_transport::Error),
    /// What a server or a client said: an address that cannot be listened on, or must not without a token, or a URL that
    /// is none.
    #[error(transparent)]
    Http(#[from] driftless_http::Error),
    /// A library that is opened at run time is not there, or is not usable.
    #[error("{what} cannot be used")]
    Library {
        /// What it would be used for.
        what: &'static str,
        /// What is missing, and what to install.
        source: BoxError,
    },
    /// Something that was asked of a link, or of the library below it, cannot be done or failed.
    #[error("cannot {action} {peer}: {status}")]
    Link {
        /// The other side, or this process.
        peer: String,
        /// What was asked.
        action: &'static str,
        /// The library's word for why not.
        status: String,
    },
    /// The other side of a link has ended, or cannot be reached any more.
    #[error("lost {peer} while trying to {action} it: {reason}")]
    LinkLost {
        /// The other side.
        peer: String,
        /// What was being done.
        action: &'static str,
        /// How that shows.
        reason: String,
    },
    /// The other side of a link did nothing for too long.
    #[error("{peer} is silent: waited {waited:.1?} to {action} it")]
    LinkTimeout {
        /// The other side.
        peer: String,
        /// What was being done.
        action: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
}

impl From<driftless_store::Error> for Error {
    fn from(error: driftless_store::Error) -> Self {
        Self::Transport(error.into())
    }
}
