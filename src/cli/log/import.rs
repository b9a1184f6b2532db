//! `driftless log import`: slime's prompt files into the log, as prompts that wait.

use super::texts::{TOKENIZER_BYTES_MAX, log_in};
use crate::cli::data::source;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::progress::{self, Work};
use crate::cli::shared::{numbers, paths};
use driftless::buffer::{
    self, Identity, Kind, Log, Options, Producer, PromptState, Reader, Sample, Scalars, SyncPolicy,
};
use driftless::trainer::data::Source;
use driftless::transport::RunId;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::time::Duration;

/// Prompts that are made durable together.
const BATCH: usize = 256;
/// How long the owner of a log that is in use may take to answer.
const OWNER: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub(super) struct Args {
    /// The log, or the run that it is of (its directory `log`); made if it is absent.
    dir: PathBuf,
    /// JSONL files, one object a line. `FILE@[100:200]` takes lines 100 to 199, counted from 0 without empty
    /// ones.
    #[arg(required = true, value_name = "FILE", value_parser = source)]
    files: Vec<Source>,
    /// Field that holds the prompt: text, or a list of messages. Every line must have it. The whole line is
    /// kept as the record's metadata, so label, metadata, tools and images stay with it.
    #[arg(long, default_value = "input", value_name = "FIELD")]
    input_key: String,
    /// Field that holds the prompt's token ids, for the record's tokens; without it they are left to whoever
    /// has the tokenizer.
    #[arg(long, value_name = "FIELD")]
    tokens_key: Option<String>,
    /// Id of the first prompt; by default one past the largest in the log. A prompt of the same id is
    /// replaced.
    #[arg(long, value_name = "N", value_parser = numbers::ordinal())]
    first_id: Option<u64>,
    /// Run that a new log belongs to, 32 hex digits [default: a random one].
    #[arg(long, value_name = "HEX")]
    run_id: Option<String>,
    /// Model that a new log belongs to.
    #[arg(long, default_value = "policy")]
    model: String,
    /// `tokenizer.json` of a new log; its BLAKE3 digest goes into the log, as `driftless train` does it.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

#[derive(serde::Serialize)]
struct Imported {
    prompts: u64,
    first_id: u64,
    next_id: u64,
}

/// One line of a file, ready to be logged.
struct Prompt {
    line: String,
    tokens: Vec<i32>,
}

/// Whoever keeps the log's books.
enum Sink {
    Own(Log),
    Owner(Producer),
}

impl Sink {
    fn append(&self, samples: &[Sample<'_>]) -> Result<()> {
        match self {
            Sink::Own(log) => log.append_all(samples)?,
            Sink::Owner(producer) => producer.append_all(samples)?,
        };
        Ok(())
    }
}

pub(super) fn run(mut args: Args, output: Output) -> Result<()> {
    args.dir = log_in(args.dir);
    let args = &args;
    let imported = progress::during("import", "prompts", |work| import(args, work))?;
    output.print(&imported, |done| match done.prompts {
        0 => "no prompts".to_owned(),
        prompts => format!("{prompts} prompts, ids {} to {}", done.first_id, done.next_id - 1),
    })
}

fn import(args: &Args, work: &Work) -> Result<Imported> {
    // Everything is read once before anything is written: a bad line costs nothing.
    for file in &args.files {
        each(args, file, |_| Ok(()))?;
    }
    let known = if args.dir.is_dir() { Some(Reader::open(&args.dir)?) } else { None };
    let sink = open(args, known.as_ref())?;
    let first_id = match (args.first_id, known) {
        (Some(first), _) => first,
        (None, Some(reader)) => reader.next_prompt(),
        (None, None) => 0,
    };
    let mut next_id = first_id;
    let mut batch = Vec::new();
    for file in &args.files {
        each(args, file, |prompt| {
            work.add(1);
            batch.push(prompt);
            if batch.len() == BATCH { flush(&sink, &mut batch, &mut next_id) } else { Ok(()) }
        })?;
    }
    flush(&sink, &mut batch, &mut next_id)?;
    if let Sink::Own(log) = sink {
        log.close()?;
    }
    Ok(Imported { prompts: next_id - first_id, first_id, next_id })
}

fn open(args: &Args, known: Option<&Reader>) -> Result<Sink> {
    let identity = match (known.and_then(Reader::identity), &args.run_id) {
        (Some(identity), _) => identity.clone(),
        // Another run would begin in the same directory, with ids from 0.
        (None, None) if known.is_some() && !buffer::check::verify(&args.dir)?.is_clean() => {
            let expected =
                "the run of this log, because none of its segments can be read (see `driftless log verify`)";
            return Err(Error::usage("--run-id", expected, "none"));
        }
        (None, run_id) => identity(args, run_id.as_deref())?,
    };
    let options = Options::new(identity.clone()).with_sync(SyncPolicy::Manual);
    match Log::open(&args.dir, options) {
        Ok(log) => Ok(Sink::Own(log)),
        Err(buffer::Error::Locked { .. }) => Ok(Sink::Owner(Producer::connect(&args.dir, &identity, OWNER)?)),
        Err(error) => Err(error.into()),
    }
}

fn identity(args: &Args, run_id: Option<&str>) -> Result<Identity> {
    let mut run = *RunId::random().as_bytes();
    if let Some(run_id) = run_id {
        hex::decode_to_slice(run_id, &mut run)
            .map_err(|_| Error::usage("--run-id", "32 hex digits", format!("`{run_id}`")))?;
    }
    let tokenizer = match &args.tokenizer {
        Some(path) => paths::read("--tokenizer", path, TOKENIZER_BYTES_MAX)?,
        None => Vec::new(),
    };
    let tokenizer_digest = *blake3::hash(&tokenizer).as_bytes();
    Ok(Identity { run_id: run, model: args.model.clone(), tokenizer_digest })
}

fn flush(sink: &Sink, batch: &mut Vec<Prompt>, next_id: &mut u64) -> Result<()> {
    if batch.is_empty() {
        return Ok(());
    }
    let record = |(id, prompt)| record(id, prompt);
    let samples: Vec<Sample<'_>> = (*next_id..).zip(&*batch).map(record).collect();
    sink.append(&samples)?;
    *next_id += batch.len() as u64;
    batch.clear();
    Ok(())
}

fn record(id: u64, prompt: &Prompt) -> Sample<'_> {
    let status = PromptState::Waiting.code();
    Sample {
        kind: Kind::Prompt,
        scalars: Scalars { sample_id: id, group_id: id, status, ..Scalars::default() },
        prompt_len: prompt.tokens.len(),
        tokens: &prompt.tokens,
        metadata: prompt.line.as_bytes(),
        ..Sample::default()
    }
}

/// Calls `take` for every prompt that `file` names.
fn each(args: &Args, file: &Source, mut take: impl FnMut(Prompt) -> Result<()>) -> Result<()> {
    let (path, rows) = (&file.path, &file.rows);
    let io = |source| Error::Io { path: path.clone(), source };
    let lines = BufReader::new(paths::open("file", path)?).lines();
    let filled =
        lines.enumerate().filter(|(_, line)| line.as_ref().map_or(true, |line| !line.trim().is_empty()));
    let number = |row: u64| usize::try_from(row).unwrap_or(usize::MAX);
    for (number, line) in filled.skip(number(rows.start)).take(number(rows.end - rows.start)) {
        let line = line.map_err(io)?;
        let place = format!("{}:{}", path.display(), number + 1);
        let tokens = tokens(args, &line, &place)?;
        take(Prompt { line, tokens })?;
    }
    Ok(())
}

/// Checks a line and takes the token ids out of it.
fn tokens(args: &Args, line: &str, place: &str) -> Result<Vec<i32>> {
    let value: Value =
        serde_json::from_str(line).map_err(|source| Error::Json { what: place.to_owned(), source })?;
    let field = |name: &str, expected: &str| {
        value
            .get(name)
            .ok_or_else(|| Error::usage(place, format!("an object with {expected} in `{name}`"), "none"))
    };
    let wrong =
        |name: &str, expected: &str| Error::usage(place, format!("{expected} in `{name}`"), "something else");
    let input = field(&args.input_key, "a prompt")?;
    if !input.is_string() && !input.is_array() {
        return Err(wrong(&args.input_key, "text or a list of messages"));
    }
    let Some(key) = &args.tokens_key else { return Ok(Vec::new()) };
    let ids = field(key, "token ids")?.as_array();
    let id = |id: &Value| id.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0);
    let ids: Option<Vec<i32>> = ids.and_then(|ids| ids.iter().map(id).collect());
    ids.ok_or_else(|| wrong(key, "token ids"))
}
