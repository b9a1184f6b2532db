//! What stands between HTTP and the generating thread: pausing, the update lock, and the ids in use.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};

/// Holds new requests back while the engine is paused or an update waits for the running ones.
///
/// The semantics are SGLang's tokenizer manager's: every request is a reader of one fair lock from admission
/// to answer; an update that finds the engine not paused takes the lock as the writer, so it waits for all
/// running requests while new ones queue up behind it.
pub(super) struct Gate {
    paused: watch::Sender<bool>,
    lock: Arc<RwLock<()>>,
}

impl Gate {
    pub(super) fn new() -> Gate {
        Gate { paused: watch::Sender::new(false), lock: Arc::default() }
    }

    pub(super) fn is_paused(&self) -> bool {
        *self.paused.borrow()
    }

    pub(super) fn set_paused(&self, paused: bool) {
        self.paused.send_replace(paused);
    }

    /// Waits until the engine is not paused, then enters as a reader.
    pub(super) async fn enter(&self) -> OwnedRwLockReadGuard<()> {
        let mut paused = self.paused.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        let _open = paused.wait_for(|paused| !paused).await.is_ok();
        Arc::clone(&self.lock).read_owned().await
    }

    /// The lock that requests hold for reading.
    pub(super) fn lock(&self) -> &RwLock<()> {
        &self.lock
    }
}

/// The request ids in use, at most `max`.
pub(super) struct Registry {
    ids: Mutex<HashSet<String>>,
    max: usize,
}

/// Why ids were not taken.
#[derive(Debug, PartialEq)]
pub(super) enum Rejected {
    /// Another request bears this id.
    Duplicate(String),
    /// As many requests as allowed are under way.
    Full,
}

/// Ids of one call, given back when it ends however it ends.
pub(super) struct Lease {
    registry: Arc<Registry>,
    ids: Vec<String>,
}

impl Registry {
    pub(super) fn new(max: usize) -> Arc<Registry> {
        Arc::new(Registry { ids: Mutex::default(), max })
    }

    /// Takes all ids, or none.
    pub(super) fn lease(self: &Arc<Self>, ids: Vec<String>) -> Result<Lease, Rejected> {
        let mut taken = self.lock();
        if taken.len() + ids.len() > self.max {
            return Err(Rejected::Full);
        }
        if let Some(id) = ids.iter().find(|id| taken.contains(*id)) {
            return Err(Rejected::Duplicate(id.clone()));
        }
        taken.extend(ids.iter().cloned());
        Ok(Lease { registry: Arc::clone(self), ids })
    }

    /// Whether a request with this id is under way.
    pub(super) fn contains(&self, id: &str) -> bool {
        self.lock().contains(id)
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        // A set of strings is whole whatever a panicking holder was doing.
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut taken = self.registry.lock();
        for id in &self.ids {
            taken.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_bounded_and_given_back() {
        let registry = Registry::new(2);
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let lease = registry.lease(ids(&["a"])).unwrap();
        assert_eq!(registry.lease(ids(&["b", "a"])).err(), Some(Rejected::Full));
        assert_eq!(registry.lease(ids(&["a"])).err(), Some(Rejected::Duplicate("a".into())));
        assert!(!registry.contains("b"), "all or none");
        drop(lease);
        assert!(registry.lease(ids(&["b", "a"])).is_ok());
        assert!(!registry.contains("a"));
    }
}
