//! Held-out prompts on versions that a run has published, or on a checkpoint, without training.
//!
//! A follower of its own brings engines of its own to one version after the other. Prompts, their order, seeds and
//! rewards are those that training measures with: what it measured at a version, an evaluation of that version measures
//! again, where sampling is greedy or the engine keeps to seeds.

mod in_use;
mod versions;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_bridge::activate::{DiskActivator, DiskOptions, PluginOptions};
use driftless_bridge::engine::Deadlines;
use driftless_bridge::fleet::{FleetOptions, Newest};
use driftless_bridge::{ClientOptions, Expected, Fleet, Label};
use driftless_store::wait::{Stop, lock};
use driftless_store::{Memory, Store};
use driftless_transport::activate::Activate;
use driftless_transport::follow::{FollowerOptions, default_id};
use driftless_transport::gc::EngineStatus;
use driftless_transport::publish::{PublisherOptions, Start, Step};
use driftless_transport::sign::TrustKey;
use driftless_transport::{self as transport, Follower, Publisher, Run, Version};
use serde::Serialize;
use tokio::runtime::Runtime;

use driftless_trainer::data::vocabulary;
use driftless_trainer::learner::MODEL;
use driftless_trainer::metrics::EvalMetrics;
use driftless_trainer::rollout::{EVAL_FOLLOWER, EvalSet, HOOK_RETRIES, RolloutOptions, Rollouts, open_log};
use driftless_trainer::seed::first_bits;
use driftless_trainer::{Error, Result};

pub use versions::Wanted;

/// Between two attempts at a follower whose loop looks at its engines.
const BUSY_AGAIN: Duration = Duration::from_millis(20);
/// Between two looks whether the evaluation is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What is measured, and where.
#[derive(Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct EvaluateOptions {
    /// What engines serve meanwhile.
    pub of: Of,
    /// The checkpoint that engines and tokens are compared with: the one that the run started from, or the one that is
    /// measured.
    pub hf_checkpoint: PathBuf,
    /// Directory that is brought to each version, and that engines load; the evaluation owns it.
    pub checkpoint_dir: PathBuf,
    /// The same as engines see it, where that differs.
    pub engine_checkpoint_dir: Option<PathBuf>,
    /// Directory of the log that keeps the answers.
    pub log: PathBuf,
    /// Addresses of the engines, all of which have to answer.
    pub engines: Vec<String>,
    /// Keys of the engines, and who vouches for them.
    pub client: ClientOptions,
    /// Whether engines are taken that others keep on a version.
    pub engines_in_use: bool,
    /// Directory of engines' plugins; none is used without one.
    pub plugin_dir: Option<PathBuf>,
    /// If given, only versions that one of these keys has signed.
    pub trust_keys: Vec<TrustKey>,
    /// The prompts, with their rewards.
    pub sets: Vec<EvalSet>,
    /// Tokens that prompt and response may have together.
    pub rollout_max_context_len: Option<usize>,
    /// Seed of sampling.
    pub seed: u64,
    /// Requests an engine is given at once.
    pub server_concurrency: usize,
    /// How long one answer may take, retries included.
    pub generate_deadline: Duration,
    /// Times that an answer is made again whose hook died or was late.
    pub hook_retries: u64,
    /// How long an engine may take to come to a version.
    pub update_deadline: Duration,
}

/// What engines serve while it is measured.
#[derive(Clone)]
#[non_exhaustive]
pub enum Of {
    /// Versions of a run, one after the other.
    Run {
        /// Where they are.
        store: Arc<dyn Store>,
        /// Name of the run.
        run: String,
        /// Which of them.
        versions: Wanted,
    },
    /// The checkpoint of [`EvaluateOptions::hf_checkpoint`], as version 0 of a run of its own.
    Checkpoint,
}

impl EvaluateOptions {
    /// `sets` on `engines`, which load `checkpoint_dir`. Seed 1, 512 requests an engine, 600 s for an answer and for an
    /// engine to come to a version; no plugins, no keys.
    #[must_use]
    pub fn new(
        of: Of,
        hf_checkpoint: impl Into<PathBuf>,
        checkpoint_dir: impl Into<PathBuf>,
        log: impl Into<PathBuf>,
        engines: Vec<String>,
        sets: Vec<EvalSet>,
    ) -> Self {
        EvaluateOptions {
            of,
            hf_checkpoint: hf_checkpoint.into(),
            checkpoint_dir: checkpoint_dir.into(),
            engine_checkpoint_dir: None,
            log: log.into(),
            engines,
            client: ClientOptions::default(),
            engines_in_use: false,
            plugin_dir: None,
            trust_keys: Vec::new(),
            sets,
            rollout_max_context_len: None,
            seed: 1,
            server_concurrency: 512,
            generate_deadline: Duration::from_secs(600),
            hook_retries: HOOK_RETRIES,
            update_deadline: Duration::from_secs(600),
        }
    }
}

/// What came of a version.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Measured {
    /// Its number.
    pub version: u64,
    /// Optimiser steps that led to it.
    pub step: u64,
    /// The label that engines had.
    pub label: String,
    /// From the version before to the last answer.
    pub seconds: f64,
    /// How each engine came by it.
    pub engines: Vec<EngineStatus>,
    /// What each set said.
    pub eval: EvalMetrics,
}

/// An evaluation whose versions and engines are known to be there.
pub struct Evaluation {
    options: EvaluateOptions,
    id: String,
    /// Absent for a checkpoint, until it is measured.
    run: Option<Run>,
    versions: Vec<Version>,
    runtime: Runtime,
    fleet: Arc<Fleet>,
    /// The version that engines are brought to.
    serving: Arc<Mutex<Option<Label>>>,
    /// There once engines are brought to versions.
    follower: OnceLock<Follower>,
}

impl Evaluation {
    /// Looks whether everything is there, and changes nothing: first the versions, then the engines.
    ///
    /// # Errors
    /// [`Error::Input`] for a version that was not published, or that was collected; [`Error::EnginesInUse`];
    /// [`Error::Bridge`] for an engine that does not answer or is of another model; what the store and the sets' parts
    /// answer.
    pub fn open(options: EvaluateOptions) -> Result<Self> {
        if options.sets.is_empty() {
            return Err(input("eval_prompt_data", "prompts to measure on", "none"));
        }
        let runtime = Runtime::new().map_err(|source| Error::Io {
            action: "start threads for",
            path: "the engines' connections".into(),
            source,
        })?;
        for set in &options.sets {
            set.task.source.check(&options.hf_checkpoint)?;
            runtime.block_on(set.task.ready())?;
        }
        let (run, versions) = match &options.of {
            Of::Checkpoint => (None, vec![Version(0)]),
            Of::Run { store, run, versions } => {
                let run = Run::open(store.clone(), run)?.trusting(&options.trust_keys);
                let versions = versions.of(&run, &options.checkpoint_dir)?;
                (Some(run), versions)
            }
        };
        let serving: Arc<Mutex<Option<Label>>> = Arc::default();
        let fleet = Arc::new(runtime.block_on(attach(&options, serving.clone()))?);
        let id = format!("{EVAL_FOLLOWER}{}", default_id(&options.checkpoint_dir));
        if !options.engines_in_use {
            in_use::check(run.as_ref(), &id, &runtime.block_on(fleet.look())?)?;
        }
        Ok(Evaluation { options, id, run, versions, runtime, fleet, serving, follower: OnceLock::new() })
    }

    /// The versions that are measured, in order.
    #[must_use]
    pub fn versions(&self) -> &[Version] {
        &self.versions
    }

    /// Engines that may be paused, as [`Follower::maybe_paused`].
    #[must_use]
    pub fn maybe_paused(&self) -> Vec<String> {
        self.follower.get().map(Follower::maybe_paused).unwrap_or_default()
    }

    /// Brings the engines to each version, and measures; `told` hears of each. It returns at the end, or soon after `stop`
    /// is thrown, and then whether it came to the end. Either way `stop` is thrown by then. Called once.
    ///
    /// # Errors
    /// Of the first version that an engine did not take, or on which a set could not be measured: whatever the engines,
    /// the store, the file system and the rewards answer.
    pub fn run(&self, stop: &Stop, mut told: impl FnMut(&Measured)) -> Result<bool> {
        let thrown = Thrown(stop);
        let run = self.run.clone().map_or_else(|| self.publish_checkpoint(), Ok)?;
        let follower = self.open_follower(&run)?;
        let rollouts = self.rollouts(&run)?;
        // It renews the lease, and brings engines back that were started again.
        let outcome = std::thread::scope(|threads| {
            // Also where a reward or `told` panics: the scope waits for the follower.
            let thrown = thrown;
            let following = threads.spawn(|| follower.run_until(stop, false));
            let mut each = || {
                for version in &self.versions {
                    match self.measure(&run, follower, &rollouts, *version, stop)? {
                        Some(measured) => told(&measured),
                        None => return Ok(false),
                    }
                }
                Ok(true)
            };
            let outcome = each();
            drop(thrown);
            let followed =
                following.join().map_err(|_| Error::Bug { what: "the follower's loop has panicked" });
            outcome.and_then(|is_whole| followed?.map(|()| is_whole).map_err(Error::from))
        });
        self.withdraw(&run);
        outcome
    }

    /// The checkpoint as version 0 of a run that nobody else sees, in the directory that engines load.
    fn publish_checkpoint(&self) -> Result<Run> {
        let (store, from) = (Arc::new(Memory::new()), &self.options.hf_checkpoint);
        let options = PublisherOptions::new("checkpoint", Start::NewRun, &self.options.checkpoint_dir);
        let mut publisher = Publisher::open(store, options)?;
        publisher.publish_reference(
            from,
            Step { trainer_step: 0, checkpoint: Some(from.display().to_string()) },
        )?;
        publisher.wait()?;
        Ok(publisher.run().clone())
    }

    /// A follower that does what it is told, of all engines.
    fn open_follower(&self, run: &Run) -> Result<&Follower> {
        let options = &self.options;
        let client = options.client.clone();
        let client = client.with_deadlines(Deadlines::default().with_load(options.update_deadline));
        let mut disk = DiskOptions::default().with_client(client).with_base(&options.hf_checkpoint);
        disk.engine_checkpoint_dir.clone_from(&options.engine_checkpoint_dir);
        disk.plugin = options.plugin_dir.as_ref().map(PluginOptions::new);
        let engine = |address: &String| -> Result<Box<dyn Activate>> {
            Ok(Box::new(DiskActivator::new(address, disk.clone())?))
        };
        let engines = options.engines.iter().map(engine).collect::<Result<_>>()?;
        let mut follow = FollowerOptions::new(run.name(), &options.checkpoint_dir, &self.id);
        follow.coordinated = true;
        follow.hf_checkpoint = Some(options.hf_checkpoint.clone());
        follow.plugin_dir.clone_from(&options.plugin_dir);
        follow.trust_keys.clone_from(&options.trust_keys);
        follow.activate_deadline = options.update_deadline;
        let follower = Follower::open(run.store().clone(), follow, engines)?;
        Ok(self.follower.get_or_init(|| follower))
    }

    fn rollouts(&self, run: &Run) -> Result<Arc<Rollouts>> {
        let options = &self.options;
        let log = open_log(&options.log, &options.hf_checkpoint, run.id())?;
        let mut settings = RolloutOptions::new(1, 1)
            .with_scope(first_bits(run.id().as_bytes()))
            .with_seed(options.seed)
            .with_hook_retries(options.hook_retries);
        settings.rollout_max_context_len = options.rollout_max_context_len;
        settings.vocabulary = vocabulary(&options.hf_checkpoint)?;
        let [first, ..] = &options.sets[..] else {
            return Err(Error::Bug { what: "an evaluation of no set" });
        };
        Ok(Rollouts::to_measure(self.fleet.clone(), first.task.clone(), log, settings))
    }

    /// Measures one version; nothing of one that is stopped.
    fn measure(
        &self,
        run: &Run,
        follower: &Follower,
        rollouts: &Arc<Rollouts>,
        version: Version,
        stop: &Stop,
    ) -> Result<Option<Measured>> {
        let begin = Instant::now();
        let Some(prepared) = self.when_free(stop, || follower.prepare(Some(version)))? else {
            return Ok(None);
        };
        let label: Label = prepared.label.parse()?;
        *lock(&self.serving) = Some(label.clone());
        let Some(status) = self.when_free(stop, || follower.activate())? else { return Ok(None) };
        let step = run.get(MODEL, version)?.manifest.trainer_step;
        let measured = self.runtime.block_on(async {
            tokio::select! {
                biased;
                () = stopped(stop) => None,
                eval = self.ask(rollouts, step, &label) => Some(eval),
            }
        });
        let Some(eval) = measured.transpose()? else { return Ok(None) };
        Ok(Some(Measured {
            version: version.0,
            step,
            label: label.to_string(),
            seconds: begin.elapsed().as_secs_f64(),
            engines: status.applied.map(|ack| ack.engines).unwrap_or_default(),
            eval,
        }))
    }

    /// Asks all prompts of engines that serve this version.
    async fn ask(&self, rollouts: &Arc<Rollouts>, step: u64, label: &Label) -> Result<EvalMetrics> {
        self.fleet.look().await?;
        for engine in self.fleet.wait_for_those_up(label, self.options.update_deadline).await? {
            tracing::warn!(%label, "measured without {engine}");
        }
        rollouts.measure_all(&self.options.sets, step, Some(label.clone()), true).await
    }

    /// Has the follower do something, once its loop is not at it; `None` once `stop` is thrown.
    fn when_free<T>(&self, stop: &Stop, ask: impl Fn() -> transport::Result<T>) -> Result<Option<T>> {
        let begin = Instant::now();
        loop {
            if stop.is_stopped() {
                return Ok(None);
            }
            match ask() {
                Err(transport::Error::Busy { .. }) if begin.elapsed() < self.options.update_deadline => {
                    _ = stop.wait(BUSY_AGAIN);
                }
                // What is under way then is cut short.
                Err(_) if stop.is_stopped() => return Ok(None),
                done => return Ok(Some(done?)),
            }
        }
    }

    /// Takes the follower's lease out of the store: it needs nothing any more.
    fn withdraw(&self, run: &Run) {
        let withdrawn = run.follower_key(&self.id).and_then(|key| Ok(run.store().delete(&key)?));
        if let Err(error) = withdrawn {
            tracing::warn!(id = self.id, %error, "its lease stays in the store until it runs out");
        }
    }
}

fn input(what: &str, expected: impl Into<String>, found: impl ToString) -> Error {
    Error::Input { what: what.to_owned(), expected: expected.into(), found: found.to_string() }
}

/// Throws a stop when it goes.
struct Thrown<'a>(&'a Stop);

impl Drop for Thrown<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Attaches all engines, which have to be of the checkpoint's model and to serve no later version than `serving`.
async fn attach(options: &EvaluateOptions, serving: Arc<Mutex<Option<Label>>>) -> Result<Fleet> {
    let expected = Expected::from_checkpoint(&options.hf_checkpoint)?;
    let mut fleet = FleetOptions::default()
        .with_concurrency(options.server_concurrency)
        .with_deadline(options.generate_deadline)
        .with_syncing(options.update_deadline)
        .with_newest(Newest::new(move || lock(&serving).clone()));
    fleet.ca.clone_from(&options.client.ca);
    Ok(Fleet::attach(&options.engines, &options.client.keys, &expected, fleet).await?)
}

/// Returns once `stop` is thrown.
async fn stopped(stop: &Stop) {
    while !stop.is_stopped() {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
