//! Whether a version's bytes are in a checkpoint's files yet.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use driftless_store::wait::lock;

use super::Checkpoint;
use crate::error::{Error, Result};

/// None while the bytes are written; then whether that went well.
type Outcome = (Mutex<Option<bool>>, Condvar);

/// The bytes of a checkpoint are written. Dropped before [`Writing::end`], they never will be.
pub(crate) struct Writing(Arc<Outcome>);

impl Writing {
    /// Marks a checkpoint, which nobody shares yet, as one whose bytes are not there.
    pub(crate) fn begin(checkpoint: &mut Arc<Checkpoint>) -> Self {
        let outcome = Arc::<Outcome>::default();
        if let Some(checkpoint) = Arc::get_mut(checkpoint) {
            checkpoint.written = Some(Arc::clone(&outcome));
        }
        Self(outcome)
    }

    /// They are there.
    pub(crate) fn end(self) {
        self.tell(true);
    }

    fn tell(&self, well: bool) {
        lock(&self.0.0).get_or_insert(well);
        self.0.1.notify_all();
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.tell(false);
    }
}

impl Checkpoint {
    /// Whether the files have the version's bytes; `None` if that failed. Without a follower they always do.
    pub fn is_written(&self) -> Option<bool> {
        match &self.written {
            None => Some(true),
            Some(outcome) => match *lock(&outcome.0) {
                None => Some(false),
                Some(well) => well.then_some(true),
            },
        }
    }

    /// Waits until the files have the version's bytes, and the directory its `config.json`. Until then only
    /// names, shapes, places and auxiliary files are the version's.
    ///
    /// # Errors
    /// [`Error::Busy`] after `limit`; [`Error::Cancelled`] if they could not be written, which the follower's
    /// status explains.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let Some(outcome) = &self.written else { return Ok(()) };
        let until = Instant::now() + limit;
        let mut written = lock(&outcome.0);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match *written {
                Some(true) => return Ok(()),
                Some(false) => return Err(Error::Cancelled { what: "writing the version's files" }),
                None if left.is_zero() => {
                    let (what, with) = (format!("`{}`", self.dir.display()), "its version, which is written");
                    return Err(Error::Busy { what, with: with.into() });
                }
                None => {
                    let waited = outcome.1.wait_timeout(written, left);
                    written = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
                }
            }
        }
    }
}
