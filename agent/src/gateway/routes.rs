//! Its routes, and who may take them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Extension, Json, Router};
use driftless_http::is_ours;
use driftless_http::listen::admit;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use super::counts::Counts;
use super::{GatewayOptions, stream};
use crate::message::{Answer, Converse, Refusal};
use crate::wire::{Fault, Frame, Hints, Protocol, ToolCache};

/// Seconds after which a client that found no room may come back.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

struct Shared {
    options: GatewayOptions,
    converse: Arc<dyn Converse>,
    places: Arc<Semaphore>,
    /// Replies, and a number that another process does not have.
    replies: AtomicU64,
    begun: u128,
    tools: ToolCache,
    counts: Counts,
}

/// What a request that was let in comes with.
#[derive(Clone)]
struct Entered {
    session: String,
    /// When its client has waited enough.
    until: Instant,
    /// Its room, which it has until its answer is drawn.
    place: Option<Arc<OwnedSemaphorePermit>>,
}

/// An answer on its way.
pub(super) type Awaited = oneshot::Receiver<Result<Answer, Refusal>>;

pub(super) fn router(options: GatewayOptions, converse: Arc<dyn Converse>, counts: Counts) -> Router {
    let (places, bytes_max) = (Semaphore::new(options.asks_max), options.body_bytes_max);
    let begun = now().as_nanos();
    let (replies, tools) = (AtomicU64::new(0), ToolCache::default());
    let shared =
        Arc::new(Shared { options, converse, places: Arc::new(places), replies, begun, tools, counts });
    let answering = |protocol| {
        let answer =
            async move |State(shared): State<Arc<Shared>>,
                        Extension(entered): Extension<Entered>,
                        headers: HeaderMap,
                        body: Bytes| { answer(shared, protocol, entered, &headers, body).await };
        post(answer)
    };
    let api = Router::new()
        .route("/v1/chat/completions", answering(Protocol::Chat))
        .route("/v1/responses", answering(Protocol::Responses))
        .route("/v1/messages", answering(Protocol::Messages))
        .route("/v1/messages/count_tokens", post(count))
        .route("/v1/models", get(models))
        .route_layer(middleware::from_fn_with_state(shared.clone(), enter));
    let closing = Router::new()
        .route("/", delete(close))
        .route_layer(middleware::from_fn_with_state(shared.clone(), enter));
    Router::new()
        .nest("/s/{session}", api.clone().merge(closing))
        .merge(api)
        .route("/", get(async || "driftless gateway\n"))
        .route("/health", get(health))
        .fallback(async |request: Request| {
            let path = request.uri().path();
            told(protocol_of(path).fault(404, None, &format!("there is nothing at {path}")))
        })
        .method_not_allowed_fallback(async |request: Request| {
            let (method, path) = (request.method(), request.uri().path());
            told(protocol_of(path).fault(405, None, &format!("{path} does not take {method}")))
        })
        .with_state(shared.clone())
        .layer(middleware::from_fn_with_state(shared, guard))
        // Outside of what reads the body.
        .layer(DefaultBodyLimit::max(bytes_max))
}

/// Refuses what a page from elsewhere may have a browser ask, and counts what is replied.
async fn guard(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let protocol = protocol_of(request.uri().path());
    let reply = if is_ours(request.headers(), shared.options.is_open) {
        next.run(request).await
    } else {
        told(protocol.fault(403, None, "the Host or the Origin is not this gateway's"))
    };
    shared.counts.replied(protocol, reply.status().as_u16());
    reply
}

/// Lets in who has the session's key, if there is room. What is refused here has not been read.
async fn enter(
    State(shared): State<Arc<Shared>>,
    params: RawPathParams,
    mut request: Request,
    next: Next,
) -> Response {
    let (protocol, options) = (protocol_of(request.uri().path()), &shared.options);
    let key = key(request.headers()).map(str::to_owned);
    let named = params.iter().find(|(name, _)| *name == "session").map(|(_, session)| session.to_owned());
    let Some(session) = named.or_else(|| key.clone()) else {
        let words = "expected a key: `Authorization: Bearer KEY`, or `x-api-key: KEY`";
        return told(protocol.refused(&Refusal::Unknown(words.into())));
    };
    if !shared.converse.opens(&session, key.as_deref()) {
        let words = "there is no such session, or the key is another's or has expired".into();
        return told(protocol.refused(&Refusal::Unknown(words)));
    }
    if length(request.headers()).is_some_and(|bytes| bytes > options.body_bytes_max as u64) {
        return told(too_large(protocol, options));
    }
    let mut place = None;
    if request.method() == Method::POST {
        let Ok(free) = shared.places.clone().try_acquire_owned() else {
            let words = format!("all {} places for requests are taken", options.asks_max);
            return told(protocol.refused(&Refusal::Busy(words)));
        };
        place = Some(Arc::new(free));
    }
    let until = Instant::now() + options.deadline;
    request.extensions_mut().insert(Entered { session, until, place });
    match timeout_at(until, admit(request, next)).await {
        Ok(reply) if reply.status() == StatusCode::PAYLOAD_TOO_LARGE => told(too_large(protocol, options)),
        Ok(reply) => reply,
        Err(_) => told(protocol.refused(&late(options))),
    }
}

async fn answer(
    shared: Arc<Shared>,
    protocol: Protocol,
    entered: Entered,
    headers: &HeaderMap,
    body: Bytes,
) -> Response {
    let call = match protocol.read(&body, &hints(headers), &shared.tools) {
        Ok(call) => call,
        Err(refusal) => return told(protocol.refused(&refusal)),
    };
    drop(body);
    let (form, frame, ping) = (call.form, shared.frame(), shared.options.ping);
    let late = late(&shared.options);
    let (until, mut awaited) = (entered.until, shared.begin(entered, call.ask));
    if !form.stream {
        return match arrived((&mut awaited).await) {
            Ok(answer) => Json(protocol.reply(&form, &answer, &frame)).into_response(),
            Err(refusal) => told(protocol.refused(&refusal)),
        };
    }
    let early = match tokio::time::timeout(ping, &mut awaited).await.map(arrived) {
        Ok(Err(refusal)) => return told(protocol.refused(&refusal)),
        early => early.ok().and_then(Result::ok),
    };
    stream::respond(stream::Told { protocol, form, frame, ping, until, late }, early, awaited)
}

impl Shared {
    /// Has an answer drawn, by a task that no client's end ends.
    fn begin(self: Arc<Self>, entered: Entered, ask: crate::message::Ask) -> Awaited {
        let (sender, receiver) = oneshot::channel();
        tokio::spawn(async move {
            let (under_way, begin) = (self.counts.began(), Instant::now());
            let answer = self.converse.ask(&entered.session, ask).await;
            self.counts.ended(&answer, begin.elapsed());
            drop(under_way);
            if let Err(refusal) = &answer {
                tracing::debug!(session = entered.session, %refusal, "a request was refused");
            }
            drop(entered.place);
            // Its client may have gone.
            let _ = sender.send(answer);
        });
        receiver
    }

    fn frame(&self) -> Frame {
        let number = self.replies.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:x}{number:06x}", self.begun);
        Frame { id, model: self.converse.model().to_owned(), created: now().as_secs() }
    }
}

async fn count(
    State(shared): State<Arc<Shared>>,
    Extension(entered): Extension<Entered>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let counted = async {
        let call = Protocol::Messages.read(&body, &hints(&headers), &shared.tools)?;
        shared.converse.count(&entered.session, call.ask).await
    };
    match counted.await {
        Ok(tokens) => Json(json!({ "input_tokens": tokens })).into_response(),
        Err(refusal) => told(Protocol::Messages.refused(&refusal)),
    }
}

/// Ends a session.
async fn close(
    State(shared): State<Arc<Shared>>,
    Extension(entered): Extension<Entered>,
    headers: HeaderMap,
) -> Response {
    match shared.converse.close(&entered.session, key(&headers)).await {
        Ok(()) => Json(json!({"session": entered.session, "closed": true})).into_response(),
        Err(refusal) => told(Protocol::Chat.refused(&refusal)),
    }
}

/// 503 once it can answer no more: whatever watches it may then start it again.
async fn health(State(shared): State<Arc<Shared>>) -> Response {
    match shared.converse.check() {
        Ok(()) => "ok\n".into_response(),
        // Why is the log's: strangers may ask here.
        Err(_) => {
            let todo = "it cannot keep what it draws: make room, or mend the disk, and start this again\n";
            (StatusCode::SERVICE_UNAVAILABLE, todo).into_response()
        }
    }
}

/// The one model, with what either vendor's clients look for.
async fn models(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let id = shared.converse.model();
    let model = json!({
        "id": id, "object": "model", "owned_by": "driftless", "created": 0,
        "type": "model", "display_name": id, "created_at": "1970-01-01T00:00:00Z",
    });
    Json(json!({"object": "list", "data": [model], "has_more": false, "first_id": id, "last_id": id}))
}

/// What came of an answer.
pub(super) fn arrived(
    answer: Result<Result<Answer, Refusal>, oneshot::error::RecvError>,
) -> Result<Answer, Refusal> {
    answer.unwrap_or_else(|_| Err(Refusal::Broken("no answer was made; the gateway's log says why".into())))
}

fn late(options: &GatewayOptions) -> Refusal {
    let words = "no answer within";
    Refusal::Busy(format!("{words} {:?}; it is drawn on, for when you ask again", options.deadline))
}

fn too_large(protocol: Protocol, options: &GatewayOptions) -> Fault {
    protocol.fault(413, None, &format!("the body has more than {} bytes", options.body_bytes_max))
}

/// A refusal as a response.
fn told(fault: Fault) -> Response {
    let status = StatusCode::from_u16(fault.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(fault.body)).into_response();
    match fault.status {
        503 | 529 => _ = response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER),
        401 => {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        _ => {}
    }
    response
}

/// Whose shape the refusals of a path have.
fn protocol_of(path: &str) -> Protocol {
    match path {
        path if path.contains("/v1/messages") => Protocol::Messages,
        path if path.contains("/v1/responses") => Protocol::Responses,
        _ => Protocol::Chat,
    }
}

/// The key: OpenAI's clients bring it as a bearer, Anthropic's in either place.
fn key(headers: &HeaderMap) -> Option<&str> {
    let bearer = text(headers, "authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    bearer.or_else(|| text(headers, "x-api-key")).filter(|key| !key.is_empty())
}

fn hints(headers: &HeaderMap) -> Hints {
    let of = |name| text(headers, name).map(str::to_owned);
    Hints { agent_id: of("x-claude-code-agent-id"), turn_metadata: of("x-codex-turn-metadata") }
}

fn length(headers: &HeaderMap) -> Option<u64> {
    text(headers, "content-length")?.parse().ok()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
