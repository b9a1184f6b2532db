//! `driftless gateway`: agents talk to the policy, by OpenAI's and Anthropic's protocols.

mod engines;
mod key;
mod open;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use crate::cli::shared::{keys, numbers, paths};
use crate::cli::train::evaluation::DrawArgs;
use driftless::agent::Family;
use driftless::agent::gateway::{Gateway, GatewayOptions};
use driftless::agent::session::{Sample, Thoughts};
use driftless::agent::sessions::{Draw, Opening, Sessions, Settings};
use driftless::http::{check_exposure, metrics, runtime};
use driftless::store::wait::Stop;
use driftless::trainer::data::context;
use engines::{Engines, Nobody};
pub(crate) use key::{KeyMaker, now};
use open::Open;
pub(crate) use open::is_name;
use serde_json::{Value, json};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The journal of the sessions, in --save.
const JOURNAL: &str = "sessions.journal";
/// What a refusal calls the address of the figures.
const METRICS: &str = "gateway's metrics address";

const HELP: &str = "\
A session is a name in the path of a client's base URL; it begins with its first request. What is sampled in it is kept in
--save as tokens, and goes on after a crash of the gateway by the same command.

Examples:
  driftless gateway --hf-checkpoint models/Qwen3-0.6B --save runs/agents --rollout-external-engine-addrs 10.0.0.1:30000

  Clients of it:
    from openai import OpenAI
    client = OpenAI(base_url=\"http://127.0.0.1:7440/s/task-1/v1\", api_key=\"any\")

    ANTHROPIC_BASE_URL=http://127.0.0.1:7440/s/task-1 ANTHROPIC_AUTH_TOKEN=any claude

  For other hosts, whose clients bring the token as their API key; a proxy before it has TLS:
    driftless gateway --hf-checkpoint models/Qwen3-0.6B --save runs/agents --rollout-external-engine-addrs 10.0.0.1:30000 \\
        --listen 0.0.0.0:7440 --token-file token

  A key of one session, for ten minutes, in place of the token:
    driftless gateway-key task-1 --token-file token --ttl 600

  What can be trained of all sessions, a sample a line:
    driftless gateway --hf-checkpoint models/Qwen3-0.6B --save runs/agents --export samples.jsonl";

/// Let agents talk to the policy as to OpenAI or Anthropic, and keep the tokens that were sampled.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Checkpoint directory that the engines started from: it has the tokenizer and the chat template.
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: PathBuf,
    /// Running engines, as host:port or https://host/path, with vllm+ before the URL for vLLM.
    #[arg(long, value_name = "ADDR", num_args = 1.., required_unless_present = "export")]
    rollout_external_engine_addrs: Vec<String>,
    /// Directory of the sessions.
    #[arg(long, value_name = "DIR")]
    save: PathBuf,
    /// Address to listen on; port 0: the system chooses, and the address is printed.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7440")]
    listen: SocketAddr,
    /// Address at which Prometheus reads what was asked and answered: GET /metrics, with the token if there is one. Port 0:
    /// the system chooses, and the address is printed.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// File holding the token that clients bring as their API key; needed to listen beyond loopback [default:
    /// DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Name of the model, as clients see it [default: that of the checkpoint's directory].
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Tokens that a conversation and its next answer may have together [default: the checkpoint's
    /// max_position_embeddings].
    #[arg(long, value_name = "TOKENS", value_parser = numbers::count::<usize>())]
    rollout_max_context_len: Option<usize>,
    /// Leave thoughts out of later prompts once the user asks something else, as most chat templates do. A session is then
    /// a sample for each question with thoughts before it.
    #[arg(long)]
    strip_thoughts: bool,
    /// Seed of sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the samples of all sessions into this file, a JSON object a line, and serve nothing.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["listen", "metrics_listen", "token_file", "rollout_external_engine_addrs"])]
    export: Option<PathBuf>,
    /// Write those of requests that are a client's own housekeeping, such as titles, too.
    #[arg(long, requires = "export")]
    auxiliary: bool,
    #[command(flatten)]
    draw: DrawArgs,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_dir("--hf-checkpoint", &args.hf_checkpoint)?;
    paths::check_place("--save", &args.save)?;
    if let Some(file) = &args.export {
        return export(&args, file, output);
    }
    let token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    check_exposure("gateway address", args.listen, token.as_deref())?;
    if let Some(addr) = args.metrics_listen {
        check_exposure(METRICS, addr, token.as_deref())?;
    }
    if !args.listen.ip().is_loopback() {
        tracing::warn!(
            "the token and all conversations go in clear text: put a proxy with TLS before {}",
            args.listen
        );
    }
    let family = Family::open(&args.hf_checkpoint)?;
    let sessions = sessions(&args, family, args.engines()?, false)?;
    let mut options = GatewayOptions::new(token.is_none());
    options.deadline += args.generate_deadline();
    let gateway = Gateway::start(args.listen, options, Arc::new(Open::new(sessions, token.clone(), now)))?;
    let counts = gateway.counts();
    let listen = |addr| metrics::serve(METRICS, addr, token, move || counts.page());
    let watched = args.metrics_listen.map(listen).transpose()?;
    let url = format!("http://{}", gateway.addr());
    let page = watched.as_ref().map(|server| format!("http://{}/metrics", server.addr()));
    output.print(&json!({ "url": url, "metrics": page }), |_| {
        let metrics = page.iter().map(|page| format!("\nmetrics at {page}")).collect::<String>();
        format!("gateway on {url}, sessions at {url}/s/NAME/v1{metrics}")
    })?;
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    while !stop.wait(Duration::from_secs(3600)) {}
    Ok(())
}

impl Args {
    fn engines(&self) -> Result<Engines> {
        let addresses = &self.rollout_external_engine_addrs;
        let (options, keys) = self.draw.fleet(addresses)?;
        let attaching = Engines::attach(addresses, &keys, &self.hf_checkpoint, options, self.seed);
        let runtime = runtime::handle();
        let runtime = runtime.map_err(|source| Error::Io { path: PathBuf::from("threads"), source })?;
        runtime::wait(&runtime, attaching)
    }

    fn generate_deadline(&self) -> Duration {
        Duration::from_secs(self.draw.generate_deadline)
    }

    /// Tokens of a conversation with its next answer.
    fn context(&self) -> Result<usize> {
        if let Some(tokens) = self.rollout_max_context_len {
            return Ok(tokens);
        }
        Ok(context(&self.hf_checkpoint)?.unwrap_or(Settings::default().context))
    }

    fn model_name(&self) -> String {
        let dir = self.hf_checkpoint.canonicalize().unwrap_or_else(|_| self.hf_checkpoint.clone());
        let name = || dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned();
        self.served_model_name.clone().unwrap_or_else(name)
    }
}

/// The sessions of --save, and those that clients begin; with `all` those too that were let go.
fn sessions<D: Draw>(args: &Args, family: Family, draw: D, all: bool) -> Result<Sessions<D>> {
    let visitors = Opening { key: None, sampling: args.draw.sampling() };
    let of = Settings::default();
    let settings = Settings {
        // What waits for an engine is not late by that.
        deadline: of.deadline + args.generate_deadline(),
        model: args.model_name(),
        context: args.context()?,
        thoughts: if args.strip_thoughts { Thoughts::Stripped } else { Thoughts::Kept },
        visitors: Some(visitors),
        all,
        ..of
    };
    let io = |source| Error::Io { path: args.save.clone(), source };
    std::fs::create_dir_all(&args.save).map_err(io)?;
    Ok(Sessions::open_journal(&args.save.join(JOURNAL), family, draw, settings)?)
}

/// Writes the samples of all sessions.
fn export(args: &Args, file: &Path, output: Output) -> Result<()> {
    paths::check_output("--export", file)?;
    paths::check_file("--save", &args.save.join(JOURNAL))?;
    let context = args.context()?;
    let sessions = sessions(args, Family::open(&args.hf_checkpoint)?, Nobody, true)?;
    let io = |source| Error::Io { path: file.to_owned(), source };
    let runtime = runtime::handle().map_err(io)?;
    let mut lines = std::io::BufWriter::new(std::fs::File::create(file).map_err(io)?);
    let mut count = 0_u64;
    for session in sessions.names() {
        let samples = runtime::wait(&runtime, sessions.samples(&session, args.auxiliary, context));
        let samples = samples.map_err(|refusal| Error::usage("--save", "sessions with samples", refusal))?;
        for sample in &samples {
            writeln!(lines, "{}", line(&session, sample)).map_err(io)?;
            count += 1;
        }
    }
    lines.flush().map_err(io)?;
    let told = json!({ "export": file.display().to_string(), "samples": count });
    output.print(&told, |_| format!("{count} samples: {}", file.display()))
}

/// A sample as JSON.
fn line(session: &str, sample: &Sample) -> Value {
    json!({
        "session": session,
        "tokens": sample.tokens,
        "prompt_len": sample.prompt_len,
        "loss_mask": sample.loss_mask,
        "log_probs": sample.log_probs,
        "spans": sample.spans,
        "ended": sample.ended,
        "turns": sample.turns,
        "branch": sample.branch,
    })
}
