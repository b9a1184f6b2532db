//! `driftless serve`.

use crate::cli::shared::error::Result;
use crate::cli::shared::output::Output;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use crate::cli::shared::{keys, numbers, paths};
use driftless::store::wait::Stop;
use driftless::torch::Kind;
use driftless::torch::engine::{self, Dialect, EngineOptions};
use driftless::torch::libtorch::device;
use serde_json::json;
use std::path::PathBuf;

/// Serve a checkpoint with the embedded engine, which speaks SGLang's HTTP routes.
///
/// Token ids go in and out; for demos, tests and small models.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkpoint directory of a Llama, Qwen2 or Qwen3 model.
    #[arg(long, value_name = "DIR")]
    model_path: PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0: the system chooses, and the address is printed.
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// Kind of the weights and the arithmetic [default: the checkpoint's].
    #[arg(long, value_parser = numbers::one_of(&KINDS))]
    dtype: Option<Kind>,
    /// Where to compute: cpu, or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// CPU threads of libtorch.
    #[arg(long, value_parser = numbers::count::<usize>())]
    num_threads: Option<usize>,
    /// Requests generated at once.
    #[arg(long, default_value_t = 512, value_parser = numbers::count::<usize>())]
    max_running_requests: usize,
    /// Tokens the key-value cache holds.
    #[arg(long, default_value_t = 65_536, value_parser = numbers::count::<usize>())]
    max_total_tokens: usize,
    /// Seed of requests that bring none.
    #[arg(long, default_value_t = 0)]
    random_seed: i64,
    /// SGLang version to speak like: 0.5.12, 0.5.17 or 0.5.23.
    #[arg(long, default_value = "0.5.23")]
    dialect: Dialect,
    #[command(flatten)]
    keys: keys::KeyArgs,
}

const KINDS: [(&str, Kind); 2] = [("bfloat16", Kind::BFloat16), ("float32", Kind::Float)];

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_checkpoint("--model-path", &args.model_path)?;
    let mut options = EngineOptions::new(&args.model_path);
    options.host = args.host;
    options.port = args.port;
    options.dialect = args.dialect;
    options.kind = match args.dtype {
        Some(kind) => kind,
        None => driftless::torch::Config::published_kind(&args.model_path)?,
    };
    options.device = device(&args.device)?;
    options.server.keys = args.keys.read()?;
    options.seed = args.random_seed;
    options.threads = args.num_threads;
    options.max_running_requests = args.max_running_requests;
    options.max_total_tokens = args.max_total_tokens;
    let server = engine::serve(options)?;
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    let value = json!({"url": server.url(), "model_path": args.model_path.display().to_string()});
    output.print(&value, |_| format!("serving {} on {}", args.model_path.display(), server.url()))?;
    Ok(server.run_until(&stop).map_err(driftless::torch::Error::from)?)
}
