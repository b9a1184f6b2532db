//! The publisher's copy of the newest version. A thread moves it while the trainer goes on.

use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use crate::error::{Error, Result};
use crate::replica::Replica;

/// A replica that one move at a time is made on, on a thread of its own.
#[derive(Debug)]
pub(super) struct Baseline {
    dir: PathBuf,
    state: Held,
}

#[derive(Debug)]
enum Held {
    Here(Box<Replica>),
    Moving(JoinHandle<(Box<Replica>, Result<()>)>),
    /// The thread that had it is gone; its journal tells the next one what to do.
    Gone,
}

impl Baseline {
    /// Opens the replica in `dir`; one that is damaged is to be built anew from the store.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        Ok(Self { dir: dir.to_path_buf(), state: Held::Here(Box::new(Replica::open_or_quarantine(dir)?)) })
    }

    /// Begins a move. Every later call waits until it is durable: the base of the next delta must not turn
    /// out to be another one while it is encoded.
    pub(super) fn begin(
        &mut self,
        change: impl FnOnce(&mut Replica) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.wait()?;
        let Held::Here(mut replica) = std::mem::replace(&mut self.state, Held::Gone) else { return Ok(()) };
        let spawned = thread::Builder::new().name("driftless-baseline".to_owned()).spawn(move || {
            let moved = change(&mut replica).and_then(|()| replica.sync().map(drop));
            (replica, moved)
        });
        self.state =
            Held::Moving(spawned.map_err(|source| Error::io("start a thread for", &self.dir, source))?);
        Ok(())
    }

    /// Waits until no move is under way, and returns how the last one ended. After an error the replica is as
    /// the move left it: at a version it had before.
    pub(super) fn wait(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, Held::Gone) {
            Held::Here(replica) => self.state = Held::Here(replica),
            Held::Moving(thread) => {
                let (replica, moved) =
                    thread.join().map_err(|_| Error::Internal { what: "moving the baseline" })?;
                self.state = Held::Here(replica);
                return moved;
            }
            Held::Gone => self.state = Held::Here(Box::new(Replica::open_or_quarantine(&self.dir)?)),
        }
        Ok(())
    }

    /// Opens the replica anew, which reads its state again.
    pub(super) fn reopen(&mut self) -> Result<()> {
        self.wait()?;
        // First, because the directory belongs to one at a time.
        self.state = Held::Gone;
        self.wait()
    }

    /// The replica, at rest.
    pub(super) fn replica(&mut self) -> Result<&mut Replica> {
        self.wait()?;
        match &mut self.state {
            Held::Here(replica) => Ok(replica),
            Held::Moving(_) | Held::Gone => Err(Error::NothingApplied { path: self.dir.clone() }),
        }
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::warn!(dir = %self.dir.display(), %error, "the baseline lags; resuming the run moves it");
        }
    }
}
