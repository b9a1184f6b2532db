//! The relay's side: a thread a session.

use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use super::control::Control;
use super::{Answer, Ask, Failure, Hello, PROTOCOL, WORD_DEADLINE, patience};
use crate::error::{Error, Result};
use crate::fabric::{Bucket, Fabric, Link};
use crate::relay::cache::Content;
use crate::relay::{Refusal, Relay, WAIT_DEADLINE};
use crate::replica::crash_point;

/// Sessions at the same time; others wait to be accepted.
const SESSIONS_MAX: usize = 256;
/// Bytes of buckets that sessions keep registered for what they are asked for next. What answers hold is bounded with those over HTTP.
const IDLE_BYTES_MAX: usize = 256 << 20;
/// A session in which nothing is asked for so long ends.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
/// Pause after a connection that could not be accepted, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// The sessions of a relay. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Sessions {
    addr: SocketAddr,
    ends: Arc<AtomicBool>,
    accepting: AbortHandle,
    threads: Threads,
}

type Threads = Arc<Mutex<Vec<JoinHandle<()>>>>;

fn lock(threads: &Threads) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
    threads.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sessions {
    /// Listens on `addr`, and serves on threads of its own what `relay` has.
    ///
    /// # Errors
    /// [`Error::Listen`].
    pub(in crate::relay) fn start(
        relay: Arc<Relay>,
        fabric: Fabric,
        addr: SocketAddr,
        token: Option<&str>,
        runtime: &Runtime,
    ) -> Result<Self> {
        let listen = |source| Error::Listen { addr, source };
        let listener = runtime.block_on(TcpListener::bind(addr)).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let ends = Arc::new(AtomicBool::new(false));
        let threads = Threads::default();
        let shared = Shared {
            relay,
            fabric,
            token: token.map(|token| blake3::hash(token.as_bytes())),
            runtime: runtime.handle().clone(),
            idle: Arc::new(Semaphore::new(IDLE_BYTES_MAX)),
            ends: ends.clone(),
        };
        let accepting = runtime.spawn(accept(listener, shared, threads.clone())).abort_handle();
        Ok(Self { addr, ends, accepting, threads })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
        self.accepting.abort();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("the thread of a UCX session panicked");
            }
        }
    }
}

/// What all sessions share.
#[derive(Clone)]
struct Shared {
    relay: Arc<Relay>,
    fabric: Fabric,
    token: Option<blake3::Hash>,
    runtime: Handle,
    idle: Arc<Semaphore>,
    ends: Arc<AtomicBool>,
}

/// A bucket, and its share of what all buckets of its kind may hold.
type Placed = (Bucket, OwnedSemaphorePermit);

async fn accept(listener: TcpListener, shared: Shared, threads: Threads) {
    let places = Arc::new(Semaphore::new(SESSIONS_MAX));
    loop {
        // Closed it is never; if it were, the bound would be gone and nothing else.
        let place = places.clone().acquire_owned().await.ok();
        let begun = match listener.accept().await {
            Ok((stream, peer)) => begin(stream, peer, shared.clone(), place),
            Err(error) => Err(error),
        };
        match begun {
            Ok(thread) => {
                let mut threads = lock(&threads);
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
            }
            Err(error) => {
                tracing::warn!(%error, "a UCX session was not begun");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn begin(
    stream: TcpStream,
    peer: SocketAddr,
    shared: Shared,
    place: Option<OwnedSemaphorePermit>,
) -> std::io::Result<JoinHandle<()>> {
    let stream = stream.into_std()?;
    thread::Builder::new().name("relay-ucx".into()).spawn(move || {
        let ended = Control::new(stream, peer.to_string()).and_then(|control| shared.session(control));
        if let Err(error) = ended {
            tracing::debug!(error = &error as &dyn std::error::Error, "a UCX session ended");
        }
        drop(place);
    })
}

impl Shared {
    fn going(&self) -> bool {
        !self.ends.load(Relaxed)
    }

    /// All that one follower asks for.
    fn session(&self, mut control: Control) -> Result<()> {
        let hello: Hello = control.hear(WORD_DEADLINE, &|| self.going())?;
        let mut link = self.fabric.link(control.peer())?;
        match self.greet(&hello, &mut link) {
            Ok(()) => control.tell(&Answer::default(), WORD_DEADLINE)?,
            Err(refusal) => return control.tell(&refusal.answer(), WORD_DEADLINE),
        }
        let mut idle: Option<Placed> = None;
        loop {
            let ask: Ask = control.hear(IDLE_DEADLINE, &|| self.going())?;
            let (filled, place) = match self.fill(&ask, &link, idle.take()) {
                Ok(placed) => placed,
                Err(refusal) => {
                    control.tell(&refusal.answer(), WORD_DEADLINE)?;
                    continue;
                }
            };
            control.tell(&Answer::default(), WORD_DEADLINE)?;
            let ticket = link.send(filled, 0..ask.bytes as usize, ask.tag)?;
            crash_point("relay.ucx.send")?;
            let mut watch = || if self.going() { control.check() } else { Err("the relay ends".to_owned()) };
            let (bucket, _) = link.finish(ticket, patience(ask.bytes), &mut watch)?;
            self.relay.cache.counters.served_bytes.fetch_add(ask.bytes, Relaxed);
            drop(place);
            let share = self.idle.clone().try_acquire_many_owned(bucket.len() as u32);
            idle = share.ok().map(|share| (bucket, share));
        }
    }

    fn greet(&self, hello: &Hello, link: &mut Link) -> std::result::Result<(), Refusal> {
        let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message);
        if hello.driftless_ucx != PROTOCOL {
            return Err(bad(format!("protocol {} is spoken here, not {}", PROTOCOL, hello.driftless_ucx)));
        }
        // Hashes of equal length compare in constant time.
        let given = hello.token.as_ref().map(|token| blake3::hash(token.as_bytes()));
        if self.token.is_some() && given != self.token {
            let message = "missing or wrong token";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
        }
        let address = hex::decode(&hello.address).map_err(|error| bad(error.to_string()))?;
        link.connect(&address).map_err(|error| bad(error.to_string()))
    }

    /// What was asked for, in a bucket, with its share of what all answers may hold.
    fn fill(&self, ask: &Ask, link: &Link, idle: Option<Placed>) -> std::result::Result<Placed, Refusal> {
        let end = ask.start.saturating_add(ask.bytes);
        let (object, range) = crate::relay::named(&ask.key, ask.size, &ask.blake3, ask.start..end)?;
        let length = (range.end - range.start) as usize;
        if length as u64 != ask.bytes || length == 0 {
            let message =
                format!("expected at least one byte, and all of them inside the object of {}", ask.size);
            return Err(Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, "range", message));
        }
        let (content, place) = self.content(object, length)?;
        let failed = |error: String| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "cache", error);
        let mut bucket = match idle {
            Some((bucket, _)) if bucket.len() >= length => bucket,
            _ => link.bucket(length).map_err(|error| failed(error.to_string()))?,
        };
        let into = bucket.get_mut(..length).unwrap_or_default();
        match content {
            Content::Memory(bytes) => {
                let bytes = bytes.get(range.start as usize..range.end as usize);
                into.copy_from_slice(
                    bytes.ok_or_else(|| failed("the object is shorter than its size".to_owned()))?,
                );
            }
            Content::File(file) => {
                file.read_exact_at(into, range.start).map_err(|error| failed(error.to_string()))?;
            }
        }
        Ok((bucket, place))
    }

    /// The object, from the cache or the origin, and room for so many bytes of it among all answers, by way of the relay's runtime.
    fn content(
        &self,
        object: crate::manifest::Object,
        length: usize,
    ) -> std::result::Result<(Content, OwnedSemaphorePermit), Refusal> {
        let internal = |message| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message);
        let (tell, told) = sync_channel(1);
        let relay = self.relay.clone();
        self.runtime.spawn(async move {
            let place = relay.answers.clone().acquire_many_owned(length as u32).await;
            let content = relay.object(object).await;
            // Whoever asked may have given up.
            let _ = tell.send((content, place));
        });
        // The object's own deadline comes first, and it hears at once when the runtime ends.
        match told.recv_timeout(WAIT_DEADLINE + WORD_DEADLINE) {
            Ok((content, Ok(place))) => Ok((content?, place)),
            _ => Err(internal("the relay ends, or has no room for another answer")),
        }
    }
}

impl Refusal {
    fn answer(self) -> Answer {
        Answer { error: Some(Failure { kind: self.kind.to_owned(), message: self.message }) }
    }
}
