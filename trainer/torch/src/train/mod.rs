//! The RL loop: generate, learn, save, publish, again.

mod learn;
mod options;
mod session;
mod update;

use std::sync::Arc;
use std::time::Instant;

use driftless_bridge::Label;
use driftless_transport::{Mode, Snapshot, Step, write_checkpoint};
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use driftless_trainer::Schedule;
use driftless_trainer::metrics::{self, EvalMetrics, PublicationMetrics, StepMetrics};
use driftless_trainer::rollout::{Dropped, EvalSet};
use session::Session;
use update::milliseconds;

pub use options::{Debug, Estimator, Evaluation, LearnOptions, TrainOptions, UpdateWeightMode};

/// Name of the policy among the models of a run.
const MODEL: &str = "policy";

/// Tensor data per file of a checkpoint that is written for others.
const SHARD_BYTES_MAX: u64 = 5 << 30;

/// What the loop is doing, for whoever watches.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The run begins, or goes on, at this step of so many.
    Begin {
        /// Steps done before.
        step: u64,
        /// Steps of the whole run.
        of: u64,
    },
    /// Something slow is being waited for.
    Waiting {
        /// What.
        what: &'a str,
    },
    /// Samples of a rollout have arrived and are durable.
    Generating {
        /// The rollout.
        rollout: u64,
        /// Samples in the log.
        done: u64,
        /// Samples of the rollout.
        total: u64,
    },
    /// A version is in the store; the engines are waited for next.
    Published {
        /// Its number.
        version: u64,
    },
    /// Success on the held-out problems was measured.
    Evaluated {
        /// After this many steps.
        step: u64,
        /// The rates.
        eval: &'a EvalMetrics,
    },
    /// A step is complete: learned, saved, published.
    Step(&'a StepMetrics),
}

/// Is told what the loop is doing; called from several threads.
pub type Observer = Arc<dyn Fn(Event<'_>) + Send + Sync>;

/// A finished run.
#[derive(Debug)]
pub struct Outcome {
    /// Every step of the run, also those before an interruption.
    pub steps: Vec<StepMetrics>,
    /// Success before the first step.
    pub eval_start: Option<EvalMetrics>,
}

/// Runs the loop to its end, or continues an interrupted run.
///
/// A step ends in this order: rollouts durable in the log, optimiser step, training checkpoint, publication. Whatever a
/// crash cuts off is done again or, where it is already there, taken as it is.
///
/// # Errors
/// Whatever the engines, the store, the file system or libtorch answer; the state on disk is then intact, and the same
/// call continues the run.
pub fn train(options: &TrainOptions, observer: Observer) -> Result<Outcome> {
    let mut session = Session::open(options, observer)?;
    let schedule = Schedule { mode: options.mode, rollouts: options.num_rollout };
    session.tell(Event::Begin { step: session.step, of: schedule.rollouts });
    session.catch_up()?;
    let mut ahead: Option<InFlight> = None;
    for rollout in session.step..schedule.rollouts {
        let generated = match ahead.take() {
            Some(in_flight) => in_flight,
            None => session.start(rollout)?,
        };
        let (generate_ms, dropped) = session.finish(generated)?;
        if let Some(next) = schedule.ahead(rollout) {
            ahead = Some(session.start(next)?);
        }
        let mut step = session.learn(rollout)?;
        step.generate_ms = generate_ms;
        (step.groups_failed, step.groups_filtered) = (dropped.failed, dropped.filtered);
        session.save(&step)?;
        session.complete(step)?;
    }
    session.end()
}

/// A rollout that is being generated.
struct InFlight {
    task: JoinHandle<Result<Dropped>>,
    begin: Instant,
}

impl Session<'_> {
    fn tell(&self, event: Event<'_>) {
        (self.observer)(event);
    }

    /// Brings the fleet to the policy as it is, and completes the step that a crash cut off.
    fn catch_up(&mut self) -> Result<()> {
        if let Some(updates) = &mut self.updates
            && updates.newest()?.is_none()
        {
            let published = updates.publish_reference(&self.options.hf_checkpoint)?;
            self.tell(Event::Waiting { what: "the engines to come to version 0" });
            self.converge(&published)?;
        }
        if let Some(unfinished) = self.unfinished.take() {
            self.complete(unfinished)?;
        } else if let Some(label) = self.label()? {
            self.tell(Event::Waiting { what: "the engines to come to the newest version" });
            let deadline = self.options.update_deadline;
            self.block_on(self.fleet()?.wait_for_label(&label, deadline))?;
        }
        if self.step == 0 && self.record.eval_start.is_none() {
            self.record.eval_start = self.evaluate(0)?;
            self.record.write(&self.options.save)?;
        }
        Ok(())
    }

    /// Begins to generate a rollout with the weights that are newest now, or newer ones.
    fn start(&self, rollout: u64) -> Result<InFlight> {
        let begin = Instant::now();
        let task = match &self.rollouts {
            Some(rollouts) => {
                let generated = rollouts.clone().generate(rollout, self.label()?);
                self.runtime.spawn(async { Ok(generated.await?) })
            }
            None => self.runtime.spawn(std::future::ready(Ok(Dropped::default()))),
        };
        Ok(InFlight { task, begin })
    }

    /// Waits until a rollout is in the log; returns how long it took, in milliseconds, and what was left out of it.
    fn finish(&self, in_flight: InFlight) -> Result<(f64, Dropped)> {
        match self.runtime.block_on(in_flight.task) {
            Ok(outcome) => outcome.map(|dropped| (milliseconds(in_flight.begin.elapsed()), dropped)),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(Error::Cancelled),
            },
        }
    }

    /// One optimiser step on a rollout from the log.
    fn learn(&mut self, rollout: u64) -> Result<StepMetrics> {
        let groups = self.groups(rollout)?;
        if self.options.debug == Debug::RolloutOnly {
            self.step = rollout + 1;
            return Ok(StepMetrics { rollout_id: rollout, ..learn::describe(&groups) });
        }
        let begin = Instant::now();
        let (policy, updates) = (self.policy.as_mut().ok_or(Error::Cancelled)?, &mut self.updates);
        let staleness = |version| match updates {
            Some(updates) => Ok(rollout.saturating_sub(updates.step_of(version)?)),
            None => Ok(0),
        };
        let learned =
            learn::learn(policy, &groups, &self.options.learn, self.options.sampling.temperature, staleness)?;
        fail::fail_point!("train.step");
        self.step = rollout + 1;
        Ok(StepMetrics { rollout_id: rollout, train_ms: milliseconds(begin.elapsed()), ..learned })
    }

    /// Publishes if it is time, measures if it is time, and records the step.
    fn complete(&mut self, mut step: StepMetrics) -> Result<()> {
        let last = self.step == self.options.num_rollout;
        if last || self.step.is_multiple_of(self.options.update_weights_interval) {
            step.publication = self.publish()?;
        }
        let interval = self.options.eval_interval;
        if last || (interval > 0 && self.step.is_multiple_of(interval)) {
            step.eval = self.evaluate(self.step)?;
        }
        self.metrics.append(&step)?;
        self.tell(Event::Step(&step));
        Ok(())
    }

    /// Publishes the policy, unless the newest version is this step's already, and waits for the fleet.
    fn publish(&mut self) -> Result<Option<PublicationMetrics>> {
        let Some(updates) = &mut self.updates else {
            return Ok(None);
        };
        if let Some((version, step)) = updates.newest()?
            && step == self.step
        {
            // A crash came between the commit and the record of it.
            let recorded = updates.recorded(version)?;
            let label = self.label()?.ok_or(Error::Cancelled)?;
            self.block_on(self.fleet()?.wait_for_label(&label, self.options.update_deadline))?;
            return Ok(Some(recorded));
        }
        let snapshot = self.snapshot()?;
        let mode = match self.options.update_weight_mode {
            UpdateWeightMode::Full => Mode::Full,
            UpdateWeightMode::Delta => Mode::Delta,
        };
        let step =
            Step { trainer_step: self.step, checkpoint: Some(self.options.save.display().to_string()) };
        let updates = self.updates.as_mut().ok_or(Error::Cancelled)?;
        let published = updates.publish(&snapshot, step, mode)?;
        let mut metrics = self.converge(&published)?;
        if self.options.check_weight_update_equal {
            let check = update::check_equal(self.fleet()?, &snapshot, &self.options.save);
            metrics.engines_checked = self.block_on(check)?;
        }
        Ok(Some(metrics))
    }

    /// What held-out prompts say of the newest weights.
    fn evaluate(&self, step: u64) -> Result<Option<EvalMetrics>> {
        let Some(rollouts) = &self.rollouts else {
            return Ok(None);
        };
        let Evaluation { held_out, sets } = &self.options.eval;
        if held_out.is_none() && sets.is_empty() {
            return Ok(None);
        }
        self.tell(Event::Waiting { what: "the held-out problems" });
        let measure = |set: &EvalSet| self.block_on(rollouts.clone().measure(set, self.label()?));
        let mut eval = EvalMetrics::default();
        if let Some([sampled, greedy]) = held_out {
            let (sampled, greedy) = (measure(sampled)?, measure(greedy)?);
            (eval.problems, eval.sampled, eval.greedy) = (sampled.prompts, sampled.reward, greedy.reward);
        }
        for set in sets {
            eval.sets.insert(set.name.clone(), measure(set)?);
        }
        self.tell(Event::Evaluated { step, eval: &eval });
        Ok(Some(eval))
    }

    /// Writes what the run leaves behind.
    fn end(self) -> Result<Outcome> {
        if let (Some(dir), Some(_)) = (&self.options.save_hf, &self.policy) {
            write_checkpoint(dir, &self.snapshot()? as &dyn Snapshot, SHARD_BYTES_MAX)?;
        }
        let steps = metrics::read(&self.metrics_path())?;
        Ok(Outcome { steps, eval_start: self.record.eval_start.clone() })
    }

    /// The label of the newest version; none when nothing is published here.
    fn label(&self) -> Result<Option<Label>> {
        self.updates.as_ref().map_or(Ok(None), update::Updates::label)
    }
}
