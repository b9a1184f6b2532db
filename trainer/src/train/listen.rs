//! `fleet_listen`: what `fleet.sock` does, over HTTP, for those who are not on this host.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Json, Response};
use axum::routing::get;
use axum::{Router, middleware};
use driftless_http::listen::{Limits, serve_http};
use driftless_http::{Server, Threads, Token, refuse};
use tokio::runtime::{Handle, Runtime};

use super::door::Keeper;
use crate::door::{Answer, Listen, PATH, Request};
use crate::error::{Error, Result};

/// Longest request.
const BODY_BYTES_MAX: usize = 64 << 10;
/// Its threads; what it does is done on the run's own.
const THREADS: Threads = Threads { io: 1, blocking: 1 };

/// What the server is about.
#[derive(Clone)]
struct Run {
    keeper: Arc<Keeper>,
    /// The run's threads: what is begun for an engine outlives this server.
    threads: Handle,
    asks_for_token: bool,
}

/// Serves `GET /fleet` and `POST /fleet` until it is dropped.
///
/// # Errors
/// [`Error::FleetListen`]: an address beyond loopback without a token, or one that cannot be had.
pub(super) fn serve(runtime: &Runtime, listen: &Listen, keeper: Arc<Keeper>) -> Result<Server> {
    listen.check()?;
    let token = Token::new(listen.token.clone());
    let (threads, asks_for_token) = (runtime.handle().clone(), listen.token.is_some());
    let router = Router::new()
        .route(PATH, get(list).post(change))
        .with_state(Run { keeper, threads, asks_for_token })
        .layer(middleware::from_fn(move |request, next| token.clone().check(request, next)))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX));
    let serving = |listener, _: &Handle| Ok(serve_http(listener, Limits::default(), router));
    Server::start("fleet-http", listen.addr, THREADS, serving).map_err(|source| Error::FleetListen { source })
}

async fn list(State(run): State<Run>) -> Response {
    run.answer(Request::List).await
}

async fn change(State(run): State<Run>, headers: HeaderMap, body: Bytes) -> Response {
    // A browser says so of each POST. A page from elsewhere reaches loopback, where no token may be asked for.
    if headers.contains_key(header::ORIGIN) {
        return refuse(StatusCode::FORBIDDEN, "forbidden", "a page in a browser changes no engines");
    }
    match serde_json::from_slice(&body) {
        // Anybody on this host could have them sent to an address of their own.
        Ok(Request::Add { keys: true, .. }) if !run.asks_for_token => {
            let why = "the run's keys are given where a token is asked for, or through fleet.sock";
            refuse(StatusCode::FORBIDDEN, "forbidden", why)
        }
        Ok(request) => run.answer(request).await,
        Err(error) => refuse(StatusCode::BAD_REQUEST, "bad_request", format!("no request: {error}")),
    }
}

impl Run {
    /// It is carried out to its end even if whoever asked hangs up.
    async fn answer(self, request: Request) -> Response {
        let Run { keeper, threads, .. } = self;
        match threads.spawn(async move { keeper.answer(request).await }).await {
            Ok(answer @ Answer::Refused { .. }) => (StatusCode::CONFLICT, Json(answer)).into_response(),
            Ok(answer) => Json(answer).into_response(),
            Err(error) => {
                tracing::error!(%error, "a change of the engines did not end");
                refuse(StatusCode::INTERNAL_SERVER_ERROR, "internal", "it did not end; see the run's log")
            }
        }
    }
}
