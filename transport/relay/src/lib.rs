#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! | Module | Is |
//! |---|---|
//! | `relays` | the follower's side: a store whose objects come from relays, and are checked |
//! | `serve`, `cache` | the relay: its HTTP interface, and the objects that it keeps |
//! | `recent` | a store that keeps in memory what was put last |
//! | [`fabric`] | bytes by another way than HTTP: UCX (feature `ucx`) |
//! | `session` | a relay and its clients over a fabric |

mod cache;
mod error;
pub mod fabric;
mod recent;
mod relays;
mod serve;
mod session;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::http::StatusCode;
use derive_setters::Setters;
use driftless_http::check_exposure;
use driftless_http::listen::Limits;
use driftless_store::os::{Lock, create_dir_synced};
use driftless_store::wait::lock;
use driftless_store::{ContentDigest, Error as StoreError, Key, Object, Store, chain_text};
use driftless_transport::Error as TransportError;
use driftless_transport::manifest::OBJECT_BYTES_MAX;
use tokio::sync::{Semaphore, watch};

use cache::{Cache, Content};
use fabric::Fabric;

pub use error::{Error, Result};
pub use recent::Recent;
pub use relays::{Relays, RelaysOptions};
pub use serve::Server;

/// Longest range that is answered.
pub(crate) const RANGE_BYTES_MAX: u64 = 16 << 20;
/// Objects that are read from the origin at the same time; each may be in memory meanwhile.
const FETCHES_MAX: usize = 4;
/// Objects that are waited for; who asks for another one is told to come again.
const WAITED_MAX: usize = 64;
/// Bytes of answers that clients have not taken yet.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// How long a client waits for an object that is being fetched.
const WAIT_DEADLINE: Duration = Duration::from_secs(120);

/// What a relay relays, and with what.
#[derive(Clone, Debug, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct RelayOptions {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The directory of its cache, which it owns.
    #[setters(into)]
    pub cache_dir: PathBuf,
    /// Bytes of objects that it keeps at most; 64 GiB by default.
    pub cache_bytes: u64,
    /// The bearer token that clients have to bring; needed beyond loopback addresses.
    #[setters(into)]
    pub token: Option<String>,
    /// What those who connect may take.
    pub limits: Limits,
    /// Where it listens for followers that ask over a fabric as well, and over which.
    pub fabric: Option<(SocketAddr, Arc<dyn Fabric>)>,
}

impl RelayOptions {
    /// The defaults, for an address and a directory.
    #[must_use]
    pub fn new(listen: SocketAddr, cache_dir: impl Into<PathBuf>) -> Self {
        Self {
            listen,
            cache_dir: cache_dir.into(),
            cache_bytes: 64 << 30,
            token: None,
            limits: Limits::default(),
            fabric: None,
        }
    }
}

/// Why a client does not get an object.
#[derive(Clone, Debug)]
struct Refusal {
    status: StatusCode,
    kind: &'static str,
    message: String,
}

impl Refusal {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into() }
    }
}

type Outcome = std::result::Result<Content, Refusal>;
/// Where an object that is being fetched will be told of.
type Flight = watch::Receiver<Option<Outcome>>;

/// What the requests share.
struct Relay {
    store: String,
    cache: Cache,
    flights: Mutex<BTreeMap<ContentDigest, Flight>>,
    fetches: Semaphore,
    answers: Arc<Semaphore>,
    /// Held as long as the value lives.
    _lock: Lock,
}

/// Serves the objects of `origin` from a cache, on threads of its own. Dropping the server ends it.
///
/// # Errors
/// [`Http`](Error::Http) for an address other than loopback without a token, or one that cannot be had;
/// [`Locked`](driftless_store::Error::Locked) if another relay has the directory;
/// the file system's errors.
pub fn serve(origin: Arc<dyn Store>, options: RelayOptions) -> Result<Server> {
    check_exposure("relay address", options.listen, options.token.as_deref())?;
    if let Some((listen, _)) = &options.fabric {
        check_exposure("relay address for a fabric", *listen, options.token.as_deref())?;
    }
    if options.limits.connections == 0 {
        let (expected, found) = ("at least 1".to_owned(), "0".to_owned());
        return Err(TransportError::BadSetting { name: "connections", expected, found }.into());
    }
    if !options.cache_dir.is_dir() {
        create_dir_synced(&options.cache_dir)?;
    }
    let lock = Lock::take(&options.cache_dir.join("lock"))?;
    let relay = Relay {
        store: origin.to_string(),
        cache: Cache::new(origin, options.cache_dir.join("objects"), options.cache_bytes),
        flights: Mutex::default(),
        fetches: Semaphore::new(FETCHES_MAX),
        answers: Arc::new(Semaphore::new(ANSWER_BYTES_MAX)),
        _lock: lock,
    };
    serve::start(Arc::new(relay), options)
}

impl Relay {
    fn flights(&self) -> MutexGuard<'_, BTreeMap<ContentDigest, Flight>> {
        lock(&self.flights)
    }

    /// An object from the cache, or from the origin: read once, however many ask for it.
    async fn object(self: &Arc<Self>, object: Object) -> Outcome {
        let this = self.clone();
        let wanted = object.clone();
        let hit = tokio::task::spawn_blocking(move || this.cache.hit(&wanted)).await.ok().flatten();
        if let Some(content) = hit {
            self.cache.counters().hits += 1;
            return Ok(content);
        }
        let mut flight = self.board(object)?;
        let told = tokio::time::timeout(WAIT_DEADLINE, flight.wait_for(Option::is_some)).await;
        let late = || Refusal::new(StatusCode::GATEWAY_TIMEOUT, "timeout", format!("{} is slow", self.store));
        match told {
            Ok(Ok(outcome)) => outcome.clone().unwrap_or_else(|| Err(late())),
            Ok(Err(_)) => {
                Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the fetch panicked"))
            }
            Err(_) => Err(late()),
        }
    }

    /// Joins the fetch of an object, or begins it.
    fn board(self: &Arc<Self>, object: Object) -> std::result::Result<Flight, Refusal> {
        let mut flights = self.flights();
        if let Some(flight) = flights.get(&object.blake3) {
            self.cache.counters().joined += 1;
            return Ok(flight.clone());
        }
        if flights.len() >= WAITED_MAX {
            self.cache.counters().refused += 1;
            let message = format!("{WAITED_MAX} objects are being waited for");
            return Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message));
        }
        let (tell, flight) = watch::channel(None);
        flights.insert(object.blake3, flight.clone());
        let this = self.clone();
        // It goes on when the clients hang up: others will ask for the same.
        tokio::spawn(async move {
            let landing = Landing { relay: &this, digest: object.blake3 };
            let outcome = this.fetch(object).await;
            drop(landing);
            // Nobody may be waiting any more.
            let _ = tell.send(Some(outcome));
        });
        Ok(flight)
    }

    async fn fetch(self: &Arc<Self>, object: Object) -> Outcome {
        // Closed it is never; if it were, the bound would be gone and nothing else.
        let _slot = self.fetches.acquire().await;
        let this = self.clone();
        let fetched = tokio::task::spawn_blocking(move || {
            this.cache.fetch(&object).inspect_err(|error| {
                let error = error as &dyn std::error::Error;
                tracing::warn!(error, key = %object.key, "an object could not be fetched");
            })
        });
        let refusal = match fetched.await {
            Ok(Ok(content)) => return Ok(content),
            Ok(Err(error)) => refusal(&error),
            Err(panic) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", panic.to_string()),
        };
        self.cache.counters().failures += 1;
        Err(refusal)
    }
}

/// Takes a fetch off the list, also when it panics.
struct Landing<'a> {
    relay: &'a Relay,
    digest: ContentDigest,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        self.relay.flights().remove(&self.digest);
    }
}

/// What a client asks for by these words, the range cut at the object's end.
fn named(
    key: &str,
    size: u64,
    blake3: &str,
    range: Range<u64>,
) -> std::result::Result<(Object, Range<u64>), Refusal> {
    let bad = |message: &str| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message);
    let (Ok(key), Ok(blake3)) = (Key::new(key), blake3.parse::<ContentDigest>()) else {
        return Err(bad("expected the key of an object and a digest of 64 lower-case hex digits"));
    };
    if size > OBJECT_BYTES_MAX {
        return Err(bad("no object is that large"));
    }
    let (start, end) = (range.start, range.end.min(size));
    if start >= end || end - start > RANGE_BYTES_MAX {
        let message = format!("expected a range inside the object, of at most {RANGE_BYTES_MAX} bytes");
        return Err(Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, "range", message));
    }
    Ok((Object { key, size, blake3 }, start..end))
}

/// What a client is told of an error.
fn refusal(error: &StoreError) -> Refusal {
    let message = chain_text(error);
    match error {
        StoreError::NotFound { .. } => Refusal::new(StatusCode::NOT_FOUND, "not_found", message),
        StoreError::WrongSize { .. } | StoreError::DigestMismatch { .. } => {
            Refusal::new(StatusCode::BAD_GATEWAY, "corrupt", message)
        }
        error if error.is_retryable() => {
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
        }
        _ => Refusal::new(StatusCode::BAD_GATEWAY, "origin", message),
    }
}
