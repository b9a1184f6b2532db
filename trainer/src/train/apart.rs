//! The halves of a run as processes of their own: what each does in the other's place.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use driftless_bridge::Label;
use driftless_buffer::{Kind, Log, PromptState, Reader, Record};
use driftless_transport::{Run, RunId};

use super::halves::{Did, Generated, LOOK_EVERY, Newest, Rolled, ToRollouts, ToTrainer, Trained};
use super::record::RunRecord;
use super::session::{LOG, Session, open_run};
use super::take::{ALL_TOO_OLD, generated};
use super::update::Updates;
use super::{LOOK_AFTER, TrainOptions, update};
use crate::error::{Error, Result};
use crate::events::{Event, Fact, Observer};
use crate::learner::{Batch, Learner, Progress, Stepped, Weights, Workspace};
use crate::metrics::StepMetrics;
use crate::options::Part;
use crate::rollout::{self, PromptNote, open_log};

/// The log of the run.
#[derive(Debug)]
pub(super) enum RunLog {
    /// This process's own.
    Own(Log),
    /// That of the rollouts beside this process.
    Beside(Reader),
}

impl RunLog {
    pub(super) fn reader(&self) -> Reader {
        match self {
            RunLog::Own(log) => log.reader(),
            RunLog::Beside(reader) => reader.clone(),
        }
    }

    /// The log of the process that generates.
    pub(super) fn own(&self) -> Result<&Log> {
        match self {
            RunLog::Own(log) => Ok(log),
            RunLog::Beside(_) => Err(Error::Bug { what: "the half that trains writes rollouts" }),
        }
    }
}

/// Stands in for the learner in the half that generates.
pub(super) struct Elsewhere;

const ELSEWHERE: Error = Error::Bug { what: "the half that generates learns" };

impl Learner for Elsewhere {
    fn describe(&self) -> String {
        "the trainer".to_owned()
    }

    fn load(&mut self, _: &Workspace) -> Result<Option<Progress>> {
        Err(ELSEWHERE)
    }

    fn log_probs(&mut self, _: &Batch<'_>) -> Result<Vec<Vec<f32>>> {
        Err(ELSEWHERE)
    }

    fn step(&mut self, _: &Batch<'_>) -> Result<Stepped> {
        Err(ELSEWHERE)
    }

    fn snapshot(&mut self, _: u64) -> Result<Weights> {
        Err(ELSEWHERE)
    }

    fn save(&mut self, _: &Progress) -> Result<()> {
        Err(ELSEWHERE)
    }

    fn save_hf(&mut self, _: &Path) -> Result<()> {
        Err(ELSEWHERE)
    }
}

/// A run, its log, and the way to its other half, where that is another process.
pub(super) struct Halves {
    pub(super) record: RunRecord,
    pub(super) updates: Option<Updates>,
    pub(super) run_id: RunId,
    pub(super) log: RunLog,
    pub(super) to_rollouts: Option<ToRollouts>,
    pub(super) to_trainer: Option<ToTrainer>,
}

impl Halves {
    pub(super) fn open(options: &TrainOptions, learner_publishes: bool, observer: &Observer) -> Result<Self> {
        let is = |part| options.part == part;
        let to_rollouts = is(Part::Trainer).then(|| to_rollouts(options, observer)).transpose()?;
        let to_trainer = is(Part::Rollouts).then(|| ToTrainer::open(options)).transpose()?;
        let (record, updates) = match &to_trainer {
            Some(trainer) => (run_of(options, observer, trainer)?, None),
            None => open_run(options, learner_publishes)?,
        };
        let run_id = record.run_id.unwrap_or_else(RunId::random);
        // It is locked before anything of the run is changed.
        let log = match &to_rollouts {
            Some(rollouts) => log_of(options, observer, run_id, rollouts)?,
            None => RunLog::Own(open_log(&options.save.join(LOG), &options.hf_checkpoint, run_id)?),
        };
        Ok(Halves { record, updates, run_id, log, to_rollouts, to_trainer })
    }
}

/// Looks until there is something, for as long as an update may take, and tells what is waited for.
fn wait_for<T>(
    options: &TrainOptions,
    observer: &Observer,
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let begin = Instant::now();
    let waiting = Event::Waiting { what: what.to_owned(), on: options.save.display().to_string() };
    observer(Fact::new(SystemTime::now(), waiting));
    loop {
        let found = look()?;
        if found.is_some() || begin.elapsed() >= options.update_deadline {
            return Ok(found);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Keeps the trainer's file, once rollouts with the same settings run.
fn to_rollouts(options: &TrainOptions, observer: &Observer) -> Result<ToRollouts> {
    let mut rollouts = ToRollouts::open(options)?;
    let what = "the rollouts of this run, a process of their own";
    match wait_for(options, observer, what, || Ok(rollouts.have_begun()?.then_some(())))? {
        Some(()) => Ok(rollouts),
        None => Err(rollouts.gone(options.update_deadline)),
    }
}

/// What the trainer says the run is, once it does.
fn run_of(options: &TrainOptions, observer: &Observer, trainer: &ToTrainer) -> Result<RunRecord> {
    let look = || Ok(RunRecord::read(&options.save)?.filter(|record| record.run_id.is_some()));
    let record = wait_for(options, observer, "the trainer of this run, a process of its own", look)?;
    let record = record.ok_or_else(|| trainer.gone(options.update_deadline))?;
    if record.run == options.run {
        return Ok(record);
    }
    let (path, expected) = (options.save.clone(), options.run.clone());
    Err(Error::OtherRun { path, expected, found: record.run })
}

/// The log of the run, once the rollouts have begun it.
fn log_of(
    options: &TrainOptions,
    observer: &Observer,
    run_id: RunId,
    rollouts: &ToRollouts,
) -> Result<RunLog> {
    let dir = options.save.join(LOG);
    let look = || match Reader::open(&dir) {
        Ok(reader) => {
            // It has none before its first record.
            let is_ours = reader.identity().is_none_or(|identity| identity.run_id == *run_id.as_bytes());
            Ok(is_ours.then_some(reader))
        }
        Err(driftless_buffer::Error::NoLog { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    };
    let log = wait_for(options, observer, "the log of the rollouts", look)?;
    log.map(RunLog::Beside).ok_or_else(|| rollouts.gone(options.update_deadline))
}

/// The half that trains.
impl Session<'_> {
    /// Tells the rollouts how far the learner is, and of the newest version, if they are a process of their own.
    pub(super) fn tell_rollouts(&mut self) -> Result<()> {
        let newest = self.updates.as_mut().map_or(Ok(None), update::Updates::newest)?;
        let newest = newest.map(|(version, step)| Newest { version: version.0, step });
        let (steps, saved) = (self.step, self.saved);
        let Some(rollouts) = &mut self.to_rollouts else { return Ok(()) };
        rollouts.tell(|line| {
            (line.steps, line.saved, line.newest, line.publishing) = (steps, saved, newest, false);
        })
    }

    /// Says that a version is about to be published, to what draws tokens.
    pub(super) fn tell_publishing(&mut self) -> Result<()> {
        if let Some(fleet) = &self.fleet {
            // A learner may publish by itself from here on.
            fleet.publishing();
        }
        let Some(rollouts) = &mut self.to_rollouts else { return Ok(()) };
        rollouts.tell(|line| line.publishing = true)?;
        rollouts.wait_seen(self.options.update_deadline)
    }

    /// Leaves out what an earlier process of this half has called too old, and the log does not yet.
    pub(super) fn leave_out_again(&self) -> Result<()> {
        let Some(rollouts) = &self.to_rollouts else { return Ok(()) };
        let log = self.log.reader();
        for group in &rollouts.too_old {
            let prompt = log.prompt(*group)?;
            if prompt.is_some_and(|prompt| PromptNote::of(&prompt).dropped.is_none()) {
                self.queue()?.leave_out(*group);
            }
        }
        Ok(())
    }

    /// The numbers of the groups of `step`, once the rollouts beside this process have finished them.
    ///
    /// # Errors
    /// [`Error::NoHalf`] if nothing at all comes for as long as a generation and an update may take.
    pub(super) fn wait_for_rollouts(&mut self, step: u64) -> Result<Vec<u64>> {
        let deadline = self.options.generate_deadline + self.options.update_deadline;
        let (queue, mut quiet) = (self.queue()?.clone(), Instant::now());
        loop {
            if self.read_log()? {
                quiet = Instant::now();
            }
            if let Some(groups) = queue.batch(step) {
                return Ok(groups);
            }
            let rollouts = self.to_rollouts.as_ref().ok_or(Error::Bug { what: "no rollouts" })?;
            if quiet.elapsed() >= deadline {
                return Err(rollouts.gone(deadline));
            }
            let on = if rollouts.is_up()? { "" } else { "their process has ended; start it again" };
            self.wait_on("groups of the rollouts", on);
            self.log.reader().wait(self.read, LOOK_AFTER)?;
        }
    }

    /// Takes note of the groups that were finished since the last look, and says whether the log has grown.
    fn read_log(&mut self) -> Result<bool> {
        let log = self.log.reader();
        log.refresh()?;
        let (queue, mut records) = (self.queue()?.clone(), log.iter(self.read));
        for record in records.by_ref() {
            let record = record?;
            if record.kind() == Kind::Prompt && record.prompt_state() == PromptState::Done {
                self.note(&log, &queue, &record);
            }
        }
        let grown = records.position() > self.read;
        self.read = records.position();
        Ok(grown)
    }

    fn note(&self, log: &Reader, queue: &rollout::Queue, prompt: &Record) {
        let (group, note) = (prompt.scalars().sample_id, PromptNote::of(prompt));
        if note.dropped.as_deref() == Some(ALL_TOO_OLD) {
            // This half has said so.
            return;
        }
        let is_whole = || rollout::group(log, group, self.options.n_samples_per_prompt).is_some();
        if note.dropped.is_some() || is_whole() {
            queue.logged(group, &note);
        }
    }
}

/// The half that generates.
impl Session<'_> {
    /// Generates until the trainer has done all steps. It may be away meanwhile.
    pub(super) fn serve(&mut self) -> Result<()> {
        let mut trainer = self.to_trainer.take().ok_or(Error::Bug { what: "no trainer's file" })?;
        let before = trainer.look()?;
        (self.step, self.saved) = (trainer.last.steps, trainer.last.saved);
        self.queue = Some(Arc::new(self.open_queue(before.taken.clone())));
        // First: what engines do is told of behind it.
        self.tell(Event::Rollouts { step: self.step, of: self.options.num_rollout });
        self.attach()?;
        self.follow(&mut trainer, Did { taken: BTreeMap::new(), ..before })?;
        let mut looked = Instant::now();
        while self.step < self.options.num_rollout {
            self.go_on_generating()?;
            if looked.elapsed() >= LOOK_AFTER {
                looked = Instant::now();
                if !trainer.is_up()? {
                    self.wait_on("the trainer", "its process has ended; what it may still take is generated");
                }
            }
            let did = trainer.look()?;
            self.follow(&mut trainer, did)?;
            self.look_at_coming()?;
            self.converged.clear();
        }
        Ok(())
    }

    /// Has groups generated for a moment, once there is a version.
    fn go_on_generating(&mut self) -> Result<()> {
        if let (None, Some(rollouts), Some(_)) = (&self.generation, &self.rollouts, &self.newest) {
            self.generation = Some(self.runtime.spawn(rollouts.clone().run()));
        }
        let ended = self.runtime.block_on(async {
            let generation = self.generation.as_mut();
            tokio::select! {
                Some(ended) = async { Some(generation?.await) } => Some(ended),
                () = tokio::time::sleep(LOOK_EVERY) => None,
            }
        });
        let Some(ended) = ended else { return Ok(()) };
        self.generation = None;
        rollout::finished(ended)?
    }

    /// Takes note of what the trainer did.
    fn follow(&mut self, trainer: &mut ToTrainer, did: Did) -> Result<()> {
        let queue = self.queue()?.clone();
        for (step, groups) in did.taken {
            let since = queue.take(step, groups, &[]);
            let known = StepMetrics { goodput: self.goodput()?, ..generated(step, &since) };
            trainer.tell(&Rolled::Generated(Generated::of(&known).into()))?;
        }
        for group in did.told.iter().flat_map(|line| &line.too_old) {
            let prompt = self.log.reader().prompt(*group)?;
            if prompt.is_some_and(|prompt| PromptNote::of(&prompt).dropped.is_none()) {
                rollout::leave_out(self.log.own()?, *group, ALL_TOO_OLD)?;
                queue.leave_out(*group);
            }
        }
        let Some(last) = did.told.back() else { return Ok(()) };
        self.hear_of(last)?;
        trainer.tell(&Rolled::Seen(last.number))
    }

    /// Takes note of how far the trainer is.
    fn hear_of(&mut self, last: &Trained) -> Result<()> {
        let (queue, fleet) = (self.queue()?.clone(), self.fleet()?.clone());
        if last.publishing {
            fleet.publishing();
        } else if let Some(newest) = last.newest {
            let label = Label::new(&self.place.run_id, newest.version)?;
            fleet.published(&label);
            if self.newest != last.newest {
                self.newest = last.newest;
                queue.published(newest.step, Some(label.clone()));
                self.come(newest.version, label);
            }
        }
        queue.trained(last.steps);
        self.step = last.steps;
        if last.saved > self.saved {
            self.saved = last.saved;
            self.trim()?;
        }
        Ok(())
    }

    /// What tells the newest version, whoever publishes it.
    pub(super) fn newest_in_store(&self) -> Result<Option<driftless_bridge::fleet::Newest>> {
        let run = match (&self.updates, self.options.part) {
            (Some(updates), _) => updates.run.clone(),
            (None, Part::Rollouts) => Run::open(self.options.store.clone(), &self.options.run)?,
            (None, _) => return Ok(None),
        };
        if let Some(run_id) = self.record.run_id {
            run.check_id(format_args!("the state in {}", self.options.save.display()), run_id)?;
        }
        Ok(Some(update::newest_in_store(run)))
    }
}
