//! What can go wrong with a server.

/// An error of a [`Server`](crate::Server).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The thread that generates cannot be started.
    #[error("cannot start the server's generating thread")]
    Thread {
        /// The reason.
        source: std::io::Error,
    },
    /// The thread that generates ended while the server was serving.
    #[error("the server's generating thread ended, and the log says why; start the server again")]
    GeneratorEnded,
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
