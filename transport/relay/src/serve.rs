//! The relay's HTTP interface.

use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use axum::{Router, middleware};
use driftless_http::listen::serve_http;
use driftless_http::metrics::{CONTENT_TYPE, Page};
use driftless_http::{self as http, Threads, Token};
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;

use super::cache::{Content, Counters, Fill};
use super::{Refusal, Relay, RelayOptions};
use crate::error::Result;
use crate::session::Sessions;

/// Threads that send and receive, and those that read files, and the origin.
const THREADS: Threads = Threads { io: 2, blocking: 16 };

/// A running relay. Dropping it ends it.
#[derive(Debug)]
pub struct Server {
    /// What is served over a fabric, which ends while the runtime still answers it.
    sessions: Option<Sessions>,
    http: http::Server,
}

impl Server {
    /// The address it listens on, with the port that the system picked if port 0 was asked for.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.http.addr()
    }

    /// The address at which it listens for those that ask over a fabric.
    #[must_use]
    pub fn fabric_addr(&self) -> Option<SocketAddr> {
        self.sessions.as_ref().map(Sessions::addr)
    }
}

/// Listens, and serves from threads of its own.
pub(super) fn start(relay: Arc<Relay>, options: RelayOptions) -> Result<Server> {
    let RelayOptions { listen, token, limits, fabric, .. } = options;
    let mut sessions = None;
    let http = http::Server::start("relay-http", listen, THREADS, |listener, runtime| -> Result<_> {
        if let Some((addr, fabric)) = fabric {
            let relay = relay.clone();
            sessions = Some(Sessions::start(relay, fabric, addr, token.as_deref(), limits, runtime)?);
        }
        Ok(serve_http(listener, limits, router(relay, token)))
    })?;
    Ok(Server { sessions, http })
}

fn router(relay: Arc<Relay>, token: Option<String>) -> Router {
    let token = Token::new(token);
    Router::new()
        .route("/objects/{*key}", get(object))
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn(move |request, next| token.clone().check(request, next)))
        .route("/health", get(|| async { Json(serde_json::json!({ "ok": true })) }))
        .layer(DefaultBodyLimit::max(0))
        .with_state(relay)
}

/// Which bytes an object has.
#[derive(Deserialize)]
struct Named {
    size: u64,
    blake3: String,
}

async fn object(
    State(relay): State<Arc<Relay>>,
    Path(key): Path<String>,
    named: std::result::Result<Query<Named>, QueryRejection>,
    headers: HeaderMap,
) -> std::result::Result<Response, Refusal> {
    let bad = |message: &str| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message);
    let Query(Named { size, blake3 }) = named.map_err(|_| bad("expected ?size=<bytes>&blake3=<hex>"))?;
    let range = headers.get(header::RANGE).and_then(|range| parse_range(range.to_str().ok()?));
    let (start, end) = range.ok_or_else(|| bad("expected a header `Range: bytes=<first>-<last>`"))?;
    let (object, Range { start, end }) = super::named(&key, size, &blake3, start..end)?;
    let length = (end - start) as usize;
    // Held until the client has taken the bytes.
    let place = relay.answers.clone().acquire_many_owned(length as u32).await;
    let place = place.map_err(|_| bad("the relay ends"))?;
    let bytes = read(relay.object(object).await?, start, length).await?;
    relay.cache.counters().served_bytes += length as u64;
    let range = format!("bytes {start}-{}/{size}", end.saturating_sub(1));
    let answer = Bytes::from_owner(Served { bytes, _place: place });
    let headers = [(header::CONTENT_RANGE, range), (header::CONTENT_TYPE, "application/octet-stream".into())];
    Ok((StatusCode::PARTIAL_CONTENT, headers, Body::from(answer)).into_response())
}

/// An answer's bytes, and their share of what all answers may hold.
struct Served {
    bytes: Vec<u8>,
    _place: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Served {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// `bytes=<first>-<last>`, as first byte and byte behind the last.
fn parse_range(text: &str) -> Option<(u64, u64)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    (first <= last).then_some((first, last.saturating_add(1)))
}

async fn read(content: Content, start: u64, length: usize) -> std::result::Result<Vec<u8>, Refusal> {
    let read = tokio::task::spawn_blocking(move || match content {
        Content::Memory(bytes) => {
            Ok(bytes.get(start as usize..start as usize + length).unwrap_or_default().to_vec())
        }
        Content::File(file) => {
            let mut bytes = vec![0; length];
            file.read_exact_at(&mut bytes, start).map(|()| bytes)
        }
    });
    let failed = |error: String| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "cache", error);
    read.await.map_err(|panic| failed(panic.to_string()))?.map_err(|error| failed(error.to_string()))
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        http::refuse(self.status, self.kind, self.message)
    }
}

/// What `GET /status` says.
#[derive(Serialize)]
struct Status {
    store: String,
    cache: Fill,
    fetching: u64,
    #[serde(flatten)]
    counters: Counters,
}

impl Status {
    fn of(relay: &Relay) -> Self {
        let (store, fetching) = (relay.store.clone(), relay.flights().len() as u64);
        Self { store, cache: relay.cache.fill(), fetching, counters: relay.cache.counted() }
    }
}

async fn status(State(relay): State<Arc<Relay>>) -> Response {
    Json(Status::of(&relay)).into_response()
}

async fn metrics(State(relay): State<Arc<Relay>>) -> Response {
    let Status { cache, fetching, counters, .. } = Status::of(&relay);
    let mut page = Page::new("driftless_relay");
    for (name, help, value) in [
        ("hits_total", "Ranges asked for that were in the cache.", counters.hits),
        ("fetches_total", "Objects asked of the origin, or checked after a restart.", counters.fetches),
        ("joined_total", "Ranges asked for whose object was being fetched already.", counters.joined),
        ("failures_total", "Objects that could not be fetched.", counters.failures),
        ("refused_total", "Ranges refused because too many objects were being waited for.", counters.refused),
        ("evictions_total", "Objects given up for others.", counters.evictions),
        ("origin_bytes_total", "Bytes read from the origin.", counters.origin_bytes),
        ("served_bytes_total", "Bytes of objects sent to clients.", counters.served_bytes),
    ] {
        page.counter(name, help, value);
    }
    for (name, help, value) in [
        ("fetching", "Objects being fetched now.", fetching),
        ("cache_objects", "Objects in the cache, in whole or in part.", cache.objects),
        ("cache_bytes", "Bytes of objects in the cache.", cache.bytes),
        ("cache_bytes_max", "Bytes that the cache may hold.", cache.bytes_max),
    ] {
        page.gauge(name, help, value);
    }
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], page.into_text()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_nothing_else() {
        assert_eq!(parse_range("bytes=0-0"), Some((0, 1)));
        assert_eq!(parse_range("bytes=5-9"), Some((5, 10)));
        assert_eq!(parse_range("bytes=0-18446744073709551615"), Some((0, u64::MAX)));
        for bad in
            ["", "bytes=", "bytes=1-", "bytes=-5", "bytes=9-5", "bytes=0-1,3-4", "items=0-1", "bytes=a-b"]
        {
            assert_eq!(parse_range(bad), None, "{bad}");
        }
    }
}
