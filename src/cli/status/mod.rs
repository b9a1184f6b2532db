//! `driftless status`: how a run is doing, by what its trainer and its followers left in the store.

mod show;

pub(super) use show::duration;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::run::{kind, model, stored_bytes};
use crate::cli::shared::store;
use driftless::store::{ContentDigest, if_found};
use driftless::transport::gc::{Ack, EngineStatus, GcOptions, Lease, Phases, leases_at};
use driftless::transport::{Run, RunId, Version};
use serde::Serialize;
use std::time::{Duration, SystemTime};

const HELP: &str = "\
Only the store is read: no follower and no engine is asked, and nothing is written. A host is shown as its follower
last wrote it, at each change and every minute; the age of the lease says when. Ages compare the store's dates with
this host's clock.

  lag       versions between the newest one and the follower's
  lease     live up to 15 minutes; one that ran out is of a follower that ended, or that cannot write to the store
  prepare   time to fetch, check and apply the version, until engines could load it
  in step   engines that serve the follower's version
  phases    how long each part of the last version's way took on that host, in milliseconds
  pause     how long an engine last stood still for a version
  by        patched in place by the plugin, loaded from disk, or pushed
  compared  how the live weights were compared with the version

Examples:
  driftless status s3://weights/team my-run
  driftless status file:///shared/store my-run --json | jq '.followers[] | select(.live | not)'";

/// Show how a run is doing: the trainer's newest version, each follower, each engine.
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// Store that the run is in: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(value_name = "STORE", required_unless_present = "store", conflicts_with = "store")]
    in_store: Option<String>,
    /// Name of the run.
    #[arg(value_name = "RUN", required_unless_present = "run", conflicts_with = "run")]
    of_run: Option<String>,
    /// The store, for scripts and --config.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// The run, likewise.
    #[arg(long, value_name = "NAME")]
    run: Option<String>,
    /// Model of the run [default: the only one].
    #[arg(long)]
    model: Option<String>,
}

/// What is known of a run.
#[derive(Debug, Serialize)]
struct Shown {
    run: String,
    run_id: RunId,
    /// None where no version says which model there is.
    model: Option<String>,
    trainer: Option<Trainer>,
    /// Sorted by name.
    followers: Vec<Follower>,
}

/// The newest version.
#[derive(Debug, Serialize)]
struct Trainer {
    version: Version,
    trainer_step: u64,
    kind: &'static str,
    anchor: bool,
    /// Of the objects and the manifest.
    bytes: u64,
    manifest_digest: ContentDigest,
    /// Since it was committed; `None` if the store dates nothing.
    age_seconds: Option<f64>,
}

/// What a follower left in the store.
#[derive(Debug, Serialize)]
struct Follower {
    follower: String,
    /// Since it last wrote; `None` if the store dates nothing.
    age_seconds: Option<f64>,
    live: bool,
    /// None where there is nothing yet, or nothing that can be read.
    acknowledged: Option<Acknowledged>,
    /// Why what is there cannot be read.
    unreadable: Option<String>,
}

/// The version that a host has, as its follower says.
#[derive(Debug, Serialize)]
struct Acknowledged {
    version: Version,
    /// Versions that it is behind the newest one.
    lag: u64,
    label: String,
    manifest_digest: ContentDigest,
    prepare_ms: f64,
    bytes: u64,
    engines: Vec<Engine>,
    /// Of the versions that it took last, oldest first.
    phases: Vec<Phases>,
}

/// An engine, as its follower last saw it.
#[derive(Debug, Serialize)]
struct Engine {
    /// Whether it serves the follower's version.
    in_step: bool,
    #[serde(flatten)]
    status: EngineStatus,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let (store, run) = place(&args)?;
    let run = Run::open(store::open(store)?, run)?;
    let model = model(&run, args.model)?;
    let now = SystemTime::now();
    let (trainer, followers) = match &model {
        Some(model) => {
            let trainer = trainer(&run, model, now)?;
            let newest = trainer.as_ref().map_or(Version(0), |trainer| trainer.version);
            (trainer, followers(&run, model, newest, now)?)
        }
        None => (None, Vec::new()),
    };
    let shown = Shown { run: run.name().to_owned(), run_id: run.id(), model, trainer, followers };
    output.print(&shown, Shown::text)
}

/// The store and the run, whichever way they are given.
fn place(args: &Args) -> Result<(&str, &str)> {
    let store = args.in_store.as_ref().or(args.store.as_ref());
    let run = args.of_run.as_ref().or(args.run.as_ref());
    // The parser asks for both.
    store
        .map(String::as_str)
        .zip(run.map(String::as_str))
        .ok_or_else(|| Error::usage("status", "STORE RUN", "none"))
}

/// The newest version, with the store's date of its manifest.
fn trainer(run: &Run, model: &str, now: SystemTime) -> Result<Option<Trainer>> {
    let Some(committed) = run.newest(model)? else { return Ok(None) };
    let manifest = &committed.manifest;
    let head = run.store().head(&run.manifest_key(model, manifest.version)?);
    let modified =
        if_found(head).map_err(driftless::transport::Error::from)?.and_then(|entry| entry.modified);
    Ok(Some(Trainer {
        version: manifest.version,
        trainer_step: manifest.trainer_step,
        kind: kind(manifest),
        anchor: manifest.is_anchor(),
        bytes: stored_bytes(manifest)?,
        manifest_digest: committed.digest,
        age_seconds: age(modified, now).map(|age| age.as_secs_f64()),
    }))
}

fn followers(run: &Run, model: &str, newest: Version, now: SystemTime) -> Result<Vec<Follower>> {
    let leases = leases_at(run, &GcOptions::new(model), Some(now))?;
    let mut followers: Vec<_> = leases.into_iter().map(|lease| Follower::of(lease, newest)).collect();
    followers.sort_by(|one, other| one.follower.cmp(&other.follower));
    Ok(followers)
}

/// An object from the store's future was put just now.
fn age(modified: Option<SystemTime>, now: SystemTime) -> Option<Duration> {
    modified.map(|then| now.duration_since(then).unwrap_or_default())
}

impl Follower {
    fn of(lease: Lease, newest: Version) -> Follower {
        let Lease { follower, age, live, ack, .. } = lease;
        let (acknowledged, unreadable) = match ack {
            Ok(ack) => (ack.map(|ack| Acknowledged::of(ack, newest)), None),
            Err(why) => (None, Some(why)),
        };
        let age_seconds = age.map(|age| age.as_secs_f64());
        Follower { follower, age_seconds, live, acknowledged, unreadable }
    }
}

impl Acknowledged {
    fn of(ack: Ack, newest: Version) -> Acknowledged {
        let Ack { version, label, manifest_digest, prepare_ms, bytes, engines, phases } = ack;
        let engine = |status: EngineStatus| Engine { in_step: status.label.as_ref() == Some(&label), status };
        let engines = engines.into_iter().map(engine).collect();
        // It may have taken one that came since `newest` was looked for.
        let lag = newest.0.saturating_sub(version.0);
        Acknowledged { version, lag, label, manifest_digest, prepare_ms, bytes, engines, phases }
    }
}
