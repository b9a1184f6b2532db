//! Finds a baseline that rotted under an unchanged date, and builds it anew from the store.
//!
//! The digest of the new bytes must equal the digest that follows from the baseline and the changes. Where it
//! does not, the baseline is at fault.

use driftless_store::{Error as StoreError, Key};

use super::encode::is_baseline_damage;
use super::{Publisher, Standing};
use crate::error::{Error, Result};

impl Publisher {
    /// Does `work`, which encodes against the baseline and stores objects under `root` with the name of an
    /// attempt. Where it finds that the baseline is not what it was, that is mended, and the work is done
    /// once more. What a failed attempt stored is removed.
    pub(super) fn on_sound_baseline<T>(
        &mut self,
        root: &Key,
        mut work: impl FnMut(&mut Self, &str) -> Result<T>,
    ) -> Result<T> {
        let mut attempt = |publisher: &mut Self| {
            let name = hex::encode(rand::random::<[u8; 8]>());
            work(publisher, &name).inspect_err(|_| publisher.sweep_attempt(root, &name))
        };
        match attempt(self) {
            Err(error) if is_baseline_damage(&error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the baseline is not what was published"
                );
                self.mend_baseline()?;
            }
            done => return done,
        }
        attempt(self).map_err(|error| match error {
            // The baseline was hashed just now: it is the new bytes that were not the same each time they
            // were read.
            Error::TensorMismatch { tensor, .. } if is_baseline_damage(&error) => {
                Error::ChangedWhileRead { tensor }
            }
            error => error,
        })
    }

    /// Hashes the baseline, and builds it anew from the store if it is not the newest version. If it is, its
    /// digests are read again.
    fn mend_baseline(&mut self) -> Result<()> {
        let Some(newest) = self.newest else { return Ok(()) };
        // Whatever fails here: the next publication brings the baseline there first.
        self.standing = Standing::Lagging(newest);
        let replica = self.baseline.replica()?;
        match replica.verify() {
            Ok(()) => self.baseline.reopen()?,
            Err(error @ Error::Store(StoreError::Io { .. } | StoreError::PermissionDenied { .. })) => {
                return Err(error);
            }
            Err(source) => {
                let path = replica.dir().to_path_buf();
                replica.quarantine(Error::DamagedReplica { path, source: Box::new(source) })?;
            }
        }
        let (replica, reference) = (self.baseline.replica()?, self.options.reference_dir.as_deref());
        replica.advance(&self.run, &self.options.model, newest.version, reference)?;
        replica.sync()?;
        self.standing = Standing::InSync;
        Ok(())
    }
}
