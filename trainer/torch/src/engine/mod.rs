//! The embedded engine: libtorch behind a [server](driftless_server) of SGLang's protocol.
//!
//! One thread owns the model and generates for all requests at once.

mod batcher;
mod generator;
mod sampler;
mod sequence;

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::sync::Arc;

use derive_setters::Setters;
use driftless_server::{Facts, Generator, ServerOptions, ServerState, Weights};
use tch::{Device, Kind};

use crate::error::{Result, input};
use crate::libtorch::set_threads;
use crate::models::Model;
use batcher::Batcher;

pub use driftless_bridge::sglang::Dialect;
pub use driftless_server::Server;

/// How to start an engine.
#[derive(Clone, Debug, Setters)]
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
    /// Seed of the first request that brings none; later ones count up from it.
    pub seed: i64,
    /// Threads of one tensor operation, for the whole process; `None` leaves libtorch's choice.
    pub threads: Option<usize>,
    /// Most requests that are generated at once.
    pub max_running_requests: usize,
    /// Most tokens that the key-value cache holds.
    pub max_total_tokens: usize,
    /// Name of the weights at start.
    #[setters(into)]
    pub weight_version: String,
    /// How clients are treated.
    pub server: ServerOptions,
}

impl EngineOptions {
    /// Defaults: loopback, a free port, the newest dialect, bf16 on the CPU, no keys.
    #[must_use]
    pub fn new(model_path: impl Into<PathBuf>) -> EngineOptions {
        EngineOptions {
            model_path: model_path.into(),
            host: "127.0.0.1".to_owned(),
            port: 0,
            dialect: Dialect::default(),
            kind: Kind::BFloat16,
            device: Device::Cpu,
            seed: 0,
            threads: None,
            max_running_requests: 512,
            max_total_tokens: 65_536,
            weight_version: "default".to_owned(),
            server: ServerOptions::default(),
        }
    }
}

/// Listens, loads the model, and serves on threads of its own; returns once requests are accepted.
///
/// # Errors
/// [`Error::Http`](crate::Error::Http) for an address that cannot be had, and together with
/// [`Config`](crate::Error::Config), [`Tensor`](crate::Error::Tensor) and [`Io`](crate::Error::Io) for a checkpoint
/// that cannot be served; [`Input`](crate::Error::Input) for a limit of 0 or a host without an address.
pub fn serve(options: EngineOptions) -> Result<Server> {
    for (what, limit) in [
        ("max_running_requests", options.max_running_requests),
        ("max_queued_requests", options.server.max_queued_requests),
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
    let server =
        Server::start(address(&options)?, options.server.clone(), || load(&options), |routes| routes)?;
    tracing::info!(address = %server.address(), dialect = %options.dialect, "engine is serving");
    Ok(server)
}

fn address(options: &EngineOptions) -> Result<SocketAddr> {
    let found = (options.host.as_str(), options.port).to_socket_addrs().ok().and_then(|mut all| all.next());
    found.ok_or_else(|| input("host", "an address of this machine, or a name of one", &options.host))
}

/// The model and what the server says of it.
fn load(options: &EngineOptions) -> Result<(Arc<ServerState>, Box<dyn Generator>)> {
    let model = Model::open(&options.model_path, options.kind, options.device)?;
    let config = model.config();
    let launched = Weights {
        model_path: options.model_path.display().to_string(),
        load_format: "auto".to_owned(),
        weight_version: options.weight_version.clone(),
    };
    let mut facts = Facts::new(launched, config.family.architecture());
    facts.dialect = options.dialect;
    facts.model_type = config.family.model_type().to_owned();
    facts.dtype = if options.kind == Kind::Float { "float32" } else { "bfloat16" }.to_owned();
    facts.device = if options.device.is_cuda() { "cuda" } else { "cpu" }.to_owned();
    facts.vocabulary = config.vocab_size;
    facts.context = usize::try_from(config.max_position_embeddings).unwrap_or(usize::MAX);
    facts.eos = config.eos_token_ids.clone();
    facts.max_running_requests = options.max_running_requests;
    facts.max_total_tokens = options.max_total_tokens;
    facts.random_seed = options.seed;
    let batcher = Batcher::new(model, options)?;
    Ok((Arc::new(ServerState::new(facts)), Box::new(batcher)))
}
