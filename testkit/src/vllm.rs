//! A stand-in for a vLLM server, in this process: what vLLM 0.32.0 answers to the calls that the bridge uses,
//! for one model, and faults on command. A real one is behind the bridge in
//! `python/tests/test_vllm_server.py`.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hasher as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::sglang::end_connection;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use driftless_bridge::live::{PatchRefused, PluginReply};
use futures_util::StreamExt as _;
use futures_util::stream::{iter, pending};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// What the next call of a path does instead of what it should.
#[derive(Debug, Clone)]
pub enum Fault {
    /// No answer, ever.
    Hang,
    /// This status and body, and nothing is done.
    Answer(u16, &'static str),
    /// The connection ends, and nothing is done.
    Die,
    /// A load that fails with half of the weights changed: with this status, or else the connection ends.
    Half(Option<u16>),
    /// The new label is not taken, and the answer is that it was.
    KeepLabel,
    /// An update that the backend has not prepared.
    Unprepared,
    /// A generation goes on until the label has changed, as one does that is kept through an update.
    Cross,
}

/// What the server is and has seen.
#[derive(Debug, Default)]
pub struct Server {
    /// The directory that it was started with.
    pub root: PathBuf,
    /// [`digest()`] of the weights that it holds; `None` for a mixture.
    pub weights: Option<u64>,
    /// Its weight version.
    pub label: String,
    /// Whether the scheduler is paused.
    pub paused: bool,
    /// Whether it was started with `VLLM_SERVER_DEV_MODE=1`.
    pub dev_mode: bool,
    /// Whether it was started with the backend `driftless` for weight transfers.
    pub backend: bool,
    /// What the backend was told: the port that the server was reached at, and the label of its weights.
    pub told: Option<(u64, String)>,
    /// Whether a weight update is under way.
    pub updating: bool,
    /// Every `POST` but generations, with its query; an RPC by its method.
    pub calls: Vec<String>,
    /// Bodies of generations.
    pub generations: Vec<Value>,
    /// Whether a stream has as many tokens as it is allowed, each the last digit of its place in prompt and answer.
    pub is_long: bool,
    /// After how many tokens such a stream stands still.
    pub stuck_after: Option<usize>,
    /// [`digest()`] of the weights of each label that means some.
    pub truths: BTreeMap<String, u64>,
    /// Every time that it carried the label of other weights than it had, or generated with a mixture.
    pub lies: Vec<String>,
    faults: BTreeMap<&'static str, VecDeque<Fault>>,
    changed: Arc<Notify>,
}

/// The server, and the runtime that its process would be.
pub struct Vllm {
    /// Where it listens.
    pub address: SocketAddr,
    server: Arc<Mutex<Server>>,
    /// Kept over a restart: a port that is let go for a moment may be another socket's after it.
    listener: std::net::TcpListener,
    process: Mutex<Option<Runtime>>,
}

impl Vllm {
    /// Starts a server of the checkpoint in a directory, on a port of the system's choice.
    pub fn start(root: &Path) -> Self {
        let server = Server {
            root: root.into(),
            weights: Some(digest(root)),
            label: "default".into(),
            dev_mode: true,
            ..Server::default()
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = Arc::new(Mutex::new(server));
        let started = Self { address, server, listener, process: Mutex::default() };
        started.serve();
        started
    }

    /// Its address, as a follower is told it.
    pub fn url(&self) -> String {
        format!("vllm+http://{}", self.address)
    }

    /// What it is and has seen.
    pub fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap()
    }

    /// The next call of `METHOD path` meets a fault; several wait for one call each.
    pub fn fault(&self, call: &'static str, fault: Fault) {
        self.server().faults.entry(call).or_default().push_back(fault);
    }

    /// Starts it again at the same address, as a new process would be: with what lies in its directory now,
    /// without a label.
    pub fn restart(&self) {
        drop(self.process.lock().unwrap().take());
        let mut server = self.server();
        (server.weights, server.label, server.paused) = (Some(digest(&server.root)), "default".into(), false);
        (server.told, server.updating) = (None, false);
        drop(server);
        self.serve();
    }

    fn serve(&self) {
        let listener = self.listener.try_clone().unwrap();
        listener.set_nonblocking(true).unwrap();
        let app = Router::new().fallback(answer).with_state(self.server.clone());
        let process =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        process.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app).await.unwrap();
        });
        *self.process.lock().unwrap() = Some(process);
    }
}

/// A digest over the weights in a checkpoint directory.
pub fn digest(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    files.iter().for_each(|path| hasher.write(&std::fs::read(path).unwrap()));
    hasher.finish()
}

type Shared = Arc<Mutex<Server>>;

async fn answer(State(server): State<Shared>, method: Method, uri: Uri, body: Bytes) -> Response {
    let (method, path) = (method.as_str().to_owned(), uri.path().to_owned());
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let fault = {
        let mut server = server.lock().unwrap();
        let rpc = body["method"].as_str().map(|name| format!(" {name}")).unwrap_or_default();
        match (method.as_str(), path.as_str()) {
            ("POST", "/v1/completions") => server.generations.push(body.clone()),
            ("POST", _) => server.calls.push(format!("{uri}{rpc}")),
            _ => {}
        }
        server.faults.get_mut(format!("{method} {path}").as_str()).and_then(VecDeque::pop_front)
    };
    let half = matches!(fault, Some(Fault::Half(None)));
    let response = match fault {
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::Die) => end_connection(),
        Some(Fault::Answer(status, text)) => (StatusCode::from_u16(status).unwrap(), text).into_response(),
        fault => respond(&server, &method, &path, uri.query(), &body, fault).await,
    };
    let mut server = server.lock().unwrap();
    server.audit();
    server.changed.notify_waiters();
    drop(server);
    if half { end_connection() } else { response }
}

impl Server {
    fn audit(&mut self) {
        if self.truths.get(&self.label).is_some_and(|weights| self.weights != Some(*weights)) {
            self.lies.push(format!("{} over {:?}", self.label, self.weights));
        }
    }
}

/// The calls that only a server in development mode has.
const DEV: [&str; 11] = [
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/weight_info",
    "/update_weight_version",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
];

async fn respond(
    shared: &Shared,
    method: &str,
    path: &str,
    query: Option<&str>,
    body: &Value,
    fault: Option<Fault>,
) -> Response {
    if (method, path) == ("POST", "/v1/completions") {
        return generate(shared, body, matches!(fault, Some(Fault::Cross))).await;
    }
    let ok = |value: Value| axum::Json(value).into_response();
    let mut server = shared.lock().unwrap();
    if DEV.contains(&path) && !server.dev_mode {
        return StatusCode::NOT_FOUND.into_response();
    }
    match (method, path) {
        ("GET", "/version") => ok(json!({"version": "0.32.0"})),
        ("GET", "/v1/models") => ok(json!({"object": "list", "data": [
            {"id": "policy", "object": "model", "root": server.root, "parent": null, "max_model_len": 4096},
            {"id": "adapter", "object": "model", "root": "/adapters/a", "parent": "policy"},
        ]})),
        ("GET", "/weight_info") => ok(json!({"weight_version": server.label})),
        ("GET", "/is_paused") => ok(json!({"is_paused": server.paused})),
        ("POST", "/pause") => {
            assert!(matches!(query, Some("mode=abort" | "mode=keep")), "{query:?}");
            server.paused = true;
            ok(json!({"status": "paused"}))
        }
        ("POST", "/resume") => {
            server.paused = false;
            if server.weights.is_none() {
                server.lies.push("it generates with a mixture".into());
            }
            ok(json!({"status": "resumed"}))
        }
        ("POST", "/reset_prefix_cache") => ok(json!({"success": true})),
        ("POST", "/update_weight_version") => {
            let label = body["new_version"].as_str().unwrap();
            if !matches!(fault, Some(Fault::KeepLabel)) {
                server.label = label.to_owned();
            }
            ok(json!({"success": true, "new_version": label}))
        }
        ("POST", "/collective_rpc") => reload(&mut server, body, fault),
        ("POST", path) if path.contains("weight_") || path == "/update_weights" => {
            match transfer(&mut server, path, body, fault) {
                Ok(message) => ok(json!({"message": message})),
                Err(error) => refuse(&error),
            }
        }
        ("GET", path) if DEV.contains(&path) => StatusCode::METHOD_NOT_ALLOWED.into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn reload(server: &mut Server, body: &Value, fault: Option<Fault>) -> Response {
    assert_eq!(body["method"], "reload_weights");
    if let Some(Fault::Half(status)) = fault {
        server.weights = None;
        return StatusCode::from_u16(status.unwrap_or(500)).unwrap().into_response();
    }
    server.weights = Some(digest(&server.root));
    axum::Json(json!({"results": [null, null]})).into_response()
}

/// A call about a weight transfer: the message of its answer, or of the exception that a worker raised.
fn transfer(
    server: &mut Server,
    path: &str,
    body: &Value,
    fault: Option<Fault>,
) -> Result<&'static str, String> {
    if !server.backend {
        return Err("Weight transfer not configured.".into());
    }
    if path == "/init_weight_transfer_engine" {
        let info = &body["init_info"];
        let port = info["port"].as_u64().unwrap();
        server.told = Some((port, info["label"].as_str().unwrap().to_owned()));
        return Ok("Weight transfer initialized");
    }
    if (path == "/start_weight_update") == server.updating {
        return Err(format!("{path} while a weight update is active: {}", server.updating));
    }
    match path {
        "/start_weight_update" => {
            server.updating = true;
            Ok("Weight update started")
        }
        "/update_weights" => {
            let label = body["update_info"]["label"].as_str().unwrap();
            if let Some(Fault::Half(_) | Fault::Unprepared) = fault {
                // A worker that raises ends the update.
                server.updating = false;
            }
            match fault {
                Some(Fault::Half(_)) => {
                    server.weights = None;
                    Err("CUDA error: an illegal memory access was encountered".into())
                }
                Some(Fault::Unprepared) => {
                    let refused =
                        "EngineError: no delta from the live version to it is prepared here".to_owned();
                    Err(PluginReply::Refused(PatchRefused { label: label.to_owned(), refused }).to_string())
                }
                _ => {
                    server.weights = Some(server.truths[label]);
                    Ok("Weights updated")
                }
            }
        }
        _ => {
            server.updating = false;
            if let (Some(label), None) = (body["weight_version"].as_str(), fault) {
                server.label = label.to_owned();
            }
            Ok("Weight update finished")
        }
    }
}

/// What vLLM answers where a worker has raised.
fn refuse(raised: &str) -> Response {
    let message = format!("Call to collective_rpc method failed: {raised}");
    let error =
        json!({"error": {"message": message, "type": "InternalServerError", "param": null, "code": 500}});
    (StatusCode::INTERNAL_SERVER_ERROR, axum::Json(error)).into_response()
}

async fn generate(shared: &Shared, body: &Value, cross: bool) -> Response {
    let (changed, began) = {
        let server = shared.lock().unwrap();
        (server.changed.clone(), server.label.clone())
    };
    loop {
        // Asked for before the look, so that no change falls between the two.
        let change = changed.notified();
        let waits = {
            let server = shared.lock().unwrap();
            server.paused || (cross && server.label == began)
        };
        if !waits {
            break;
        }
        change.await;
    }
    let id = body["request_id"].as_str().unwrap();
    if body["stream"] == true {
        return stream(shared, body, id);
    }
    axum::Json(json!({"id": format!("cmpl-{id}"), "object": "text_completion", "model": "policy", "choices": [{
        "index": 0, "text": "g", "finish_reason": "length", "stop_reason": null, "token_ids": [7],
        "prompt_token_ids": body["prompt"],
        "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.25], "text_offset": [0], "top_logprobs": [null]},
    }]}))
    .into_response()
}

/// A reply in events of one token.
fn stream(shared: &Shared, body: &Value, id: &str) -> Response {
    let (is_long, stuck_after) = {
        let server = shared.lock().unwrap();
        (server.is_long, server.stuck_after)
    };
    let prompt = body["prompt"].as_array().unwrap().len();
    let most = if is_long { body["max_tokens"].as_u64().unwrap() } else { 1 };
    let event = |at: usize| {
        let token = if is_long { (prompt + at) % 10 } else { 7 };
        let finish = (at + 1 == most as usize).then_some("length");
        let log_probs = json!({"tokens": [format!("token_id:{token}")], "token_logprobs": [-0.25]});
        let choice = json!({"index": 0, "text": "", "finish_reason": finish, "token_ids": [token], "logprobs": log_probs});
        let event = json!({"id": format!("cmpl-{id}"), "object": "text_completion", "choices": [choice]});
        Ok::<_, std::convert::Infallible>(format!("data: {event}\n\n"))
    };
    let shown = stuck_after.unwrap_or(most as usize).min(most as usize);
    let events: Vec<_> = (0..shown).map(event).collect();
    let done = iter([Ok("data: [DONE]\n\n".to_owned())]);
    let rest = if shown < most as usize { pending().right_stream() } else { done.left_stream() };
    let body = axum::body::Body::from_stream(iter(events).chain(rest));
    ([(axum::http::header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}
