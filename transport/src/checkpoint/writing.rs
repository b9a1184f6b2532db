//! Whether a version's bytes are in a checkpoint's files yet, and whether anybody wants them there.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use driftless_store::wait::lock;

use super::Checkpoint;
use crate::error::{Error, Result};

pub(super) type Outcome = (Mutex<Progress>, Condvar);

/// How far the bytes are, and what wakes up who waits for that.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Whether there is a reason to write the bytes now.
    wanted: bool,
    /// None before all bytes are there; then whether that went well.
    written: Option<bool>,
}

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

    /// Waits until somebody wants the bytes, for `limit` at most.
    pub(crate) fn hold(&self, limit: Duration) {
        let held = self.0.1.wait_timeout_while(lock(&self.0.0), limit, |progress| !progress.wanted);
        drop(held.unwrap_or_else(PoisonError::into_inner));
    }

    /// They are there.
    pub(crate) fn end(self) {
        self.tell(true);
    }

    fn tell(&self, well: bool) {
        lock(&self.0.0).written.get_or_insert(well);
        self.0.1.notify_all();
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.tell(false);
    }
}

fn want(outcome: &Outcome) {
    lock(&outcome.0).wanted = true;
    outcome.1.notify_all();
}

impl Checkpoint {
    /// Whether the files have the version's bytes; `None` if that failed. Without a follower they always do.
    pub fn is_written(&self) -> Option<bool> {
        match &self.written {
            None => Some(true),
            Some(outcome) => match lock(&outcome.0).written {
                None => Some(false),
                Some(well) => well.then_some(true),
            },
        }
    }

    /// Has the bytes be written now, if they wait for a reason.
    pub(crate) fn want(&self) {
        self.written.iter().for_each(|outcome| want(outcome));
    }

    /// Waits until the files have the version's bytes, and the directory its `config.json`. Until then only
    /// names, shapes, places and auxiliary files are the version's.
    ///
    /// # Errors
    /// [`Error::Busy`] after `limit`; [`Error::Cancelled`] if they could not be written, which the follower's
    /// status explains.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let Some(outcome) = &self.written else { return Ok(()) };
        self.want();
        let until = Instant::now() + limit;
        let mut progress = lock(&outcome.0);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match progress.written {
                Some(true) => return Ok(()),
                Some(false) => return Err(Error::Cancelled { what: "writing the version's files" }),
                None if left.is_zero() => {
                    let (what, with) = (format!("`{}`", self.dir.display()), "its version, which is written");
                    return Err(Error::Busy { what, with: with.into() });
                }
                None => {
                    let waited = outcome.1.wait_timeout(progress, left);
                    progress = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn bytes_are_held_until_they_are_wanted_or_the_limit_passes() {
        let writing = Writing(Arc::default());
        writing.hold(Duration::ZERO);
        let outcome = Arc::clone(&writing.0);
        let (tell, told) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                writing.hold(Duration::from_secs(600));
                tell.send(lock(&outcome.0).wanted).unwrap();
            });
            assert!(told.try_recv().is_err());
            want(&outcome);
            assert!(told.recv_timeout(Duration::from_secs(60)).unwrap());
        });
        // What was wanted once is not held again.
        writing.hold(Duration::from_secs(600));
    }
}
