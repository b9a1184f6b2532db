//! What a run of the loop holds while it runs, and how it is opened or taken up again.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use driftless_bridge::activate::{DiskOptions, Outlook, PluginOptions, outlook_of};
use driftless_bridge::fleet::{FleetOptions, Phase, PhaseTold};
use driftless_bridge::{Expected, Fleet};
use driftless_buffer::{Position, Record, Retention};
use driftless_http::Server;
use driftless_store::{Store, chain_text};
use driftless_transport::activate::How;
use driftless_transport::publish::{PublisherOptions, Start};
use driftless_transport::{self as transport, Publisher, Run, RunId};
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet};

use super::apart::{Halves, RunLog};
use super::changes::{Changes, Engine};
use super::coming::Coming;
use super::door::{Door, Keeper};
use super::halves::{Newest, ToRollouts, ToTrainer};
use super::record::{Data, RunRecord, Start as Begun};
use super::update::{self, Updates};
use super::versions::Versions;
use super::{TrainOptions, listen, options, watched};
use crate::error::{Error, Result, io};
use crate::events::{Alerts, Event, Fact, LEARNER_STARTS, Observer};
use crate::learner::{Learner, MODEL, Progress, Workspace};
use crate::ledger::{Ledger, Recipe};
use crate::metrics::{self, Converged, METRICS, MetricsFile, StepMetrics};
use crate::options::{Debug, Mode};
use crate::push::Pusher;
use crate::rollout::{self, Policy, Queue, RolloutOptions, Rollouts};
use crate::seed::first_bits;

/// The loop's cursor in the log.
const CONSUMER: &str = "trainer";
/// The directory of the rollout log.
pub(super) const LOG: &str = "log";
/// Training checkpoints that are kept.
const CHECKPOINTS: usize = 2;
/// The directory of the publisher's baseline.
pub(super) const BASELINE: &str = "baseline";

/// A run in progress.
pub(super) struct Session<'o> {
    pub(super) options: &'o TrainOptions,
    pub(super) observer: Observer,
    pub(super) runtime: Runtime,
    pub(super) record: RunRecord,
    /// Loaded only where more than rollouts is wanted.
    pub(super) learner: Box<dyn Learner>,
    pub(super) place: Workspace,
    /// Whether the learner may be asked anything but to load; not before [`Session::load`].
    pub(super) loaded: bool,
    /// Absent when nothing is published.
    pub(super) updates: Option<Updates>,
    /// Absent where followers bring versions to the engines, and when nothing is published.
    pub(super) pusher: Option<Pusher>,
    /// The engines that the options name.
    named: Vec<Engine>,
    /// The engines that the run begins with.
    pub(super) at_start: Vec<Engine>,
    /// What was changed of them while the run ran.
    changes: Changes,
    /// Absent before [`Session::attach`], and when there are no engines.
    pub(super) fleet: Option<Arc<Fleet>>,
    /// Where the engines are changed while the run runs. Absent as the fleet is, and where it could not be opened.
    door: Option<Door>,
    /// The same over HTTP, where the options say so.
    listens: Option<Server>,
    /// What follows the file of engines.
    watch: JoinSet<()>,
    /// Absent before [`Session::attach`], and when there are no engines.
    pub(super) rollouts: Option<Arc<Rollouts>>,
    /// Generates what the queue says; absent before the first step, and when there are no engines.
    pub(super) generation: Option<JoinHandle<Result<()>>>,
    /// The groups of the log; absent before [`Session::load`].
    pub(super) queue: Option<Arc<Queue>>,
    /// Absent in the half that generates.
    pub(super) ledger: Option<Ledger>,
    pub(super) log: RunLog,
    /// How far a log is read that rollouts beside this process write.
    pub(super) read: Position,
    /// The rollouts, where they are a process of their own.
    pub(super) to_rollouts: Option<ToRollouts>,
    /// The trainer, where it is a process of its own.
    pub(super) to_trainer: Option<ToTrainer>,
    /// The newest version that it told of.
    pub(super) newest: Option<Newest>,
    /// Absent before [`Session::load`].
    pub(super) metrics: Option<MetricsFile>,
    pub(super) alerts: Alerts,
    /// Optimiser steps done.
    pub(super) step: u64,
    /// Those of the newest training checkpoint.
    pub(super) saved: u64,
    /// When the step before was complete, or the loop began.
    pub(super) complete_at: Instant,
    /// Versions that engines are coming to, the oldest first.
    pub(super) coming: VecDeque<Coming>,
    /// Those that they have come to since the last step was recorded.
    pub(super) converged: Vec<Converged>,
    /// The last step of an interrupted run, saved but perhaps not published or recorded.
    pub(super) unfinished: Option<StepMetrics>,
    /// The removal of old versions that was begun last.
    pub(super) collection: Option<JoinHandle<()>>,
}

impl<'o> Session<'o> {
    /// Opens the state directory, the store and the log, in an order in which a crash anywhere leaves a state
    /// that opens again.
    pub(super) fn open(
        options: &'o TrainOptions,
        learner: Box<dyn Learner>,
        observer: Observer,
    ) -> Result<Self> {
        // Before anything is claimed, sent or written: tokens of another task would be trained on to no
        // effect.
        options.task.source.check(&options.hf_checkpoint)?;
        options.check()?;
        let runtime = Runtime::new().map_err(io("start threads for", "the engines' connections"))?;
        if options.generates() {
            runtime.block_on(options.task.ready())?;
        }
        let changes = Changes::read(&options.save)?;
        let named = watched::named(&runtime, options)?;
        let at_start = changes.applied_to(&named)?;
        let pusher = pusher(options, &at_start)?;
        std::fs::create_dir_all(&options.save).map_err(io("create", &options.save))?;
        let Halves { record, updates, run_id, log, to_rollouts, to_trainer } =
            Halves::open(options, learner.publishes(), &observer)?;
        let mut session = Session {
            place: place(options, run_id),
            metrics: None,
            alerts: Alerts::after(&metrics::read(&options.save.join(METRICS))?),
            options,
            observer,
            runtime,
            record,
            learner,
            loaded: false,
            updates,
            pusher,
            named,
            at_start,
            changes,
            fleet: None,
            door: None,
            listens: None,
            watch: JoinSet::new(),
            rollouts: None,
            generation: None,
            queue: None,
            ledger: to_trainer.is_none().then(|| Ledger::open(&options.save)).transpose()?,
            log,
            read: Position(0),
            to_rollouts,
            to_trainer,
            newest: None,
            step: 0,
            saved: 0,
            complete_at: Instant::now(),
            coming: VecDeque::new(),
            converged: Vec::new(),
            unfinished: None,
            collection: None,
        };
        if session.to_trainer.is_none() {
            session.note_data()?;
        }
        Ok(session)
    }

    /// Says in what the data differ from those of the last start, and remembers them as they are.
    fn note_data(&mut self) -> Result<()> {
        let now = Data { settings: self.options.data.clone(), prompts: self.options.task.source.digest() };
        let then = self.record.data.replace(now.clone());
        if then.as_ref() == Some(&now) {
            return Ok(());
        }
        if let Some(then) = then.filter(|_| self.log.reader().next_prompt() > 0) {
            for (name, now) in &now.settings {
                if let Some(then) = then.settings.get(name).filter(|then| *then != now) {
                    self.tell(changed(name, then, now));
                }
            }
            if then.prompts != now.prompts {
                self.tell(Event::OtherPrompts);
            }
        }
        self.record.write(&self.options.save)
    }

    /// Remembers what the first step starts from, once it is published.
    pub(super) fn note_start(&mut self) -> Result<()> {
        let updates = self.updates.as_ref().filter(|_| self.record.start.is_none());
        let Some(weights_digest) = updates.and_then(Updates::start) else { return Ok(()) };
        let start = self.options.hf_checkpoint.as_path();
        let hf_checkpoint = std::path::absolute(start).map_err(io("name", start))?;
        self.record.start = Some(Begun { hf_checkpoint, weights_digest });
        self.record.write(&self.options.save)
    }

    /// How steps learn from now on.
    pub(super) fn recipe(&self) -> Recipe {
        Recipe {
            learn: self.options.learn.clone(),
            temperature: self.options.sampling.temperature,
            n_samples_per_prompt: self.options.n_samples_per_prompt,
            max_staleness: self.options.oldest(),
            learner: self.learner.settings(),
        }
    }

    /// Has the learner take up its newest checkpoint, and goes back to the step of that.
    pub(super) fn load(&mut self) -> Result<()> {
        let progress = match self.options.debug {
            Debug::RolloutOnly => None,
            _ => {
                self.wait_on(LEARNER_STARTS, &self.learner.describe());
                self.learner.load(&self.place)?
            }
        };
        if let Some(progress) = &progress {
            self.check(progress)?;
            self.check_log(progress.step)?;
        }
        self.step = progress.as_ref().map_or(0, |progress| progress.step);
        self.saved = self.step;
        // The line of a step is its last trace: without it, the step may not have been published.
        let recorded =
            metrics::read(&self.metrics_path())?.iter().any(|last| last.rollout_id + 1 == self.step);
        self.unfinished = progress.and_then(|progress| progress.metrics).filter(|_| !recorded);
        self.metrics = Some(MetricsFile::open(&self.metrics_path(), self.step)?);
        if let Some(updates) = &mut self.updates {
            updates.look()?;
            #[cfg(feature = "cuda")]
            if let Some(codec) = self.learner.codec() {
                updates.encode_on(codec);
            }
        }
        match &self.queue {
            Some(queue) => queue.trained(self.step),
            None => {
                let log = self.log.reader();
                log.refresh()?;
                self.read = log.end();
                let taken = self.ledger.as_ref().map(Ledger::groups).unwrap_or_default();
                self.queue = Some(Arc::new(self.open_queue(taken)));
                self.leave_out_again()?;
            }
        }
        self.loaded = true;
        Ok(())
    }

    /// The groups that the log has, given those that each step took.
    pub(super) fn open_queue(&self, taken: BTreeMap<u64, Vec<u64>>) -> Queue {
        let options = self.options;
        let mut policy = Policy::new(options.mode, options.rollout_batch_size, options.num_rollout);
        (policy.surplus, policy.partial) = (options.surplus(), options.partial_rollout);
        Queue::open(policy, &self.log.reader(), options.n_samples_per_prompt, self.step, taken)
    }

    pub(super) fn queue(&self) -> Result<&Arc<Queue>> {
        self.queue.as_ref().ok_or(Error::Bug { what: "the log is not looked through" })
    }

    /// Refuses the checkpoint of a run that this one cannot go on with.
    fn check(&self, progress: &Progress) -> Result<()> {
        let settings = self.options.settings();
        let refused = |what: &str, expected: &str, found: &str| {
            let (path, expected, found) = (self.options.save.clone(), expected.to_owned(), found.to_owned());
            Err(Error::Resume { path, what: what.to_owned(), expected, found })
        };
        if progress.seed != self.options.seed {
            // Its rollouts were drawn with the other seed: going on would mix two runs.
            return refused("seed", &self.options.seed.to_string(), &progress.seed.to_string());
        }
        for (name, now) in &settings {
            // Older checkpoints have them by flag.
            let flag = || format!("--{}", name.replace('_', "-"));
            match progress.settings.get(name).or_else(|| progress.settings.get(&flag())) {
                // Numbers of samples follow from it: new ones would take those of old ones.
                Some(then) if then != now && name == options::GROUP_SIZE => {
                    return refused(options::GROUP_SIZE, now, then);
                }
                Some(then) if then != now => self.tell(changed(name, then, now)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Says that the log of a run that has done steps is empty, and does not believe in steps without any trace.
    fn check_log(&mut self, step: u64) -> Result<()> {
        if step == 0 || self.log.reader().next_prompt() > 0 {
            return Ok(());
        }
        let published = match &mut self.updates {
            Some(updates) => updates.newest()?.is_some_and(|(_, made)| made > 0),
            None => false,
        };
        if !published && metrics::read(&self.metrics_path())?.is_empty() {
            let (learner, path) = (self.learner.describe(), self.options.save.clone());
            return Err(Error::LearnerAhead { learner, step, path });
        }
        self.tell(Event::LogMissing { step });
        Ok(())
    }

    /// Attaches the engines, which have to be of the model that they start from.
    pub(super) fn attach(&mut self) -> Result<()> {
        let options = self.options;
        let expected = Expected::from_checkpoint(options.start())?;
        let mut fleet_options = FleetOptions::default()
            .with_concurrency(options.server_concurrency)
            .with_deadline(options.generate_deadline)
            .with_engines_min(options.engines_min)
            .with_syncing(options.update_deadline);
        fleet_options.keyless = self.at_start.iter().filter(|engine| !engine.keys).map(address).collect();
        fleet_options.ca.clone_from(&options.engine_ca);
        let observer = self.observer.clone();
        fleet_options.phases = Some(PhaseTold::new(move |url, phase| {
            observer(Fact::new(SystemTime::now(), phase_of(url, phase)));
        }));
        fleet_options.newest = self.newest_in_store()?;
        let fleet = Arc::new(self.attach_those_up(&expected, &fleet_options)?);
        self.tell_outlook(&fleet);
        self.fleet = Some(fleet.clone());
        let keeper = Arc::new(Keeper {
            fleet: fleet.clone(),
            keys: options.keys.clone(),
            save: options.save.clone(),
            changes: self.changes.clone().into(),
            coming: Default::default(),
            pushes: self.pusher.is_some(),
        });
        self.watch = watched::watch(&self.runtime, options, self.named.clone(), keeper.clone())?;
        if let Some(listen) = &options.fleet_listen {
            let server = listen::serve(&self.runtime, listen, keeper.clone())?;
            self.tell(Event::Listening { addr: server.addr() });
            self.listens = Some(server);
        }
        self.open_door(keeper);
        let observer = self.observer.clone();
        self.rollouts = Some(Arc::new(Rollouts {
            engines: fleet,
            task: options.task.clone(),
            progress: Arc::new(move |rollout, done, total| {
                observer(Fact::new(SystemTime::now(), Event::Generating { rollout, done, total }));
            }),
            options: RolloutOptions {
                scope: first_bits(&self.log.own()?.identity().run_id),
                seed: options.seed,
                sampling: options.sampling.clone(),
                rollout_max_context_len: options.rollout_max_context_len,
                vocabulary: crate::data::vocabulary(&options.hf_checkpoint)?,
                hook_retries: options.hook_retries,
                easy_threshold: options.easy_threshold,
                ..RolloutOptions::new(options.rollout_batch_size, options.n_samples_per_prompt)
            },
            log: self.log.own()?.clone(),
            queue: self.queue()?.clone(),
        }));
        Ok(())
    }

    /// Lets the engines be changed while the run runs. A run that cannot goes on with those that it has.
    fn open_door(&mut self, keeper: Arc<Keeper>) {
        match Door::open(&self.runtime, keeper) {
            Ok(door) => self.door = Some(door),
            Err(error) => {
                tracing::warn!(
                    error = chain_text(&error),
                    "the engines of this run cannot be changed while it runs"
                );
            }
        }
    }

    /// Tells what each engine gets of the run's versions, as far as it shows from this host.
    fn tell_outlook(&self, fleet: &Fleet) {
        let mut options = DiskOptions::default();
        options.plugin = self.options.plugin_dir.as_ref().map(PluginOptions::new);
        for engine in fleet.engines() {
            let gets = match outlook_of(&engine, &options) {
                Outlook::Taken { compared, .. } if self.options.push.is_some() => {
                    Outlook::Taken { how: How::Pushed, compared }
                }
                outlook => outlook,
            };
            let url = engine.engine().url();
            self.tell(Event::Engine { url: url.to_owned(), gets: gets.to_string() });
            if self.options.mode != Mode::Synchronous && !engine.identity().spans {
                tracing::warn!(
                    engine = url,
                    "the engine does not say by itself which version drew which token: unless driftless's plugin in it \
                     does, a reply that an update crosses is asked for again, so that long answers may never end; \
                     give it the plugin, generate in turns, or take SGLang 0.5.19 or later"
                );
            }
        }
    }

    pub(super) fn block_on<T>(&self, future: impl Future<Output = Result<T, impl Into<Error>>>) -> Result<T> {
        self.runtime.block_on(future).map_err(Into::into)
    }

    pub(super) fn fleet(&self) -> Result<&Arc<Fleet>> {
        self.fleet.as_ref().ok_or(Error::Bug { what: "no engines are attached" })
    }

    /// The versions, which every run has that is not for debugging.
    pub(super) fn updates(&mut self) -> Result<&mut Updates> {
        self.updates.as_mut().ok_or(Error::Bug { what: "a run for debugging publishes" })
    }

    /// Makes the step durable.
    pub(super) fn save(&mut self, step: &StepMetrics) -> Result<()> {
        let last = self.step == self.options.num_rollout;
        let due = last || self.step.is_multiple_of(self.options.save_interval);
        if !due || self.options.debug == Debug::RolloutOnly {
            return Ok(());
        }
        let metrics = Some(step.clone());
        let (step, seed, settings) = (self.step, self.options.seed, self.options.settings());
        // First, so that a crash between the two leaves none of the series out.
        if let Some(dir) = self.options.save_hf_after(step) {
            self.learner.save_hf(&dir)?;
        }
        self.learner.save(&Progress { step, seed, metrics, settings })?;
        self.saved = step;
        self.trim()
    }

    /// Lets the log give back what no step learns from again, where it is larger than it may be.
    pub(super) fn trim(&mut self) -> Result<()> {
        if self.rollouts.is_none() {
            return Ok(());
        }
        let own = self.log.own()?;
        let log = own.reader();
        // The prompt that was taken last stays: it says which is the next.
        let last = log.next_prompt().checked_sub(1).map(|last| log.prompt(last)).transpose()?.flatten();
        let mut needed = last.map(|record| record.position());
        for group in self.queue()?.kept(self.saved.saturating_sub(1)) {
            let group = rollout::group(&log, group, self.options.n_samples_per_prompt);
            let records = group.iter().flat_map(|group| &group.records).map(Record::position);
            needed = records.chain(needed).min();
        }
        let Some(begin) = needed else { return Ok(()) };
        own.cursor(CONSUMER)?.commit(begin)?;
        own.retain(&Retention {
            bytes_max: Some(self.options.rollout_log_bytes_max),
            consumed_by: vec![CONSUMER.to_owned()],
            ..Retention::default()
        })?;
        Ok(())
    }

    pub(super) fn metrics_path(&self) -> PathBuf {
        self.options.save.join(METRICS)
    }
}

/// What brings versions into the engines, where followers do not.
fn pusher(options: &TrainOptions, engines: &[Engine]) -> Result<Option<Pusher>> {
    let pushes = options.push.as_ref().filter(|_| options.debug == Debug::Off);
    let opened = pushes.map(|pushes| Pusher::open(pushes.clone(), &addresses(engines)));
    opened.transpose().map_err(|source| Error::PushSetUp { source })
}

fn changed(name: &str, then: &str, now: &str) -> Event {
    Event::Changed { name: name.to_owned(), then: then.to_owned(), now: now.to_owned() }
}

/// That an engine has come to a phase, or has left.
fn phase_of(url: &str, phase: Option<&Phase>) -> Event {
    let why = match phase {
        Some(Phase::Lost { why }) => why.clone(),
        _ => String::new(),
    };
    Event::Phase { url: url.to_owned(), phase: phase.map_or("gone", Phase::name), why }
}

/// Where the engines are.
pub(super) fn addresses(engines: &[Engine]) -> Vec<String> {
    engines.iter().map(address).collect()
}

fn address(engine: &Engine) -> String {
    engine.address.clone()
}

/// Begins the run in the store, or goes on with it.
pub(super) fn open_run(
    options: &TrainOptions,
    learner_publishes: bool,
) -> Result<(RunRecord, Option<Updates>)> {
    // One without an identity has no version: it was turned away from its name, or killed before it had it.
    let recorded =
        RunRecord::read(&options.save)?.filter(|record| record.run_id.is_some() || record.run == options.run);
    let fresh = || RunRecord { run: options.run.clone(), ..RunRecord::default() };
    if options.debug != Debug::Off {
        let mut record = recorded.unwrap_or_else(fresh);
        record.run_id.get_or_insert_with(RunId::random);
        record.write(&options.save)?;
        return Ok((record, None));
    }
    let (store, versions) = (options.store.clone(), Versions::open(&options.save)?);
    let start = match &recorded {
        Some(record) if record.run != options.run => {
            let (path, expected) = (options.save.clone(), options.run.clone());
            return Err(Error::OtherRun { path, expected, found: record.run.clone() });
        }
        Some(record) if record.run_id.is_some() || claimed_by_us(&store, &options.run)? => Start::Resume,
        _ => Start::NewRun,
    };
    // Written before the name is claimed, so that a claim without a recorded identity is known to be ours.
    let mut record = recorded.unwrap_or_else(fresh);
    record.write(&options.save)?;
    if let (true, Start::Resume, Some(run_id)) = (learner_publishes, start, record.run_id) {
        let run = Run::open(store.clone(), &options.run)?;
        run.check_id(format_args!("the state in {}", options.save.display()), run_id)?;
        if run.newest_version(MODEL)?.is_some() {
            return Ok((record, Some(Updates::watch(run, versions)?)));
        }
    }
    let mut publisher = PublisherOptions::new(&options.run, start, options.save.join(BASELINE));
    publisher.anchor_every = options.anchor_every;
    publisher.anchor_share = options.anchor_share;
    publisher.notify.clone_from(&options.notify);
    publisher.reference_dir = Some(options.start().to_owned());
    publisher.sign_key.clone_from(&options.sign_key);
    publisher.trust_keys.clone_from(&options.trust_keys);
    let mut publisher = Publisher::open(store, publisher)?;
    if let Some(run_id) = record.run_id {
        publisher.run().check_id(format_args!("the state in {}", options.save.display()), run_id)?;
    }
    record.run_id = Some(publisher.run().id());
    record.write(&options.save)?;
    if !learner_publishes {
        return Ok((record, Some(Updates::new(publisher, versions))));
    }
    // The learner goes on from here, with this baseline.
    if publisher.version().is_none() {
        update::publish_reference(&mut publisher, options.start())?;
        publisher.wait()?;
    }
    Ok((record, Some(Updates::watch(publisher.run().clone(), versions)?)))
}

/// Whether the name was claimed without anything published: what a crash between claim and record leaves.
fn claimed_by_us(store: &Arc<dyn Store>, name: &str) -> Result<bool> {
    match Run::open(store.clone(), name) {
        Ok(run) => Ok(run.newest_version(MODEL)?.is_none()),
        Err(transport::Error::NoSuchRun { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn place(options: &TrainOptions, run_id: RunId) -> Workspace {
    Workspace {
        save: options.save.clone(),
        hf_checkpoint: options.hf_checkpoint.clone(),
        log: options.save.join(LOG),
        store: options.store_url.clone(),
        run: options.run.clone(),
        run_id: run_id.to_string(),
        model: MODEL.to_owned(),
        baseline: options.save.join(BASELINE),
        keep: CHECKPOINTS,
        anchor_every: options.anchor_every,
        anchor_share: options.anchor_share,
    }
}
