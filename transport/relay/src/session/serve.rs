//! The relay's side of sessions, a thread for each.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::http::StatusCode;
use driftless_http::Error as HttpError;
use driftless_http::listen::{Admission, Limits, accept};
use driftless_store::os::crash_point;
use driftless_store::wait::lock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use super::control::{Control, DOCUMENT_BYTES_MAX, frame};
use super::{Answer, Ask, Failure, Hello, PROTOCOL, WORD_DEADLINE, patience};
use crate::cache::Content;
use crate::error::Result;
use crate::fabric::{Fabric, Link, Wait};
use crate::{Refusal, Relay, WAIT_DEADLINE};

/// Sessions at the same time at most.
const SESSIONS_MAX: usize = 256;
/// Bytes of memory that sessions keep registered for what they are asked for next. What answers hold is
/// bounded with those over HTTP.
const IDLE_BYTES_MAX: usize = 256 << 20;
/// A session in which nothing is asked for so long ends.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);

/// The sessions of a relay. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Sessions {
    addr: SocketAddr,
    ends: Arc<AtomicBool>,
    accepting: AbortHandle,
    threads: Threads,
}

type Threads = Arc<Mutex<Vec<JoinHandle<()>>>>;

impl Sessions {
    /// Listens on `addr`, and serves on threads of its own what `relay` has.
    ///
    /// # Errors
    /// [`Listen`](HttpError::Listen).
    pub(crate) fn start(
        relay: Arc<Relay>,
        fabric: Arc<dyn Fabric>,
        addr: SocketAddr,
        token: Option<&str>,
        limits: Limits,
        runtime: &Handle,
    ) -> Result<Self> {
        let listen = |source| HttpError::Listen { addr, source };
        let listener = runtime.block_on(TcpListener::bind(addr)).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let ends = Arc::new(AtomicBool::new(false));
        let threads = Threads::default();
        let shared = Shared {
            relay,
            fabric,
            token: token.map(|token| blake3::hash(token.as_bytes())),
            runtime: runtime.clone(),
            idle: Arc::new(Semaphore::new(IDLE_BYTES_MAX)),
            ends: ends.clone(),
            threads: threads.clone(),
        };
        let mut limits = limits;
        limits.connections = limits.connections.min(SESSIONS_MAX);
        let accepting = accept(listener, limits, move |stream, admission| {
            greet(stream, admission, shared.clone(), limits.authorise)
        });
        let accepting = runtime.spawn(accepting).abort_handle();
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
                tracing::error!("the thread of a session panicked");
            }
        }
    }
}

/// What all sessions share.
#[derive(Clone)]
struct Shared {
    relay: Arc<Relay>,
    fabric: Arc<dyn Fabric>,
    token: Option<blake3::Hash>,
    runtime: Handle,
    idle: Arc<Semaphore>,
    ends: Arc<AtomicBool>,
    threads: Threads,
}

/// Hears who has come. A stranger costs no thread and no link.
async fn greet(mut stream: TcpStream, admission: Admission, shared: Shared, deadline: Duration) {
    let begun = match tokio::time::timeout(deadline, shared.greeting(&mut stream)).await {
        Ok(Ok(Some(hello))) => {
            admission.grant();
            shared.begin(stream, hello, admission)
        }
        Ok(Ok(None)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    };
    if let Err(error) = begun {
        tracing::debug!(%error, "a session was not begun");
    }
}

impl Shared {
    fn going(&self) -> bool {
        !self.ends.load(Relaxed)
    }

    /// What a follower says first; `None` for one that was told that it may not come in.
    async fn greeting(&self, stream: &mut TcpStream) -> io::Result<Option<Hello>> {
        let length = stream.read_u32_le().await? as usize;
        if length > DOCUMENT_BYTES_MAX {
            return Err(io::Error::other(format!("a document of {length} bytes")));
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        let hello = serde_json::from_slice(&body)?;
        match self.check(&hello) {
            Ok(()) => Ok(Some(hello)),
            Err(refusal) => {
                stream.write_all(&frame(&refusal.answer())?).await?;
                Ok(None)
            }
        }
    }

    fn begin(self, stream: TcpStream, hello: Hello, admission: Admission) -> io::Result<()> {
        let (peer, stream) = (stream.peer_addr()?, stream.into_std()?);
        let threads = self.threads.clone();
        let mut threads = lock(&threads);
        // The end is told first, and joins the threads that are here then.
        if !self.going() {
            return Ok(());
        }
        let thread = thread::Builder::new().name("relay-session".into()).spawn(move || {
            let ended =
                Control::new(stream, peer.to_string()).and_then(|control| self.session(control, &hello));
            if let Err(error) = ended {
                tracing::debug!(error = &error as &dyn std::error::Error, "a session ended");
            }
            drop(admission);
        })?;
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// All that one follower asks for.
    fn session(&self, mut control: Control, hello: &Hello) -> Result<()> {
        let mut link = self.fabric.link(control.peer())?;
        let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message);
        let address = hex::decode(&hello.address).map_err(|error| bad(error.to_string()));
        let connected =
            address.and_then(|address| link.connect(&address).map_err(|error| bad(error.to_string())));
        match connected {
            Ok(()) => control.tell(&Answer::default(), WORD_DEADLINE)?,
            Err(refusal) => return control.tell(&refusal.answer(), WORD_DEADLINE),
        }
        // The share of what idle memory may hold.
        let mut idle: Option<OwnedSemaphorePermit> = None;
        loop {
            let ask: Ask = control.hear(IDLE_DEADLINE, &|| self.going())?;
            let place = match self.fill(&ask, &mut *link) {
                Ok(place) => place,
                Err(refusal) => {
                    link.release();
                    drop(idle.take());
                    control.tell(&refusal.answer(), WORD_DEADLINE)?;
                    continue;
                }
            };
            // The answer's share covers it now.
            drop(idle.take());
            control.tell(&Answer::default(), WORD_DEADLINE)?;
            crash_point("relay.ucx.send")?;
            let mut watch = || if self.going() { control.check() } else { Err("the relay ends".to_owned()) };
            let mut wait = Wait { deadline: patience(ask.bytes), watch: &mut watch };
            link.send(ask.bytes as usize, ask.tag, &mut wait)?;
            self.relay.cache.counters().served_bytes += ask.bytes;
            drop(place);
            idle = self.idle.clone().try_acquire_many_owned(link.memory(0)?.len() as u32).ok();
            if idle.is_none() {
                link.release();
            }
        }
    }

    fn check(&self, hello: &Hello) -> std::result::Result<(), Refusal> {
        if hello.driftless_ucx != PROTOCOL {
            let message = format!("protocol {} is spoken here, not {}", PROTOCOL, hello.driftless_ucx);
            return Err(Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message));
        }
        // Hashes of equal length compare in constant time.
        let given = hello.token.as_ref().map(|token| blake3::hash(token.as_bytes()));
        if self.token.is_some() && given != self.token {
            let message = "missing or wrong token";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
        }
        Ok(())
    }

    /// Puts what was asked for into the link's memory, and returns its share of what all answers may hold.
    fn fill(&self, ask: &Ask, link: &mut dyn Link) -> std::result::Result<OwnedSemaphorePermit, Refusal> {
        let end = ask.start.saturating_add(ask.bytes);
        let (object, range) = crate::named(&ask.key, ask.size, &ask.blake3, ask.start..end)?;
        let length = (range.end - range.start) as usize;
        if length as u64 != ask.bytes || length == 0 {
            let message =
                format!("expected at least one byte, and all of them inside the object of {}", ask.size);
            return Err(Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, "range", message));
        }
        let (content, place) = self.content(object, length)?;
        let failed = |error: String| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "cache", error);
        let into = &mut link.memory(length).map_err(|error| failed(error.to_string()))?[..length];
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
        Ok(place)
    }

    /// The object, from the cache or the origin, and room for so many bytes of it among all answers, by way
    /// of the relay's runtime.
    fn content(
        &self,
        object: driftless_store::Object,
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
