//! The page over HTTP, and what it asks for as JSON and by MCP: read-only, for this host or for those who have the token.

use super::samples::Ask;
use super::{Board, PAGE, mcp};
use crate::cli::shared::error::{Error, Result};
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use driftless::http::listen::{Limits, serve_http};
use driftless::http::{Server, Threads, Token, check_exposure, is_ours, refuse};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::task::{JoinError, spawn_blocking};

/// Its threads: files are read on those that may wait.
const THREADS: Threads = Threads { io: 1, blocking: 4 };

/// Longest message of MCP.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// What every answer carries: nothing of it runs or is shown within another page, and it loads nothing from elsewhere.
const HEADERS: [(&str, &str); 4] = [
    (
        "content-security-policy",
        "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
];

/// Serves until it is dropped. What callers have to bring is `token`, if there is one.
pub(super) fn serve(board: Board, addr: SocketAddr, token: Option<String>) -> Result<Server> {
    check_exposure("dashboard address", addr, token.as_deref())?;
    let is_open = token.is_none();
    let token = Token::new(token);
    // The page holds nothing of a run. It asks whoever opened it for the token.
    let mut router = Router::new();
    for (path, kind, bytes) in PAGE {
        router = router
            .route(path, get(move || async move { ([(header::CONTENT_TYPE, kind)], bytes).into_response() }));
    }
    let api = Router::new()
        .route("/api/{what}", get(answer))
        .route("/mcp", post(message).layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX)))
        .with_state(Arc::new(board))
        .layer(middleware::from_fn(move |request, next| token.clone().check(request, next)));
    let router =
        router.merge(api).layer(middleware::from_fn(move |request, next| guard(is_open, request, next)));
    let serving = |listener, _: &Handle| {
        Ok::<_, driftless::http::Error>(serve_http(listener, Limits::default(), router))
    };
    Ok(Server::start("dashboard", addr, THREADS, serving)?)
}

async fn answer(
    State(board): State<Arc<Board>>,
    Path(what): Path<String>,
    ask: Result<Query<Ask>, QueryRejection>,
) -> Response {
    let ask = match ask {
        Ok(Query(ask)) => ask,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, "bad_request", error.body_text()),
    };
    match spawn_blocking(move || board.answer(&what, &ask)).await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Ok(Err(error @ Error::Usage { .. })) => refuse(StatusCode::NOT_FOUND, "not_found", error.to_string()),
        Ok(Err(error)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, "unreadable", super::told(&error)),
        Err(error) => unmade(&error),
    }
}

async fn message(State(board): State<Arc<Board>>, headers: HeaderMap, body: Bytes) -> Response {
    // A client that names none speaks an older revision, or has yet to agree on one.
    let revision = headers.get("mcp-protocol-version");
    if let Some(found) = revision.filter(|found| !mcp::REVISIONS.iter().any(|known| found == known)) {
        let known = mcp::REVISIONS.join(", ");
        let what = format!("expected mcp-protocol-version to be one of {known}, found {found:?}");
        return refuse(StatusCode::BAD_REQUEST, "bad_request", what);
    }
    match spawn_blocking(move || mcp::answer(&board, &body)).await {
        Ok(Some(answer)) => Json(answer).into_response(),
        Ok(None) => StatusCode::ACCEPTED.into_response(),
        Err(error) => unmade(&error),
    }
}

fn unmade(error: &JoinError) -> Response {
    tracing::error!(%error, "an answer was not made");
    refuse(StatusCode::INTERNAL_SERVER_ERROR, "internal", "no answer was made; see standard error")
}

/// Refuses what a page from elsewhere may have a browser ask: it would come under another name, or say where from.
async fn guard(is_open: bool, request: Request, next: Next) -> Response {
    let mut answer = match is_ours(request.headers(), is_open) {
        true => next.run(request).await,
        false => refuse(StatusCode::FORBIDDEN, "forbidden", "the Host or the Origin is not this dashboard's"),
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    answer
}
