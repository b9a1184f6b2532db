//! `driftless log export --atif`: a file for each sample, as all readers of ATIF take one document of a file.

use super::export::Args;
use super::texts::Texts;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::output::Output;
use crate::cli::shared::paths;
use crate::cli::shared::progress::{self, Work};
use driftless::agent::atif::{Agent, Sampled, Trajectory, VERSION};
use driftless::bridge::engine::ReplyDigest;
use driftless::buffer::sample::{ColumnId, Verdict};
use driftless::buffer::{self, Kind, Position, Reader, Record};
use driftless::trainer::rollout::EvaluationNote;
use driftless::trainer::sample::{label_text, part_of};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

#[derive(serde::Serialize)]
struct Exported {
    trajectories: u64,
    damaged: u64,
}

/// Where the newest record of each sample is.
#[derive(Default)]
struct Samples {
    /// By answer and part.
    learned: BTreeMap<(u64, usize), Position>,
    /// Of evaluations, which count their answers anew each time.
    measured: Vec<Position>,
    damaged: u64,
}

impl Samples {
    fn read(reader: &Reader, positions: &Range<Position>) -> Result<Self> {
        let mut samples = Samples::default();
        let mut records = reader.iter(positions.start);
        while let Some(record) = records.next() {
            if records.position() > positions.end {
                break;
            }
            match record {
                Ok(record) if record.kind() != Kind::Sample => {}
                Ok(record) if record.scalars().evaluation => samples.measured.push(record.position()),
                Ok(record) => {
                    samples.learned.insert((record.scalars().answer(), part(&record)), record.position());
                }
                Err(buffer::Error::Damaged { .. }) => samples.damaged += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(samples)
    }
}

/// Which part of its answer a sample is.
fn part(record: &Record) -> usize {
    if record.scalars().parts == 0 { 0 } else { part_of(record.scalars().sample_id) }
}

pub(super) fn run(dir: &Path, args: &Args, log: &Path, output: Output) -> Result<()> {
    check_new(dir)?;
    paths::check_outside("--atif", dir, "the log", log)?;
    let texts = Texts::open(log, args.hf_checkpoint.as_deref())?;
    let positions = args.positions(texts.reader());
    // Beside its final place, so that a part of it is never taken for the whole.
    let unfinished = PathBuf::from([dir.as_os_str(), ".new".as_ref()].iter().copied().collect::<OsString>());
    check_new(&unfinished)?;
    std::fs::create_dir_all(&unfinished).map_err(io(&unfinished))?;
    let task = |work: &Work| write(&texts, &positions, &unfinished, work);
    let written = progress::during("export", "trajectories", task).inspect_err(|_| {
        // The error being returned matters more.
        let _ = std::fs::remove_dir_all(&unfinished);
    })?;
    std::fs::rename(&unfinished, dir).map_err(io(dir))?;
    output
        .print(&written, |written| format!("{} trajectories in {}", written.trajectories, dir.display()))?;
    super::whole(log, written.damaged + super::tell_lost(texts.reader(), positions.start.0))
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { path, source }
}

/// Refuses a directory with something in it.
fn check_new(dir: &Path) -> Result<()> {
    paths::check_place("--atif", dir)?;
    let mut entries = match dir.exists() {
        true => std::fs::read_dir(dir).map_err(io(dir))?,
        false => return Ok(()),
    };
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(Error::usage(
            format!("--atif {}", dir.display()),
            "a new or empty directory",
            "one with files",
        )),
    }
}

fn write(texts: &Texts, positions: &Range<Position>, dir: &Path, work: &Work) -> Result<Exported> {
    let reader = texts.reader();
    let Samples { learned, measured, damaged } = Samples::read(reader, positions)?;
    let mut exported = Exported { trajectories: 0, damaged };
    // A part of which the answer's first sample says nothing is of an earlier try.
    let (mut answer, mut parts) = (None, usize::MAX);
    for ((number, part), position) in learned {
        let Some(record) = record_at(reader, position)? else { continue };
        if answer != Some(number) {
            let said = usize::from(record.scalars().parts);
            (answer, parts) = (Some(number), if part == 0 && said > 0 { said } else { usize::MAX });
        }
        if part < parts {
            let name = if part == 0 { format!("answer-{number}") } else { format!("answer-{number}.{part}") };
            one(texts, &record, dir, &name, &format!("answer-{number}"))?;
            exported.trajectories += 1;
            work.add(1);
        }
    }
    for position in measured {
        let Some(record) = record_at(reader, position)? else { continue };
        let name = format!("evaluation-{}", position.0);
        one(texts, &record, dir, &name, &name)?;
        exported.trajectories += 1;
        work.add(1);
    }
    Ok(exported)
}

/// A record, unless retention has removed it meanwhile.
fn record_at(reader: &Reader, position: Position) -> Result<Option<Record>> {
    match reader.get(position) {
        Err(buffer::Error::Retired { .. }) => Ok(None),
        record => Ok(record?),
    }
}

/// Writes a sample; samples of one answer are of one session.
fn one(texts: &Texts, record: &Record, dir: &Path, name: &str, session: &str) -> Result<()> {
    let identity = texts.reader().identity();
    let run = identity.map_or_else(String::new, |identity| hex::encode(identity.run_id));
    let trajectory = Trajectory {
        schema_version: VERSION.to_owned(),
        session_id: Some(format!("{run}-{session}")),
        trajectory_id: Some(format!("{run}-{name}")),
        agent: Agent {
            name: "driftless".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model_name: identity.map(|identity| identity.model.clone()),
        },
        steps: sampled(record).steps(|ids| texts.decode(ids))?,
        extra: json!({ "driftless": extra(texts, record, &run)? }),
        subagent_trajectories: None,
    };
    let path = dir.join(format!("{name}.json"));
    let mut file = BufWriter::new(File::create(&path).map_err(io(&path))?);
    serde_json::to_writer(&mut file, &trajectory).map_err(|error| io(&path)(error.into()))?;
    file.flush().map_err(io(&path))
}

fn sampled(record: &Record) -> Sampled<'_> {
    let column = |id| record.column(id).map_or(&[][..], |(_, bytes)| bytes);
    let replies = column(ColumnId::REPLIES).chunks(ReplyDigest::BYTES).map_while(ReplyDigest::from_bytes);
    Sampled {
        tokens: record.tokens(),
        prompt_len: record.prompt_len(),
        log_probs: record.log_probs(),
        loss_mask: column(ColumnId::LOSS_MASK),
        is_masked: record.verdict() == Verdict::Masked,
        spans: record.spans().iter().map(|span| (span.version, span.start, span.end)).collect(),
        replies: replies.collect(),
    }
}

/// What the log knows of a sample beside its tokens.
fn extra(texts: &Texts, record: &Record, run: &str) -> Result<Value> {
    let scalars = record.scalars();
    let (prompt_id, answer, part) = super::show::ids(record);
    let note = texts.note(record)?;
    Ok(json!({
        "run_id": run,
        "position": record.position(),
        "prompt_id": prompt_id,
        "answer": answer,
        "part": part,
        "rollout_id": scalars.rollout_id,
        "reward": record.is_scored().then_some(scalars.reward),
        "raw_reward": record.rewards().first(),
        "verdict": format!("{:?}", record.verdict()).to_lowercase(),
        "finish": format!("{:?}", record.finish()).to_lowercase(),
        "dropped": note.dropped,
        "outcome": note.outcome,
        "evaluation": scalars.evaluation.then(|| EvaluationNote::of(record).set),
        "source": note.source.map(String::from),
        "label": note.label.map(|label| label_text(&label)),
        "engine": record.engine(),
        "times_us": record.times(),
    }))
}
