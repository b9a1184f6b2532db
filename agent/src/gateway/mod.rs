//! The gateway: what OpenAI's and Anthropic's clients call, over HTTP.
//!
//! A session is named by the path, `/s/NAME/v1/…`, which every client can be given as its base URL. Without it the key is
//! the session. A key is checked, and room for the request found, before a byte of its body is read. An answer is drawn to
//! its end whether or not its client still waits: who asks again gets it.

mod counts;
mod routes;
mod stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use driftless_http::listen::{Limits, serve_http};
use driftless_http::{Server, Threads};

use crate::error::{Error, Result};
use crate::message::Converse;

pub use counts::Counts;

/// Its threads. Those that block read conversations: a first turn with tools that are new takes some hundred times a later
/// one, which does not wait for it.
const THREADS: Threads = Threads { io: 2, blocking: 4 };
/// Connections beside those that asks have: probes, and strangers.
const SPARE_CONNECTIONS: usize = 256;

/// How a gateway treats its clients.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GatewayOptions {
    /// Whether sessions ask for no key. Then only names of this host are answered.
    pub is_open: bool,
    /// Largest body that is read; 64 MiB by default.
    pub body_bytes_max: usize,
    /// Requests under way at once, those included whose clients have gone; 256 by default. More are told to come back.
    pub asks_max: usize,
    /// How long a client waits for its answer; 30 minutes by default. The answer is drawn on, for when it asks again.
    pub deadline: Duration,
    /// How long a stream may be silent, and how long a refusal may take to have a status of its own; 5 s by default.
    pub ping: Duration,
}

impl GatewayOptions {
    /// The defaults.
    #[must_use]
    pub fn new(is_open: bool) -> Self {
        let (deadline, ping) = (Duration::from_secs(1800), Duration::from_secs(5));
        Self { is_open, body_bytes_max: 64 << 20, asks_max: 256, deadline, ping }
    }
}

/// A running gateway. Dropping it ends the server and the answers under way.
#[derive(Debug)]
pub struct Gateway {
    http: Server,
    counts: Counts,
}

impl Gateway {
    /// Serves at `addr`, where port 0 takes a free one, what `converse` answers.
    ///
    /// # Errors
    /// [`Error::Http`] if the address cannot be had.
    pub fn start(addr: SocketAddr, options: GatewayOptions, converse: Arc<dyn Converse>) -> Result<Self> {
        let limits = Limits::default().with_connections(options.asks_max.saturating_add(SPARE_CONNECTIONS));
        let counts = Counts::default();
        let router = routes::router(options, converse, counts.clone());
        let http = Server::start("gateway", addr, THREADS, |listener, _| {
            Ok::<_, Error>(serve_http(listener, limits, router))
        })?;
        Ok(Self { http, counts })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.http.addr()
    }

    /// What it was asked and has answered, while that goes on.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts.clone()
    }
}
