//! A stand-in for an SGLang server, in this process: the calls that the bridge uses, and faults on command.

mod checkpoint;
mod memory;
mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use driftless_bridge::ClientOptions;
use driftless_bridge::engine::Deadlines;
use driftless_bridge::sglang::checksums;
use driftless_transport::Checkpoint;
use serde_json::{Value, json};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

pub use checkpoint::{checkpoint, version, write};
pub use memory::Memory;
pub use wire::{FakeRoot, Receiver, Wire};

/// What a call does instead of what it should.
#[derive(Debug, Clone)]
pub enum Fault {
    /// No answer, ever.
    Hang,
    /// The same, and word that the call has come.
    HangTold(std::sync::mpsc::Sender<()>),
    /// The right answer, after so long.
    Slow(Duration),
    /// This status and body.
    Answer(u16, String),
    /// The engine ends, and with it the connection.
    Die,
    /// The body of `/generate` replies is changed.
    Label(&'static str),
    /// One checksum is wrong.
    WrongSum,
    /// The new label is not taken, and the answer is that it was.
    KeepLabel,
    /// The update loads and says that it could not flush.
    Unflushed,
    /// The update is answered by a plugin that has the version's weights prepared.
    Patched,
    /// Likewise, and the plugin could not ask for the cache to be dropped.
    PatchedOnly,
    /// The update fails, and what the engine calls a rollback loads the new path once more, as SGLang's does.
    Rollback,
    /// The update fails with half of the weights loaded: this status, or else the connection ends.
    Half(Option<u16>),
}

/// What the engine is and has seen.
#[derive(Debug)]
pub struct Engine {
    /// The directory that it loaded last.
    pub model_path: PathBuf,
    /// The directory that it was started with.
    pub started_with: PathBuf,
    /// The checkpoint whose weights it holds; `None` for a mixture.
    pub weights: Option<PathBuf>,
    /// The checkpoint of each label that means one.
    pub truths: BTreeMap<String, PathBuf>,
    /// Every time that it carried the label of other weights than it had.
    pub lies: Vec<String>,
    /// Where it says that its weights are.
    pub device: &'static str,
    /// Its weight version.
    pub label: String,
    /// `--load-format`.
    pub load_format: String,
    /// Whether it is paused.
    pub paused: bool,
    /// The checkpoint whose weights generate NaN.
    pub broken: Option<PathBuf>,
    /// The token that a generation has: each of these in turn, whatever is asked.
    pub tokens: Vec<i32>,
    /// Generations that have ended.
    pub generated: usize,
    /// Whether replies say which tokens are whose.
    pub spans: bool,
    /// The version that it says it is.
    pub release: &'static str,
    /// Path and body of every call that changes something.
    pub calls: Vec<(String, Value)>,
    /// Authorization headers seen, by path.
    pub keys: Vec<(String, Option<String>)>,
    /// Faults by `METHOD path`: the next calls of it meet them, one each.
    pub faults: BTreeMap<&'static str, VecDeque<Fault>>,
    /// Generations under way.
    pub generating: usize,
    /// Most that were under way at once.
    pub most_generating: usize,
    /// Told after every call.
    changed: Arc<Notify>,
    /// Its place in weight-update groups.
    pub pushes: Receiver,
    /// What it has given back, and whether it can.
    pub memory: Memory,
}

/// The engine, and the runtime that its process would be: with it go all connections and all calls under way.
pub struct Fake {
    /// Where it listens.
    pub address: SocketAddr,
    /// Bound to the address and never listening: nothing else gets the port between a kill and a restart.
    _port: TcpSocket,
    engine: Arc<Mutex<Engine>>,
    process: Mutex<Option<Runtime>>,
}

impl Fake {
    /// Starts an engine with this checkpoint on a port of the system's choice.
    pub fn start(checkpoint: &Path) -> Self {
        let engine = Engine {
            model_path: checkpoint.into(),
            started_with: checkpoint.into(),
            weights: Some(checkpoint.into()),
            truths: [("default".to_owned(), checkpoint.into())].into(),
            lies: Vec::new(),
            device: "cpu",
            label: "default".into(),
            load_format: "auto".into(),
            paused: false,
            broken: None,
            tokens: vec![7],
            generated: 0,
            spans: true,
            release: "0.5.23",
            calls: Vec::new(),
            keys: Vec::new(),
            faults: BTreeMap::new(),
            generating: 0,
            most_generating: 0,
            changed: Arc::default(),
            pushes: Receiver::default(),
            memory: Memory::default(),
        };
        let port = TcpSocket::new_v4().unwrap();
        port.set_reuseaddr(true).unwrap();
        port.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = port.local_addr().unwrap();
        let engine = Arc::new(Mutex::new(engine));
        let fake = Self { address, _port: port, engine, process: Mutex::default() };
        fake.serve();
        fake
    }

    /// What it is and has seen.
    pub fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap()
    }

    /// The next call of `METHOD path` meets a fault; several wait for one call each.
    pub fn fault(&self, call: &'static str, fault: Fault) {
        self.engine().faults.entry(call).or_default().push_back(fault);
    }

    /// The next such call hangs, and word of it comes.
    pub fn hang(&self, call: &'static str) -> std::sync::mpsc::Receiver<()> {
        let (told, asked) = std::sync::mpsc::channel();
        self.fault(call, Fault::HangTold(told));
        asked
    }

    /// Paths of the calls that change something, in order.
    pub fn changes(&self) -> Vec<String> {
        self.engine().calls.iter().map(|(path, _)| path.clone()).collect()
    }

    /// No call of `path`, which brought buckets, named the version; that came after the last of them.
    pub fn assert_labelled_after(&self, path: &str, label: &str) {
        let engine = self.engine();
        let last = engine.calls.iter().rposition(|(called, _)| called == path).unwrap();
        let (buckets, after) = engine.calls.split_at(last + 1);
        let named = |body: &Value| body["weight_version"] == label || body["new_version"] == label;
        assert!(!buckets.iter().any(|(_, body)| named(body)), "{buckets:?}");
        assert!(after.iter().any(|(_, body)| named(body)), "{after:?}");
    }

    /// Ends the engine as a kill would: its port and its connections are closed when this returns, and no
    /// call goes on.
    pub fn kill(&self) {
        let process = self.process.lock().unwrap().take();
        // Waits for the threads, and with them for every task: aborting the server alone would leave its
        // connections to themselves.
        drop(process);
    }

    /// Starts it again at the same address as a new process would be: with its first weights, not paused.
    pub fn restart(&self) {
        self.kill();
        let mut engine = self.engine();
        engine.pushes.restart();
        engine.memory.restart();
        (engine.model_path, engine.label, engine.paused) =
            (engine.started_with.clone(), "default".into(), false);
        engine.weights = Some(engine.started_with.clone());
        drop(engine);
        self.serve();
    }

    fn serve(&self) {
        let listener = std::net::TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let app = Router::new().fallback(answer).with_state(self.engine.clone());
        let process =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        process.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app).await.unwrap();
        });
        *self.process.lock().unwrap() = Some(process);
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

type Shared = Arc<Mutex<Engine>>;

async fn answer(
    State(engine): State<Shared>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path().to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let fault = {
        let mut engine = engine.lock().unwrap();
        let key = headers.get("authorization").map(|key| key.to_str().unwrap().to_owned());
        engine.keys.push((path.clone(), key));
        if method == Method::POST && path != "/generate" && path != "/weights_checker" {
            engine.calls.push((path.clone(), body.clone()));
        }
        engine.faults.get_mut(format!("{method} {path}").as_str()).and_then(VecDeque::pop_front)
    };
    match fault {
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::HangTold(told)) => {
            told.send(()).unwrap();
            std::future::pending().await
        }
        Some(Fault::Slow(time)) => {
            tokio::time::sleep(time).await;
            respond(engine, &method, &path, body, None).await
        }
        Some(Fault::Answer(status, text)) => (StatusCode::from_u16(status).unwrap(), text).into_response(),
        // Not a panic that is reported: its backtrace takes longer than the deadlines that the test is about.
        Some(Fault::Die) => std::panic::resume_unwind(Box::new("the engine dies here, as the test wants")),
        fault => {
            let dies = matches!(fault, Some(Fault::Half(None)));
            let response = respond(engine.clone(), &method, &path, body, fault).await;
            let mut engine = engine.lock().unwrap();
            engine.audit();
            engine.changed.notify_waiters();
            if dies {
                drop(engine);
                std::panic::resume_unwind(Box::new("the connection ends here, as the test wants"));
            }
            response
        }
    }
}

impl Engine {
    /// Whether its label tells the truth about its weights; one that means no checkpoint claims nothing.
    pub fn audit(&mut self) {
        if self.truths.get(&self.label).is_some_and(|claimed| !self.holds(claimed)) {
            self.lies.push(format!("{} over {:?} and what was pushed", self.label, self.weights));
        }
    }

    fn holds(&self, path: &Path) -> bool {
        match self.pushes.snapshot(&self.started_with) {
            None => self.weights.as_deref() == Some(path),
            Some(pushed) => {
                let sums = checksums(&Checkpoint::open(path).unwrap(), path).unwrap();
                checksums(&pushed, &self.started_with).is_ok_and(|pushed| pushed == sums)
            }
        }
    }
}

async fn respond(engine: Shared, method: &Method, path: &str, body: Value, fault: Option<Fault>) -> Response {
    let ok = |value: Value| axum::Json(value).into_response();
    match (method.as_str(), path) {
        ("GET", "/model_info") => ok(model_info(&engine.lock().unwrap())),
        ("GET", "/server_info") => ok(server_info(&engine.lock().unwrap())),
        ("GET", "/ready") => {
            if engine.lock().unwrap().paused { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
                .into_response()
        }
        ("GET", "/v1/loads") => {
            let engine = engine.lock().unwrap();
            let (running, waiting) = (engine.generating, engine.memory.waiting);
            ok(
                json!({"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": 0}]}),
            )
        }
        (
            "GET",
            "/pause_generation"
            | "/continue_generation"
            | "/update_weights_from_disk"
            | "/begin_weight_update"
            | "/update_weight_version"
            | "/update_weights_from_tensor",
        ) => StatusCode::METHOD_NOT_ALLOWED.into_response(),
        ("POST", "/pause_generation") => {
            let mut engine = engine.lock().unwrap();
            engine.paused = true;
            engine.memory.pause(&body);
            ok(json!({"status": "ok"}))
        }
        ("POST", "/continue_generation") => {
            let mut engine = engine.lock().unwrap();
            engine.memory.whole("it generates");
            engine.paused = false;
            ok(json!({"status": "ok"}))
        }
        ("POST", "/flush_cache" | "/abort_request") => StatusCode::OK.into_response(),
        ("POST", "/update_weight_version") => {
            if !matches!(fault, Some(Fault::KeepLabel)) {
                engine.lock().unwrap().label = body["new_version"].as_str().unwrap().to_owned();
            }
            ok(json!({"success": true, "message": ""}))
        }
        ("POST", "/update_weights_from_disk") => update(&mut engine.lock().unwrap(), &body, fault),
        (
            "POST",
            "/init_weights_update_group"
            | "/destroy_weights_update_group"
            | "/begin_weight_update"
            | "/end_weight_update",
        ) => engine.lock().unwrap().pushes.control(path, &body),
        ("POST", "/release_memory_occupation" | "/resume_memory_occupation") => {
            engine.lock().unwrap().memory.control(path, &body)
        }
        ("POST", "/update_weights_from_tensor") => memory::update(&mut engine.lock().unwrap(), &body),
        ("POST", "/update_weights_from_distributed") => wire::update(&engine, &body).await,
        ("POST", "/weights_checker") => ok(sums(&engine.lock().unwrap(), fault)),
        ("POST", "/generate") => generate(engine, body, fault).await,
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn model_info(engine: &Engine) -> Value {
    json!({"model_path": engine.model_path, "tokenizer_path": engine.started_with, "weight_version": engine.label, "is_generation": true,
        "load_format": engine.load_format, "disaggregation_mode": "null", "architectures": ["Qwen3ForCausalLM"]})
}

fn server_info(engine: &Engine) -> Value {
    json!({"version": engine.release, "frontend": "python", "model_path": engine.started_with, "tokenizer_path": engine.started_with,
        "tp_size": engine.memory.ranks.max(1), "pp_size": 1, "dp_size": 1, "device": engine.device, "dtype": "auto", "quantization": null, "load_format": engine.load_format,
        "disaggregation_mode": "null", "weight_cache_mode": "off", "enable_memory_saver": engine.memory.saver, "speculative_algorithm": null, "json_model_override_args": "{}"})
}

fn update(engine: &mut Engine, body: &Value, fault: Option<Fault>) -> Response {
    let fail = |status: u16, message: &str| {
        let body = json!({"success": false, "message": message});
        (StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
    };
    let path: PathBuf = body["model_path"].as_str().unwrap().into();
    let label = body["weight_version"].as_str().unwrap_or_default();
    let patched = |cache| format!("driftless: patched to it{cache}. Weight version updated to {label}.");
    let message = match fault {
        Some(Fault::Patched) => patched(", cache dropped, 16.250 ms in all"),
        Some(Fault::PatchedOnly) => patched(""),
        _ => String::new(),
    };
    engine.weights = Some(path.clone());
    match fault {
        Some(Fault::Half(status)) => {
            engine.weights = None;
            return fail(status.unwrap_or(500), "Failed to update weights: no memory.");
        }
        Some(Fault::Rollback) => {
            return fail(400, "Failed to update weights: no memory.\nRolling back to original weights.");
        }
        Some(Fault::Unflushed) => {
            engine.model_path = path;
            return fail(
                400,
                "Weights were updated, but the cache was not flushed because requests are still running or queued.",
            );
        }
        _ => {}
    }
    (engine.model_path, engine.label) = (path, body["weight_version"].as_str().unwrap().to_owned());
    axum::Json(json!({"success": true, "message": message, "num_paused_requests": 0})).into_response()
}

fn sums(engine: &Engine, fault: Option<Fault>) -> Value {
    let mut sums = match engine.pushes.snapshot(&engine.started_with) {
        Some(pushed) => checksums(&pushed, &engine.started_with).unwrap(),
        None => {
            let path = engine.weights.as_ref().unwrap_or(&engine.started_with);
            checksums(&Checkpoint::open(path).unwrap(), path).unwrap()
        }
    };
    if engine.weights.is_none() || matches!(fault, Some(Fault::WrongSum)) {
        sums.insert("model.norm.weight".into(), "0".repeat(16));
    }
    json!({"success": true, "message": "", "ranks": [{"checksums": sums}]})
}

async fn generate(engine: Shared, body: Value, fault: Option<Fault>) -> Response {
    let changed = {
        let mut engine = engine.lock().unwrap();
        engine.generating += 1;
        engine.most_generating = engine.most_generating.max(engine.generating);
        engine.changed.clone()
    };
    loop {
        // Asked for before the look, so that no change falls between the two.
        let change = changed.notified();
        let waits = {
            let engine = engine.lock().unwrap();
            engine.paused
        };
        if !waits {
            break;
        }
        change.await;
    }
    let mut engine = engine.lock().unwrap();
    engine.generating -= 1;
    let label = if let Some(Fault::Label(label)) = fault { label.to_owned() } else { engine.label.clone() };
    let broken = engine.broken.is_some() && engine.broken == engine.weights;
    let token = engine.tokens[engine.generated % engine.tokens.len()];
    engine.generated += 1;
    // As orjson writes NaN.
    let log_prob = if broken { Value::Null } else { json!(-0.25) };
    let mut meta = json!({"id": body["rid"], "finish_reason": {"type": "length", "length": 1}, "weight_version": label, "num_retractions": 0,
        "output_token_logprobs": [[log_prob, token, null]]});
    if engine.spans {
        meta["weight_versions"] = json!([{"version": label, "start": 0, "end": 1}]);
    }
    axum::Json(json!({"output_ids": [token], "meta_info": meta})).into_response()
}

/// For calls that end, whatever the machine is doing.
pub fn patient() -> ClientOptions {
    let long = Duration::from_secs(60);
    let deadlines = Deadlines::default()
        .with_connect(long)
        .with_info(long)
        .with_control(long)
        .with_load(long)
        .with_generate(long);
    ClientOptions::default().with_deadlines(deadlines)
}

/// What a call has that is told to hang. Others of its kind have to end within it.
pub const SHORT: Duration = Duration::from_secs(1);

/// The same, but for the kind of call that hangs.
pub fn short(hangs: fn(&mut Deadlines) -> &mut Duration) -> ClientOptions {
    let mut options = patient();
    *hangs(&mut options.deadlines) = SHORT;
    options
}
