//! The newest version that was published: an engine that says it serves a later one is wrong about its weights.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::engine::Label;
use crate::error::{Error, Result};

/// Tells a fleet the label of the newest version of its run. It is asked whenever an engine serves a later one than
/// is known, and may block. `None` says that it cannot tell now: any version will then do.
#[derive(Clone)]
pub struct Newest(Arc<dyn Fn() -> Option<Label> + Send + Sync>);

impl Newest {
    /// `look` reads the newest label where versions are published.
    pub fn new(look: impl Fn() -> Option<Label> + Send + Sync + 'static) -> Self {
        Self(Arc::new(look))
    }
}

impl fmt::Debug for Newest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Newest").finish_non_exhaustive()
    }
}

/// What is known of the newest version.
#[derive(Debug)]
pub(super) struct Known {
    newest: Newest,
    label: Mutex<Option<Label>>,
}

impl Known {
    pub(super) fn new(newest: Newest) -> Self {
        Self { newest, label: Mutex::default() }
    }

    fn label(&self) -> MutexGuard<'_, Option<Label>> {
        self.label.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses the label of a version of the run that was not published; `call` is what told it.
    pub(super) async fn check(&self, engine: &str, call: &str, found: &str) -> Result<()> {
        let Ok(label) = found.parse::<Label>() else { return Ok(()) };
        if self.label().as_ref().is_some_and(|known| covers(known, &label)) {
            return Ok(());
        }
        let look = self.newest.clone();
        let looked = tokio::task::spawn_blocking(move || (look.0)());
        let looked = looked.await.map_err(|_| Error::Closed)?;
        let Some(newest) = looked else { return Ok(()) };
        *self.label() = Some(newest.clone());
        if covers(&newest, &label) {
            return Ok(());
        }
        let expected = format!("a version that was published, {newest} at most");
        let (engine, call, found) = (engine.to_owned(), call.to_owned(), found.to_owned());
        Err(Error::Reply { engine, call, expected, found })
    }
}

/// Whether a version is `newest` or an earlier one; those of other runs are not judged.
fn covers(newest: &Label, label: &Label) -> bool {
    newest.run() != label.run() || newest.at_least(label)
}
