//! The RL loop: generate, learn, save, publish, again.

mod apart;
mod changes;
mod coming;
mod converge;
mod door;
mod halves;
mod learn;
mod listen;
mod options;
mod record;
pub mod replay;
mod resolved;
mod session;
mod take;
#[cfg(test)]
mod tests;
mod update;
mod versions;
mod watched;
mod weights;

use std::time::{Duration, Instant, SystemTime};

use driftless_bridge::Label;
use driftless_transport::publish::{self, Step};
use driftless_transport::{Snapshot, Version};
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::events::{Change, Event, Fact, Observer};
use crate::goodput::Goodput;
use crate::learner::{Learner, Weights};
use crate::metrics::{self, EvalMetrics, PublicationMetrics, StepMetrics};
#[cfg(doc)]
use crate::options::Part;
use crate::options::{Debug, Mode, UpdateWeightMode};
use session::Session;
use take::Taken;
use update::milliseconds;

pub use options::TrainOptions;

/// How often a learner may be lost before its next training checkpoint.
const LOST_MAX: u32 = 3;

/// Time between two looks at the engines while a rollout is waited for.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// A finished run.
#[derive(Debug)]
pub struct Outcome {
    /// Every step of the run, also those before an interruption.
    pub steps: Vec<StepMetrics>,
    /// What was measured before the first step.
    pub eval_start: Option<EvalMetrics>,
}

/// Runs the loop to its end, or continues an interrupted run, and tells `observer` what it is doing.
///
/// A step ends in this order: rollouts durable in the log, optimiser step, training checkpoint, publication.
/// Whatever a crash cuts off is done again or, where it is already there, taken as it is. A learner that is
/// lost is loaded again, and the steps behind its last checkpoint are learned again from the log.
///
/// # Errors
/// Whatever the engines, the store, the file system or the learner answer; the state on disk is then intact,
/// and the same call continues the run.
pub fn train(options: &TrainOptions, learner: Box<dyn Learner>, observer: Observer) -> Result<Outcome> {
    let mut session = Session::open(options, learner, observer)?;
    let mut lost = 0;
    loop {
        let saved = session.saved;
        let error = match session.go() {
            Ok(()) => return session.outcome(),
            Err(error) => error,
        };
        lost = if session.saved > saved { 1 } else { lost + 1 };
        if !error.is_learner_lost() || lost > LOST_MAX {
            return Err(error);
        }
        session.tell(Event::LearnerLost { error: error.to_string() });
        session.loaded = false;
    }
}

/// Generates the rollouts of a run that another process trains, until that has done all of its steps, and tells
/// `observer` what it is doing.
///
/// [`TrainOptions::part`] is [`Part::Rollouts`]; the trainer's is [`Part::Trainer`], with the same settings beside that.
/// Either may end and come again, in any order. Engines go on, and so do the answers under way.
///
/// # Errors
/// Whatever the engines, the store or the file system answer, and [`Error::NoHalf`] where no trainer begins the run; the
/// state on disk is then intact, and the same call goes on.
pub fn rollout(options: &TrainOptions, observer: Observer) -> Result<()> {
    Session::open(options, Box::new(apart::Elsewhere), observer)?.serve()
}

impl Session<'_> {
    fn tell(&self, event: Event) {
        (self.observer)(Fact::new(SystemTime::now(), event));
    }

    /// Tells that something is waited for, and where it lacks.
    fn wait_on(&self, what: &str, on: &str) {
        self.tell(Event::Waiting { what: what.to_owned(), on: on.to_owned() });
    }

    /// The steps that are left.
    fn go(&mut self) -> Result<()> {
        if !self.loaded {
            self.load()?;
            self.check_start()?;
        }
        if self.rollouts.is_none() && self.options.generates() {
            self.attach()?;
        }
        self.tell(Event::Begin { step: self.step, of: self.options.num_rollout });
        self.complete_at = Instant::now();
        self.catch_up()?;
        self.generate()?;
        if self.options.num_rollout == 0 && self.step > 0 {
            self.evaluate(self.step)?;
        }
        while self.step < self.options.num_rollout {
            self.turn(self.step)?;
        }
        match &self.options.save_hf {
            Some(dir) if self.options.learns() && !options::is_series(dir) => self.learner.save_hf(dir),
            _ => Ok(()),
        }
    }

    /// Refuses, before engines are asked for, what they start from in another dtype if it is not the learner's.
    fn check_start(&mut self) -> Result<()> {
        let (Some(dir), Some(updates)) = (&self.options.rollout_hf_checkpoint, &mut self.updates) else {
            return Ok(());
        };
        // After steps that were only for debugging, version 1 tells the difference.
        if self.step > 0 || updates.newest()?.is_some() {
            return Ok(());
        }
        match self.learner.snapshot(0)? {
            Weights::Tensors(own) => update::check_start(&*own, dir),
            Weights::Published(_) => Ok(()),
        }
    }

    /// One step, from its groups to its publication.
    fn turn(&mut self, step: u64) -> Result<()> {
        let taken = self.take(step)?;
        let mut step = self.learn(taken)?;
        let rate = |tokens: u64, ms: f64| if ms > 0.0 { 1e3 * tokens as f64 / ms } else { 0.0 };
        step.rollout_tokens_per_s = rate(step.response_tokens, step.generate_ms);
        step.train_tokens_per_s = rate(step.tokens, step.train_ms);
        self.save(&step)?;
        self.complete(step)
    }

    /// Brings the fleet to the policy as it is, and completes the step that a crash cut off.
    fn catch_up(&mut self) -> Result<()> {
        if let Some(updates) = &mut self.updates
            && updates.newest()?.is_none()
        {
            let published = updates.publish_reference(self.options.start())?;
            self.converge(update::measured(&published), None)?;
        }
        self.note_start()?;
        if let Some(unfinished) = self.unfinished.take() {
            self.complete(unfinished)?;
        } else if let Some(label) = self.label()? {
            self.bring(&label, None)?;
        }
        if self.step == 0 && self.record.eval_start.is_none() {
            self.record.eval_start = self.evaluate(0)?;
            self.record.write(&self.options.save)?;
        }
        Ok(())
    }

    /// Has groups generated beside what follows, unless that goes on already.
    fn generate(&mut self) -> Result<()> {
        self.publish_to_queue()?;
        let ended = self.generation.as_ref().is_none_or(JoinHandle::is_finished);
        if let (true, Some(rollouts)) = (ended, &self.rollouts) {
            self.generation = Some(self.runtime.spawn(rollouts.clone().run()));
        }
        Ok(())
    }

    /// Lets groups be generated with the newest weights.
    fn publish_to_queue(&mut self) -> Result<()> {
        let label = self.label()?;
        let newest = self.updates.as_mut().map_or(Ok(None), update::Updates::newest)?;
        if let (Some(fleet), Some(label)) = (&self.fleet, &label) {
            fleet.published(label);
        }
        self.queue()?.published(newest.map_or(self.step, |(_, step)| step), label);
        self.tell_rollouts()
    }

    /// One optimiser step.
    fn learn(&mut self, taken: Taken) -> Result<StepMetrics> {
        let Taken { groups, ages, generated } = taken;
        let rollout = generated.rollout_id;
        let described = learn::describe(generated, &groups, &self.files(&groups)?);
        if self.options.debug == Debug::RolloutOnly {
            self.step = rollout + 1;
            return Ok(described);
        }
        let begin = Instant::now();
        let learn = &self.options.learn;
        let (StepMetrics { stats, log_prob_diff_by_engine, .. }, not_finite) =
            learn::step(&mut *self.learner, rollout, &groups, &ages, learn, Some(&self.log.reader()))?;
        let skipped = not_finite.is_some();
        not_finite.map_or(Ok(()), |what| self.skip(rollout, what))?;
        fail::fail_point!("train.step");
        let train_ms = milliseconds(begin.elapsed());
        let max_staleness = self.options.oldest();
        let mut step =
            StepMetrics { stats, skipped, train_ms, log_prob_diff_by_engine, max_staleness, ..described };
        learn::add_staleness(&mut step, &groups, &ages);
        self.step = rollout + 1;
        Ok(step)
    }

    /// Leaves out a step that was not finite, unless too many in a row were.
    fn skip(&mut self, rollout: u64, what: String) -> Result<()> {
        self.tell(Event::Skipped { rollout, what: what.clone() });
        let before = metrics::read(&self.metrics_path())?;
        let row = before.iter().rev().take_while(|step| step.skipped).count() as u64 + 1;
        if row <= self.options.max_skipped_steps {
            return Ok(());
        }
        Err(Error::NotFinite { learner: self.learner.describe(), what, rollout, row })
    }

    /// Publishes if it is time, measures if it is time, and records the step.
    fn complete(&mut self, mut step: StepMetrics) -> Result<()> {
        let last = self.step == self.options.num_rollout;
        let is_active = self.queue()?.is_active();
        let due = last || self.step.is_multiple_of(self.options.update_weights_interval);
        let interval = self.options.eval_interval;
        let measured = last || (interval > 0 && self.step.is_multiple_of(interval));
        // A step that is only done again needs no engine: the next one has its groups.
        if due && (measured || !self.queue()?.has_taken(self.step)) {
            let begin = Instant::now();
            step.publication = self.publish(measured)?;
            // Without a rollout under way, an engine that stands still holds up nothing else.
            let pause_ms = step.publication.as_ref().and_then(|publication| publication.pause_ms);
            let beside = pause_ms.filter(|_| is_active).unwrap_or_default();
            step.weights_ms = milliseconds(begin.elapsed()) + beside;
        }
        if measured {
            step.eval = self.evaluate(self.step)?;
        }
        self.go_on()?;
        self.look_at_coming()?;
        step.converged = std::mem::take(&mut self.converged);
        step.completed_at_ms = metrics::unix_us(SystemTime::now()) / 1000;
        step.goodput = self.goodput()?;
        step.wall_ms = milliseconds(std::mem::replace(&mut self.complete_at, Instant::now()).elapsed());
        if let Some(rollouts) = &mut self.to_rollouts {
            step = rollouts.complete(step)?;
        }
        let metrics =
            self.metrics.as_mut().ok_or(Error::Bug { what: "a step before the learner is loaded" })?;
        metrics.append(&step)?;
        let changes = self.alerts.see(&step);
        self.tell(Event::Step(step.into()));
        for Change { alert, begins, text } in changes {
            self.tell(Event::Alert { alert: alert.name(), begins, text });
        }
        Ok(())
    }

    /// Where the time of the engines' places went so far.
    fn goodput(&self) -> Result<Option<Goodput>> {
        let Some(fleet) = &self.fleet else { return Ok(None) };
        // First: what becomes of tokens is told behind what was spent on them.
        let kept = self.queue()?.fates();
        let (engines, mut usage) = fleet.usage();
        engines.iter().for_each(|(_, engine)| usage.add(engine));
        Ok(Some(Goodput::of(&usage, &kept)))
    }

    /// Lets groups be generated for the steps behind the one that is done.
    fn go_on(&mut self) -> Result<()> {
        self.publish_to_queue()?;
        self.queue()?.trained(self.step);
        Ok(())
    }

    /// Publishes the policy, unless the newest version is this step's already, and waits for the fleet where something
    /// asks it for that version.
    fn publish(&mut self, is_measured: bool) -> Result<Option<PublicationMetrics>> {
        if let Some(version) = self.published_already()? {
            let recorded = self.updates()?.recorded(version)?;
            let label = self.newest_label()?;
            self.bring(&label, None)?;
            return Ok(Some(recorded));
        }
        if self.updates.is_none() {
            return Ok(None);
        }
        let begin = Instant::now();
        self.tell_publishing()?;
        let (metrics, snapshot) = match self.learner.snapshot(self.step)? {
            Weights::Tensors(snapshot) => (self.publish_here(&*snapshot)?, Some(snapshot)),
            Weights::Published(version) => {
                let (learner, step, options) = (self.learner.describe(), self.step, self.options);
                let updates = self.updates()?;
                updates.published(&learner, version, step)?;
                if let Some(notify) = &options.notify {
                    notify.tell(Version(version));
                }
                let recorded = updates.recorded(Version(version))?;
                let encode_publish_ms = milliseconds(begin.elapsed());
                (PublicationMetrics { encode_publish_ms, ..recorded }, None)
            }
        };
        self.tell(Event::Published { version: metrics.version, step: self.step });
        if let Mode::Bounded { .. } = self.options.mode {
            // Groups of the next step need not wait for the slowest engine.
            self.go_on()?;
        }
        if self.goes_on_before_engines(is_measured) {
            return self.let_come(metrics).map(Some);
        }
        let mut metrics = self.converge(metrics, snapshot.as_deref())?;
        if let Some(snapshot) = snapshot.filter(|_| self.options.check_weight_update_equal) {
            let label = self.newest_label()?;
            let check = update::check_equal(self.fleet()?, &label, &*snapshot, &self.options.save);
            metrics.engines_checked = self.block_on(check)?;
        }
        Ok(Some(metrics))
    }

    /// The newest version, if it is this step's: a crash came between the commit and the record of it. One
    /// with other weights is of a copy of this run's directory.
    fn published_already(&mut self) -> Result<Option<Version>> {
        let Some(updates) = &mut self.updates else { return Ok(None) };
        let Some((version, _)) = updates.newest()?.filter(|(_, step)| *step == self.step) else {
            return Ok(None);
        };
        if !updates.publishes() {
            return Ok(Some(version));
        }
        match self.learner.snapshot(self.step)? {
            Weights::Tensors(own) if !updates.holds(&*own, &self.place.baseline)? => Ok(None),
            _ => Ok(Some(version)),
        }
    }

    fn publish_here(&mut self, snapshot: &dyn Snapshot) -> Result<PublicationMetrics> {
        let mode = match self.options.update_weight_mode {
            UpdateWeightMode::Full => publish::Mode::Full,
            UpdateWeightMode::Delta => publish::Mode::Delta,
        };
        let step =
            Step { trainer_step: self.step, checkpoint: Some(self.options.save.display().to_string()) };
        self.updates()?.publish(snapshot, step, mode)
    }

    /// What held-out prompts say of the newest weights.
    fn evaluate(&self, step: u64) -> Result<Option<EvalMetrics>> {
        let rollouts = self.rollouts.as_ref().filter(|_| !self.options.eval.is_empty());
        let Some(rollouts) = rollouts else { return Ok(None) };
        self.wait_on("the held-out prompts", "");
        // What cannot be measured at all is a mistake at the start, and bad luck later.
        let eval = self.block_on(rollouts.measure_all(&self.options.eval, step, self.label()?, step == 0))?;
        self.tell(Event::Evaluated { step, eval: eval.clone() });
        Ok(Some(eval))
    }

    /// What the run leaves behind.
    fn outcome(self) -> Result<Outcome> {
        let steps = metrics::read(&self.metrics_path())?;
        Ok(Outcome { steps, eval_start: self.record.eval_start.clone() })
    }

    /// The label of the newest version; none when nothing is published here.
    fn label(&self) -> Result<Option<Label>> {
        self.updates.as_ref().map_or(Ok(None), update::Updates::label)
    }

    /// The label of the newest version, once there is one.
    fn newest_label(&self) -> Result<Label> {
        self.label()?.ok_or(Error::Bug { what: "no version is published" })
    }
}
