//! The other side of a child process: a learner here, whose loop is in the process that started this one.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use driftless_buffer::{Position, Reader, Record};
use driftless_store::chain_text;
use serde_json::{Value, json};

use super::wire::{self, Call, Hello, Line, PROTOCOL};
use super::{Batch, Learner, Sample, Stepped, Weights};
use crate::error::{Error, Result, io};

/// Longest call.
const CALL_BYTES_MAX: u64 = 1 << 30;

/// Answers the loop that listens at `socket` until it hangs up. `make` makes the learner that it asks for.
///
/// # Errors
/// [`Error::Io`] if the socket is not there or breaks, or the loop says what `docs/wire/learner.md` does not
/// have. What the learner itself refuses is told to the loop.
pub fn serve(socket: &Path, make: impl FnOnce(&Hello) -> Box<dyn Learner>) -> Result<()> {
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
        let Line { id, call } = serde_json::from_slice(&line)
            .map_err(|error| broken("understand what came from")(error.into()))?;
        let answer = match (call, &mut served) {
            (Call::Hello(told), _) => match make.take() {
                Some(make) => Served::begin(*told, make).map(|(new, answer)| {
                    served = Some(new);
                    answer
                }),
                None => Err(unexpected("a second hello")),
            },
            (_, None) => Err(unexpected("another call before hello")),
            (call, Some(served)) => served.answer(call),
        };
        let mut reply = answer.unwrap_or_else(|error| json!({ "error": chain_text(&error) }));
        reply["id"] = json!(id);
        writeln!(writer, "{reply}").map_err(broken("write to"))?;
    }
}

struct Served {
    learner: Box<dyn Learner>,
    log: Reader,
}

impl Served {
    fn begin(told: Hello, make: impl FnOnce(&Hello) -> Box<dyn Learner>) -> Result<(Served, Value)> {
        if told.protocol != PROTOCOL {
            return Err(crate::error::input("protocol", PROTOCOL, told.protocol));
        }
        let mut learner = make(&told);
        let progress = learner.load(&told.workspace)?;
        let answer = json!({ "protocol": PROTOCOL, "name": learner.describe(), "progress": progress });
        Ok((Served { learner, log: Reader::open(&told.workspace.log)? }, answer))
    }

    fn answer(&mut self, call: Call) -> Result<Value> {
        match call {
            Call::LogProbs { rollout_id, samples } => {
                let records = self.records(&samples)?;
                let log_probs = self.learner.log_probs(&batch(rollout_id, &samples, &records))?;
                Ok(json!({ "log_probs": log_probs }))
            }
            Call::Step { rollout_id, samples, trained_log_probs } => {
                let records = self.records(&samples)?;
                Ok(match self.learner.step(&batch(rollout_id, &samples, &records))? {
                    Stepped::Done(stats) => {
                        let log_probs = self.learner.take_log_probs().filter(|_| trained_log_probs);
                        json!({ "stats": stats, "trained_log_probs": log_probs.map(|some| wire::encode(&some)) })
                    }
                    Stepped::NotFinite(what) => json!({ "not_finite": what }),
                })
            }
            Call::Publish { step } => match self.learner.snapshot(step)? {
                Weights::Published(version) => Ok(json!({ "version": version })),
                Weights::Tensors(_) => Err(unexpected("a call to publish, of a learner that does not")),
            },
            Call::Save { progress } => self.learner.save(&progress).map(|()| json!({})),
            Call::SaveHf { dir } => self.learner.save_hf(&dir).map(|()| json!({})),
            Call::Hello(_) => Err(unexpected("a second hello")),
        }
    }

    fn records(&self, samples: &[wire::Sample]) -> Result<Vec<Record>> {
        self.log.refresh()?;
        let record = |at: &wire::Sample| {
            let found = self.log.get(Position(at.position))?;
            found.ok_or_else(|| crate::error::input("sample", "a position of the log", at.position))
        };
        samples.iter().map(record).collect()
    }
}

fn batch<'a>(rollout_id: u64, samples: &[wire::Sample], records: &'a [Record]) -> Batch<'a> {
    let sample = |(at, record): (&wire::Sample, &'a Record)| Sample {
        answer: at.rollout_id,
        stale: at.stale,
        ..Sample::of(record, at.advantage)
    };
    Batch { rollout_id, samples: samples.iter().zip(records).map(sample).collect() }
}

fn unexpected(found: &str) -> Error {
    crate::error::input("call", "one of docs/wire/learner.md, in order", found)
}
