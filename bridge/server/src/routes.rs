//! SGLang's routes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{self, DefaultBodyLimit, Query};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use driftless_http::listen::admit;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::auth::{Pass, pass};
use crate::reply::{self, Refusal};
use crate::request::{new_rid, parse};
use crate::state::Registry;
use crate::stream::Stream;
use crate::worker::Worker;
use crate::{Completion, Ended, Facts, Job, Request, Sampling, ServerState, Updated, info};
use driftless_bridge::Keys;
use driftless_bridge::engine::PauseMode;
use driftless_bridge::sglang::{DiskUpdate, Feature};

/// Largest body that is read.
const BODY_BYTES_MAX: usize = 64 << 20;
/// How often a draining pause aborts again: requests may pass the gate just before it closes.
const DRAIN_INTERVAL: Duration = Duration::from_millis(100);
/// How often a flush with a timeout looks again.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);

/// What every handler sees.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) worker: Worker,
    pub(super) state: Arc<ServerState>,
    pub(super) registry: Arc<Registry>,
    pub(super) keys: Keys,
    pub(super) address: SocketAddr,
    pub(super) healthy: AtomicBool,
    /// When the last health probe was answered, and whether by a token.
    pub(super) probed: tokio::sync::Mutex<Option<(Instant, bool)>>,
    pub(super) health_timeout: Duration,
}

type Handle = extract::State<Arc<Shared>>;
type Reply = Result<Response, Refusal>;

/// Routes that the oldest dialect lacks, with what brought them.
const LATER: [(&str, Feature); 3] = [
    ("/ready", Feature::Ready),
    ("/begin_weight_update", Feature::Sessions),
    ("/end_weight_update", Feature::Sessions),
];

/// The routes of a server, with what `extend` makes of them behind its keys and its bound on bodies.
pub(super) fn router(shared: Arc<Shared>, extend: impl FnOnce(Router) -> Router) -> Router {
    let routes = Router::new()
        .route("/health", get(health))
        .route("/health_generate", get(health))
        .route("/ready", get(ready))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/v1/loads", get(loads))
        .route("/v1/models", get(models))
        .route("/generate", post(generate).put(generate))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/abort_request", post(abort))
        .route("/flush_cache", get(flush).post(flush))
        .route("/update_weights_from_disk", post(update))
        .route("/update_weight_version", post(rename))
        .route("/begin_weight_update", post(begin))
        .route("/end_weight_update", post(end))
        .route("/weights_checker", get(check).post(check))
        .fallback(async || not_found())
        .method_not_allowed_fallback(async || not_allowed())
        .with_state(Arc::clone(&shared));
    extend(routes)
        .layer(middleware::from_fn_with_state(shared, authorise))
        // Outside of what reads the body.
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
}

fn not_found() -> Refusal {
    Refusal::json(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"}))
}

fn not_allowed() -> Refusal {
    Refusal::json(StatusCode::METHOD_NOT_ALLOWED, &json!({"detail": "Method Not Allowed"}))
}

impl Shared {
    /// Waits until the server is not paused, then until all requests of a call are complete. Dropping the future
    /// aborts them.
    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Completion>, Refusal> {
        let _reader = self.state.enter().await;
        let submit = |request| {
            let (reply, answer) = oneshot::channel();
            self.worker
                .tell(move |generator| generator.submit(Job { request, reply, progress: None }))
                .map(|()| answer)
        };
        let answers = requests.into_iter().map(submit).collect::<Result<Vec<_>, _>>()?;
        let mut completions = Vec::with_capacity(answers.len());
        for answer in answers {
            completions.push(answer.await.map_err(|_| Refusal::unavailable())?);
        }
        Ok(completions)
    }

    pub(super) fn facts(&self) -> Facts {
        self.state.facts().clone()
    }

    fn has(&self, feature: Feature) -> bool {
        self.state.facts().dialect.has(feature)
    }
}

async fn authorise(extract::State(shared): Handle, request: extract::Request, next: Next) -> Response {
    let path = request.uri().path();
    let authorization = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let passes = pass(&shared.keys, request.method(), path, authorization);
    if passes == Pass::Refused {
        return Refusal::json(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"})).into_response();
    }
    if LATER.iter().any(|(later, feature)| *later == path && !shared.has(*feature)) {
        return not_found().into_response();
    }
    if passes == Pass::Granted { admit(request, next).await } else { next.run(request).await }
}

/// The body of a control call. Unknown keys are ignored, as in SGLang.
fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Refusal> {
    serde_json::from_slice(bytes).map_err(Refusal::malformed)
}

async fn generate(extract::State(shared): Handle, body: Bytes) -> Reply {
    let received = Instant::now();
    let mut call = parse(&body, &shared.facts())?;
    let ids = call.requests.iter().map(|request| request.rid.clone()).collect();
    let lease = shared.registry.lease(ids)?;
    if let Some(interval) = call.stream
        && let Some(request) = call.requests.pop()
    {
        let stream = Stream::begin(shared, request, interval, call.log_probs, lease).await?;
        return Ok(stream.into_response());
    }
    let completions = shared.run(call.requests).await?;
    let facts = shared.facts();
    let entry = |completion| reply::generated(completion, 0, call.log_probs, &facts, received);
    let mut entries = completions.iter().map(entry).collect::<Result<Vec<_>, _>>()?;
    let single = if call.is_list { None } else { entries.pop() };
    Ok(Json(single.unwrap_or(Value::Array(entries))).into_response())
}

/// Generates one token. While the engine is paused this waits, and ends in 503, as in SGLang.
async fn health(extract::State(shared): Handle) -> StatusCode {
    let answered = tokio::time::timeout(shared.health_timeout, probe(&shared, Instant::now())).await;
    let healthy = answered.unwrap_or(false);
    shared.healthy.store(healthy, Ordering::Relaxed);
    status(healthy)
}

/// Whether the engine generates. One token serves all who asked before it came: a probe needs no key, so many
/// cost what one costs.
async fn probe(shared: &Shared, asked: Instant) -> bool {
    let mut probed = shared.probed.lock().await;
    if let Some((_, healthy)) = probed.filter(|(answered, _)| *answered >= asked) {
        return healthy;
    }
    let (temperature, top_p, top_k, min_p, max_new_tokens) = (1.0, 1.0, 1, 0.0, 1);
    let (stop, seed) = (Vec::new(), Some(0));
    let sampling = Sampling { temperature, top_p, top_k, min_p, max_new_tokens, stop, seed };
    let rid = format!("HEALTH_CHECK_{}", new_rid());
    let request = Request { rid, prompt: vec![0], sampling, prompt_log_probs_from: None };
    let failed = |completion: &Completion| matches!(completion.finish, Ended::Failed(_));
    let healthy = matches!(shared.run(vec![request]).await, Ok(done) if !done.iter().any(failed));
    *probed = Some((Instant::now(), healthy));
    healthy
}

async fn ready(extract::State(shared): Handle) -> StatusCode {
    status(!shared.state.is_paused() && shared.healthy.load(Ordering::Relaxed))
}

fn status(healthy: bool) -> StatusCode {
    if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn model_info(extract::State(shared): Handle) -> Json<Value> {
    Json(info::model_info(&shared.facts()))
}

async fn server_info(extract::State(shared): Handle) -> Json<Value> {
    Json(info::server_info(&shared.facts(), shared.address))
}

async fn models(extract::State(shared): Handle) -> Json<Value> {
    Json(info::models(&shared.facts()))
}

async fn loads(extract::State(shared): Handle) -> Reply {
    let load = shared.worker.ask(|generator| generator.busy()).await?;
    Ok(Json(info::loads(&shared.facts(), load)).into_response())
}

#[derive(Deserialize)]
struct PauseBody {
    mode: Option<PauseMode>,
}

async fn pause(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    let mode = body::<PauseBody>(&bytes)?.mode.unwrap_or(PauseMode::Abort);
    shared.state.set_paused(true);
    match mode {
        PauseMode::Abort => drain(&shared).await?,
        PauseMode::InPlace => shared.worker.ask(|generator| generator.pause(false)).await?,
        PauseMode::Retract => shared.worker.ask(|generator| generator.pause(true)).await?,
    }
    Ok(Json(json!({"message": "Generation paused successfully.", "status": "ok"})).into_response())
}

/// Aborts everything until no request is left.
async fn drain(shared: &Shared) -> Result<(), Refusal> {
    loop {
        shared.worker.ask(|generator| generator.abort(None, true)).await?;
        if tokio::time::timeout(DRAIN_INTERVAL, shared.state.lock.write()).await.is_ok() {
            return Ok(());
        }
    }
}

async fn resume(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    body::<serde_json::Map<String, Value>>(&bytes)?;
    shared.worker.ask(|generator| generator.resume()).await?;
    shared.state.set_paused(false);
    Ok(Json(json!({"message": "Generation continued successfully.", "status": "ok"})).into_response())
}

#[derive(Deserialize)]
struct AbortBody {
    rid: Option<String>,
    abort_all: Option<bool>,
}

/// The id has to be one that is under way; requests whose ids only start with it are aborted with it.
async fn abort(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    let AbortBody { rid, abort_all } = body(&bytes)?;
    let prefix = match abort_all {
        Some(true) => None,
        _ => match rid.filter(|rid| !rid.is_empty() && shared.registry.contains(rid)) {
            Some(rid) => Some(rid),
            None => return Ok(StatusCode::OK.into_response()),
        },
    };
    shared.worker.ask(move |generator| generator.abort(prefix.as_deref(), false)).await?;
    Ok(StatusCode::OK.into_response())
}

#[derive(Deserialize)]
struct FlushQuery {
    timeout: Option<String>,
}

async fn flush(extract::State(shared): Handle, Query(query): Query<FlushQuery>) -> Reply {
    let seconds = query.timeout.as_deref().map_or(Ok(0.0), str::parse::<f64>).map_err(Refusal::malformed)?;
    let timeout = Duration::try_from_secs_f64(seconds).map_err(Refusal::malformed)?;
    let started = Instant::now();
    while !shared.worker.ask(|generator| generator.flush()).await? {
        if started.elapsed() >= timeout {
            return Ok((StatusCode::BAD_REQUEST, "Flush cache failed.\n").into_response());
        }
        tokio::time::sleep(FLUSH_INTERVAL).await;
    }
    let text = "Cache flushed.\nPlease check backend logs for more details. \
                (When there are running or waiting requests, the operation will not be performed.)\n";
    Ok(text.into_response())
}

#[derive(Deserialize)]
struct UpdateBody {
    model_path: PathBuf,
    load_format: Option<String>,
    abort_all_requests: Option<bool>,
    weight_version: Option<String>,
    flush_cache: Option<bool>,
}

async fn update(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    let body: UpdateBody = body(&bytes)?;
    // In a task of its own: a client that hangs up must not leave a load that nobody takes note of.
    tokio::spawn(load(shared, body)).await.unwrap_or_else(|_| Err(Refusal::unavailable()))
}

async fn load(shared: Arc<Shared>, body: UpdateBody) -> Reply {
    if body.abort_all_requests == Some(true) {
        shared.worker.ask(|generator| generator.abort(None, false)).await?;
    }
    let format = body.load_format.unwrap_or_else(|| shared.state.facts().serving.load_format.clone());
    if !matches!(format.as_str(), "auto" | "safetensors") {
        let reason = format!("Failed to get model loader: {format} is not supported");
        return Ok(reply::updated(&Updated::Refused(reason), None));
    }
    // Not paused: wait for the running requests, and let new ones wait behind. Paused: at once.
    let _writer = if shared.state.is_paused() { None } else { Some(shared.state.lock.write().await) };
    let (model_path, version) = (body.model_path.display().to_string(), body.weight_version.clone());
    let update = DiskUpdate {
        model_path: body.model_path,
        load_format: Some(format.clone()),
        weight_version: body.weight_version,
        flush_cache: body.flush_cache.unwrap_or(true),
        only: None,
    };
    let updated = shared.worker.ask(move |generator| generator.load(&update)).await?;
    if updated == Updated::Loaded {
        let mut facts = shared.state.facts();
        (facts.serving.model_path, facts.serving.load_format) = (model_path, format);
        if let Some(version) = &version {
            facts.serving.weight_version.clone_from(version);
        }
    }
    Ok(reply::updated(&updated, version.as_deref()))
}

#[derive(Deserialize)]
struct RenameBody {
    new_version: String,
    abort_all_requests: Option<bool>,
}

async fn rename(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    let RenameBody { new_version: version, abort_all_requests } = body(&bytes)?;
    if abort_all_requests.unwrap_or(true) {
        shared.worker.ask(|generator| generator.abort(None, false)).await?;
    }
    let label = version.clone();
    shared.worker.ask(move |generator| generator.set_version(&label)).await?;
    shared.state.facts().serving.weight_version.clone_from(&version);
    let message = format!("Weight version updated to {version}");
    Ok(Json(json!({"success": true, "message": message, "new_version": version})).into_response())
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Selector {
    Target,
    Draft,
    All,
}

#[derive(Deserialize)]
struct BeginBody {
    #[serde(rename = "selector")]
    _selector: Option<Selector>,
}

async fn begin(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    body::<BeginBody>(&bytes)?;
    let opened = shared.worker.ask(|generator| generator.session(true)).await?;
    let refused = "a weight-update session is already open; call end_weight_update() first";
    Ok(reply::verdict(opened, if opened { "Success" } else { refused }))
}

async fn end(extract::State(shared): Handle, bytes: Bytes) -> Reply {
    body::<serde_json::Map<String, Value>>(&bytes)?;
    let closed = shared.worker.ask(|generator| generator.session(false)).await?;
    let refused = "no weight-update session is open; call begin_weight_update() first";
    Ok(reply::verdict(closed, if closed { "Success" } else { refused }))
}

#[derive(Default, Deserialize)]
struct CheckBody {
    action: Option<String>,
    skip_tensor_list: Option<Vec<String>>,
}

async fn check(extract::State(shared): Handle, method: Method, bytes: Bytes) -> Reply {
    let needs_body = !shared.has(Feature::EngineChecksum);
    if needs_body && method != Method::POST {
        return Err(not_allowed());
    }
    let body = if bytes.is_empty() && !needs_body { CheckBody::default() } else { body(&bytes)? };
    let action = match body.action {
        Some(action) => action,
        None if needs_body => return Err(Refusal::malformed("action: Field required")),
        None => "checksum".to_owned(),
    };
    if action != "checksum" {
        return Ok(reply::verdict(false, &format!("Unsupported action='{action}'")));
    }
    let skip = body.skip_tensor_list.unwrap_or_default();
    let mut sums = match shared.worker.ask(|generator| generator.checksums()).await? {
        Ok(sums) => sums,
        Err(error) => return Ok(reply::verdict(false, &error)),
    };
    sums.retain(|name, _| !skip.iter().any(|part| name.contains(part)));
    Ok(reply::checked(&sums, shared.facts().dialect))
}
