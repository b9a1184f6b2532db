//! `driftless log`.

#[cfg(feature = "arrow")]
mod atif;
#[cfg(feature = "arrow")]
mod export;
mod import;
pub(in crate::cli) mod show;
pub(in crate::cli) mod texts;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::{Output, fail};
use crate::cli::shared::{numbers, progress};
use driftless::buffer::check::{Damage, Severity, Stat};
use driftless::buffer::{self, Kind, Position, Reader, Record};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use texts::log_of;

/// How long one wait for new records lasts before it is begun again.
const TAIL_WAIT: Duration = Duration::from_secs(1);

const AFTER_HELP: &str = "\
Examples:
  driftless log stat runs/first
  driftless log show runs/first --worst -n 2
  driftless log show runs/first --evaluation --worst
  driftless log show runs/first --mismatch -n 1       # where learner and engine disagree most
  driftless log tail runs/first --follow --json | jq .reward
  driftless log verify runs/first
  driftless log export runs/first rollouts.parquet --text
  driftless log export runs/first --atif trajectories
  driftless log import runs/first prompts.jsonl@[0:5000] --input-key prompt

All but `import` are read-only. All are safe beside the process that owns the log; `import` then writes through it.";

/// Look at a rollout log, and put prompts into it.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Count what is in the log.
    Stat {
        /// Directory of a run, as `train --save` has it, or of its log.
        #[arg(value_name = "RUN")]
        dir: PathBuf,
    },
    /// Check every byte; exit code 3 if anything is damaged that was whole before, copies that no record
    /// needs included.
    Verify {
        /// Directory of a run, as `train --save` has it, or of its log.
        #[arg(value_name = "RUN")]
        dir: PathBuf,
    },
    /// Print the last records. What is damaged among them is named on standard error; exit code 3 if anything
    /// is.
    Tail {
        /// Directory of a run, as `train --save` has it, or of its log.
        #[arg(value_name = "RUN")]
        dir: PathBuf,
        /// How many records.
        #[arg(short = 'n', long, default_value_t = 10, value_parser = numbers::ordinal())]
        lines: u64,
        /// Wait for new records and print them, too.
        #[arg(short, long)]
        follow: bool,
    },
    /// Print what the policy wrote in a training step: prompts and answers as text, with rewards.
    Show(show::Args),
    /// Write records as a data frame, an Arrow IPC file or Parquet, or as trajectories in ATIF; exit code 3 if damaged
    /// records were left out.
    #[cfg(feature = "arrow")]
    Export(export::Args),
    /// Append prompts from JSONL files, as slime reads them, as prompts that wait to be generated.
    Import(import::Args),
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    match args.command {
        Command::Stat { dir } => stat(&dir, output),
        Command::Verify { dir } => verify(&dir, output),
        Command::Tail { dir, lines, follow } => tail(&dir, lines, follow, output),
        Command::Show(args) => show::run(&args, output),
        #[cfg(feature = "arrow")]
        Command::Export(args) => export::run(&args, output),
        Command::Import(args) => import::run(args, output),
    }
}

fn stat(dir: &Path, output: Output) -> Result<()> {
    output.print(&buffer::check::stat(&log_of(dir)?)?, |stat| {
        let range = |range: Option<(u64, u64)>| {
            range.map_or_else(|| "none".to_owned(), |(a, b)| format!("{a} to {b}"))
        };
        let Stat { run_id, model, oldest, end, tokens, bytes, segments, sealed, .. } = stat;
        let Stat { samples, partials, prompts, scores, evaluations, empty, corrupt, .. } = stat;
        let live = if stat.live { ", being written" } else { "" };
        let (rollouts, versions) = (range(stat.rollouts), range(stat.versions));
        format!(
            "run {run_id}, model {model}\n\
             positions {oldest} to {end}: {samples} samples, {scores} scores, {partials} partial, {prompts} prompts, \
             {evaluations} of evaluations, {empty} empty, {corrupt} corrupt\n\
             {tokens} tokens, {bytes} bytes in {segments} segments ({sealed} sealed){live}\n\
             rollouts {rollouts}, versions {versions}"
        )
    })
}

fn verify(dir: &Path, output: Output) -> Result<()> {
    let log = log_of(dir)?;
    let report = progress::during("verify", "", |_| buffer::check::verify(&log))?;
    output.print(&report, |report| {
        let line = |damage: &Damage| {
            let Damage { path, offset, what, severity, .. } = damage;
            format!("{}:{offset}: {what} ({severity:?})", path.display())
        };
        let mut lines: Vec<_> = report.damage.iter().map(line).collect();
        lines.push(format!("{} records, {} bytes checked", report.records, report.bytes));
        lines.join("\n")
    })?;
    let damaged = report.damage.iter().filter(|damage| damage.severity != Severity::Torn).count();
    whole(dir, damaged as u64)
}

/// An error if anything of the log was damaged, which has been told by then.
fn whole(dir: &Path, damaged: u64) -> Result<()> {
    if damaged == 0 { Ok(()) } else { Err(Error::Damaged { what: dir.display().to_string(), damaged }) }
}

fn tail(dir: &Path, lines: u64, follow: bool, output: Output) -> Result<()> {
    let reader = Reader::open(&log_of(dir)?)?;
    let first = reader.end().0.saturating_sub(lines).max(reader.oldest().0);
    let (mut position, mut damaged) = (Position(first), tell_lost(&reader, first));
    loop {
        let mut records = reader.iter(position);
        for record in records.by_ref() {
            match record {
                Ok(record) => output.print(&fields(&record), text)?,
                // The records behind it are as they were.
                Err(error @ buffer::Error::Damaged { .. }) => {
                    fail(&error.into());
                    damaged += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
        position = records.position();
        if !follow {
            return whole(dir, damaged);
        }
        reader.wait(position, TAIL_WAIT)?;
    }
}

/// Tells what is lost of a log from position `first` on, of which no record is met; returns how much.
fn tell_lost(reader: &Reader, first: u64) -> u64 {
    let is_lost = |position: Position| position.0 >= first && matches!(reader.get(position), Ok(None));
    let corrupt = reader.recovery().damage.iter().filter(|damage| damage.severity == Severity::Corrupt);
    let lost = corrupt.filter(|damage| damage.position.is_none_or(is_lost));
    lost.map(|damage| {
        let (path, offset, what) = (damage.path.clone(), damage.offset, damage.what);
        fail(&buffer::Error::Damaged { path, offset, what }.into());
    })
    .count() as u64
}

fn fields(record: &Record) -> Value {
    let scalars = record.scalars();
    let spans: Vec<_> =
        record.spans().iter().map(|span| json!([span.version, span.start, span.end])).collect();
    let status = match record.kind() {
        Kind::Score => ("verdict", format!("{:?}", record.verdict())),
        _ => ("finish", format!("{:?}", record.finish())),
    };
    let mut fields = json!({
        "position": record.position(),
        "kind": format!("{:?}", record.kind()).to_lowercase(),
        "sample_id": scalars.sample_id,
        "group_id": scalars.group_id,
        "rollout_id": scalars.rollout_id,
        "reward": record.is_scored().then_some(scalars.reward),
        "evaluation": scalars.evaluation,
        "prompt_len": record.prompt_len(),
        "tokens": record.tokens(),
        "weight_versions": spans,
        "engine": record.engine(),
        "times_us": record.times(),
    });
    fields[status.0] = status.1.to_lowercase().into();
    fields
}

fn text(record: &Value) -> String {
    let tokens = record["tokens"].as_array().map_or(0, Vec::len);
    let of = format!("{} rollout {} group {}", record["position"], record["rollout_id"], record["group_id"]);
    if record["kind"] == "prompt" {
        return format!("{of} prompt {tokens} tokens");
    }
    if record["kind"] == "score" {
        let verdict = record["verdict"].as_str().unwrap_or_default();
        return format!("{of} score of {} reward {} {verdict}", record["sample_id"], record["reward"]);
    }
    let kind = if record["evaluation"] == true { "evaluation" } else { "sample" };
    format!(
        "{of} {kind} {} reward {} {} versions {} {tokens} tokens",
        record["sample_id"],
        record["reward"],
        record["finish"].as_str().unwrap_or_default(),
        record["weight_versions"],
    )
}
