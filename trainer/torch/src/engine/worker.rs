//! The thread that owns the model: takes commands in order, and generates in between.

use std::path::PathBuf;
use std::sync::mpsc::Receiver;

use driftless_transport::Checkpoint;
use tokio::sync::oneshot;

use super::checksum::{Checksums, checksums};
use super::dialect::Dialect;
use super::generator::Generator;
use super::sequence::{Finish, Job, Sequence};
use crate::error::Error;

/// Where the answer of a command goes.
pub(super) type Answer<T> = oneshot::Sender<T>;

/// What the HTTP side asks of the generating thread. Commands are carried out in order, between two passes.
pub(super) enum Command {
    /// Queue a request.
    Generate(Job),
    /// Stop stepping; with `retract`, send running requests back to the queue.
    Pause { retract: bool, done: Answer<()> },
    /// Step again.
    Continue { done: Answer<()> },
    /// End requests whose id starts with `prefix` (all, if `None`); with `now`, even while paused.
    Abort { prefix: Option<String>, now: bool, done: Answer<()> },
    /// Whether the cache could be flushed.
    Flush { done: Answer<bool> },
    /// Load a checkpoint.
    Update(Update, Answer<Updated>),
    /// Rename the weights.
    SetVersion { version: String, done: Answer<()> },
    /// Open an update session; false if one is open.
    Begin { done: Answer<bool> },
    /// Close it; false if none is open.
    End { done: Answer<bool> },
    /// Checksums of the live weights, without tensors whose name contains one of `skip`.
    Check { skip: Vec<String>, done: Answer<Result<Checksums, Error>> },
    /// How busy the engine is.
    Load { done: Answer<Load> },
    /// Stop the thread.
    Stop,
}

/// A checkpoint to load.
pub(super) struct Update {
    pub(super) path: PathBuf,
    pub(super) version: Option<String>,
    pub(super) flush: bool,
}

/// How an update ended.
#[derive(Debug, PartialEq)]
pub(super) enum Updated {
    /// The new weights serve.
    Loaded,
    /// The new weights serve, but requests hold cache of the old ones although a flush was asked for.
    NotFlushed,
    /// Refused before anything was touched, because SGLang of this dialect would not survive it.
    WouldEnd,
    /// The checkpoint does not fit or is damaged; the old weights serve.
    Refused(String),
}

/// Counts for `/v1/loads`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) running: usize,
    pub(super) waiting: usize,
    pub(super) used_tokens: usize,
}

/// State of the generating thread.
pub(super) struct Worker {
    generator: Generator,
    commands: Receiver<Command>,
    dialect: Dialect,
    paused: bool,
    in_session: bool,
    /// Seed of the next request that brings none.
    next_seed: i64,
    /// Why the weights cannot be trusted, after a load that failed half-way.
    torn: Option<String>,
}

impl Worker {
    pub(super) fn new(
        generator: Generator,
        commands: Receiver<Command>,
        dialect: Dialect,
        seed: i64,
    ) -> Self {
        Worker { generator, commands, dialect, paused: false, in_session: false, next_seed: seed, torn: None }
    }

    /// Works until told to stop, or until nobody can give commands any more.
    pub(super) fn run(mut self) {
        tch::no_grad(|| {
            while self.obey_pending() {
                if let Err(error) = self.generator.step() {
                    tracing::error!(error = %chain(&error), "generation failed");
                    self.generator.fail_all(&chain(&error));
                }
            }
        });
        self.generator.fail_all("the engine is shutting down");
    }

    /// Carries out all pending commands; waits for one while there is nothing to generate. False to stop.
    fn obey_pending(&mut self) -> bool {
        loop {
            let idle = self.paused || !self.generator.has_work();
            let command = match idle {
                true => self.commands.recv().ok(),
                false => self.commands.try_recv().ok(),
            };
            match command {
                Some(Command::Stop) => return false,
                Some(command) => self.obey(command),
                None => return !idle,
            }
        }
    }

    fn obey(&mut self, command: Command) {
        // A client that gave up waiting for its answer is no error.
        match command {
            Command::Generate(job) => self.submit(job),
            Command::Pause { retract, done } => {
                self.paused = true;
                if retract {
                    self.generator.drop_aborted();
                    self.generator.retract();
                }
                let _gone = done.send(());
            }
            Command::Continue { done } => {
                self.paused = false;
                let _gone = done.send(());
            }
            Command::Abort { prefix, now, done } => {
                self.generator.abort(|rid| prefix.as_ref().is_none_or(|prefix| rid.starts_with(prefix)));
                if now || !self.paused {
                    self.generator.drop_aborted();
                }
                let _gone = done.send(());
            }
            Command::Flush { done } => {
                let _gone = done.send(self.can_flush());
            }
            Command::Update(update, done) => {
                let _gone = done.send(self.update(&update));
            }
            Command::SetVersion { version, done } => {
                self.generator.set_version(&version);
                let _gone = done.send(());
            }
            Command::Begin { done } => {
                let _gone = done.send(!std::mem::replace(&mut self.in_session, true));
            }
            Command::End { done } => {
                let _gone = done.send(std::mem::replace(&mut self.in_session, false));
            }
            Command::Check { skip, done } => {
                let _gone = done.send(checksums(&self.generator.model, &skip));
            }
            Command::Load { done } => {
                let _gone = done.send(Load {
                    running: self.generator.running.len(),
                    waiting: self.generator.waiting.len(),
                    used_tokens: self.generator.used_tokens(),
                });
            }
            Command::Stop => {}
        }
    }

    fn submit(&mut self, job: Job) {
        let seed = self.next_seed;
        self.next_seed = seed.wrapping_add(1);
        let sequence = Sequence::new(job, seed);
        match &self.torn {
            Some(reason) => sequence.finish(Finish::Failed(reason.clone()), &self.generator.version),
            None if sequence.sampling.max_new_tokens == 0 => {
                sequence.finish(Finish::Length, &self.generator.version);
            }
            None => self.generator.waiting.push_back(sequence),
        }
    }

    /// Running requests always hold cache; waiting ones count unless the dialect ignores them while paused.
    fn can_flush(&mut self) -> bool {
        if !self.paused {
            self.generator.drop_aborted();
        }
        let waiting_counts = !(self.paused && self.dialect.flush_ignores_waiting());
        self.generator.running.is_empty() && (self.generator.waiting.is_empty() || !waiting_counts)
    }

    fn update(&mut self, update: &Update) -> Updated {
        let flushable = self.can_flush();
        if update.flush && !flushable && !self.dialect.survives_refused_flush() {
            return Updated::WouldEnd;
        }
        if let Err(error) = self.load(update) {
            tracing::error!(path = %update.path.display(), error = %chain(&error), "update refused");
            return Updated::Refused(chain(&error));
        }
        if let Some(version) = &update.version {
            self.generator.set_version(version);
        }
        match update.flush && !flushable {
            true => Updated::NotFlushed,
            false => Updated::Loaded,
        }
    }

    fn load(&mut self, update: &Update) -> Result<(), Error> {
        let weights = Checkpoint::open(&update.path)?;
        let loaded = self.generator.model.load_from(&weights);
        match &loaded {
            // Everything that can be wrong with a checkpoint is found before the first weight is written;
            // what is left is libtorch failing between two weights.
            Err(Error::Torch(error)) => self.torn = Some(format!("weights are half loaded: {error}")),
            Err(_) => {}
            Ok(()) => self.torn = None,
        }
        loaded
    }
}

/// An error with its causes, for a reply or a log line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
