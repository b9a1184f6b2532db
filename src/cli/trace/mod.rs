//! `driftless trace`.

mod rows;

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::paths;
use crate::cli::shared::progress::{self, Work};
use crate::cli::shared::timeline::is_answer;
use driftless::buffer::{self, Reader};
use driftless::trainer::events::{EARLIER, EVENTS};
use driftless::trainer::metrics::{METRICS, StepMetrics};
use rows::Trace;
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Read as _, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest line of metrics or events that is read; pieces of a longer one count as damaged.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Write when everything in a run happened, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of a run, as `train --save` has it.
    run: PathBuf,
    /// The file to write; replaced if it is there.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Only these steps, the first of them and one past the last, and what was generated for them [default: all].
    #[arg(long, value_name = "A..B", value_parser = steps)]
    steps: Option<Range<u64>>,
}

/// What the trace has, and what was left out of it.
#[derive(Default, Serialize)]
struct Traced {
    steps: u64,
    samples: u64,
    /// Samples of logs that do not say when they were asked for.
    samples_without_times: u64,
    events: u64,
    /// Lines that are no JSON, such as those that a crash has cut off.
    damaged_lines: u64,
    damaged_records: u64,
}

fn steps(text: &str) -> std::result::Result<Range<u64>, String> {
    let parsed = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    let steps: Option<Range<u64>> = parsed.filter(|steps: &Range<u64>| !steps.is_empty());
    steps.ok_or_else(|| "expected two numbers such as 10..20, the second larger".to_owned())
}

pub(crate) fn run(args: Args, output: Output) -> Result<()> {
    paths::check_dir("RUN", &args.run)?;
    if ![EARLIER, EVENTS, METRICS, "log"].iter().any(|part| args.run.join(part).exists()) {
        return Err(Error::usage(
            "RUN",
            "a directory with metrics.jsonl, events.jsonl or log",
            "one with none of them",
        ));
    }
    paths::check_output("--output", &args.output)?;
    paths::check_outside("--output", &args.output, "the run", &args.run)?;
    paths::check_outside("--output", &args.output, "the log", &args.run.join("log"))?;
    let io = |source| Error::Io { path: args.output.clone(), source };
    // Beside its final place, so that nobody ever reads half a file there.
    let mut unfinished = args.output.clone().into_os_string();
    unfinished.push(".new");
    let file = File::create(&unfinished).map_err(io)?;
    let task = |work: &Work| write(&args, BufWriter::new(file), io, work);
    let traced = progress::during("trace", "answers", task).inspect_err(|_| {
        // The error being returned matters more.
        let _ = std::fs::remove_file(&unfinished);
    })?;
    std::fs::rename(&unfinished, &args.output).map_err(io)?;
    output.print(&traced, |traced| text(traced, &args.output))
}

fn text(traced: &Traced, file: &Path) -> String {
    let Traced { steps, samples, events, .. } = traced;
    let mut text = format!("{steps} steps, {samples} samples and {events} events in {}", file.display());
    for (what, count) in [
        ("samples without times", traced.samples_without_times),
        ("lines that are damaged or half written", traced.damaged_lines),
        ("damaged records", traced.damaged_records),
    ] {
        if count > 0 {
            // Writing to a string cannot fail.
            let _ = write!(text, "\nleft out: {count} {what}");
        }
    }
    text
}

/// Reads the run once, a line and a record at a time, and writes what it says.
fn write(args: &Args, out: impl Write, io: impl Fn(std::io::Error) -> Error, work: &Work) -> Result<Traced> {
    let (mut trace, mut traced) = (Trace::begin(out).map_err(&io)?, Traced::default());
    let is_asked = |step: u64| args.steps.as_ref().is_none_or(|steps| steps.contains(&step));
    let mut window: Option<Range<u64>> = None;
    traced.damaged_lines += lines(&args.run.join(METRICS), |line| {
        let Ok(step) = serde_json::from_slice::<StepMetrics>(line) else { return Ok(false) };
        if is_asked(step.rollout_id) {
            let time = trace.step(&step).map_err(&io)?;
            window = Some(window.as_ref().map_or(time.start, |window| window.start)..time.end);
            traced.steps += 1;
        }
        Ok(true)
    })?;
    if args.steps.is_some() {
        let none = || Error::usage("--steps", "some that metrics.jsonl has", "none of them");
        trace.keep(window.ok_or_else(none)?);
    }
    for name in [EARLIER, EVENTS] {
        traced.damaged_lines += lines(&args.run.join(name), |line| {
            let Ok(fields) = serde_json::from_slice(line) else { return Ok(false) };
            let is_event = trace.event(fields).map_err(&io)?.is_some();
            traced.events += u64::from(is_event);
            Ok(is_event)
        })?;
    }
    if let Some(log) = Some(args.run.join("log")).filter(|log| log.is_dir()) {
        let log = Reader::open(&log)?;
        for record in log.iter(log.oldest()) {
            let record = match record {
                Ok(record) => record,
                // Retention has removed it meanwhile.
                Err(buffer::Error::Retired { .. }) => continue,
                Err(_) => {
                    traced.damaged_records += 1;
                    continue;
                }
            };
            if is_answer(&record) && is_asked(record.scalars().rollout_id) {
                work.add(1);
                let is_timed = trace.sample(&record).map_err(&io)?.is_some();
                traced.samples += u64::from(is_timed);
                traced.samples_without_times += u64::from(!is_timed);
            }
        }
    }
    trace.end().map_err(&io)?;
    Ok(traced)
}

/// Hands on each line of a file that may be absent; returns how many were refused.
fn lines(path: &Path, mut take: impl FnMut(&[u8]) -> Result<bool>) -> Result<u64> {
    if path.symlink_metadata().is_err() {
        return Ok(0);
    }
    let io = |source| Error::Io { path: path.to_owned(), source };
    let (mut file, mut line, mut refused) = (BufReader::new(paths::open("RUN", path)?), Vec::new(), 0);
    loop {
        line.clear();
        if file.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(io)? == 0 {
            return Ok(refused);
        }
        if !line.trim_ascii().is_empty() && !take(&line)? {
            refused += 1;
        }
    }
}
