//! Answers become durable as they end, and their tokens before that as they come. Those that come while others are synced
//! share the next sync.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::pieces::Chunk;
use super::record::{Answered, Columns};
use super::{Rollouts, blocking};
use crate::error::{Error, Result};

/// Answers and pieces that wait to be written, and that share a sync.
const TOGETHER_MAX: usize = 256;

/// Hands answers to the task that writes them.
#[derive(Clone)]
pub(super) struct Keeper {
    items: mpsc::Sender<Item>,
    /// The run's id, in hex.
    run: Arc<str>,
}

enum Item {
    Piece(Chunk),
    Answer {
        answered: Arc<Answered>,
        durable: oneshot::Sender<()>,
    },
    /// Nothing, told once what came before it is durable.
    Mark(oneshot::Sender<()>),
}

impl Keeper {
    /// Starts the task, which ends with the last of these handles, or with what the log says.
    pub(super) fn start(rollouts: Arc<Rollouts>) -> (Self, JoinHandle<Result<()>>) {
        let (items, queue) = mpsc::channel(TOGETHER_MAX);
        let run = rollouts.log.identity().run_id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        (Keeper { items, run: run.into() }, tokio::spawn(keep(rollouts, queue)))
    }

    /// The run's id, in hex.
    pub(super) fn run(&self) -> &str {
        &self.run
    }

    /// Has a piece written, if there is room for it. It is in the log before the answer that it is a part of.
    pub(super) fn piece(&self, chunk: Chunk) -> bool {
        self.items.try_send(Item::Piece(chunk)).is_ok()
    }

    /// Returns once an answer is durable.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the task has ended.
    pub(super) async fn keep(&self, answered: Arc<Answered>) -> Result<()> {
        let (durable, kept) = oneshot::channel();
        self.items.send(Item::Answer { answered, durable }).await.map_err(|_| Error::Cancelled)?;
        kept.await.map_err(|_| Error::Cancelled)
    }

    /// Returns once all that was handed over before is durable.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the task has ended.
    pub(super) async fn settle(&self) -> Result<()> {
        let (durable, settled) = oneshot::channel();
        self.items.send(Item::Mark(durable)).await.map_err(|_| Error::Cancelled)?;
        settled.await.map_err(|_| Error::Cancelled)
    }
}

async fn keep(rollouts: Arc<Rollouts>, mut queue: mpsc::Receiver<Item>) -> Result<()> {
    let mut together = Vec::new();
    while queue.recv_many(&mut together, TOGETHER_MAX).await > 0 {
        blocking(|| append(&rollouts, &together))?;
        for item in together.drain(..) {
            if let Item::Answer { durable, .. } | Item::Mark(durable) = item {
                // A group that was given up meanwhile does not wait for it any more.
                let _ = durable.send(());
            }
        }
    }
    Ok(())
}

fn append(rollouts: &Rollouts, together: &[Item]) -> Result<()> {
    let columns = |item: &Item| match item {
        Item::Piece(chunk) => Columns::of_piece(chunk.replies()),
        Item::Answer { answered, .. } => Columns::of(answered),
        Item::Mark(_) => Columns::of_piece(&[]),
    };
    let columns: Vec<Columns> = together.iter().map(columns).collect();
    let extra: Vec<_> = columns.iter().map(Columns::beside).collect();
    let mut samples = Vec::new();
    for (item, extra) in together.iter().zip(&extra) {
        match item {
            Item::Piece(chunk) => samples.extend(extra.iter().map(|extra| chunk.sample(&extra[1..]))),
            Item::Answer { answered, .. } => samples.extend(answered.samples(extra)),
            Item::Mark(_) => {}
        }
    }
    if !samples.is_empty() {
        rollouts.log.append_all(&samples)?;
    }
    Ok(())
}
