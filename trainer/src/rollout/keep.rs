//! Makes answers durable as they end. Those that end while others are synced share the next sync.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::Rollouts;
use super::record::{Answered, append_answers};
use crate::error::{Error, Result};

/// Answers that wait to be written, and that share a sync.
const TOGETHER_MAX: usize = 256;

/// Hands answers to the task that writes them.
#[derive(Clone)]
pub(super) struct Keeper(mpsc::Sender<Ended>);

struct Ended {
    answered: Arc<Answered>,
    durable: oneshot::Sender<()>,
}

impl Keeper {
    /// Starts the task, which ends with the last of these handles, or with what the log says.
    pub(super) fn start(rollouts: Arc<Rollouts>) -> (Self, JoinHandle<Result<()>>) {
        let (ended, queue) = mpsc::channel(TOGETHER_MAX);
        (Keeper(ended), tokio::spawn(keep(rollouts, queue)))
    }

    /// Returns once an answer is durable.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the task has ended.
    pub(super) async fn keep(&self, answered: Arc<Answered>) -> Result<()> {
        let (durable, kept) = oneshot::channel();
        self.0.send(Ended { answered, durable }).await.map_err(|_| Error::Cancelled)?;
        kept.await.map_err(|_| Error::Cancelled)
    }
}

async fn keep(rollouts: Arc<Rollouts>, mut queue: mpsc::Receiver<Ended>) -> Result<()> {
    let mut together = Vec::new();
    while queue.recv_many(&mut together, TOGETHER_MAX).await > 0 {
        let answers: Vec<_> = together.iter().map(|ended: &Ended| ended.answered.clone()).collect();
        tokio::task::block_in_place(|| append_answers(&rollouts.log, &answers))?;
        // A group that was given up meanwhile does not wait for it any more.
        for ended in together.drain(..) {
            let _ = ended.durable.send(());
        }
    }
    Ok(())
}
