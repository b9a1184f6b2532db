//! `driftless publish`.

mod ranks;
mod serving;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::run::RunArgs;
use crate::cli::shared::signals::{self, PATIENCE, stop_on_signals};
use crate::cli::shared::slime::{self, Layout};
use crate::cli::shared::{keys, numbers, paths, progress, store};
use driftless::bridge::Expected;
use driftless::bridge::activate::forecast;
use driftless::delta::Profile;
use driftless::store::Store;
use driftless::store::wait::Stop;
use driftless::transport::gc::{GcOptions, collect};
use driftless::transport::manifest::Kind;
use driftless::transport::publish::{FullBecause, LeftOut, Mode, Published, PublisherOptions, Start, Step};
use driftless::transport::{Checkpoint, Publisher, Run, Version};
use ranks::RankArgs;
use serde_json::json;
use serving::ServingArgs;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  driftless publish --store file:///shared/store --run my-run --new-run --checkpoint out/step-0
  driftless publish --store s3://bucket/prefix --run my-run --resume --checkpoint out/step-1 --step 1

  For slime's receivers, which have out/step-0 already:
    driftless publish --layout slime --store file:///shared/deltas --new-run --checkpoint out/step-0
    driftless publish --layout slime --store file:///shared/deltas --resume --checkpoint out/step-1
  Serving the objects over UCX from this process, to followers with --relay ucx://10.0.0.2:7421:
    driftless publish --store s3://bucket/prefix --run my-run --resume --checkpoint out/step-1 --step 1 \\
        --listen-ucx 10.0.0.2:7421 --relay-cache-dir /dev/shm/relay --relay-token-file relay.token --until-followed 600
  As rank 1 of 4, all of which run the same command:
    driftless publish --store file:///shared/store --run my-run --resume --checkpoint out/rank-1 --step 1 \\
        --rank 1 --ranks 4 --attempt job-7-step-1

Credentials, region and endpoint of an object store come from the environment, as its own tools have them: AWS_…, GOOGLE_…, AZURE_….

The baseline is a copy of the newest version that the next delta starts from. The command keeps it; if it is not there it is
fetched from the store and verified.";

/// Publish a Hugging Face checkpoint directory as the next version of a run.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("start").required(true))]
pub(crate) struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// Begin the run; refused if its name is taken.
    #[arg(long, group = "start")]
    new_run: bool,
    /// Go on with the run; refused if there is none.
    #[arg(long, group = "start")]
    resume: bool,
    /// Go on with the run if there is one, and otherwise begin it: for a job that is started again.
    #[arg(long, group = "start")]
    resume_or_new: bool,
    /// Hugging Face checkpoint directory to publish.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Whole tensors, or the difference to the newest version; the result says why a version is published in
    /// full.
    #[arg(long, value_parser = numbers::one_of(&MODES), default_value = "delta")]
    mode: Mode,
    /// Publish version 0 by reference: digests only, for hosts that have the checkpoint already.
    #[arg(long, requires = "new_run")]
    by_reference: bool,
    /// Deltas as small as they get, or quick to decode.
    #[arg(long, value_parser = numbers::one_of(&PROFILES), default_value = "wire")]
    profile: Profile,
    /// Where the baseline is kept [default: driftless/baselines in the user's cache directory, by store and
    /// run].
    #[arg(long, value_name = "DIR")]
    baseline_dir: Option<PathBuf>,
    /// Optimiser step of the checkpoint, for the record.
    #[arg(long, default_value_t = 0, value_parser = numbers::ordinal())]
    step: u64,
    /// Make every version whose number is a multiple of this an anchor: it carries full tensors beside the
    /// delta.
    #[arg(long, value_name = "VERSIONS", value_parser = numbers::count::<u64>())]
    anchor_every: Option<u64>,
    /// Make a version an anchor when the deltas since the last one weigh this share of the model, such as
    /// 0.5.
    #[arg(long, value_name = "SHARE", value_parser = numbers::positive)]
    anchor_share: Option<f64>,
    /// Publish in full what has other tensors, shapes or types than the version before; refused without this.
    #[arg(long)]
    allow_layout_change: bool,
    /// Publish elements that are NaN or infinite; refused without this.
    #[arg(long)]
    allow_non_finite: bool,
    #[command(flatten)]
    sign: keys::SignArgs,
    #[command(flatten)]
    notify: store::NotifyArgs,
    /// Afterwards remove versions that no follower needs, as `driftless gc --keep` does.
    #[arg(long, value_name = "VERSIONS", value_parser = numbers::count::<u64>())]
    keep: Option<u64>,
    #[command(flatten)]
    serving: ServingArgs,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    slime: slime::PublishArgs,
}

const MODES: [(&str, Mode); 2] = [("full", Mode::Full), ("delta", Mode::Delta)];
/// Deltas as small as they get, or quick to decode.
pub(crate) const PROFILES: [(&str, Profile); 2] = [("wire", Profile::Wire), ("fast", Profile::Fast)];

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_checkpoint("--checkpoint", &args.checkpoint)?;
    let notify = args.notify.notify()?;
    args.serving.prepare()?;
    let mut store = store::open(&args.run.store)?;
    let baseline_dir = baseline(&args, &store.to_string())?;
    if args.run.layout == Layout::Slime {
        return publish_for_slime(store, &args, &baseline_dir, output);
    }
    let stop = Stop::new();
    stop_on_signals(&stop, PATIENCE)?;
    let server = args.serving.start(&mut store, output)?;
    let mut options = options(&args, &store, &baseline_dir)?;
    options.notify = notify;
    let (run, version) = publish(&args, store, options, &stop, output).map_err(signals::caused)?;
    if server.is_some() {
        args.serving.linger(&run, &args.run.model, version, &stop);
    }
    Ok(())
}

/// Where the baseline is: a place that was named, and is ours, or one of the user's cache.
fn baseline(args: &Args, store: &str) -> Result<PathBuf> {
    if let Some(dir) = &args.baseline_dir {
        let start = Some(args.checkpoint.as_path()).filter(|_| args.by_reference);
        paths::check_own("--baseline-dir", dir, start)?;
        return Ok(dir.clone());
    }
    default_baseline(store, &args.run.name()?, &args.run.model).ok_or_else(|| {
        Error::usage("baseline directory", "--baseline-dir, or HOME to put it under", "neither")
    })
}

fn publish_for_slime(store: Arc<dyn Store>, args: &Args, baseline_dir: &Path, output: Output) -> Result<()> {
    refuse_for_slime(args)?;
    let start = if args.new_run { Start::NewRun } else { Start::Resume };
    let mut options = args.slime.options(start, baseline_dir, &args.checkpoint)?;
    options.allow_non_finite = args.allow_non_finite;
    match slime::publish(store, options, &args.checkpoint, output)? {
        Some(published) => show(&published, baseline_dir, args, output),
        None => Ok(()),
    }
}

/// Publishes the version, or this rank's part of it, and shows what it was once the next publisher may begin.
fn publish(
    args: &Args,
    store: Arc<dyn Store>,
    options: PublisherOptions,
    stop: &Stop,
    output: Output,
) -> Result<(Run, Version)> {
    let rank = args.ranks.rank();
    if !args.resume && options.start == Start::Resume {
        args.ranks.wait_for_run(&store, &options.run, stop)?;
    }
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let baseline_dir = options.baseline_dir.clone();
    let mut publisher = Publisher::open(store, options)?;
    publisher.stop_on(stop);
    let (bar, moved) = progress::publication();
    publisher.on_progress(moved);
    let step = Step { trainer_step: args.step, checkpoint: Some(args.checkpoint.display().to_string()) };
    if let Some(rank) = &rank {
        let (version, bytes) = args.ranks.publish(&mut publisher, &checkpoint, step, args.mode, rank)?;
        bar.finish_and_clear();
        let run = finish(args, publisher);
        let value = json!({"version": version, "rank": rank.rank, "publication_bytes": bytes});
        output.print(&value, |_| format!("version {version}: {bytes} bytes as rank {}", rank.rank))?;
        return Ok((run, version));
    }
    let published = if args.by_reference {
        publisher.publish_reference(&args.checkpoint, step)?
    } else {
        publisher.publish(&checkpoint, step, args.mode)?
    };
    bar.finish_and_clear();
    let run = finish(args, publisher);
    show(&published, &baseline_dir, args, output)?;
    Ok((run, published.version))
}

/// Once a version is committed: removes what nobody needs any more, if that was asked for. The baseline is free
/// afterwards.
fn finish(args: &Args, publisher: Publisher) -> Run {
    let run = publisher.run().clone();
    // One rank is enough.
    let is_first = args.ranks.rank().is_none_or(|rank| rank.rank == 0);
    let Some(keep) = args.keep.filter(|_| is_first) else { return run };
    let mut options = GcOptions::new(&args.run.model);
    options.keep = keep;
    // The version is published whatever becomes of the old ones; the next collection goes on.
    if let Err(error) = collect(&run, &options) {
        tracing::warn!(error = &error as &dyn std::error::Error, "old versions were not all removed");
    }
    run
}

fn options(args: &Args, store: &Arc<dyn Store>, baseline_dir: &Path) -> Result<PublisherOptions> {
    let joins = args.ranks.rank().is_some_and(|rank| rank.rank > 0);
    let start = match (args.resume || joins, args.new_run) {
        (true, _) => Start::Resume,
        (_, true) => Start::NewRun,
        _ => Start::resume_or_new(store, &args.run.name()?)?,
    };
    let mut options = PublisherOptions::new(args.run.name()?, start, baseline_dir);
    options.model = args.run.model.clone();
    options.profile = args.profile;
    options.anchor_every = args.anchor_every;
    options.anchor_share = args.anchor_share;
    options.allow_layout_change = args.allow_layout_change;
    options.allow_non_finite = args.allow_non_finite;
    options.reference_dir = Some(args.checkpoint.clone()).filter(|_| args.by_reference);
    (options.sign_key, options.trust_keys) = args.sign.read()?;
    Ok(options)
}

/// What the layout has no place for.
fn refuse_for_slime(args: &Args) -> Result<()> {
    let refused = [
        ("--mode full", args.mode == Mode::Full),
        ("--resume-or-new", args.resume_or_new),
        ("--by-reference", args.by_reference),
        ("--anchor-every", args.anchor_every.is_some()),
        ("--anchor-share", args.anchor_share.is_some()),
        ("--allow-layout-change", args.allow_layout_change),
        ("--keep", args.keep.is_some()),
        ("--sign-key", args.sign.is_given()),
        ("--notify", args.notify.is_given()),
        ("--rank", args.ranks.rank().is_some()),
        ("--listen-ucx", args.serving.listen_ucx.is_some()),
        ("--profile fast", args.profile == Profile::Fast),
        ("--step", args.step != 0),
    ];
    match refused.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((flag, _)) => Err(Error::usage("--layout slime", "deltas of slime's own encodings", *flag)),
    }
}

fn show(published: &Published, baseline_dir: &Path, args: &Args, output: Output) -> Result<()> {
    // Without a version to compare with, nothing has changed.
    let density = published.changed as f64 / published.elements.max(1) as f64;
    let density = (published.kind == Kind::Delta || density < 1.0).then_some(density);
    let engines = engines(published, &args.checkpoint);
    let value = json!({
        "version": published.version.0,
        "label": published.label,
        "baseline_dir": baseline_dir.display().to_string(),
        "manifest_digest": published.manifest_digest.to_string(),
        "anchor": published.anchor,
        "full_because": published.full_because.as_ref().map(ToString::to_string),
        "left_out": published.left_out.iter().map(|head| (&head.tensor, &head.same_as)).collect::<BTreeMap<_, _>>(),
        "engines": engines,
        "publication_bytes": published.publication_bytes,
        "full_bytes": published.full_bytes,
        "density": density,
        "encode_ms": published.encode.as_secs_f64() * 1e3,
        "upload_ms": published.upload.as_secs_f64() * 1e3,
    });
    let why =
        published.full_because.as_ref().map_or_else(String::new, |why| format!("; in full, because {why}"));
    // It takes the room of a checkpoint in a place that was not named.
    let baseline = if !args.resume && args.baseline_dir.is_none() {
        let (dir, bytes) = (baseline_dir.display(), published.full_bytes);
        format!("\nbaseline: {bytes} bytes in {dir}; --baseline-dir keeps it elsewhere")
    } else {
        String::new()
    };
    // Once a run.
    let is_first = published.full_because == Some(FullBecause::FirstVersion);
    let left_out: String = published.left_out.iter().filter(|_| is_first).map(left_out).collect();
    output.print(&value, |_| {
        let changed = density.map_or_else(String::new, |density| {
            format!(", {:.3} % of the elements changed", 100.0 * density)
        });
        let (stored, full) = (published.publication_bytes, published.full_bytes);
        let ratio = full as f64 / stored.max(1) as f64;
        let stored = match published.kind {
            Kind::Reference => format!("by reference to {full} bytes"),
            // There is nothing that it is smaller than.
            Kind::Full => format!("{stored} bytes for {full} of tensors{changed}"),
            Kind::Delta => format!("{stored} bytes for {full} in full ({ratio:.1}x){changed}"),
        };
        let (version, label) = (published.version, &published.label);
        let elapsed_ms = (published.encode + published.upload).as_secs_f64() * 1e3;
        let engines = engines.map_or_else(String::new, |engines| format!("\n{engines}"));
        format!("version {version} ({label}): {stored}, {elapsed_ms:.0} ms{why}{left_out}{engines}{baseline}")
    })
}

/// What engines can get of a run that begins with this version, as its `config.json` alone says.
fn engines(published: &Published, checkpoint: &Path) -> Option<String> {
    let begins =
        published.kind == Kind::Reference || published.full_because == Some(FullBecause::FirstVersion);
    if !begins || !checkpoint.join("config.json").is_file() {
        return None;
    }
    let config = Expected::from_checkpoint(checkpoint).map(|expected| forecast(&expected.config));
    Some(config.unwrap_or_else(|error| format!("engines: refused: {error}")))
}

/// Says why a tensor of the checkpoint is none of the version.
fn left_out(head: &LeftOut) -> String {
    let LeftOut { tensor, same_as } = head;
    format!("\n{tensor} is left out: config.json ties it to {same_as}, which engines take for it")
}

/// Where the baseline of a model is kept by default: a directory in the user's cache that no other store, run
/// or model has. `None` where neither XDG_CACHE_HOME nor HOME says where that cache is.
#[must_use]
pub fn default_baseline(store: &str, run: &str, model: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    // Escaped, so that every store and name is one path component of its own.
    let escape = |text: &str| text.replace('%', "%25").replace('/', "%2F");
    Some(cache.join("driftless/baselines").join(escape(store)).join(escape(run)).join(escape(model)))
}
