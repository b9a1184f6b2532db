//! One suite that every engine must pass: SGLang itself, and whatever stands in for it.
//!
//! It checks each call and field that the bridge uses, error replies included, and what pausing, aborting and
//! updating do to requests under way. It changes the engine's weights and ends with those of
//! [`Subject::first`]. Not covered by semantic versioning.

/// What is wrong, in the words behind a condition, if that does not hold.
macro_rules! ensure {
    ($holds:expr, $($otherwise:tt)+) => {
        if $holds { Checked::Ok(()) } else { Err(format!($($otherwise)+).into()) }
    };
}

mod generate;
mod info;
mod lifecycle;
mod pause;
mod update;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use driftless_store::chain_text;
use serde_json::{Value, json};

use crate::engine::{Engine, Expected, Finish, GenerateRequest, Generation, PauseMode, Rid};
use crate::sglang::{Client, Dialect, DiskUpdate, DiskUpdated, Feature};

/// Outcome of one check; any error fails it.
type Checked<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The engine under test.
#[derive(Debug, Clone)]
pub struct Subject {
    /// A client of it, with the keys it asks for. Nobody else may use the engine meanwhile.
    pub client: Client,
    /// A checkpoint directory that the engine can read at this very path.
    pub first: PathBuf,
    /// Another one of the same shapes with other weights: greedy outputs must differ.
    pub second: PathBuf,
    /// What to expect of its release.
    pub dialect: Dialect,
    /// Output length that keeps the engine busy for some hundred milliseconds at least, within its context
    /// length.
    pub long_tokens: u32,
}

/// The checks that passed, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Their names.
    pub passed: Vec<&'static str>,
}

/// The first check that failed.
#[derive(Debug, thiserror::Error)]
#[error("conformance check {check:?} failed on {engine}: {reason}")]
pub struct Failure {
    /// Its name.
    pub check: &'static str,
    /// URL of the engine.
    pub engine: String,
    /// What went wrong, with its causes.
    pub reason: String,
}

/// Runs every check, in an order that lets each start from an idle engine that is not paused.
///
/// # Errors
/// The first check that fails; the engine may then be left with other weights.
pub async fn run(subject: &Subject) -> Result<Report, Failure> {
    let mut report = Report::default();
    macro_rules! checks {
        ($($name:literal: $check:path),* $(,)?) => {$(
            tracing::info!(check = $name, "conformance");
            let outcome = $check(subject).await;
            // Whatever failed, the engine must not stay paused.
            let resumed = subject.client.resume().await.map_err(Into::into);
            outcome.and(resumed).map_err(|error| failure($name, subject, &*error))?;
            report.passed.push($name);
        )*};
    }
    checks! {
        "load the first checkpoint": update::load_first,
        "model_info": info::model_info,
        "server_info": info::server_info,
        "loads, health, ready": info::liveness,
        "capabilities are probed as the dialect says": info::capabilities,
        "attach": info::attach,
        "unknown routes are 404": info::unknown_route,
        "greedy generation repeats": generate::greedy,
        "a stream has the tokens of its reply": generate::stream,
        "an aborted stream ends with its tokens": generate::aborted_stream,
        "a dropped stream ends its request": generate::dropped_stream,
        "a stop token ends the output": generate::stop_token,
        "log-probabilities include the temperature": generate::temperature,
        "malformed requests are 400": generate::malformed,
        "unknown sampling parameters": generate::unknown_parameter,
        "abort of one request": lifecycle::abort,
        "abort matches prefixes": lifecycle::abort_prefix,
        "abort of an unknown request": lifecycle::abort_unknown,
        "flush": lifecycle::flush,
        "a paused engine holds new requests": pause::holds_requests,
        "retract": pause::retract,
        "in_place": pause::in_place,
        "abort mode": pause::abort,
        "flush after a retracting pause": pause::flush_retracted,
        "pause and continue repeat": pause::repeat,
        "an update from nowhere changes nothing": update::missing,
        "an update while paused": update::paused,
        "checksums": update::checksums,
        "an update in place splits the spans": update::spans,
        "a refused flush": update::refused_flush,
        "update_weight_version": update::relabel,
        "update sessions": update::sessions,
        "load the first checkpoint again": update::load_first,
    }
    Ok(report)
}

fn failure(check: &'static str, subject: &Subject, error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure { check, engine: subject.client.url().into(), reason: chain_text(error) }
}

/// Bound on waiting for the engine to come into a state.
const SETTLE: Duration = Duration::from_secs(30);

impl Subject {
    fn has(&self, feature: Feature) -> bool {
        self.dialect.has(feature)
    }

    fn engine(&self) -> Arc<dyn Engine> {
        Arc::new(self.client.clone())
    }

    fn expected(&self) -> Checked<Expected> {
        Ok(Expected::from_checkpoint(&self.first)?)
    }

    fn request(&self, max_new_tokens: u32) -> GenerateRequest {
        GenerateRequest::probe(vec![1, 2, 3], max_new_tokens)
    }

    /// What the engine answers greedily now; tells the two checkpoints apart.
    async fn signature(&self) -> Checked<Generation> {
        Ok(self.client.generate(&self.request(8)).await?)
    }

    /// Starts a long request and waits until the engine generates it.
    async fn start_long(&self) -> Checked<Running> {
        let request = self.request(self.long_tokens);
        let (client, sent) = (self.client.clone(), request.clone());
        let reply = tokio::spawn(async move { client.generate(&sent).await });
        let running = Running { rid: request.rid, reply };
        self.until_running(1).await?;
        Ok(running)
    }

    /// Waits until this many requests are generated. Not for a paused engine: its loads are those from
    /// before.
    async fn until_running(&self, count: u64) -> Checked {
        let end = tokio::time::Instant::now() + SETTLE;
        loop {
            let running: u64 = self.client.loads().await?.iter().map(|load| load.num_running_reqs).sum();
            if running >= count {
                return Ok(());
            }
            ensure!(
                tokio::time::Instant::now() < end,
                "waited {SETTLE:?} for {count} running requests, found {running}"
            )?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a flush succeeds: no request is left in any form.
    async fn settle(&self) -> Checked {
        let end = tokio::time::Instant::now() + SETTLE;
        while !self.client.flush_cache().await? {
            ensure!(tokio::time::Instant::now() < end, "no flush succeeded within {SETTLE:?}")?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Loads a checkpoint into an idle engine.
    async fn load(&self, directory: &Path, label: &str) -> Checked {
        self.settle().await?;
        self.update_in(PauseMode::Retract, directory, label).await?;
        self.serves(label).await
    }

    /// Loads a checkpoint in a pause.
    async fn update_in(&self, mode: PauseMode, directory: &Path, label: &str) -> Checked {
        self.client.pause(mode).await?;
        let done = self.client.update_weights_from_disk(&update_of(directory, label, false)).await?;
        self.client.resume().await?;
        ensure!(done == DiskUpdated::Done, "{done:?}")
    }

    async fn serves(&self, label: &str) -> Checked {
        let found = self.client.model_info().await?.weight_version;
        ensure!(
            found.as_deref() == Some(label),
            "model_info.weight_version {label} expected, found {found:?}"
        )
    }

    /// Expects a status from a call the client has no method for, or would not send.
    async fn status(&self, method: &str, path: &str, body: Value, expected: &[u16]) -> Checked<Value> {
        let (status, reply) = self.client.raw(method, path, &body).await?;
        ensure!(
            expected.contains(&status),
            "{method} {path} {body}: one of {expected:?} expected, found {status}: {reply}"
        )?;
        Ok(reply)
    }
}

/// A long request under way.
struct Running {
    rid: Rid,
    reply: tokio::task::JoinHandle<crate::error::Result<Generation>>,
}

impl Running {
    async fn finish(self) -> Checked<Generation> {
        Ok(self.reply.await??)
    }

    /// Waits for the end of a request that was aborted.
    async fn finish_aborted(self) -> Checked<Generation> {
        let reply = self.finish().await?;
        ensure!(matches!(reply.finish, Finish::Abort { .. }), "finish abort expected: {:?}", reply.finish)?;
        Ok(reply)
    }
}

fn update_of(directory: &Path, label: &str, flush_cache: bool) -> DiskUpdate {
    DiskUpdate {
        model_path: directory.into(),
        load_format: Some("auto".into()),
        weight_version: Some(label.into()),
        flush_cache,
        only: None,
    }
}

/// Body of a raw long generation under an id of the caller's.
fn raw_request(rid: &str, tokens: u32) -> Value {
    let sampling = json!({ "temperature": 0, "max_new_tokens": tokens, "ignore_eos": true });
    json!({ "rid": rid, "input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": true })
}
