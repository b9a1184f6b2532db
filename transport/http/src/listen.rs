//! Accepting connections: how many, and how long each may take to authenticate. All servers of the workspace
//! accept here.
//!
//! A connection is a stranger's until one of its requests is authorised. A stranger has a deadline that no
//! byte extends, and one request. When all places are taken, the oldest stranger's connection is closed for
//! the new one. A flood of strangers therefore costs the process a bounded number of descriptors, and a
//! client with the token still gets in.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest as _, Request};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use derive_setters::Setters;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep};

/// Pause after a connection that could not be accepted, such as for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest head of a request.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// How often the log mentions connections that were closed to make room.
const TELL: Duration = Duration::from_secs(60);

/// What connections may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct Limits {
    /// Connections at the same time; 256 by default. There are fewer where the process may open few files,
    /// see `files_kept`.
    pub connections: usize,
    /// Descriptors that are left to the rest of the process, 768 by default; three quarters of all where that
    /// is less.
    pub files_kept: u64,
    /// How long a connection may last before one of its requests is authorised; 10 s by default.
    pub authorise: Duration,
    /// How long an authorised connection may be silent between requests, or take no byte of an answer; 150 s
    /// by default.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let (authorise, idle) = (Duration::from_secs(10), Duration::from_secs(150));
        Self { connections: 256, files_kept: 768, authorise, idle }
    }
}

impl Limits {
    fn places(&self) -> usize {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let left = files - self.files_kept.min(files / 4 * 3);
        self.connections.min(usize::try_from(left).unwrap_or(usize::MAX)).clamp(1, Semaphore::MAX_PERMITS)
    }
}

/// Connections of which no request has been authorised, oldest first.
#[derive(Debug, Default)]
struct Strangers(Mutex<BTreeMap<u64, AbortHandle>>);

impl Strangers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, AbortHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the connection of the one that has been here longest.
    fn close_oldest(&self) -> bool {
        let oldest = self.lock().pop_first();
        oldest.map(|(_, task)| task.abort()).is_some()
    }
}

/// A connection's place, which it has until this is dropped.
#[derive(Debug)]
pub struct Admission {
    number: u64,
    strangers: Arc<Strangers>,
    /// 0 for a stranger, odd while a request is carried out, even and not 0 between requests.
    turn: AtomicU64,
    _place: Option<OwnedSemaphorePermit>,
}

impl Admission {
    /// The other side has shown that it may be here: its connection no longer makes room for others.
    pub fn grant(&self) {
        self.strangers.lock().remove(&self.number);
        // One that was granted before stays as it is.
        let _ = self.turn.compare_exchange(0, 2, Relaxed, Relaxed);
    }

    fn is_stranger(&self) -> bool {
        self.turn.load(Relaxed) == 0
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.strangers.lock().remove(&self.number);
    }
}

/// A request being carried out, which may take as long as it takes.
struct Working<'a>(&'a Admission);

impl<'a> Working<'a> {
    fn begin(admission: &'a Admission) -> Self {
        admission.turn.fetch_add(1, Relaxed);
        Self(admission)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.turn.fetch_add(1, Relaxed);
    }
}

/// Accepts connections for ever, within `limits`, and runs `serve` for each in a task of its own. A task that
/// does not [grant](Admission::grant) its admission is ended when its place is needed; its own deadline it
/// has to keep itself.
pub async fn accept<F>(listener: TcpListener, limits: Limits, serve: impl Fn(TcpStream, Admission) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(limits.places()));
    let strangers = Arc::new(Strangers::default());
    let (mut number, mut closed, mut told) = (0, 0_u64, None::<Instant>);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                strangers.close_oldest();
                sleep(PAUSE).await;
                continue;
            }
        };
        let place = match places.clone().try_acquire_owned() {
            Ok(place) => Some(place),
            Err(_) => {
                closed += u64::from(strangers.close_oldest());
                // Closed it is never; if it were, the bound would be gone and nothing else.
                places.clone().acquire_owned().await.ok()
            }
        };
        if closed > 0 && told.is_none_or(|told| told.elapsed() >= TELL) {
            tracing::warn!(closed, "connections without an authorised request made room for others");
            (closed, told) = (0, Some(Instant::now()));
        }
        number += 1;
        let turn = AtomicU64::new(0);
        let admission = Admission { number, strangers: strangers.clone(), turn, _place: place };
        let serving = serve(stream, admission);
        {
            // A task that ends at once waits for this, and is taken off the list behind it.
            let mut strangers = strangers.lock();
            strangers.insert(number, tokio::spawn(serving).abort_handle());
        }
        // The new connection is heard before the next one can take its place.
        tokio::task::yield_now().await;
    }
}

/// Serves `router` over HTTP/1 for ever. What has to be authorised passes through [`admit`]; a connection
/// whose request does not is closed with the answer.
pub async fn serve_http(listener: TcpListener, limits: Limits, router: Router) {
    let router = TowerToHyperService::new(router);
    let mut http = http1::Builder::new();
    // The deadlines are those of the stream.
    http.max_buf_size(HEAD_BYTES_MAX).header_read_timeout(None);
    accept(listener, limits, move |stream, admission| {
        let (admission, router) = (Arc::new(admission), router.clone());
        // Answers are waited for; a stream that is gone already shows that soon enough.
        let _ = stream.set_nodelay(true);
        let io = Watched {
            stream,
            deadline: Box::pin(sleep(limits.authorise)),
            idle: limits.idle,
            turn: 0,
            admission: admission.clone(),
        };
        let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
            let (admission, router) = (admission.clone(), router.clone());
            request.extensions_mut().insert(admission.clone());
            async move {
                let mut answer = router.call(request).await?;
                if admission.is_stranger() {
                    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, std::convert::Infallible>(answer)
            }
        });
        let connection = http.serve_connection(TokioIo::new(io), service);
        async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = &error as &dyn std::error::Error, "an HTTP connection ended");
            }
        }
    })
    .await;
}

/// Carries out a request that is authorised: its connection makes no room for others from now on. The
/// body is here before `next` runs; the router's `DefaultBodyLimit` has to be outside of this.
pub async fn admit(request: Request, next: Next) -> Response {
    let Some(admission) = request.extensions().get::<Arc<Admission>>().cloned() else {
        return next.run(request).await;
    };
    admission.grant();
    let (parts, body) = request.into_parts();
    match Bytes::from_request(Request::from_parts(parts.clone(), body), &()).await {
        Ok(body) => {
            let _working = Working::begin(&admission);
            next.run(Request::from_parts(parts, Body::from(body))).await
        }
        Err(rejection) => rejection.into_response(),
    }
}

/// A stranger's stream until its deadline; later one with a deadline that moves on with every byte.
struct Watched {
    stream: TcpStream,
    deadline: Pin<Box<Sleep>>,
    idle: Duration,
    /// The admission's when the deadline was last checked.
    turn: u64,
    admission: Arc<Admission>,
}

impl Watched {
    fn watch<T>(
        &mut self,
        polled: Poll<io::Result<T>>,
        is_read: bool,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        let turn = self.admission.turn.load(Relaxed);
        if turn != self.turn || (polled.is_ready() && turn != 0) {
            self.turn = turn;
            self.deadline.as_mut().reset(Instant::now() + self.idle);
        }
        // While a request is carried out, nothing is expected of the client.
        if (polled.is_ready() && turn != 0) || (is_read && turn % 2 == 1) {
            return polled;
        }
        match self.deadline.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => polled,
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.watch(polled, true, context)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(polled, false, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.watch(polled, false, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
