#![doc = include_str!("../README.md")]

use std::net::SocketAddr;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use derive_setters::Setters;
use driftless_http::listen::{Limits, serve_http};
use driftless_http::{Server, Threads, Token, check_exposure, metrics, refuse};
use driftless_store::{Error as StoreError, chain_text};
use serde::{Deserialize, Serialize};

use driftless_transport::follow::PrepareReply;
use driftless_transport::{Error, Follower, Version};

/// Requests carry a version number at most.
const BODY_BYTES_MAX: usize = 4096;
/// Prepares and activates at once; all but one are answered that the follower is busy.
const REQUESTS_MAX: usize = 8;

/// Where a follower is served, and what clients may do.
#[derive(Debug, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct ServeOptions {
    /// The address to listen on; with port 0 the system picks a port.
    pub addr: SocketAddr,
    /// If set, every request but `GET /health` needs `Authorization: Bearer <token>`.
    #[setters(into)]
    pub token: Option<String>,
    /// How many may connect, and for how long.
    pub limits: Limits,
    /// Further routes, behind the same token and the same limits.
    pub routes: Router,
}

impl ServeOptions {
    /// No token, the default limits, no further routes.
    #[must_use]
    pub fn new(addr: impl Into<SocketAddr>) -> Self {
        Self { addr: addr.into(), token: None, limits: Limits::default(), routes: Router::new() }
    }
}

/// Serves `follower` from threads of its own: `POST /prepare`, `POST /activate`, `POST /notify`,
/// `GET /status`, `GET /metrics`, `GET /health`.
///
/// # Errors
///
/// Those of [`check_exposure`] and [`Server::start`]: an address other than loopback without a token, an empty token, or an address that cannot be
/// had.
pub fn serve(follower: Follower, options: ServeOptions) -> Result<Server, driftless_http::Error> {
    let ServeOptions { addr, token, limits, routes } = options;
    check_exposure("follower address", addr, token.as_deref())?;
    let router = router(follower, token, routes);
    let threads = Threads { io: 1, blocking: REQUESTS_MAX };
    Server::start("follower-http", addr, threads, |listener, _| Ok(serve_http(listener, limits, router)))
}

fn router(follower: Follower, token: Option<String>, more: Router) -> Router {
    let token = Token::new(token);
    let routes = Router::new()
        .route("/prepare", post(prepare))
        .route("/activate", post(activate))
        .route("/notify", post(notify))
        .route("/status", get(status))
        .route("/metrics", get(page))
        .with_state(follower)
        .merge(more);
    routes
        .layer(middleware::from_fn(move |request, next| token.clone().check(request, next)))
        .route("/health", get(|| async { Json(serde_json::json!({ "ok": true })) }))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PrepareRequest {
    version: Option<Version>,
}

async fn prepare(State(follower): State<Follower>, body: Bytes) -> Response {
    let request = if body.is_empty() { Ok(PrepareRequest::default()) } else { serde_json::from_slice(&body) };
    match request {
        Ok(PrepareRequest { version }) => {
            blocking(move || follower.prepare(version).map(PrepareReply::from)).await
        }
        Err(error) => refuse(StatusCode::BAD_REQUEST, "bad_request", error.to_string()),
    }
}

async fn activate(State(follower): State<Follower>) -> Response {
    blocking(move || follower.activate()).await
}

/// A version may be there: the loop polls at once. The body is ignored: the store says what there is.
async fn notify(State(follower): State<Follower>) -> Response {
    (StatusCode::ACCEPTED, Json(serde_json::json!({ "watching": follower.notify() }))).into_response()
}

async fn status(State(follower): State<Follower>) -> Response {
    Json(follower.status()).into_response()
}

async fn page(State(follower): State<Follower>) -> Response {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], follower.metrics()).into_response()
}

/// Runs a follower's call off the server's thread. It goes on to its end even if the client hangs up.
async fn blocking<T: Serialize + Send + 'static>(
    call: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Response {
    match tokio::task::spawn_blocking(call).await {
        Ok(Ok(reply)) => Json(reply).into_response(),
        Ok(Err(error)) => {
            let (status, kind) = classify(&error);
            refuse(status, kind, chain_text(&error))
        }
        Err(panic) => {
            tracing::error!(%panic, "a request of the follower panicked");
            let message = "the request panicked; see the follower's log";
            refuse(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
        }
    }
}

/// HTTP status and stable name of an error.
fn classify(error: &Error) -> (StatusCode, &'static str) {
    match error {
        Error::NoSuchRun { .. } | Error::NoSuchVersion { .. } | Error::Collected { .. } => {
            (StatusCode::NOT_FOUND, "not_found")
        }
        Error::NothingApplied { .. } => (StatusCode::CONFLICT, "nothing_prepared"),
        Error::Busy { .. } => (StatusCode::CONFLICT, "busy"),
        Error::Rewind { .. } => (StatusCode::CONFLICT, "rewind"),
        Error::ForeignRun { .. } | Error::ForeignModel { .. } => (StatusCode::CONFLICT, "foreign"),
        Error::BrokenChain { .. } => (StatusCode::CONFLICT, "broken_chain"),
        Error::Engine { .. } => (StatusCode::BAD_GATEWAY, "engine"),
        Error::EngineTimeout { .. } => (StatusCode::GATEWAY_TIMEOUT, "engine_timeout"),
        Error::Store(StoreError::NoSpace { .. }) => (StatusCode::INSUFFICIENT_STORAGE, "no_space"),
        Error::Unsigned { .. } | Error::BadSignature { .. } => (StatusCode::BAD_GATEWAY, "untrusted"),
        error if error.is_refusal() => (StatusCode::BAD_GATEWAY, "corrupt"),
        Error::DamagedReplica { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "damaged_replica"),
        error if error.is_retryable() => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
    }
}
