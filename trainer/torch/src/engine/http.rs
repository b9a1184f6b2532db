//! SGLang's routes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use driftless_http::listen::admit;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::auth::{Access, Pass};
use super::dialect::Dialect;
use super::gate::{Gate, Registry, Rejected};
use super::info::{self, Facts, Shown};
use super::reply::{self, Refusal};
use super::request::{self, Bounds, new_rid, parse};
use super::sequence::{Finish, Job, Outcome, Sampling};
use super::worker::{Answer, Command, Update, Updated, chain};

/// Largest body that is read.
const BODY_BYTES_MAX: usize = 64 << 20;
/// How often a draining pause aborts again: requests may pass the gate just before it closes.
const DRAIN_INTERVAL: Duration = Duration::from_millis(100);
/// How often a flush with a timeout looks again.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);

/// What every handler sees.
pub(super) struct Shared {
    pub(super) commands: SyncSender<Command>,
    pub(super) gate: Gate,
    pub(super) registry: Arc<Registry>,
    pub(super) access: Access,
    pub(super) bounds: Bounds,
    pub(super) facts: Facts,
    /// What `/model_info` shows: changes with updates.
    pub(super) shown: Mutex<Shown>,
    pub(super) healthy: AtomicBool,
    /// When the last health probe was answered, and whether by a token.
    pub(super) probed: tokio::sync::Mutex<Option<(Instant, bool)>>,
    pub(super) health_timeout: Duration,
}

type Reply = Result<Response, Refusal>;

/// The router of one engine.
pub(super) fn router(shared: Arc<Shared>) -> Router {
    let dialect = shared.facts.dialect;
    let check = if dialect.has_engine_checksum() { get(check).post(self::check) } else { post(self::check) };
    let mut router = Router::new()
        .route("/health", get(health))
        .route("/health_generate", get(health))
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
        .route("/weights_checker", check);
    if dialect.has_sessions() {
        router = router
            .route("/ready", get(ready))
            .route("/begin_weight_update", post(begin))
            .route("/end_weight_update", post(end));
    }
    router
        .fallback(async || Refusal::json(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"})))
        .method_not_allowed_fallback(async || {
            Refusal::json(StatusCode::METHOD_NOT_ALLOWED, &json!({"detail": "Method Not Allowed"}))
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), authorise))
        // Outside of what reads the body.
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}

impl Shared {
    /// Gives the generating thread a command and waits for its answer.
    async fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, Refusal> {
        let (done, answer) = oneshot::channel();
        self.commands.try_send(command(done)).map_err(|_| Refusal::unavailable())?;
        answer.await.map_err(|_| Refusal::unavailable())
    }

    /// Passes the gate with a call's requests and waits for all of them. Dropping the future aborts them.
    async fn run(&self, requests: Vec<request::Request>) -> Result<Vec<Outcome>, Refusal> {
        let _reader = self.gate.enter().await;
        let mut answers = Vec::with_capacity(requests.len());
        for request::Request { rid, prompt, sampling, prompt_log_probs_from } in requests {
            let (reply, answer) = oneshot::channel();
            let job = Job { rid, prompt, sampling, prompt_log_probs_from, reply };
            self.commands.try_send(Command::Generate(job)).map_err(|_| Refusal::unavailable())?;
            answers.push(answer);
        }
        let mut outcomes = Vec::with_capacity(answers.len());
        for answer in answers {
            outcomes.push(answer.await.map_err(|_| Refusal::unavailable())?);
        }
        Ok(outcomes)
    }

    fn shown<T>(&self, with: impl FnOnce(&mut Shown) -> T) -> T {
        // Plain values: whole whatever a panicking holder was doing.
        with(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn dialect(&self) -> Dialect {
        self.facts.dialect
    }
}

async fn authorise(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    match shared.access.pass(request.method(), request.uri().path(), authorization) {
        Pass::Granted => admit(request, next).await,
        Pass::Probe => next.run(request).await,
        Pass::Refused => {
            Refusal::json(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"})).into_response()
        }
    }
}

/// The body of a control call. Unknown keys are ignored, as in SGLang.
fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Refusal> {
    serde_json::from_slice(bytes).map_err(Refusal::malformed)
}

async fn generate(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let received = Instant::now();
    let call = parse(&body, shared.dialect(), &shared.bounds)?;
    let ids = call.requests.iter().map(|request| request.rid.clone()).collect();
    let _lease = shared.registry.lease(ids).map_err(|rejected| match rejected {
        Rejected::Duplicate(id) => Refusal::invalid(format!("Duplicate request ID detected: {id}")),
        Rejected::Full => Refusal::message(StatusCode::SERVICE_UNAVAILABLE, "The request queue is full."),
    })?;
    let outcomes = shared.run(call.requests).await?;
    let version = shared.shown(|shown| shown.weight_version.clone());
    let mut entries = Vec::with_capacity(outcomes.len());
    for outcome in outcomes {
        entries.push(reply::generated(outcome, call.log_probs, &version, received, shared.dialect())?);
    }
    let single = if call.is_list { None } else { entries.pop() };
    Ok(Json(single.unwrap_or(Value::Array(entries))).into_response())
}

/// Generates one token. While the engine is paused this waits, and ends in 503, as in SGLang.
async fn health(State(shared): State<Arc<Shared>>) -> StatusCode {
    let answered = tokio::time::timeout(shared.health_timeout, probe(&shared, Instant::now())).await;
    let healthy = answered.unwrap_or(false);
    shared.healthy.store(healthy, Ordering::Relaxed);
    if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// Whether the engine generates. One token serves all who asked before it came: a probe needs no key, so many
/// cost what one costs.
async fn probe(shared: &Shared, asked: Instant) -> bool {
    let mut probed = shared.probed.lock().await;
    if let Some((_, healthy)) = probed.filter(|(answered, _)| *answered >= asked) {
        return healthy;
    }
    let sampling = Sampling {
        temperature: 1.0,
        top_p: 1.0,
        top_k: 1,
        min_p: 0.0,
        max_new_tokens: 1,
        stop: Vec::new(),
        seed: Some(0),
    };
    let rid = format!("HEALTH_CHECK_{}", new_rid());
    let request = request::Request { rid, prompt: vec![0], sampling, prompt_log_probs_from: None };
    let failed = |outcome: &Outcome| matches!(outcome.finish, Finish::Failed(_));
    let healthy = matches!(shared.run(vec![request]).await, Ok(outcomes) if !outcomes.iter().any(failed));
    *probed = Some((Instant::now(), healthy));
    healthy
}

async fn ready(State(shared): State<Arc<Shared>>) -> StatusCode {
    match !shared.gate.is_paused() && shared.healthy.load(Ordering::Relaxed) {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn model_info(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(shared.shown(|shown| info::model_info(&shared.facts, shown)))
}

async fn server_info(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(info::server_info(&shared.facts))
}

async fn models(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(shared.shown(|shown| info::models(&shared.facts, shown)))
}

async fn loads(State(shared): State<Arc<Shared>>) -> Reply {
    let load = shared.ask(|done| Command::Load { done }).await?;
    Ok(Json(info::loads(&shared.facts, load)).into_response())
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Abort,
    Retract,
    InPlace,
}

#[derive(Deserialize)]
struct PauseBody {
    mode: Option<Mode>,
}

async fn pause(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    let mode = body::<PauseBody>(&bytes)?.mode.unwrap_or(Mode::Abort);
    shared.gate.set_paused(true);
    match mode {
        Mode::Abort => drain(&shared).await?,
        Mode::InPlace => shared.ask(|done| Command::Pause { retract: false, done }).await?,
        Mode::Retract => shared.ask(|done| Command::Pause { retract: true, done }).await?,
    }
    Ok(Json(json!({"message": "Generation paused successfully.", "status": "ok"})).into_response())
}

/// Aborts everything until no request is left.
async fn drain(shared: &Shared) -> Result<(), Refusal> {
    loop {
        shared.ask(|done| Command::Abort { prefix: None, now: true, done }).await?;
        if tokio::time::timeout(DRAIN_INTERVAL, shared.gate.lock().write()).await.is_ok() {
            return Ok(());
        }
    }
}

async fn resume(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    body::<serde_json::Map<String, Value>>(&bytes)?;
    shared.ask(|done| Command::Continue { done }).await?;
    shared.gate.set_paused(false);
    Ok(Json(json!({"message": "Generation continued successfully.", "status": "ok"})).into_response())
}

#[derive(Deserialize)]
struct AbortBody {
    rid: Option<String>,
    abort_all: Option<bool>,
}

/// The id has to be one that is under way; requests whose ids only start with it are aborted with it.
async fn abort(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    let AbortBody { rid, abort_all } = body(&bytes)?;
    let prefix = match abort_all {
        Some(true) => None,
        _ => match rid.filter(|rid| !rid.is_empty() && shared.registry.contains(rid)) {
            Some(rid) => Some(rid),
            None => return Ok(StatusCode::OK.into_response()),
        },
    };
    shared.ask(|done| Command::Abort { prefix, now: false, done }).await?;
    Ok(StatusCode::OK.into_response())
}

#[derive(Deserialize)]
struct FlushQuery {
    timeout: Option<String>,
}

async fn flush(State(shared): State<Arc<Shared>>, Query(query): Query<FlushQuery>) -> Reply {
    let seconds = query.timeout.as_deref().map_or(Ok(0.0), str::parse::<f64>).map_err(Refusal::malformed)?;
    let timeout = Duration::try_from_secs_f64(seconds).map_err(Refusal::malformed)?;
    let started = Instant::now();
    while !shared.ask(|done| Command::Flush { done }).await? {
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

async fn update(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    let body: UpdateBody = body(&bytes)?;
    // In a task of its own: a client that hangs up must not leave a load that nobody takes note of.
    tokio::spawn(load(shared, body)).await.unwrap_or_else(|_| Err(Refusal::unavailable()))
}

async fn load(shared: Arc<Shared>, body: UpdateBody) -> Reply {
    if body.abort_all_requests == Some(true) {
        shared.ask(|done| Command::Abort { prefix: None, now: false, done }).await?;
    }
    let format = body.load_format.unwrap_or_else(|| shared.shown(|shown| shown.load_format.clone()));
    if !matches!(format.as_str(), "auto" | "safetensors") {
        let reason = format!("Failed to get model loader: {format} is not supported");
        return Ok(reply::updated(&Updated::Refused(reason), None));
    }
    // Not paused: wait for the running requests, and let new ones wait behind. Paused: at once.
    let _writer = if shared.gate.is_paused() { None } else { Some(shared.gate.lock().write().await) };
    let update = Update {
        path: body.model_path.clone(),
        version: body.weight_version.clone(),
        flush: body.flush_cache.unwrap_or(true),
    };
    let updated = shared.ask(|done| Command::Update(update, done)).await?;
    if updated == Updated::Loaded {
        shared.shown(|shown| {
            shown.model_path = body.model_path.display().to_string();
            shown.load_format = format;
            if let Some(version) = &body.weight_version {
                shown.weight_version.clone_from(version);
            }
        });
    }
    Ok(reply::updated(&updated, body.weight_version.as_deref()))
}

#[derive(Deserialize)]
struct RenameBody {
    new_version: String,
    abort_all_requests: Option<bool>,
}

async fn rename(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    let RenameBody { new_version: version, abort_all_requests } = body(&bytes)?;
    if abort_all_requests.unwrap_or(true) {
        shared.ask(|done| Command::Abort { prefix: None, now: false, done }).await?;
    }
    let name = version.clone();
    shared.ask(|done| Command::SetVersion { version: name, done }).await?;
    shared.shown(|shown| shown.weight_version.clone_from(&version));
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

async fn begin(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    body::<BeginBody>(&bytes)?;
    let opened = shared.ask(|done| Command::Begin { done }).await?;
    let refused = "a weight-update session is already open; call end_weight_update() first";
    Ok(reply::verdict(opened, if opened { "Success" } else { refused }))
}

async fn end(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    body::<serde_json::Map<String, Value>>(&bytes)?;
    let closed = shared.ask(|done| Command::End { done }).await?;
    let refused = "no weight-update session is open; call begin_weight_update() first";
    Ok(reply::verdict(closed, if closed { "Success" } else { refused }))
}

#[derive(Default, Deserialize)]
struct CheckBody {
    action: Option<String>,
    skip_tensor_list: Option<Vec<String>>,
}

async fn check(State(shared): State<Arc<Shared>>, bytes: Bytes) -> Reply {
    let needs_body = !shared.dialect().has_engine_checksum();
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
    match shared.ask(|done| Command::Check { skip, done }).await? {
        Ok(sums) => Ok(reply::checked(&sums, shared.dialect())),
        Err(error) => Ok(reply::verdict(false, &chain(&error))),
    }
}
