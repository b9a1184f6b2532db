//! The embedded engine: an inference server for the trainer's models with SGLang's routes, fields, status
//! codes and order of events, so that a client of SGLang cannot tell the two apart.
//!
//! One thread owns the model and generates for all requests at once; an HTTP server hands it commands, which
//! it carries out in order between two forward passes. `docs/wire/engine.md` lists what is spoken and what
//! differs: where SGLang would crash, this engine answers 400 and keeps serving.

mod auth;
mod checksum;
mod dialect;
mod gate;
mod generator;
mod http;
mod info;
mod reply;
mod request;
mod sampler;
mod sequence;
mod worker;

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use derive_setters::Setters;
use driftless_http::listen::{self, serve_http};
use tch::{Device, Kind};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::config::Config;
use crate::error::{Error, Result, input};
use crate::libtorch::set_threads;
use crate::models::Model;
use auth::Access;
use gate::{Gate, Registry};
use generator::{Generator, Limits};
use http::Shared;
use info::{Facts, Shown};
use request::Bounds;
use worker::{Command, Worker};

pub use dialect::Dialect;

/// Requests that may be under way, unless told otherwise.
const REQUESTS_MAX: usize = 8192;
/// Control calls that may be under way beside the allowed requests.
const CONTROL_CALLS_MAX: usize = 1024;
/// Descriptors that connections leave to the engine, which opens a checkpoint's files and little else.
const FILES_KEPT: u64 = 128;
/// How long a connection may last without a key: longer than a health probe, which is then answered.
const AUTHORISE: Duration = Duration::from_secs(30);

/// How to start an engine.
#[derive(Clone, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Checkpoint directory: `config.json` of a [family](crate::Family) that is computed here, and
    /// safetensors.
    #[setters(into)]
    pub model_path: PathBuf,
    /// Address to listen on.
    #[setters(into)]
    pub host: String,
    /// Port to listen on; 0 lets the system choose.
    pub port: u16,
    /// The SGLang version to speak like.
    pub dialect: Dialect,
    /// Kind of weights and activations: `Float` or `BFloat16`.
    pub kind: Kind,
    /// Where to compute.
    pub device: Device,
    /// Bearer key of generation and information, and of the rest where there is no admin key.
    #[setters(into)]
    pub api_key: Option<String>,
    /// Bearer key of the calls that change weights or generation.
    #[setters(into)]
    pub admin_key: Option<String>,
    /// Seed of the first request that brings none; later ones count up from it.
    pub seed: i64,
    /// Threads of one tensor operation, for the whole process; `None` leaves libtorch's choice.
    pub threads: Option<usize>,
    /// Most requests that are generated at once.
    pub max_running_requests: usize,
    /// Most requests that are under way, waiting ones included; more are answered 503.
    pub max_queued_requests: usize,
    /// Most tokens that the key-value cache holds.
    pub max_total_tokens: usize,
    /// Name of the weights at start.
    #[setters(into)]
    pub weight_version: String,
    /// How long `/health` waits for its token.
    pub health_timeout: Duration,
    /// What those who connect may take. A request under way has a connection, and a health probe ends with
    /// `authorise`.
    pub limits: listen::Limits,
}

impl EngineOptions {
    /// Defaults: loopback, a free port, the newest dialect, bf16 on the CPU, no keys.
    #[must_use]
    pub fn new(model_path: impl Into<PathBuf>) -> EngineOptions {
        let mut limits = listen::Limits::default();
        limits.connections = REQUESTS_MAX + CONTROL_CALLS_MAX;
        (limits.files_kept, limits.authorise) = (FILES_KEPT, AUTHORISE);
        EngineOptions {
            model_path: model_path.into(),
            host: "127.0.0.1".to_owned(),
            port: 0,
            dialect: Dialect::default(),
            kind: Kind::BFloat16,
            device: Device::Cpu,
            api_key: None,
            admin_key: None,
            seed: 0,
            threads: None,
            max_running_requests: 512,
            max_queued_requests: REQUESTS_MAX,
            max_total_tokens: 65_536,
            weight_version: "default".to_owned(),
            health_timeout: Duration::from_secs(20),
            limits,
        }
    }
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineOptions")
            .field("model_path", &self.model_path)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("dialect", &self.dialect)
            .field("kind", &self.kind)
            .field("device", &self.device)
            .field("has_api_key", &self.api_key.is_some())
            .field("has_admin_key", &self.admin_key.is_some())
            .field("weight_version", &self.weight_version)
            .finish_non_exhaustive()
    }
}

/// Loads the model, listens, and serves on threads of its own; returns once requests are accepted.
///
/// # Errors
/// [`Error::Config`], [`Error::Tensor`], [`Error::Transport`] or [`Error::Io`] for a checkpoint that cannot
/// be served, [`Error::EngineStart`] for an address that cannot be had, [`Error::Input`] for a limit of 0.
pub fn serve(options: EngineOptions) -> Result<Server> {
    for (what, limit) in [
        ("max_running_requests", options.max_running_requests),
        ("max_queued_requests", options.max_queued_requests),
        ("max_total_tokens", options.max_total_tokens),
    ] {
        if limit == 0 {
            return Err(input(what, "at least 1", limit));
        }
    }
    if let Some(threads) = options.threads {
        set_threads(threads)?;
    }
    // The port first: being told at once that it is taken beats being told after a long load.
    let (listener, address) = bind(&options)?;
    let model = Model::open(&options.model_path, options.kind, options.device)?;
    let config = model.config().clone();
    let limits = Limits { running: options.max_running_requests, tokens: options.max_total_tokens };
    let dialect = options.dialect;
    let version = options.weight_version.clone();
    let generator = Generator::new(model, version, limits, dialect.stop_beats_length())?;
    let (commands, queue) = sync_channel(options.max_queued_requests + CONTROL_CALLS_MAX);
    let worker = Worker::new(generator, queue, dialect, options.seed);
    let (alive, ended) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        worker.run();
        drop(alive);
    });
    let thread =
        thread.map_err(|source| Error::EngineStart { action: "start its thread".to_owned(), source })?;
    let connections = options.limits;
    let shared = Arc::new(shared(options, &config, address, commands.clone()));
    let runtime = start_http(listener, connections, shared)?;
    tracing::info!(%address, dialect = %dialect, "engine is serving");
    Ok(Server { address, commands, thread: Some(thread), ended, runtime: Some(runtime) })
}

fn bind(options: &EngineOptions) -> Result<(TcpListener, SocketAddr)> {
    let action = format!("listen on {}:{}", options.host, options.port);
    let failed = |source| Error::EngineStart { action: action.clone(), source };
    let listener = TcpListener::bind((options.host.as_str(), options.port)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

fn shared(
    options: EngineOptions,
    config: &Config,
    address: SocketAddr,
    commands: SyncSender<Command>,
) -> Shared {
    let context = usize::try_from(config.max_position_embeddings).unwrap_or(usize::MAX);
    let model_path = options.model_path.display().to_string();
    let facts = Facts {
        dialect: options.dialect,
        family: config.family,
        address,
        model_path: model_path.clone(),
        dtype: if options.kind == Kind::Float { "float32" } else { "bfloat16" },
        device: if options.device.is_cuda() { "cuda" } else { "cpu" },
        weight_version: options.weight_version.clone(),
        context,
        max_running: options.max_running_requests,
        max_total_tokens: options.max_total_tokens,
        seed: options.seed,
    };
    let shown = Shown { model_path, load_format: "auto".to_owned(), weight_version: options.weight_version };
    Shared {
        commands,
        gate: Gate::new(),
        registry: Registry::new(options.max_queued_requests),
        access: Access { api_key: options.api_key, admin_key: options.admin_key },
        bounds: Bounds {
            vocabulary: config.vocab_size,
            context,
            cache: options.max_total_tokens,
            eos: config.eos_token_ids.clone(),
        },
        facts,
        shown: Mutex::new(shown),
        healthy: AtomicBool::new(true),
        probed: tokio::sync::Mutex::default(),
        health_timeout: options.health_timeout,
    }
}

fn start_http(listener: TcpListener, limits: listen::Limits, shared: Arc<Shared>) -> Result<Runtime> {
    let failed = |source| Error::EngineStart { action: "start its HTTP server".to_owned(), source };
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime =
        builder.worker_threads(1).thread_name("engine-http").enable_all().build().map_err(failed)?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener).map_err(failed)?
    };
    runtime.spawn(serve_http(listener, limits, http::router(shared)));
    Ok(runtime)
}

/// A running engine. Dropping it stops it: requests under way are answered with a failure.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    commands: SyncSender<Command>,
    thread: Option<JoinHandle<()>>,
    ended: oneshot::Receiver<()>,
    runtime: Option<Runtime>,
}

impl Server {
    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http://address`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Serves until `stop` is ready, for example at a signal.
    ///
    /// # Errors
    /// [`Error::EngineEnded`] when the generating thread ends first.
    pub fn run_until(mut self, stop: impl Future<Output = ()>) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let ended = &mut self.ended;
        runtime.block_on(async {
            tokio::select! {
                () = stop => Ok(()),
                _ = ended => Err(Error::EngineEnded),
            }
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Waits while the queue is full; fails only when the thread has ended already.
        let _ended = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's generating thread had panicked");
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
