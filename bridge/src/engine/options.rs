//! How engines are called: keys, deadlines, bounds.

use std::time::Duration;

use derive_setters::Setters;

use crate::http::Link;
use crate::keys::Keys;
use crate::tls::Ca;

/// How long each kind of call may take, connection and reply included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct Deadlines {
    /// Establishing a connection.
    pub connect: Duration,
    /// Information calls.
    pub info: Duration,
    /// Pause, continue, flush, abort, relabel.
    pub control: Duration,
    /// Loading weights, and computing checksums over all of them.
    pub load: Duration,
    /// One generation, pauses of the engine included.
    pub generate: Duration,
}

impl Default for Deadlines {
    /// 5 s, 10 s, 60 s, 10 min and 10 min.
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            connect: seconds(5),
            info: seconds(10),
            control: seconds(60),
            load: seconds(600),
            generate: seconds(600),
        }
    }
}

/// Options of an engine's client.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct ClientOptions {
    /// The engine's keys.
    pub keys: Keys,
    /// Deadlines of its calls.
    pub deadlines: Deadlines,
    /// Who vouches for engines at `https://` addresses, and nobody else then; those that the system trusts, if `None`.
    pub ca: Option<Ca>,
    /// Bound on one reply, in bytes.
    pub reply_bytes_max: usize,
}

impl Default for ClientOptions {
    /// No keys, the default deadlines, the system's CAs, 64 MiB.
    fn default() -> Self {
        Self { keys: Keys::default(), deadlines: Deadlines::default(), ca: None, reply_bytes_max: 64 << 20 }
    }
}

impl ClientOptions {
    /// What of them a connection is made with.
    pub(crate) fn link(&self) -> Link<'_> {
        let Self { keys, deadlines, ca, reply_bytes_max } = self;
        Link { keys, ca: ca.as_ref(), connect: deadlines.connect, reply_bytes_max: *reply_bytes_max }
    }
}
