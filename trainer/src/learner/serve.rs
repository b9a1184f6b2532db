//! The other side of a child process: a learner here, whose loop is in the process that started this one.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use driftless_buffer::{Position, Reader, Record};
use serde::Deserialize;
use serde_json::{Value, json};

use super::wire::PROTOCOL;
use super::{Batch, Learner, MODEL, Progress, Sample, Stepped, Weights, Workspace};
use crate::error::{Error, Result, io};
use crate::options::LearnOptions;

/// Longest call.
const CALL_BYTES_MAX: u64 = 1 << 30;

/// What a loop says to its learner before anything else.
#[derive(Debug, Deserialize)]
pub struct Told {
    protocol: u32,
    hf_checkpoint: PathBuf,
    save: PathBuf,
    keep: usize,
    log: PathBuf,
    store: String,
    run: String,
    run_id: String,
    baseline_dir: PathBuf,
    /// Temperature of the rollouts.
    pub temperature: f64,
    /// What the optimiser and the loss are told.
    pub options: LearnOptions,
}

#[derive(Deserialize)]
struct Line {
    id: u64,
    #[serde(flatten)]
    asked: Asked,
}

#[derive(Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
enum Asked {
    Hello(Box<Told>),
    LogProbs { rollout_id: u64, samples: Vec<At> },
    Step { rollout_id: u64, samples: Vec<At> },
    Publish {},
    Save { progress: Box<Progress> },
    SaveHf { dir: PathBuf },
}

/// A sample, by its place in the log.
#[derive(Deserialize)]
struct At {
    position: u64,
    rollout_id: u64,
    advantage: f32,
}

/// Answers the loop that listens at `socket` until it hangs up. `make` makes the learner that it asks for.
///
/// # Errors
/// [`Error::Io`] if the socket is not there or breaks, or the loop says what `docs/wire/learner.md` does not
/// have. What the learner itself refuses is told to the loop.
pub fn serve(socket: &Path, make: impl FnOnce(&Told) -> Box<dyn Learner>) -> Result<()> {
    let broken = |action: &'static str| io(action, socket);
    let mut writer = UnixStream::connect(socket).map_err(broken("connect to"))?;
    let mut reader = BufReader::new(writer.try_clone().map_err(broken("read from"))?);
    let (mut make, mut served) = (Some(make), None);
    loop {
        let mut line = Vec::new();
        let read = reader.by_ref().take(CALL_BYTES_MAX).read_until(b'\n', &mut line);
        if read.map_err(broken("read from"))? == 0 {
            return Ok(());
        }
        let Line { id, asked } = serde_json::from_slice(&line)
            .map_err(|error| broken("understand what came from")(error.into()))?;
        let answer = match (asked, &mut served) {
            (Asked::Hello(told), None) => match make.take() {
                Some(make) => Served::begin(*told, make).map(|(new, answer)| {
                    served = Some(new);
                    answer
                }),
                None => Err(unexpected("a second hello")),
            },
            (Asked::Hello(_), Some(_)) => Err(unexpected("a second hello")),
            (_, None) => Err(unexpected("another call before hello")),
            (asked, Some(served)) => served.answer(asked),
        };
        let mut reply = answer.unwrap_or_else(|error| json!({ "error": causes(&error) }));
        reply["id"] = json!(id);
        writeln!(writer, "{reply}").map_err(broken("write to"))?;
    }
}

struct Served {
    learner: Box<dyn Learner>,
    log: Reader,
}

impl Served {
    fn begin(told: Told, make: impl FnOnce(&Told) -> Box<dyn Learner>) -> Result<(Served, Value)> {
        if told.protocol != PROTOCOL {
            return Err(crate::error::input("protocol", PROTOCOL, told.protocol));
        }
        let mut learner = make(&told);
        let place = Workspace {
            save: told.save,
            hf_checkpoint: told.hf_checkpoint,
            log: told.log,
            store: told.store,
            run: told.run,
            run_id: told.run_id,
            model: MODEL,
            baseline: told.baseline_dir,
            keep: told.keep,
        };
        let progress = learner.load(&place)?;
        let answer = json!({ "protocol": PROTOCOL, "name": learner.describe(), "progress": progress });
        Ok((Served { learner, log: Reader::open(&place.log)? }, answer))
    }

    fn answer(&mut self, asked: Asked) -> Result<Value> {
        match asked {
            Asked::LogProbs { rollout_id, samples } => {
                let records = self.records(&samples)?;
                let log_probs = self.learner.log_probs(&batch(rollout_id, &samples, &records))?;
                Ok(json!({ "log_probs": log_probs }))
            }
            Asked::Step { rollout_id, samples } => {
                let records = self.records(&samples)?;
                Ok(match self.learner.step(&batch(rollout_id, &samples, &records))? {
                    Stepped::Done(stats) => json!({ "stats": stats }),
                    Stepped::NotFinite(what) => json!({ "not_finite": what }),
                })
            }
            Asked::Publish {} => match self.learner.snapshot(0)? {
                Weights::Published(version) => Ok(json!({ "version": version })),
                Weights::Tensors(_) => Err(unexpected("a call to publish, of a learner that does not")),
            },
            Asked::Save { progress } => self.learner.save(&progress).map(|()| json!({})),
            Asked::SaveHf { dir } => self.learner.save_hf(&dir).map(|()| json!({})),
            Asked::Hello(_) => Err(unexpected("a second hello")),
        }
    }

    fn records(&self, samples: &[At]) -> Result<Vec<Record>> {
        self.log.refresh()?;
        let record = |at: &At| {
            let found = self.log.get(Position(at.position))?;
            found.ok_or_else(|| crate::error::input("sample", "a position of the log", at.position))
        };
        samples.iter().map(record).collect()
    }
}

fn batch<'a>(rollout_id: u64, samples: &[At], records: &'a [Record]) -> Batch<'a> {
    let sample = |(at, record): (&At, &'a Record)| Sample {
        answer: at.rollout_id,
        ..Sample::of(record, at.advantage)
    };
    Batch { rollout_id, samples: samples.iter().zip(records).map(sample).collect() }
}

fn unexpected(found: &str) -> Error {
    crate::error::input("call", "one of docs/wire/learner.md, in order", found)
}

/// An error and what is behind it.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}
