//! What a run of the loop holds while it runs, and how it is opened or taken up again.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftless_bridge::{Expected, Fleet, FleetOptions};
use driftless_buffer::{self as buffer, Group, Identity, Log, Reader};
use driftless_trainer::rollout::{RolloutOptions, Rollouts};
use driftless_transport::{
    self as transport, Published, Publisher, PublisherOptions, Run, RunId, Start, Store,
};
use serde::{Deserialize, Serialize};
use tch::Kind;
use tokio::runtime::Runtime;

use super::update::{self, Updates};
use super::{Debug, Event, MODEL, Observer, TrainOptions};
use crate::checkpoint::{self, Progress};
use crate::config::Config;
use crate::error::{Error, Result, io};
use crate::models::Model;
use crate::optimizer::AdamWOptions;
use crate::policy::Policy;
use crate::snapshot::PolicySnapshot;
use crate::torch;
use driftless_trainer::metrics::{self, EvalMetrics, MetricsFile, PublicationMetrics, StepMetrics};

/// Time between two attempts to attach engines that do not answer.
const ATTACH_AGAIN: Duration = Duration::from_millis(200);

/// A run in progress.
pub(super) struct Session<'o> {
    pub(super) options: &'o TrainOptions,
    pub(super) observer: Observer,
    pub(super) runtime: Runtime,
    pub(super) record: RunRecord,
    /// Absent when only rollouts are wanted.
    pub(super) policy: Option<Policy>,
    /// Absent when nothing is published.
    pub(super) updates: Option<Updates>,
    /// Absent when there are no engines.
    fleet: Option<Arc<Fleet>>,
    /// Absent when there are no engines.
    pub(super) rollouts: Option<Arc<Rollouts>>,
    log: Reader,
    pub(super) metrics: MetricsFile,
    /// Optimiser steps done.
    pub(super) step: u64,
    /// The last step of an interrupted run, saved but perhaps not published or recorded.
    pub(super) unfinished: Option<StepMetrics>,
}

/// `run.json`: what ties the state directory to a run in the store.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RunRecord {
    /// Name of the run.
    run: String,
    /// Its identity, once it has one.
    run_id: Option<RunId>,
    /// Success before the first step.
    pub(super) eval_start: Option<EvalMetrics>,
}

impl RunRecord {
    fn path(save: &Path) -> PathBuf {
        save.join("run.json")
    }

    fn read(save: &Path) -> Result<Option<Self>> {
        let path = Self::path(save);
        match std::fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|source| Error::Json { path, source })
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        }
    }

    pub(super) fn write(&self, save: &Path) -> Result<()> {
        let path = Self::path(save);
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|source| Error::Json { path: path.clone(), source })?;
        checkpoint::write_atomically(&path, &bytes)
    }
}

impl<'o> Session<'o> {
    /// Opens the state directory, the store, the log and the engines, in an order in which a crash anywhere leaves a
    /// state that opens again.
    pub(super) fn open(options: &'o TrainOptions, observer: Observer) -> Result<Self> {
        torch::set_threads(options.num_threads)?;
        // Before anything is claimed, sent or written: tokens of another task would be trained on to no effect.
        options.task.check(&options.hf_checkpoint)?;
        std::fs::create_dir_all(&options.save).map_err(io("create", &options.save))?;
        let runtime = Runtime::new().map_err(io("start threads for", "the engines' connections"))?;
        let (record, updates) = open_run(options)?;
        let log = open_log(options, record.run_id.unwrap_or_else(RunId::random))?;
        let (policy, progress) = open_policy(options)?;
        let step = progress.as_ref().map_or(0, |progress| progress.step);
        let metrics_path = options.save.join("metrics.jsonl");
        // The line of a step is its last trace: without it, the step may not have been published.
        let recorded = metrics::read(&metrics_path)?.iter().any(|last| last.rollout_id + 1 == step);
        let unfinished = progress.and_then(|progress| progress.metrics).filter(|_| !recorded);
        let metrics = MetricsFile::open(&metrics_path, step)?;
        let mut session = Session {
            options,
            observer,
            runtime,
            record,
            policy,
            updates,
            fleet: None,
            rollouts: None,
            log: log.reader(),
            metrics,
            step,
            unfinished,
        };
        if options.debug != Debug::TrainOnly {
            session.rollouts = Some(session.attach(log)?);
        }
        Ok(session)
    }

    /// Attaches the engines, which have to be of the model that the run starts from.
    fn attach(&mut self, log: Log) -> Result<Arc<Rollouts>> {
        let options = self.options;
        let expected = Expected::from_checkpoint(&options.hf_checkpoint)?;
        let fleet_options = FleetOptions {
            concurrency: options.server_concurrency,
            deadline: options.generate_deadline,
            ..FleetOptions::default()
        };
        let addresses = &options.rollout_external_engine_addrs;
        self.tell(Event::Waiting { what: "the engines to answer" });
        let fleet = self.runtime.block_on(async {
            let end = Instant::now() + options.update_deadline;
            loop {
                match Fleet::attach(addresses, &options.keys, &expected, fleet_options.clone()).await {
                    // It may still be starting, or be started again by its supervisor.
                    Err(error) if error.is_transient() && Instant::now() < end => {
                        tracing::info!(%error, "an engine does not answer yet");
                        tokio::time::sleep(ATTACH_AGAIN).await;
                    }
                    attached => return attached,
                }
            }
        });
        let fleet = Arc::new(fleet?);
        self.fleet = Some(fleet.clone());
        let observer = self.observer.clone();
        Ok(Arc::new(Rollouts {
            engines: fleet,
            task: options.task.clone(),
            progress: Arc::new(move |rollout, done, total| {
                observer(Event::Generating { rollout, done, total });
            }),
            options: RolloutOptions {
                scope: scope(log.identity()),
                seed: options.seed,
                rollout_batch_size: options.rollout_batch_size,
                n_samples_per_prompt: options.n_samples_per_prompt,
                sampling: options.sampling.clone(),
                rollout_max_context_len: options.rollout_max_context_len,
            },
            log,
        }))
    }

    pub(super) fn block_on<T>(&self, future: impl Future<Output = Result<T, impl Into<Error>>>) -> Result<T> {
        self.runtime.block_on(future).map_err(Into::into)
    }

    pub(super) fn fleet(&self) -> Result<&Arc<Fleet>> {
        self.fleet.as_ref().ok_or(Error::Cancelled)
    }

    /// The groups of a rollout, which has to be complete in the log.
    pub(super) fn groups(&self, rollout: u64) -> Result<Vec<Group>> {
        let groups = self.log.groups(rollout, self.options.n_samples_per_prompt as usize);
        if groups.len() as u64 == self.options.rollout_batch_size {
            return Ok(groups);
        }
        Err(Error::IncompleteRollout {
            rollout,
            expected: self.options.rollout_batch_size,
            found: groups.len() as u64,
        })
    }

    /// The policy as it is published.
    pub(super) fn snapshot(&self) -> Result<PolicySnapshot> {
        let policy = self.policy.as_ref().ok_or(Error::Cancelled)?;
        PolicySnapshot::new(policy, &self.options.hf_checkpoint)
    }

    /// Tells of a publication, waits for the fleet and collects what its followers wrote about it.
    pub(super) fn converge(&self, published: &Published) -> Result<PublicationMetrics> {
        self.tell(Event::Published { version: published.version.0 });
        let label = self.label()?.ok_or(Error::Cancelled)?;
        let converged = update::converge(self.fleet()?, &label, published, self.options.update_deadline);
        let mut metrics = self.block_on(converged)?;
        if let Some(updates) = &self.updates {
            (metrics.prepare_ms, metrics.pause_ms) = updates.acknowledged(published.version)?;
        }
        Ok(metrics)
    }

    /// Makes the step durable.
    pub(super) fn save(&self, step: &StepMetrics) -> Result<()> {
        let last = self.step == self.options.num_rollout;
        let due = last || self.step.is_multiple_of(self.options.save_interval);
        let Some(policy) = self.policy.as_ref().filter(|_| due) else {
            return Ok(());
        };
        let progress = Progress { step: self.step, seed: self.options.seed, metrics: Some(step.clone()) };
        checkpoint::save(
            &checkpoint::dir(&self.options.save),
            policy,
            &progress,
            self.options.keep_checkpoints,
        )
    }

    pub(super) fn metrics_path(&self) -> PathBuf {
        self.options.save.join("metrics.jsonl")
    }
}

/// Begins the run in the store, or goes on with it.
fn open_run(options: &TrainOptions) -> Result<(RunRecord, Option<Updates>)> {
    let recorded = RunRecord::read(&options.save)?;
    if options.debug != Debug::Off {
        let mut record =
            recorded.unwrap_or_else(|| RunRecord { run: options.run.clone(), ..RunRecord::default() });
        record.run_id.get_or_insert_with(RunId::random);
        record.write(&options.save)?;
        return Ok((record, None));
    }
    let store = options.store.clone();
    let start = match &recorded {
        Some(record) if record.run != options.run => {
            return Err(Error::OtherRun {
                path: options.save.clone(),
                expected: options.run.clone(),
                found: record.run.clone(),
            });
        }
        Some(record) if record.run_id.is_some() || claimed_by_us(&store, &options.run)? => Start::Resume,
        _ => Start::NewRun,
    };
    // Written before the name is claimed, so that a claim without a recorded identity is known to be ours.
    let mut record =
        recorded.unwrap_or_else(|| RunRecord { run: options.run.clone(), ..RunRecord::default() });
    record.write(&options.save)?;
    let mut publisher = PublisherOptions::new(&options.run, start, options.save.join("baseline"));
    publisher.anchor_every = options.anchor_every;
    publisher.reference_dir = Some(options.hf_checkpoint.clone());
    publisher.sign_key.clone_from(&options.sign_key);
    publisher.trust_keys.clone_from(&options.trust_keys);
    let publisher = Publisher::open(store, publisher)?;
    if let Some(run_id) = record.run_id {
        publisher.run().check_id(format_args!("the state in {}", options.save.display()), run_id)?;
    }
    record.run_id = Some(publisher.run().id());
    record.write(&options.save)?;
    Ok((record, Some(Updates::new(publisher))))
}

/// Whether the name was claimed without anything published: what a crash between claim and record leaves.
fn claimed_by_us(store: &Arc<dyn Store>, name: &str) -> Result<bool> {
    match Run::open(store.clone(), name) {
        Ok(run) => Ok(run.newest_version(MODEL)?.is_none()),
        Err(transport::Error::NoSuchRun { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn open_log(options: &TrainOptions, run_id: RunId) -> Result<Log> {
    let tokenizer = options.hf_checkpoint.join("tokenizer.json");
    let tokenizer = match std::fs::read(&tokenizer) {
        Ok(bytes) => bytes,
        // A model without a tokenizer is used with token ids alone.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(Error::Io { action: "read", path: tokenizer, source }),
    };
    let identity = Identity {
        run_id: *run_id.as_bytes(),
        model: MODEL.to_owned(),
        tokenizer_digest: *blake3::hash(&tokenizer).as_bytes(),
    };
    let mut log = buffer::Options::new(identity);
    log.sync = buffer::SyncPolicy::Manual;
    log.wait_deadline = Duration::from_secs(60);
    Ok(Log::open(options.save.join("log"), log)?)
}

/// The policy from the newest training checkpoint, else from the Hugging Face checkpoint.
fn open_policy(options: &TrainOptions) -> Result<(Option<Policy>, Option<Progress>)> {
    if options.debug == Debug::RolloutOnly {
        return Ok((None, None));
    }
    let learn = &options.learn;
    let adamw = AdamWOptions {
        beta1: learn.adam_beta1,
        beta2: learn.adam_beta2,
        weight_decay: learn.weight_decay,
        clip_grad: learn.clip_grad,
        ..AdamWOptions::default()
    };
    let device = torch::device(&options.device)?;
    let model = Model::open(&options.hf_checkpoint, Kind::Float, device)?;
    let published = Config::published_kind(&options.hf_checkpoint)?;
    let mut policy = Policy::new(model, published, adamw)?;
    let progress = checkpoint::load(&checkpoint::dir(&options.save), &mut policy)?;
    if let Some(progress) = progress.as_ref().filter(|progress| progress.seed != options.seed) {
        // Its rollouts were drawn with the other seed: going on would mix two runs.
        return Err(Error::Resume {
            path: checkpoint::dir(&options.save),
            what: "seed",
            expected: options.seed.to_string(),
            found: progress.seed.to_string(),
        });
    }
    Ok((Some(policy), progress))
}

/// Eight bytes of the run's identity.
fn scope(identity: &Identity) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&identity.run_id[..8]);
    u64::from_le_bytes(bytes)
}
