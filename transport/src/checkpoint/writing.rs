//! Whether a version's bytes are in a checkpoint's files yet, and whether anybody wants them there.

use std::sync::Arc;
use std::time::Duration;

use driftless_store::wait::{Awaited, Doing};

use super::Checkpoint;
use crate::error::{Error, Result};

impl Checkpoint {
    /// Marks a checkpoint, which nobody shares yet, as one whose bytes are not there before [`Doing::end`].
    pub(crate) fn begin_writing(checkpoint: &mut Arc<Self>) -> Doing {
        let writing = Doing::default();
        if let Some(checkpoint) = Arc::get_mut(checkpoint) {
            checkpoint.written = Some(writing.awaited());
        }
        writing
    }

    /// Whether the files have the version's bytes; `None` if that failed. Without a follower they always do.
    pub fn is_written(&self) -> Option<bool> {
        let outcome = self.written.as_ref().map_or(Some(true), Awaited::outcome);
        (outcome != Some(false)).then_some(outcome.is_some())
    }

    /// Has the bytes be written now, if they wait for a reason.
    pub(crate) fn want(&self) {
        self.written.iter().for_each(Awaited::want);
    }

    /// Waits until the files have the version's bytes, and the directory its `config.json`. Until then only
    /// names, shapes, places and auxiliary files are the version's.
    ///
    /// # Errors
    /// [`Error::Busy`] after `limit`; [`Error::Cancelled`] if they could not be written, which the follower's
    /// status explains.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        match self.written.as_ref().map_or(Some(true), |written| written.wait(limit)) {
            Some(true) => Ok(()),
            Some(false) => Err(Error::Cancelled { what: "writing the version's files" }),
            None => {
                let (what, with) = (format!("`{}`", self.dir.display()), "its version, which is written");
                Err(Error::Busy { what, with: with.into() })
            }
        }
    }
}
