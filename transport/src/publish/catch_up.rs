//! Keeps the baseline at the newest version: moved after each commit, and brought there again before the next
//! one.

use driftless_store::Error as StoreError;

use super::{Mode, Publisher, Standing};
use crate::error::{Error, Result};
use crate::replica::Replica;
use crate::run::Committed;

impl Publisher {
    /// Begins to move the baseline to a version just committed, which stands whether that succeeds or not.
    pub(super) fn move_baseline(
        &mut self,
        committed: &Committed,
        change: impl FnOnce(&mut Replica) -> Result<()> + Send + 'static,
    ) {
        if let Err(error) = self.baseline.begin(change) {
            let version = committed.manifest.version;
            tracing::warn!(%version, %error, "the baseline lags; the next publication moves it first");
            self.standing = Standing::Lagging(committed.identity());
        }
    }

    /// Brings the baseline to the newest version before another one is made. A full one can do without what
    /// the store has lost; the standing says so until it is committed.
    pub(super) fn catch_up(&mut self, mode: Mode) -> Result<()> {
        // An error of the last move is in the standing now.
        let _ = self.wait();
        match self.standing {
            Standing::InSync => Ok(()),
            Standing::Fenced(winner) => Err(self.lost(winner)),
            Standing::Lagging(ours) => {
                let newest = self.run.newest(&self.options.model)?;
                let have = self.baseline.replica()?.identity().map(|base| base.version);
                match newest.filter(|newest| Some(newest.manifest.version) > have) {
                    Some(newest) if newest.manifest.version >= ours.version && newest.identity() != ours => {
                        self.standing = Standing::Fenced(newest.identity());
                        return Err(self.lost(newest.identity()));
                    }
                    Some(_) => match self.restore_baseline() {
                        Err(error) if mode == Mode::Full && is_lost(&error) => return Ok(()),
                        restored => restored?,
                    },
                    // It is there, but perhaps not on the disk.
                    None => drop(self.baseline.replica()?.sync()?),
                }
                self.standing = Standing::InSync;
                Ok(())
            }
        }
    }

    /// Brings the baseline to the newest committed version, from wherever it is.
    pub(super) fn restore_baseline(&mut self) -> Result<()> {
        let model = self.options.model.as_str();
        let subject = || format!("the baseline `{}`", self.options.baseline_dir.display());
        let replica = self.baseline.replica()?;
        let applied = replica.applied().cloned();
        if let Some(applied) = &applied {
            self.run.check_id(subject(), applied.run_id)?;
            if applied.model != model {
                let (expected, found) = (model.to_owned(), applied.model.clone());
                return Err(Error::ForeignModel { subject: subject(), expected, found });
            }
        }
        let Some(mut newest) = self.run.newest(model)? else {
            return match applied {
                None => Ok(()),
                Some(applied) => Err(Error::NoSuchVersion {
                    run_id: applied.run_id,
                    model: applied.model,
                    version: applied.version,
                }),
            };
        };
        let reference = self.options.reference_dir.as_deref();
        loop {
            match replica.advance(&self.run, model, newest.manifest.version, reference) {
                // Versions were published and collected meanwhile: it is not the newest any more.
                Err(error @ Error::Collected { .. }) => match self.run.newest(model)? {
                    Some(now) if now.manifest.version > newest.manifest.version => newest = now,
                    _ => return Err(error),
                },
                advanced => {
                    // What a full version goes on from, whether or not the baseline gets there.
                    self.newest = Some(newest.identity());
                    self.chain_bytes = None;
                    advanced?;
                    replica.sync()?;
                    break;
                }
            }
        }
        if self.sweep_due {
            self.sweep(&newest);
        }
        Ok(())
    }
}

/// Whether what the store held of a version is gone or is something else.
pub(super) fn is_lost(error: &Error) -> bool {
    matches!(
        error,
        Error::Store(
            StoreError::NotFound { .. } | StoreError::DigestMismatch { .. } | StoreError::WrongSize { .. }
        ) | Error::Corrupt { .. }
    )
}
