//! What can go wrong with connections.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// What every fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in this crate, by meaning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is not the URL of a server.
    #[error(
        "`{text}` is not a {what}, expected http://host:port or https://host:port, without user, password and query"
    )]
    BadUrl {
        /// The server that it should have named.
        what: &'static str,
        /// Its host; a user, a password or a query may be a secret.
        text: String,
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
    /// An address cannot be listened on.
    #[error("cannot listen on {addr}")]
    Listen {
        /// The address asked for.
        addr: SocketAddr,
        /// The operating system's error.
        source: io::Error,
    },
    /// A client, or the threads of its connections, cannot be had.
    #[error("cannot start an HTTP client")]
    Start {
        /// The operating system's error, or that of the TLS library.
        source: io::Error,
    },
    /// A request could not be sent, or its answer ended early.
    #[cfg(feature = "client")]
    #[error("the connection was refused or lost")]
    Lost(#[from] Lost),
    /// A server answered that it does not do what it was asked.
    #[error("the answer is {words}")]
    Refused {
        /// The status and the beginning of the body.
        words: String,
    },
    /// A server did not answer in time.
    #[error("no answer within {after:.1?}")]
    NoAnswer {
        /// The time it had.
        after: Duration,
    },
    /// An answer is longer than what was asked for.
    #[error("more than the {max} bytes that were asked for")]
    TooLong {
        /// Bytes asked for.
        max: u64,
    },
    /// The threads that drive connections have ended.
    #[error("the HTTP client has ended")]
    Ended,
}

/// Why a connection failed: the first cause, without the frames that the HTTP library puts around it.
#[cfg(feature = "client")]
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Lost(String);

#[cfg(feature = "client")]
impl From<reqwest::Error> for Lost {
    fn from(error: reqwest::Error) -> Self {
        let error = error.without_url();
        let mut first: &dyn std::error::Error = &error;
        while let Some(source) = first.source() {
            first = source;
        }
        Self(first.to_string())
    }
}

#[cfg(feature = "client")]
impl From<reqwest::Error> for Error {
    fn from(error: reqwest::Error) -> Self {
        Self::Lost(error.into())
    }
}
