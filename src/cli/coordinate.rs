//! `driftless coordinate`.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::signals::{PATIENCE, stop_on_signals};
use crate::cli::shared::{keys, numbers, store};
use driftless::bridge::coordinate::{Coordinator, CoordinatorOptions, HostOutcome, Rolled};
use driftless::bridge::{Keys, Label};
use driftless::http::runtime;
use driftless::store::Store;
use driftless::store::wait::Stop;
use driftless::transport::{Error as Transport, Run};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  Two hosts, each with its follower and its engines:
    driftless follow … --listen 10.0.0.11:9750 --token-file token --coordinated
    driftless follow … --listen 10.0.0.12:9750 --token-file token --coordinated
    driftless coordinate --store s3://bucket/prefix --run my-run --token-file token \\
        --follower 10.0.0.11:9750 --follower 10.0.0.12:9750 --hosts-min 1

All hosts prepare a version while their engines generate; then all engines change to it. With --hosts-min, stragglers are
waited for no longer than --grace: they keep what they have until a later round.";

/// Polls after which the same version is rolled again: a host that was started anew has lost what it was
/// ordered.
const AGAIN: u32 = 20;

/// Bring the followers of many hosts to each version together.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Store with the run: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(long, value_name = "URL")]
    store: String,
    /// Name of the run; it need not have begun.
    #[arg(long, value_name = "NAME")]
    run: String,
    /// Model of the run.
    #[arg(long, default_value = "policy")]
    model: String,
    /// A follower's address, as host:port or URL; given once for each host.
    #[arg(long, value_name = "URL", required = true)]
    follower: Vec<String>,
    /// File holding the followers' token [default: DRIFTLESS_TOKEN].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Hosts that have to be prepared before any engine is paused [default: all].
    #[arg(long, value_name = "HOSTS", value_parser = numbers::count::<usize>())]
    hosts_min: Option<usize>,
    /// Seconds to wait for the other hosts once --hosts-min are prepared.
    #[arg(long, default_value_t = 5, value_name = "SECONDS", value_parser = numbers::seconds())]
    grace: u64,
    /// Seconds a host may take to prepare a version.
    #[arg(long, default_value_t = 1800, value_name = "SECONDS", value_parser = numbers::deadline())]
    prepare_deadline: u64,
    /// Seconds a host may take to activate a version on all its engines.
    #[arg(long, default_value_t = 660, value_name = "SECONDS", value_parser = numbers::deadline())]
    activate_deadline: u64,
    /// Milliseconds between two polls of the store.
    #[arg(long, default_value_t = 500, value_parser = numbers::milliseconds())]
    poll_ms: u64,
    /// Bring the hosts to the newest version once, then end; failures are not retried.
    #[arg(long)]
    once: bool,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let token = keys::secret(args.token_file.as_deref(), "DRIFTLESS_TOKEN")?;
    let options = CoordinatorOptions::default()
        .with_keys(Keys::new(token.as_deref(), None)?)
        .with_hosts_min(args.hosts_min.unwrap_or(0))
        .with_grace(Duration::from_secs(args.grace))
        .with_prepare_deadline(Duration::from_secs(args.prepare_deadline))
        .with_activate_deadline(Duration::from_secs(args.activate_deadline));
    let coordinator = Coordinator::new(&args.follower, options)?;
    let store = store::open(&args.store)?;
    let runtime = runtime::handle().map_err(|source| Error::Io { path: PathBuf::from("runtime"), source })?;
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    let mut there = None;
    let mut polls = 0_u32;
    while !stop.is_stopped() {
        polls = polls.wrapping_add(1);
        let round = match newest(&store, &args) {
            Ok(Some(newest)) if there.as_ref() == Some(&newest) && !polls.is_multiple_of(AGAIN) => Ok(None),
            Ok(Some(newest)) => runtime.block_on(coordinator.roll(&newest)).map(Some).map_err(Error::from),
            Ok(None) | Err(Error::Transport(Transport::NoSuchRun { .. })) if !args.once => Ok(None),
            Ok(None) => {
                let expected = format!("a version of model `{}` in run `{}`", args.model, args.run);
                Err(Error::usage("--once", expected, "none"))
            }
            Err(error) => Err(error),
        };
        match round {
            Ok(None) => {}
            Ok(Some(rolled)) => {
                // With a straggler the same version is rolled again: nothing is done where it is already.
                let complete = rolled.stragglers().next().is_none();
                if there.as_ref() != Some(&rolled.label) {
                    tracing::info!(label = %rolled.label, complete, "rolled");
                }
                there = complete.then(|| rolled.label.clone());
                if args.once {
                    return show(&rolled, output);
                }
            }
            Err(error) if args.once => return Err(error),
            Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "no progress"),
        }
        if stop.wait(Duration::from_millis(args.poll_ms)) {
            break;
        }
    }
    Ok(())
}

/// The label of the run's newest version.
fn newest(store: &Arc<dyn Store>, args: &Args) -> Result<Option<Label>> {
    let run = Run::open(store.clone(), &args.run)?;
    let newest = run.newest_version(&args.model)?;
    Ok(newest.map(|newest| Label::new(&run.id().to_string(), newest.0)).transpose()?)
}

fn show(rolled: &Rolled, output: Output) -> Result<()> {
    let milliseconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
    let host = |host: &HostOutcome| {
        json!({"url": host.url, "prepare_ms": milliseconds(host.prepared),
            "activate_ms": milliseconds(host.activated), "failure": host.failure})
    };
    let hosts: Vec<_> = rolled.hosts.iter().map(host).collect();
    output.print(&json!({"label": rolled.label.to_string(), "hosts": hosts}), |_| {
        let line = |host: &HostOutcome| match &host.failure {
            None => format!("{}: {}", host.url, rolled.label),
            Some(failure) => format!("{}: a straggler: {failure}", host.url),
        };
        rolled.hosts.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}
