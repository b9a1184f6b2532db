//! `driftless follow`.

mod heard;
mod outlook;
mod show;

use crate::cli::shared::engines::COMPARES;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, table};
use crate::cli::shared::run::RunArgs;
use crate::cli::shared::signals::{self, PATIENCE, PAUSE_ENDS, stop_on_signals_or};
use crate::cli::shared::slime::Layout;
use crate::cli::shared::transport::TransportArgs;
use crate::cli::shared::{keys, numbers, paths, store};
use driftless::bridge::activate::{Compare, DiskActivator, DiskOptions, PluginOptions};
use driftless::bridge::engine::{Deadlines, PauseMode};
use driftless::bridge::live::{PLUGIN_DIR, plugin_dir};
use driftless::bridge::push::PushOptions;
use driftless::follower::{ServeOptions, serve};
use driftless::http::Server;
use driftless::relay::{Relays, RelaysOptions};
use driftless::store::Store;
use driftless::store::wait::Stop;
use driftless::store::wrap::Count;
use driftless::transport::activate::Activate;
use driftless::transport::follow::{ACTIVATE_DEADLINE, FollowerOptions, default_id};
use driftless::transport::prepared::OfferWhen;
use driftless::transport::replica::{Plan, PlannedVersion};
use driftless::transport::{Follower, Replica, Run, Version};
use serde::Serialize;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  Beside an SGLang server, for as long as the run goes:
    driftless follow --store file:///shared/store --run my-run --checkpoint-dir /dev/shm/policy \\
        --hf-checkpoint /models/start --engine http://127.0.0.1:30000

  What the next step would fetch, without taking it:
    driftless follow --store s3://bucket/prefix --run my-run --checkpoint-dir /dev/shm/policy --dry-run

  Beside a vLLM server, on the directory that it loads; it is materialised before the server starts:
    driftless follow --store file:///shared/store --run my-run --checkpoint-dir /dev/shm/policy --once
    VLLM_SERVER_DEV_MODE=1 vllm serve /dev/shm/policy --host 127.0.0.1
    driftless follow --store file:///shared/store --run my-run --checkpoint-dir /dev/shm/policy \\
        --engine vllm+http://127.0.0.1:8000

  For engines anywhere on a fast network, from a GPU of this host, without a follower beside each:
    driftless follow --store file:///shared/store --run my-run --checkpoint-dir /dev/shm/policy \\
        --hf-checkpoint /models/start --engine http://10.0.0.2:30000 --engine http://10.0.0.3:30000 \\
        --update-weight-transport nccl --nccl-library …/site-packages/nvidia/nccl/lib/libnccl.so.2

  With the bytes from a relay on a fast network, over RDMA, TCP or shared memory:
    driftless follow --store s3://bucket/prefix --run my-run --checkpoint-dir /dev/shm/policy \\
        --update-weight-transport ucx --relay ucx://10.0.0.2:7421 --relay-token-file relay.token

  For an engine on a GPU of this process, into its memory:
    driftless follow --store file:///shared/store --run my-run --checkpoint-dir /dev/shm/policy \\
        --hf-checkpoint /models/start --engine http://127.0.0.1:30000 --colocate

  Only materialise the newest version, once:
    driftless follow --store s3://bucket/prefix --run my-run --checkpoint-dir out/newest --once

  What slime's trainer writes, on the weights it starts from:
    driftless follow --layout slime --store file:///shared/deltas --hf-checkpoint /models/start \\
        --checkpoint-dir /dev/shm/policy --engine http://127.0.0.1:30000

Credentials, region and endpoint of an object store come from the environment, as its own tools have them: AWS_…, GOOGLE_…, AZURE_….";

/// Keep a local checkpoint directory, and the engines that load it, at a run's newest version.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(mut_arg("colocate", |arg| arg.requires("engine").conflicts_with("engine_checkpoint_dir")))]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// Directory for the checkpoint; the follower owns it.
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: PathBuf,
    /// The checkpoint that version 0 refers to, when it was published by reference; always so with --layout
    /// slime.
    #[arg(long, value_name = "DIR")]
    hf_checkpoint: Option<PathBuf>,
    /// File of public keys: only versions that one of them has signed are followed; may be given several
    /// times.
    #[arg(long, value_name = "FILE")]
    trust_key: Vec<PathBuf>,
    /// Engine to keep on the version: host:port or http://host:port for SGLang, vllm+http://host:port for
    /// vLLM, which has to be started with the checkpoint directory as its model. May be given several times.
    #[arg(long, value_name = "URL")]
    engine: Vec<String>,
    /// The checkpoint directory as the engines see it, if their file system is another [default:
    /// --checkpoint-dir].
    #[arg(long, value_name = "DIR")]
    engine_checkpoint_dir: Option<PathBuf>,
    #[command(flatten)]
    transport: TransportArgs,
    /// What happens to running requests while an engine loads: they are recomputed with the new weights,
    /// aborted, or continued on the key-value cache of the old ones. With the last, SGLang's plugin patches without a
    /// pause.
    #[arg(long, value_parser = numbers::one_of(&PAUSES), default_value = "retract")]
    pause_generation_mode: PauseMode,
    /// Whether to patch engines in place that have the Python package's plugin: where they have it, always
    /// (an engine without it is refused), or never. A version that cannot be patched is loaded.
    #[arg(long, value_enum, default_value_t = PluginUse::Auto)]
    plugin: PluginUse,
    /// Whether an engine is taken of whose live weights nothing can be compared, neither by its plugin nor by checksums:
    /// auto takes it and says so with each version, require refuses it.
    #[arg(long, value_parser = numbers::one_of(&COMPARES), default_value = "auto")]
    compare: Compare,
    /// Directory where plugins and followers of one user meet [default: DRIFTLESS_PLUGIN_DIR, or
    /// /dev/shm/driftless-<user id>].
    #[arg(long, value_name = "DIR")]
    plugin_dir: Option<PathBuf>,
    /// When plugins are offered a version: once its journal is durable, or sooner, once it is checked and decoded. Then a
    /// crash may leave an engine ahead of the directory until the next start has brought that there.
    #[arg(long, value_parser = numbers::one_of(&OFFERS), default_value = "durable")]
    offer: OfferWhen,
    /// Name of this follower in the store, which no other one of the run has [default: the host's name and a digest of
    /// the checkpoint directory's path].
    #[arg(long)]
    id: Option<String>,
    /// Bring everything to the newest version, then end; failures are not retried.
    #[arg(long)]
    once: bool,
    /// Go no further than this version, and end when it is on disk and on every engine.
    #[arg(long, value_name = "VERSION", value_parser = numbers::ordinal())]
    until_version: Option<u64>,
    /// Print what would be fetched and applied now, and change nothing: no directory, no lock, no lease, no
    /// engine. Engines are asked who they are, and it says what each gets: patched or loaded, compared or not, or
    /// refused. With --layout slime the versions are read and tried on copies of the tensors, and every
    /// checksum is compared.
    #[arg(long)]
    dry_run: bool,
    /// Prepare and activate only when told to over HTTP, as `driftless coordinate` does.
    #[arg(long, requires = "listen", conflicts_with = "once")]
    coordinated: bool,
    /// Milliseconds between two polls of the store.
    #[arg(long, default_value_t = 500, value_parser = numbers::milliseconds())]
    poll_ms: u64,
    /// Milliseconds between two looks at each engine, which find one that was restarted or paused. A new version is
    /// brought to the engines at once.
    #[arg(long, default_value_t = 500, value_parser = numbers::milliseconds())]
    engine_poll_ms: u64,
    /// Milliseconds between two samples of each engine's weights, which its plugin takes while it generates; 0 for none.
    /// They find what another program wrote, and that is loaded over.
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(..=24 * 60 * 60 * 1000))]
    engine_sample_ms: u64,
    /// GiB of the checkpoint to read in an hour, in the background, and to compare with its digests; 0 for
    /// none. A damaged checkpoint is rebuilt from the store, and engines load it again.
    #[arg(long, value_name = "GIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    scrub_gib_per_hour: u64,
    /// Seconds an engine may take to load a version, all calls together. After that the engine stays paused
    /// until a load succeeds, unless its weights were not touched.
    #[arg(long, default_value_t = ACTIVATE_DEADLINE.as_secs(), value_name = "SECONDS", value_parser = numbers::deadline())]
    activate_deadline: u64,
    /// Answer HTTP calls (prepare, activate, status, metrics) on this address.
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// Relay to read objects through, as http://host:port or ucx://host:port; may be given several times.
    /// What relays do not give comes from the store.
    #[arg(long, value_name = "URL")]
    relay: Vec<String>,
    /// File holding the token that relays want [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE", requires = "relay")]
    relay_token_file: Option<PathBuf>,
    /// File holding the token that HTTP calls must bring; needed to listen beyond loopback [default:
    /// DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    call: keys::CallArgs,
}

const PAUSES: [(&str, PauseMode); 3] =
    [("retract", PauseMode::Retract), ("abort", PauseMode::Abort), ("in_place", PauseMode::InPlace)];

const OFFERS: [(&str, OfferWhen); 2] = [("durable", OfferWhen::Durable), ("decoded", OfferWhen::Decoded)];

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum PluginUse {
    Auto,
    Require,
    Off,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_own("--checkpoint-dir", &args.checkpoint_dir, args.hf_checkpoint.as_deref())?;
    if let Some(dir) = &args.hf_checkpoint {
        paths::check_checkpoint("--hf-checkpoint", dir)?;
    }
    if args.run.layout == Layout::Slime && args.offer == OfferWhen::Decoded {
        // Nothing keeps a trainer's directory, so that what an engine has may be gone before it is on the host.
        return Err(Error::usage("--offer", "durable with --layout slime", "decoded"));
    }
    if args.run.layout == Layout::Slime && !args.relay.is_empty() {
        return Err(Error::usage(
            "--layout slime",
            "a store without --relay, which has its files",
            "--relay",
        ));
    }
    if args.dry_run {
        return dry_run(&args, output);
    }
    args.transport.check(&args.run.store, &args.relay)?;
    args.transport.prepare(&args.relay)?;
    args.transport.log();
    let opened = open(&args)?;
    let store = Arc::new(Count::new(opened.clone()));
    let follower = follower(&args, store.clone())?;
    let _server = listen(&args, &follower)?;
    let stop = Stop::new();
    if !args.once && !args.coordinated {
        heard::hear(&args, opened, &follower, &stop)
            .map_err(|source| Error::Io { path: args.checkpoint_dir.clone(), source })?;
    }
    let told = follower.clone();
    let patience = if args.engine.is_empty() { PATIENCE } else { PAUSE_ENDS };
    stop_on_signals_or(&stop, patience, move |interrupted| match paused(&told) {
        Some(engines) => Error::LeftPaused { engines, source: Some(Box::new(interrupted)) },
        None => interrupted,
    })?;
    // With --once the status at the end says what the line would.
    let bar = show::versions(&follower, store, (!args.once).then_some(output));
    let outcome = follower.run_until(&stop, args.once);
    bar.finish_and_clear();
    let ends = args.once || (args.until_version.is_some() && !stop.is_stopped());
    if ends && outcome.is_ok() {
        output.print(&follower.status(), show::status)?;
    }
    if let Some(engines) = paused(&follower) {
        // Whatever else there is to say.
        let source = outcome.err().map(|error| Box::new(error.into()));
        return Err(Error::LeftPaused { engines, source });
    }
    outcome?;
    if stop.is_stopped() && args.until_version.is_some() {
        return Err(signals::interruption("following up to --until-version"));
    }
    Ok(())
}

/// The store, behind relays if there are some.
fn open(args: &Args) -> Result<Arc<dyn Store>> {
    let store = store::open(&args.run.store)?;
    if args.relay.is_empty() {
        return Ok(store);
    }
    let mut options = RelaysOptions::default();
    options.token = keys::secret(args.relay_token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    Ok(Arc::new(Relays::new(store, &args.relay, options)?))
}

/// What the command line says of versions, and nothing of engines.
fn options(args: &Args) -> Result<FollowerOptions> {
    let id = args.id.clone().unwrap_or_else(|| default_id(&args.checkpoint_dir));
    let mut options = FollowerOptions::new(args.run.name()?, &args.checkpoint_dir, id);
    options.model.clone_from(&args.run.model);
    options.hf_checkpoint.clone_from(&args.hf_checkpoint);
    options.trust_keys = keys::trusted(&args.trust_key)?;
    options.until = args.until_version.map(Version);
    Ok(options)
}

fn follower(args: &Args, store: Arc<Count>) -> Result<Follower> {
    let plugin = plugin(args)?;
    let engines = engines(args, plugin.clone())?;
    let mut options = options(args)?;
    (options.coordinated, options.offer) = (args.coordinated, args.offer);
    options.poll = Duration::from_millis(args.poll_ms);
    options.engine_poll = Duration::from_millis(args.engine_poll_ms);
    options.sample_poll = Duration::from_millis(args.engine_sample_ms);
    // An engine that was started again should not wait long for its weights.
    options.backoff_max = options.poll.max(Duration::from_secs(2));
    options.scrub_bytes_per_hour = args.scrub_gib_per_hour << 30;
    options.activate_deadline = Duration::from_secs(args.activate_deadline);
    options.plugin_dir = plugin.map(|plugin| plugin.dir);
    Ok(match args.run.layout {
        Layout::Driftless => Follower::open(store, options, engines)?,
        Layout::Slime => driftless::slime::open(store, options, engines)?,
    })
}

/// Serves the follower over HTTP, if that was asked for.
fn listen(args: &Args, follower: &Follower) -> Result<Option<Server>> {
    let token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    let Some(address) = args.listen else { return Ok(None) };
    let mut options = ServeOptions::new(address);
    options.token = token;
    if args.run.layout == Layout::Slime {
        options.routes = driftless::slime::routes(follower.clone());
    }
    let server = serve(follower.clone(), options)?;
    tracing::info!(address = %server.addr(), "listening");
    Ok(Some(server))
}

/// The engines that the command leaves paused, or may leave so.
fn paused(follower: &Follower) -> Option<String> {
    let engines = follower.maybe_paused();
    (!engines.is_empty()).then(|| engines.join(", "))
}

/// Prints what would be done. Locks nothing, and changes neither the checkpoint directory nor an engine.
fn dry_run(args: &Args, output: Output) -> Result<()> {
    let (store, options) = (store::open(&args.run.store)?, options(args)?);
    let foreseen = Foreseen { plan: plan(args, store, &options)?, engines: outlook::engines(args)? };
    output.print(&foreseen, foreseen_text)
}

/// What would be done.
#[derive(Serialize)]
struct Foreseen {
    #[serde(flatten)]
    plan: Plan,
    /// What each engine gets, by its address.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    engines: Vec<outlook::Engine>,
}

fn foreseen_text(foreseen: &Foreseen) -> String {
    let engines = foreseen.engines.iter().map(outlook::Engine::text);
    std::iter::once(plan_text(&foreseen.plan)).chain(engines).collect::<Vec<_>>().join("\n")
}

fn plan(args: &Args, store: Arc<dyn Store>, options: &FollowerOptions) -> Result<Plan> {
    if args.run.layout == Layout::Slime {
        return Ok(driftless::slime::plan(store, options)?);
    }
    let run = Run::open(store, &options.run)?.trusting(&options.trust_keys);
    let newest = run.newest_version(&options.model)?.unwrap_or_default();
    let to = options.until.map_or(newest, |until| newest.min(until));
    Ok(Replica::plan(&args.checkpoint_dir, &run, &options.model, to)?)
}

fn plan_text(plan: &Plan) -> String {
    let from = plan.from.map_or("nothing".to_owned(), |from| format!("version {from}"));
    let changed = plan.changed.map_or("an unknown number of".to_owned(), |changed| changed.to_string());
    let mut lines = vec![format!(
        "from {from} to version {}: {} objects, {} bytes to fetch, {changed} elements to change",
        plan.to, plan.objects, plan.bytes
    )];
    if plan.unfinished {
        lines.push("an interrupted apply would be finished first".to_owned());
    }
    let row = |planned: &PlannedVersion| {
        let kind = if planned.full { "in full" } else { "delta" };
        let [version, objects, bytes] =
            [planned.version.0, planned.objects, planned.bytes].map(|n| n.to_string());
        vec![version, kind.to_owned(), objects, bytes]
    };
    if !plan.versions.is_empty() {
        lines.push(table(&["version", "as", "objects", "bytes"], plan.versions.iter().map(row)));
    }
    lines.join("\n")
}

/// How engines' plugins are used, if any may be.
fn plugin(args: &Args) -> Result<Option<PluginOptions>> {
    let pushes = args.transport.pushes();
    if pushes && args.plugin == PluginUse::Require {
        return Err(Error::usage("--plugin", "auto or off where weights are pushed", "require"));
    }
    if pushes || args.plugin == PluginUse::Off || args.engine.is_empty() {
        return Ok(None);
    }
    let usual = || plugin_dir(std::env::var_os(PLUGIN_DIR));
    let dir = args.plugin_dir.clone().unwrap_or_else(usual);
    let required = args.plugin == PluginUse::Require;
    Ok(Some(PluginOptions::new(dir).with_required(required)))
}

/// How engines load.
fn disk_options(args: &Args, plugin: Option<PluginOptions>) -> Result<DiskOptions> {
    let load = Duration::from_secs(args.activate_deadline);
    let deadlines = Deadlines::default().with_load(load);
    let client = args.call.client("--engine", &args.engine)?.with_deadlines(deadlines);
    let mut options = DiskOptions::default().with_client(client).with_pause(args.pause_generation_mode);
    (options.base, options.plugin, options.compare) = (args.hf_checkpoint.clone(), plugin, args.compare);
    options.engine_checkpoint_dir = args.engine_checkpoint_dir.clone();
    Ok(options)
}

fn engines(args: &Args, plugin: Option<PluginOptions>) -> Result<Vec<Box<dyn Activate>>> {
    let options = disk_options(args, plugin)?;
    if args.transport.pushes() {
        let mut push = PushOptions::default().with_client(options.client).with_pause(options.pause);
        (push.base, push.compare) = (options.base, options.compare);
        return Ok(vec![args.transport.push(&args.engine, push)?]);
    }
    let engine = |url: &String| -> Result<Box<dyn Activate>> {
        Ok(Box::new(DiskActivator::new(url, options.clone())?))
    };
    args.engine.iter().map(engine).collect()
}
