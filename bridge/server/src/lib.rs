#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! | File | Is |
//! |---|---|
//! | `routes` | the handlers |
//! | `auth` | who may call what |
//! | `request` | the body of `/generate`: SGLang's defaults, and what is refused before it is queued |
//! | `reply`, `info` | the JSON that goes out |
//! | `state` | what the server says of itself, the gate that a pause closes, the ids in use |
//! | `stream` | replies that come in pieces |
//! | `job` | a request on its way to the generator, and how it ended |
//! | `worker` | the thread that owns the generator |

mod auth;
mod error;
mod info;
mod job;
mod reply;
mod request;
mod routes;
mod state;
mod stream;
mod worker;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::Router;
use derive_setters::Setters;
use driftless_http::Threads;
use driftless_http::listen::{Limits, serve_http};
use driftless_store::wait::Stop;

use driftless_bridge::Keys;
use driftless_bridge::sglang::{DiskUpdate, Load};
pub use error::{Error, Result};
pub use job::{Completion, Ended, Job, Progress, Request, Sampling};
use routes::Shared;
use state::Registry;
pub use state::{Facts, ServerState, Weights};
use worker::Worker;

/// Requests that may be under way, unless told otherwise.
const REQUESTS_MAX: usize = 8192;
/// Control calls that may be under way beside the allowed requests.
const CONTROL_CALLS_MAX: usize = 1024;
/// Descriptors that connections leave to the process, which opens a checkpoint's files and little else.
const FILES_KEPT: u64 = 128;
/// How long a connection may last without a key: longer than a health probe, which is then answered.
const AUTHORISE: Duration = Duration::from_secs(30);
/// How long the end of a generator may go unnoticed by [`Server::run_until`].
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Checksum of each parameter, by the engine's fused name: what `/weights_checker` reports.
pub type Checksums = BTreeMap<String, String>;

/// What generates behind a [`Server`], and holds the weights. A thread of its own makes all calls, in order.
pub trait Generator: Send + 'static {
    /// Takes a request, and answers it now or in a later step. The client is gone once its reply is closed.
    fn submit(&mut self, job: Job);

    /// Generates a little; false if there is nothing to do until the next call, as in a pause.
    fn step(&mut self) -> bool;

    /// Stops stepping; with `retract`, running requests lose their cache and go back to the queue.
    fn pause(&mut self, retract: bool);

    /// Steps again.
    fn resume(&mut self);

    /// Ends requests whose id starts with `prefix`, or all. Running ones end in the next step; with `now`, also in a
    /// pause.
    fn abort(&mut self, prefix: Option<&str>, now: bool);

    /// Drops the cache; false if requests hold it.
    fn flush(&mut self) -> bool;

    /// Loads a checkpoint, whose label is that of the weights from then on.
    fn load(&mut self, update: &DiskUpdate) -> Updated;

    /// Renames the weights.
    fn set_version(&mut self, label: &str);

    /// Opens or closes an update session; false if it is open or closed already.
    fn session(&mut self, open: bool) -> bool;

    /// Checksums of the weights it holds, or why there are none.
    fn checksums(&mut self) -> Result<Checksums, String>;

    /// How busy it is.
    fn busy(&self) -> Load;
}

/// How an update ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Updated {
    /// The new weights serve.
    Loaded,
    /// The new weights serve, but requests hold cache of the old ones although a flush was asked for.
    NotFlushed,
    /// Refused before anything was touched, because SGLang of this dialect would not survive it.
    WouldEnd,
    /// The checkpoint does not fit or is damaged; the old weights serve.
    Refused(String),
}

/// How a [`Server`] treats its clients.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct ServerOptions {
    /// The keys that it asks for: one for generation and information, one for the calls that change weights or
    /// generation.
    pub keys: Keys,
    /// Most requests that are under way, waiting ones included; more are answered 503.
    pub max_queued_requests: usize,
    /// How long `/health` waits for its token.
    pub health_timeout: Duration,
    /// What those who connect may take. A request under way has a connection, and a health probe ends with
    /// `authorise`.
    pub limits: Limits,
}

impl Default for ServerOptions {
    /// No keys, 8192 requests, 20 s for a health probe, as many connections as requests and control calls.
    fn default() -> Self {
        let limits = Limits::default()
            .with_connections(REQUESTS_MAX + CONTROL_CALLS_MAX)
            .with_files_kept(FILES_KEPT)
            .with_authorise(AUTHORISE);
        let health_timeout = Duration::from_secs(20);
        Self { keys: Keys::default(), max_queued_requests: REQUESTS_MAX, health_timeout, limits }
    }
}

/// A running server, with threads of its own. Dropping it closes its connections and drops the generator.
#[derive(Debug)]
pub struct Server {
    /// Ends first, and with it whatever asks the generator.
    http: driftless_http::Server,
    shared: Arc<Shared>,
}

impl Server {
    /// Listens at `address`, where port 0 takes a free one, and serves what `generator` makes, which may take its
    /// time: clients that connect meanwhile wait. `extend` may add routes and layers to the server's; they stand behind
    /// its keys.
    ///
    /// # Errors
    /// [`Listen`](driftless_http::Error::Listen) if the address cannot be had; [`Error::Thread`] if the
    /// generator's thread cannot; those of `generator`.
    pub fn start<E>(
        address: SocketAddr,
        options: ServerOptions,
        generator: impl FnOnce() -> Result<(Arc<ServerState>, Box<dyn Generator>), E>,
        extend: impl FnOnce(Router) -> Router,
    ) -> Result<Self, E>
    where
        E: From<Error> + From<driftless_http::Error>,
    {
        let mut started = None;
        let threads = Threads { io: 1, blocking: 1 };
        let http =
            driftless_http::Server::start("engine-http", address, threads, |listener, _| -> Result<_, E> {
                let address = listener.local_addr().unwrap_or(address);
                let (state, generator) = generator()?;
                let worker = Worker::start(generator, options.max_queued_requests + CONTROL_CALLS_MAX);
                let shared = Arc::new(Shared {
                    worker: worker.map_err(|source| Error::Thread { source })?,
                    state,
                    registry: Registry::new(options.max_queued_requests),
                    keys: options.keys,
                    address,
                    healthy: AtomicBool::new(true),
                    probed: tokio::sync::Mutex::default(),
                    health_timeout: options.health_timeout,
                });
                started = Some(shared.clone());
                Ok(serve_http(listener, options.limits, routes::router(shared, extend)))
            })?;
        // Set where nothing failed.
        let shared = started.ok_or(Error::GeneratorEnded)?;
        Ok(Self { http, shared })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.http.addr()
    }

    /// `http://address`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    /// Serves until `stop` is thrown.
    ///
    /// # Errors
    /// [`Error::GeneratorEnded`] when the generating thread ends first.
    pub fn run_until(self, stop: &Stop) -> Result<()> {
        while !stop.wait(LOOK_EVERY) {
            if self.shared.worker.has_ended() {
                return Err(Error::GeneratorEnded);
            }
        }
        Ok(())
    }
}
