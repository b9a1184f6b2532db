//! `Fleet`: samples from engines, token ids in and out.

use crate::error;
use crate::work::{self, Held};
use driftless::bridge::engine::{Finish, VersionSpan};
use driftless::bridge::fleet::{self, FleetOptions};
use driftless::bridge::{Expected, GenerateRequest, Keys, Label, Rid, SamplingParams};
use driftless::store::wait::Stop;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;

/// See the stub.
#[pyclass(frozen, get_all, module = "driftless_rl")]
pub(crate) struct Generation {
    output_ids: Vec<i32>,
    log_probs: Vec<f32>,
    versions: Vec<(String, u32, u32)>,
    versions_reported: bool,
    finish: String,
    engine: String,
    rid: String,
    retractions: u64,
    cached_tokens: Option<u32>,
}

#[pymethods]
impl Generation {
    fn __repr__(&self) -> String {
        let Self { output_ids, finish, engine, versions, .. } = self;
        let versions: Vec<&str> = versions.iter().map(|(label, ..)| label.as_str()).collect();
        format!(
            "Generation({} tokens, finish='{finish}', versions={versions:?}, engine='{engine}')",
            output_ids.len()
        )
    }
}

impl From<driftless::bridge::Generation> for Generation {
    fn from(made: driftless::bridge::Generation) -> Self {
        let span = |VersionSpan { label, start, end }| (label, start, end);
        Self {
            output_ids: made.output_ids,
            log_probs: made.log_probs,
            versions: made.spans.into_iter().map(span).collect(),
            versions_reported: made.spans_reported,
            finish: match made.finish {
                Finish::Stop => "stop".to_owned(),
                Finish::Length => "length".to_owned(),
                Finish::Abort { .. } => "abort".to_owned(),
                other => format!("{other:?}"),
            },
            engine: made.engine,
            rid: made.rid.to_string(),
            retractions: made.retractions,
            cached_tokens: made.cached_tokens,
        }
    }
}

/// See the stub.
#[pyclass(frozen, get_all, module = "driftless_rl")]
pub(crate) struct EngineStatus {
    url: String,
    up: bool,
    serving: Option<String>,
    in_flight: usize,
    failure: Option<String>,
}

/// What `Fleet` of `driftless_rl` stands on: see there.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct Fleet {
    held: Held<Handles>,
    /// Keeps this fleet's requests apart from others' on the same engines.
    scope: u64,
    next: AtomicU64,
}

#[derive(Clone)]
struct Handles {
    // Before the runtime that its connections live on.
    fleet: Arc<fleet::Fleet>,
    runtime: Arc<Runtime>,
}

/// How tokens are drawn, as Python's class passes it on.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Sampling {
    temperature: f64,
    top_p: f64,
    top_k: i64,
    max_new_tokens: u32,
    stop_token_ids: Vec<i32>,
    stop: Vec<String>,
    ignore_eos: bool,
    sampling_seed: Option<u64>,
}

impl From<Sampling> for SamplingParams {
    fn from(given: Sampling) -> Self {
        let Sampling { temperature, top_p, top_k, max_new_tokens, ignore_eos, sampling_seed, .. } = given;
        let (stop_token_ids, stop) = (given.stop_token_ids, given.stop);
        Self { temperature, top_p, top_k, max_new_tokens, stop_token_ids, stop, ignore_eos, sampling_seed }
    }
}

/// The callback that waits for a sample. It is called once, also where the fleet is closed before.
struct Waiting(Option<Py<PyAny>>);

impl Waiting {
    fn tell(&mut self, made: PyResult<Generation>) {
        let Some(done) = self.0.take() else { return };
        // An interpreter that has ended wants no sample.
        Python::try_attach(|py| {
            let told = match made {
                Ok(made) => done.call1(py, (made, py.None())),
                Err(error) => done.call1(py, (py.None(), error)),
            };
            if let Err(error) = told {
                error.write_unraisable(py, Some(done.bind(py)));
            }
        });
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.0.is_some() {
            self.tell(Err(error::own("ClosedError", "this Fleet was closed, or the request was cancelled")));
        }
    }
}

/// A request under way.
#[pyclass(frozen, module = "driftless_rl._native")]
pub(crate) struct Request(AbortHandle);

#[pymethods]
impl Request {
    /// Gives the request up, and aborts it on its engine.
    fn cancel(&self) {
        self.0.abort();
    }
}

#[pymethods]
impl Fleet {
    #[new]
    fn new(
        py: Python<'_>,
        engines: Vec<String>,
        checkpoint: PathBuf,
        keys: (Option<String>, Option<String>),
        concurrency: usize,
        deadline: f64,
    ) -> PyResult<Self> {
        let keys = Keys::new(keys.0.as_deref(), keys.1.as_deref()).map_err(error::bridge)?;
        let deadline = error::seconds("deadline", deadline)?;
        let options = FleetOptions::default().with_concurrency(concurrency).with_deadline(deadline);
        let attach = || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            let expected = Expected::from_checkpoint(&checkpoint).map_err(error::bridge)?;
            let fleet = runtime.block_on(fleet::Fleet::attach(&engines, &keys, &expected, options));
            let fleet = Arc::new(fleet.map_err(error::bridge)?);
            PyResult::Ok(Handles { fleet, runtime: Arc::new(runtime) })
        };
        let held = Held::new("Fleet", work::run(py, &Stop::new(), attach)??);
        Ok(Self { held, scope: rand::random(), next: AtomicU64::new(0) })
    }

    /// Asks for a sample. `done` gets it, or an exception, on another thread.
    fn start(
        &self,
        py: Python<'_>,
        input_ids: Vec<i32>,
        sampling: Sampling,
        min_version: Option<String>,
        done: Py<PyAny>,
    ) -> PyResult<Request> {
        let minimum = min_version.map(|label| label.parse::<Label>()).transpose().map_err(error::bridge)?;
        let rid = Rid::new(self.scope, self.next.fetch_add(1, Ordering::Relaxed));
        let request = GenerateRequest::new(rid, input_ids, sampling.into());
        let mut waiting = Waiting(Some(done));
        // A handle may be the last one, whose drop waits for threads that wait for the interpreter.
        py.detach(move || {
            let Handles { fleet, runtime } = self.held.get()?;
            let task = runtime.spawn(async move {
                let made = fleet.generate(request, minimum.as_ref()).await;
                waiting.tell(made.map(Generation::from).map_err(error::bridge));
            });
            Ok(Request(task.abort_handle()))
        })
    }

    fn status(&self, py: Python<'_>) -> PyResult<Vec<EngineStatus>> {
        let known = py.detach(|| self.held.get().map(|handles| handles.fleet.status()))?;
        let status = |known: fleet::EngineStatus| {
            let fleet::EngineStatus { url, up, serving, in_flight, failure, .. } = known;
            EngineStatus { url, up, serving, in_flight, failure }
        };
        Ok(known.into_iter().map(status).collect())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)
    }
}
