//! `driftless eval`: held-out prompts on versions of a run, or on a checkpoint, without training.

use crate::cli::shared::engines::came_by;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, say, table};
use crate::cli::shared::scratch::{self, Scratch};
use crate::cli::shared::signals::{self, PAUSE_ENDS, stop_on_signals_or};
use crate::cli::shared::{keys, numbers, paths, progress, store};
use crate::cli::train::evaluation::{DrawArgs, EvalArgs};
use crate::cli::train::hooks::missing;
use crate::cli::train::report::describe;
use driftless::bridge::live::{PLUGIN_DIR, plugin_dir};
use driftless::evaluate::{EvaluateOptions, Evaluation, Measured, Of, Wanted};
use driftless::store::wait::Stop;
use driftless::trainer::metrics::SetMetrics;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const AFTER_HELP: &str = "\
Versions, oldest first whatever their order here:
  latest     the newest
  0,10,20    these
  10..       from 10 to the newest
  0..40      from 0 to 40, both included
  0..40/10   each tenth of them

Examples:
  How a run came on, on its own held-out prompts; the engine is one that no run uses:
    driftless eval file:///shared/store math --versions 0../10 --hf-checkpoint models/Qwen3-0.6B \\
        --engine http://10.0.0.9:30000 --eval-prompt-data test test.jsonl --input-key question --label-key answer \\
        --apply-chat-template --rm-type math --eval-temperature 0

  The problems of a task that are never practised, on two engines, with the answers kept:
    driftless eval store demo --versions 0,60,120 --hf-checkpoint runs/sft-hf --task arithmetic \\
        --rollout-max-response-len 4 --engine 10.0.0.8:30000 --engine 10.0.0.9:30000 --log evals/demo
    driftless log show evals/demo --evaluation --step 60 --worst --hf-checkpoint runs/sft-hf

  A checkpoint, of any origin:
    driftless eval --checkpoint models/Qwen3-0.6B --engine http://10.0.0.9:30000 \\
        --eval-prompt-data test test.jsonl --input-key question --label-key answer --apply-chat-template --rm-type math

The engines are those of one model, on hosts that see the directory that they load: $TMPDIR, or --checkpoint-dir. They are
patched or load each version as beside `driftless follow`, and keep the last one. Flags that `train` has mean the same here:
with its flags and its --seed, greedy answers are those that it measured. A line tells of each version on standard error, a
table of all of them at the end; with --json the lines are objects on standard output.";

/// Measure held-out prompts on versions of a run, or on a checkpoint, without training.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP, next_help_heading = "Prompts, rewards and sampling, as `train` has them")]
pub(crate) struct Args {
    /// Store of the run: file:///dir, a path, s3://bucket/prefix, gs://…, az://….
    #[arg(required_unless_present = "checkpoint", conflicts_with = "checkpoint", help_heading = None)]
    store: Option<String>,
    /// Name of the run in the store.
    #[arg(required_unless_present = "checkpoint", help_heading = None)]
    run: Option<String>,
    /// Which versions; see below.
    #[arg(long, value_name = "LIST", default_value = "latest", conflicts_with = "checkpoint", help_heading = None)]
    versions: String,
    /// Checkpoint directory to measure, in place of a run.
    #[arg(long, value_name = "DIR", help_heading = None)]
    checkpoint: Option<PathBuf>,
    /// Checkpoint directory that the run's engines and followers start from: it has the tokenizer, and version 0.
    #[arg(long, value_name = "DIR", required_unless_present = "checkpoint", conflicts_with = "checkpoint", help_heading = None)]
    hf_checkpoint: Option<PathBuf>,
    /// Engine to measure on: host:port or http://host:port for SGLang, vllm+http://host:port for vLLM, which has to be
    /// started with --checkpoint-dir as its model, and cannot load a --checkpoint. May be given several times.
    #[arg(long, value_name = "URL", required = true, help_heading = None)]
    engine: Vec<String>,
    /// Take engines that a follower keeps on a version, or that serve a version of a run that the store does not have.
    #[arg(long, help_heading = None)]
    engines_in_use: bool,
    /// Directory that is brought to each version, and stays [default: one in $TMPDIR, removed at the end].
    #[arg(long, value_name = "DIR", help_heading = None)]
    checkpoint_dir: Option<PathBuf>,
    /// The same as the engines see it, if their file system is another.
    #[arg(long, value_name = "DIR", requires = "checkpoint_dir", help_heading = None)]
    engine_checkpoint_dir: Option<PathBuf>,
    /// Directory of a log that keeps the answers, for `driftless log show DIR --evaluation`.
    #[arg(long, value_name = "DIR", help_heading = None)]
    log: Option<PathBuf>,
    /// File of public keys: only versions that one of them has signed are measured; may be given several times.
    #[arg(long, value_name = "FILE", conflicts_with = "checkpoint", help_heading = None)]
    trust_key: Vec<PathBuf>,
    /// Seconds an engine may take to come to a version.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = numbers::deadline(), help_heading = None)]
    update_deadline: u64,
    /// Seed of sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    eval: EvalArgs,
    #[command(flatten)]
    draw: DrawArgs,
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    let scratch = Scratch::new("eval");
    let options = options(args, &scratch.dir)?;
    let evaluation = Arc::new(Evaluation::open(options)?);
    let stop = Stop::new();
    let (told, dir) = (evaluation.clone(), scratch.dir.clone());
    stop_on_signals_or(&stop, PAUSE_ENDS, move |interrupted| {
        scratch::remove(&dir);
        left_paused(&told, Some(interrupted)).unwrap_or_else(|| signals::interruption("the evaluation"))
    })?;
    let (mut rows, mut printed) = (Vec::new(), Ok(()));
    let outcome = progress::during("eval", "versions", |work| {
        evaluation.run(&stop, |measured| {
            work.add(1);
            rows.extend(measured.eval.sets.iter().map(|(name, set)| row(measured, name, set)));
            printed = work.aside(|| match output.json {
                true => output.print(measured, |_| String::new()),
                false => tell(measured),
            });
            if printed.is_err() {
                stop.stop();
            }
        })
    });
    if !evaluation.maybe_paused().is_empty() {
        let source = outcome.err().map(Error::from);
        return Err(
            left_paused(&evaluation, source).unwrap_or_else(|| signals::interruption("the evaluation"))
        );
    }
    printed?;
    if !output.json && !rows.is_empty() {
        output.print(&(), |()| table(&COLUMNS, rows))?;
    }
    if outcome? { Ok(()) } else { Err(signals::interruption("the evaluation")) }
}

/// What is to be said where engines may be paused.
fn left_paused(evaluation: &Evaluation, source: Option<Error>) -> Option<Error> {
    let engines = evaluation.maybe_paused();
    let engines = (!engines.is_empty()).then(|| engines.join(", "));
    engines.map(|engines| Error::LeftPaused { engines, source: source.map(Box::new) })
}

/// Reads the prompts, and then opens the store.
fn options(args: Args, scratch: &Path) -> Result<EvaluateOptions> {
    let flag = if args.checkpoint.is_some() { "--checkpoint" } else { "--hf-checkpoint" };
    let start = args.checkpoint.clone().or(args.hf_checkpoint);
    let start = start.ok_or_else(|| missing("checkpoint", "--hf-checkpoint DIR, or --checkpoint DIR"))?;
    paths::check_checkpoint(flag, &start)?;
    let versions: Wanted = args.versions.parse()?;
    let dir = args.checkpoint_dir.unwrap_or_else(|| scratch.join("checkpoint"));
    paths::check_own("--checkpoint-dir", &dir, None)?;
    let is_empty = std::fs::read_dir(&dir).map_or(true, |mut files| files.next().is_none());
    if args.checkpoint.is_some() && !is_empty {
        let expected = "an empty directory, or none, with --checkpoint".to_owned();
        return Err(Error::Usage {
            what: "--checkpoint-dir".to_owned(),
            expected,
            found: dir.display().to_string(),
        });
    }
    if let Some(vllm) =
        args.engine.iter().find(|engine| args.checkpoint.is_some() && engine.starts_with("vllm+"))
    {
        let expected =
            "engines of SGLang with --checkpoint, as vLLM loads no directory but that of its start"
                .to_owned();
        return Err(Error::Usage { what: "--engine".to_owned(), expected, found: vllm.clone() });
    }
    let log = args.log.unwrap_or_else(|| scratch.join("log"));
    paths::check_place("--log", &log)?;
    let sets = args.eval.alone(&start, &args.draw.sampling())?;
    let client = args.draw.call.client("--engine", &args.engine)?;
    let of = match (args.checkpoint, args.store, args.run) {
        (None, Some(store), Some(run)) => Of::Run { store: store::open(&store)?, run, versions },
        _ => Of::Checkpoint,
    };
    Ok(EvaluateOptions::new(of, start, dir, log, args.engine, sets)
        .with_engine_checkpoint_dir(args.engine_checkpoint_dir)
        .with_client(client)
        .with_engines_in_use(args.engines_in_use)
        .with_plugin_dir(Some(plugin_dir(std::env::var_os(PLUGIN_DIR))))
        .with_trust_keys(keys::trusted(&args.trust_key)?)
        .with_rollout_max_context_len(args.eval.context_len())
        .with_seed(args.seed)
        .with_hook_retries(args.eval.rewards.hook_retries)
        .with_server_concurrency(args.draw.sglang_server_concurrency)
        .with_generate_deadline(Duration::from_secs(args.draw.generate_deadline))
        .with_update_deadline(Duration::from_secs(args.update_deadline)))
}

/// A line for each set of a version.
fn tell(measured: &Measured) -> Result<()> {
    let ways: BTreeSet<_> =
        measured.engines.iter().filter_map(|engine| Some(came_by(engine.how.as_ref()?).0)).collect();
    let ways: String = ways.into_iter().map(|way| format!(", {way}")).collect();
    let Measured { version, step, seconds, .. } = measured;
    for (name, set) in &measured.eval.sets {
        say(&format!(
            "eval: version {version} (step {step}{ways}): {name}: {}, {seconds:.1} s",
            describe(set)
        ));
    }
    Ok(())
}

const COLUMNS: [&str; 11] = [
    "version", "step", "set", "reward", "pass@1", "pass@k", "tokens", "cut off", "answers", "failed",
    "seconds",
];

fn row(measured: &Measured, name: &str, set: &SetMetrics) -> Vec<String> {
    let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{share:.3}"));
    vec![
        measured.version.to_string(),
        measured.step.to_string(),
        name.to_owned(),
        format!("{:.3}", set.reward),
        share(set.pass_1),
        share(set.pass),
        format!("{:.1}", set.response_length),
        format!("{:.1} %", 100.0 * set.truncated),
        (set.prompts * set.samples).to_string(),
        set.failed.to_string(),
        format!("{:.1}", measured.seconds),
    ]
}
