//! One thread per engine, so that a slow engine costs only its own deadline.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use driftless_store::BoxError;

use crate::activate::{Activate, Activated, Limit, Target};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::Manifest;

/// How often a limit is checked while an engine is waited for: it may become shorter.
const TICK: Duration = Duration::from_millis(50);

/// The version that an engine is to have, and how long it may take to answer.
#[derive(Clone)]
pub(super) struct Order {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) manifest: Arc<Manifest>,
    pub(super) limit: Limit,
}

impl Order {
    fn given<T>(&self, to: impl FnOnce(&Target<'_>) -> T) -> T {
        let Self { checkpoint, manifest, limit } = self;
        let (checkpoint, label) = (&**checkpoint, manifest.label());
        to(&Target { checkpoint, weights: checkpoint, label: &label, manifest, limit })
    }
}

/// What an engine is asked.
pub(super) enum Job {
    Serving,
    Activate(Order),
    /// A sample of this number.
    Sample(Order, u64),
}

/// What it answered.
pub(super) enum Answer {
    Serving(Option<String>),
    Activated(Activated),
    Sampled(Option<String>),
}

struct Reply {
    action: &'static str,
    answer: Result<Answer, BoxError>,
    paused: bool,
}

/// An engine and its thread. There is at most one job under way; an answer that came after its deadline is
/// thrown away.
pub(super) struct Worker {
    name: String,
    jobs: SyncSender<Job>,
    replies: Receiver<Reply>,
    /// Since when the engine owes an answer.
    owed: Option<Instant>,
    /// Whether it was paused at the end of its last job.
    paused: bool,
    waits: bool,
}

impl Worker {
    pub(super) fn start(mut engine: Box<dyn Activate>) -> Result<Self> {
        let (name, waits) = (engine.name(), engine.waits());
        let (jobs, inbox) = mpsc::sync_channel::<Job>(1);
        let (outbox, replies) = mpsc::sync_channel::<Reply>(1);
        let serve = move || {
            for job in inbox {
                if outbox.send(perform(engine.as_mut(), job)).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new().name(format!("engine {name}")).spawn(serve).map_err(|source| {
            Error::Engine { engine: name.clone(), action: "start", source: source.into() }
        })?;
        Ok(Self { name, jobs, replies, owed: None, paused: false, waits })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it waits for the bytes of a checkpoint by itself.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Whether the engine was paused at the end of its last job, by the follower or by others.
    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether the engine is still inside an earlier job; takes and drops an answer that came late.
    pub(super) fn is_busy(&mut self) -> bool {
        if self.owed.is_some() {
            match self.replies.try_recv() {
                Err(TryRecvError::Empty) => return true,
                Ok(late) => self.paused = late.paused,
                Err(TryRecvError::Disconnected) => {}
            }
            self.owed = None;
        }
        false
    }

    /// Hands over a job.
    pub(super) fn ask(&mut self, action: &'static str, job: Job) -> Result<()> {
        if self.is_busy() {
            let waited = self.owed.map_or(Duration::ZERO, |since| since.elapsed());
            return Err(Error::EngineTimeout { engine: self.name.clone(), action, waited });
        }
        self.jobs.try_send(job).map_err(|_| self.gone(action))?;
        self.owed = Some(Instant::now());
        Ok(())
    }

    /// Waits for the answer up to `limit`, and then for as long as the engine's driver may take to `leave`
    /// its job.
    pub(super) fn wait(&mut self, action: &'static str, limit: &Limit, leave: Duration) -> Result<Answer> {
        let mut over = None;
        loop {
            let left = limit.left();
            let tick = if left.is_zero() { TICK.min(leave) } else { TICK.min(left) };
            match self.replies.recv_timeout(tick) {
                Ok(Reply { action, answer, paused }) => {
                    (self.owed, self.paused) = (None, paused);
                    return answer.map_err(|source| Error::Engine {
                        engine: self.name.clone(),
                        action,
                        source,
                    });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.gone(action)),
                Err(RecvTimeoutError::Timeout) if !limit.left().is_zero() => {}
                Err(RecvTimeoutError::Timeout) => {
                    if over.get_or_insert_with(Instant::now).elapsed() >= leave {
                        let waited = self.owed.map_or(Duration::ZERO, |since| since.elapsed());
                        return Err(Error::EngineTimeout { engine: self.name.clone(), action, waited });
                    }
                }
            }
        }
    }

    fn gone(&self, action: &'static str) -> Error {
        Error::Engine {
            engine: self.name.clone(),
            action,
            source: "its driver panicked; restart the follower".into(),
        }
    }
}

fn perform(engine: &mut dyn Activate, job: Job) -> Reply {
    let (action, answer) = match job {
        Job::Serving => (super::engines::POLL, engine.serving().map(Answer::Serving)),
        Job::Activate(order) => {
            ("activate", order.given(|target| engine.activate(target).map(Answer::Activated)))
        }
        Job::Sample(order, turn) => {
            (super::engines::SAMPLE, order.given(|target| engine.sample(target, turn).map(Answer::Sampled)))
        }
    };
    Reply { action, answer, paused: engine.is_paused() }
}
