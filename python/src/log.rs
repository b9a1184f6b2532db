//! `RolloutLog`: records in and out of the log, read where they lie.
#![allow(unsafe_code, reason = "lends the log's map through the buffer protocol")]

use crate::error::{self, buffer, named};
use crate::work::{self, Held};
use driftless::buffer::producer::{Producer, Producers};
use driftless::buffer::query::Order;
use driftless::buffer::reservation::Ack;
use driftless::buffer::sample::{ColumnId, Verdict};
use driftless::buffer::{
    Error as LogError, Finish, Group as Found, GroupQuery, Identity, Kind, Log, Options, Position, Reader,
    Record, Result as LogResult, Sample as Given, Scalars, VersionSpan,
};
use driftless::store::wait::Stop;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the owner of a log may take for an answer to a producer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// Time between two looks at whether a wait is to end.
const LOOK: Duration = Duration::from_millis(100);

/// A log, open for writing.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct RolloutLog {
    held: Held<Log>,
    /// What lets other processes write, if it was asked for.
    producers: Held<Option<Producers>>,
}

/// Writes to a log that another process has open.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct RolloutProducer {
    held: Held<Arc<Producer>>,
}

/// A record to append, in memory of ours, which needs no interpreter.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Row {
    sample_id: u64,
    group_id: u64,
    rollout_id: u64,
    reward: f32,
    finish: String,
    prompt_len: usize,
    #[pyo3(from_py_with = numbers)]
    tokens: Vec<i32>,
    #[pyo3(from_py_with = numbers)]
    log_probs: Vec<f32>,
    #[pyo3(from_py_with = numbers)]
    loss_mask: Vec<u8>,
    #[pyo3(from_py_with = spans)]
    spans: Vec<VersionSpan>,
    engine: String,
    metadata: Vec<u8>,
}

fn numbers<T: Element>(array: &Bound<'_, PyAny>) -> PyResult<Vec<T>> {
    PyBuffer::get(array)?.to_vec(array.py())
}

fn spans(list: &Bound<'_, PyAny>) -> PyResult<Vec<VersionSpan>> {
    let span = |(version, start, end)| VersionSpan { version, start, end };
    Ok(list.extract::<Vec<_>>()?.into_iter().map(span).collect())
}

impl Row {
    fn sample(&self) -> PyResult<Given<'_>> {
        let status = named("finish", &FINISHES, &self.finish)?.code();
        let finite = |value: &f32| value.is_finite();
        all("reward", "a finite number", &[self.reward], finite)?;
        all("tokens", "ids from 0 on", &self.tokens, |id| *id >= 0)?;
        all("log_probs", "finite numbers", &self.log_probs, finite)?;
        all("loss_mask", "0 or 1", &self.loss_mask, |mask| *mask <= 1)?;
        let Self { sample_id, group_id, rollout_id, reward, .. } = *self;
        Ok(Given {
            kind: Kind::Sample,
            scalars: Scalars { sample_id, group_id, rollout_id, reward, status, ..Scalars::default() },
            prompt_len: self.prompt_len,
            tokens: &self.tokens,
            log_probs: &self.log_probs,
            loss_mask: &self.loss_mask,
            spans: &self.spans,
            engine: &self.engine,
            metadata: &self.metadata,
            extra: &[],
        })
    }
}

#[pymethods]
impl RolloutLog {
    #[new]
    fn new(
        py: Python<'_>,
        dir: PathBuf,
        run_id: [u8; 16],
        model: String,
        tokenizer_digest: [u8; 32],
    ) -> PyResult<Self> {
        let options = Options::new(Identity { run_id, model, tokenizer_digest });
        let log = py.detach(|| Log::open(dir, options)).map_err(buffer)?;
        Ok(Self { held: Held::new("RolloutLog", log), producers: Held::new("RolloutLog", None) })
    }

    /// Appends records and makes them durable together; returns their positions.
    fn append(&self, py: Python<'_>, rows: Vec<Row>) -> PyResult<Vec<u64>> {
        let log = self.held.get()?;
        append(py, &rows, |samples| log.append_all(samples))
    }

    /// Lets other processes write, until it is closed.
    fn serve(&self, py: Python<'_>) -> PyResult<()> {
        let log = self.held.get()?;
        self.producers.with(|producers| {
            if producers.is_none() {
                *producers = Some(py.detach(|| log.serve()).map_err(buffer)?);
            }
            Ok(())
        })
    }

    /// The durable position called `name`.
    fn cursor(&self, name: &str) -> PyResult<u64> {
        Ok(self.held.get()?.cursor(name).map_err(buffer)?.position().0)
    }

    /// Moves it.
    fn commit(&self, py: Python<'_>, name: &str, position: u64) -> PyResult<()> {
        let log = self.held.get()?;
        py.detach(|| log.cursor(name)?.commit(Position(position))).map_err(buffer)
    }

    fn reader(&self) -> PyResult<LogReader> {
        Ok(LogReader { held: Held::new("RolloutLog", self.held.get()?.reader()) })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.check()?;
        self.producers.close(py)?;
        // One that was closed is.
        if let Ok(log) = self.held.get() {
            py.detach(|| log.close()).map_err(buffer)?;
        }
        self.held.close(py)
    }
}

#[pymethods]
impl RolloutProducer {
    #[new]
    fn new(
        py: Python<'_>,
        dir: PathBuf,
        run_id: [u8; 16],
        model: String,
        tokenizer_digest: [u8; 32],
        seconds: f64,
    ) -> PyResult<Self> {
        let deadline = error::seconds("timeout", seconds)?;
        let identity = Identity { run_id, model, tokenizer_digest };
        let (until, stop) = (Instant::now() + deadline, Stop::new());
        let connect = || loop {
            match Producer::try_connect(&dir, &identity, ANSWER_DEADLINE) {
                Err(LogError::Owner { .. }) if Instant::now() < until && !stop.is_stopped() => {
                    std::thread::sleep(LOOK);
                }
                connected => return connected,
            }
        };
        let producer = work::run(py, &stop, connect)?.map_err(buffer)?;
        Ok(Self { held: Held::new("RolloutProducer", Arc::new(producer)) })
    }

    /// Appends records and makes them durable together; returns their positions.
    fn append(&self, py: Python<'_>, rows: Vec<Row>) -> PyResult<Vec<u64>> {
        let producer = self.held.get()?;
        append(py, &rows, |samples| producer.append_all(samples))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)
    }
}

/// The positions of rows that `all` makes durable together.
fn append(
    py: Python<'_>,
    rows: &[Row],
    all: impl FnOnce(&[Given<'_>]) -> LogResult<Vec<Ack>> + Send,
) -> PyResult<Vec<u64>> {
    let samples = rows.iter().map(Row::sample).collect::<PyResult<Vec<_>>>()?;
    let acks = py.detach(|| all(&samples)).map_err(buffer)?;
    Ok(acks.iter().map(|ack| ack.position().0).collect())
}

/// Reads a log.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct LogReader {
    held: Held<Reader>,
}

/// Ids, position at which it was complete, oldest and newest version, and samples of a group.
type Group = (u64, u64, u64, Option<(u64, u64)>, Vec<LogRecord>);

#[pymethods]
impl LogReader {
    #[new]
    fn new(py: Python<'_>, dir: PathBuf) -> PyResult<Self> {
        let reader = py.detach(|| Reader::open(dir)).map_err(buffer)?;
        Ok(Self { held: Held::new("RolloutReader", reader) })
    }

    /// One past the last position that can be read.
    fn end(&self) -> PyResult<u64> {
        Ok(self.held.get()?.end().0)
    }

    fn get(&self, py: Python<'_>, position: u64) -> PyResult<Option<LogRecord>> {
        let reader = self.held.get()?;
        let record = py.detach(|| reader.get(Position(position))).map_err(buffer)?;
        Ok(record.map(|record| LogRecord { record }))
    }

    /// Waits until something can be read at or after `position`, `seconds` at most; returns the end.
    fn wait(&self, py: Python<'_>, position: u64, seconds: f64) -> PyResult<u64> {
        let reader = self.held.get()?;
        let time = error::seconds("timeout", seconds)?;
        let (begin, stop) = (Instant::now(), Stop::new());
        let wait = || -> LogResult<Position> {
            loop {
                let left = time.saturating_sub(begin.elapsed());
                let end = reader.wait(Position(position), left.min(LOOK))?;
                if end > Position(position) || left.is_zero() || stop.is_stopped() {
                    return Ok(end);
                }
            }
        };
        Ok(work::run(py, &stop, wait)?.map_err(buffer)?.0)
    }

    /// Position of each sample that a step learned from, and the learner's log-probs of its response tokens.
    fn learned(&self, py: Python<'_>, step: u64) -> PyResult<Vec<(u64, Vec<f32>)>> {
        let reader = self.held.get()?;
        let read = || -> LogResult<Vec<(u64, Vec<f32>)>> {
            let Some(learned) = reader.learned(step)? else { return Ok(Vec::new()) };
            let column = |at: Position| -> LogResult<(u64, Vec<f32>)> {
                Ok((at.0, learned.log_probs(at)?.unwrap_or_default()))
            };
            learned.rows().iter().map(|row| column(row.position)).collect()
        };
        py.detach(read).map_err(buffer)
    }

    /// The groups of `samples` finished samples.
    fn groups(
        &self,
        py: Python<'_>,
        samples: usize,
        rollout_id: Option<u64>,
        completed_from: u64,
        version_min: Option<u64>,
        limit: Option<usize>,
    ) -> PyResult<Vec<Group>> {
        let reader = self.held.get()?;
        let mut query = GroupQuery::complete(samples);
        if let Some(id) = rollout_id {
            (query.rollouts, query.order) = (id..=id, Order::Id);
        }
        query.completed_from = Position(completed_from);
        query.version_min = version_min;
        query.limit = limit.unwrap_or(usize::MAX);
        let find = || reader.refresh().map(|()| reader.find(&query));
        let group = |found: Found| {
            let records = found.records.into_iter().map(|record| LogRecord { record }).collect();
            (found.rollout_id, found.group_id, found.completed.0, found.versions, records)
        };
        Ok(py.detach(find).map_err(buffer)?.into_iter().map(group).collect())
    }
}

/// A record, in the log's map.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct LogRecord {
    record: Record,
}

#[pymethods]
impl LogRecord {
    /// Position, sample, group, rollout, reward, why it ended, tokens of the prompt, and the engine.
    fn fields(&self) -> (u64, u64, u64, u64, f32, &'static str, usize, &str) {
        let (record, scalars) = (&self.record, self.record.scalars());
        let Scalars { sample_id, group_id, rollout_id, reward, .. } = *scalars;
        let (finish, engine) = (finish_name(record.finish()), record.engine());
        (record.position().0, sample_id, group_id, rollout_id, reward, finish, record.prompt_len(), engine)
    }

    /// Whether its reward is known, what its score says, several rewards, its times, and whether it was measured.
    fn score(&self) -> (bool, &'static str, Vec<f32>, Vec<i64>, bool) {
        let record = &self.record;
        let verdict = match record.verdict() {
            Verdict::Kept => "kept",
            Verdict::Masked => "masked",
            Verdict::LeftOut => "left_out",
            _ => "unknown",
        };
        let (rewards, times) = (record.rewards().to_vec(), record.times().to_vec());
        (record.is_scored(), verdict, rewards, times, record.scalars().evaluation)
    }

    fn spans(&self) -> Vec<(u64, u32, u32)> {
        self.record.spans().iter().map(|span| (span.version, span.start, span.end)).collect()
    }

    fn metadata(&self) -> &[u8] {
        self.record.metadata()
    }

    /// The bytes of a column; `None` where there is none.
    fn column(&self, id: u16) -> Option<Column> {
        let id = ColumnId(id);
        self.record.column(id)?;
        Some(Column { record: self.record.clone(), id })
    }
}

/// The bytes of a column, lent through the buffer protocol for as long as somebody looks at them.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct Column {
    record: Record,
    id: ColumnId,
}

#[pymethods]
impl Column {
    // SAFETY: the interpreter hands over a view that is to be filled.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let column = slf.get();
        let bytes = column.record.column(column.id).map(|(_, bytes)| bytes).unwrap_or_default();
        let start = bytes.as_ptr().cast_mut().cast();
        // SAFETY: the bytes lie in a map that the record keeps; the view holds this object, which holds the
        // record. They are never written again, and the view says that it is read-only.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes.len() as ffi::Py_ssize_t, 1, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Refuses values of which one is not as `expected`.
fn all<T: Display>(name: &str, expected: &str, values: &[T], is: impl Fn(&T) -> bool) -> PyResult<()> {
    match values.iter().enumerate().find(|(_, value)| !is(value)) {
        None => Ok(()),
        Some((index, found)) => Err(error::usage(name, expected, &format!("{found} at {index}"))),
    }
}

const FINISHES: [(&str, Finish); 3] =
    [("stop", Finish::Stop), ("length", Finish::Length), ("abort", Finish::Abort)];

fn finish_name(finish: Finish) -> &'static str {
    FINISHES.iter().find(|(_, known)| *known == finish).map_or("unfinished", |(name, _)| name)
}
