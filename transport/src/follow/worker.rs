//! One thread per engine, so that a slow engine costs its deadline and not the follower.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use crate::activate::{Activate, Activated, Target};
use crate::checkpoint::Checkpoint;
use crate::error::{BoxError, Error, Result};
use crate::manifest::Manifest;

/// What an engine is asked.
pub(super) enum Job {
    Serving,
    Activate { checkpoint: Arc<Checkpoint>, manifest: Arc<Manifest> },
}

/// What it answered.
pub(super) enum Answer {
    Serving(Option<String>),
    Activated(Activated),
}

type Reply = (&'static str, Result<Answer, BoxError>);

/// An engine and its thread. There is at most one job under way; an answer that came after its deadline is
/// thrown away.
pub(super) struct Worker {
    name: String,
    jobs: SyncSender<Job>,
    replies: Receiver<Reply>,
    /// Since when the engine owes an answer.
    owed: Option<Instant>,
}

impl Worker {
    pub(super) fn start(mut engine: Box<dyn Activate>) -> Result<Self> {
        let name = engine.name();
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
        Ok(Self { name, jobs, replies, owed: None })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the engine is still inside an earlier job; takes and drops an answer that came late.
    pub(super) fn is_busy(&mut self) -> bool {
        if self.owed.is_some() && !matches!(self.replies.try_recv(), Err(TryRecvError::Empty)) {
            self.owed = None;
        }
        self.owed.is_some()
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

    /// Waits for the answer until `deadline`.
    pub(super) fn wait(&mut self, action: &'static str, deadline: Instant) -> Result<Answer> {
        let waited = self.owed.map_or(Duration::ZERO, |since| since.elapsed());
        match self.replies.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((action, answer)) => {
                self.owed = None;
                answer.map_err(|source| Error::Engine { engine: self.name.clone(), action, source })
            }
            Err(RecvTimeoutError::Timeout) => {
                let waited = self.owed.map_or(waited, |since| since.elapsed());
                Err(Error::EngineTimeout { engine: self.name.clone(), action, waited })
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.gone(action)),
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
    match job {
        Job::Serving => ("report its version", engine.serving().map(Answer::Serving)),
        Job::Activate { checkpoint, manifest } => {
            let label = manifest.label();
            let target = Target { checkpoint: &checkpoint, label: &label, manifest: &manifest };
            ("activate", engine.activate(&target).map(Answer::Activated))
        }
    }
}
