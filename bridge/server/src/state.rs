//! What stands between HTTP and the generating thread: what the server says of itself, pausing, the update lock, and
//! the ids in use.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};

use crate::reply::Refusal;
use driftless_bridge::sglang::Dialect;

/// Weights, as an engine names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// The checkpoint directory that they came from.
    pub model_path: String,
    /// How they were loaded: `auto`, `safetensors`, `dummy`.
    pub load_format: String,
    /// Their label.
    pub weight_version: String,
}

/// What a server says of itself, and checks requests against.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Facts {
    /// The release that it speaks like.
    pub dialect: Dialect,
    /// The weights at start.
    pub launched: Weights,
    /// The weights now: what `/model_info` shows. Updates change it.
    pub serving: Weights,
    /// `model_type` of the config.
    pub model_type: String,
    /// The one of `architectures` in the config.
    pub architecture: String,
    /// `auto`, `bfloat16`, `float32`.
    pub dtype: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Whether it can give memory back and take it again.
    pub enable_memory_saver: bool,
    /// Whether a piece of a stream has new tokens only, or all tokens so far.
    pub incremental_streaming_output: bool,
    /// Token ids of prompts are below this.
    pub vocabulary: i64,
    /// Longest sequence of the model, in tokens.
    pub context: usize,
    /// Ids that end a request unless it ignores them.
    pub eos: Vec<i64>,
    /// Most requests that run at once.
    pub max_running_requests: usize,
    /// Most tokens that the cache holds.
    pub max_total_tokens: usize,
    /// Seed of the first request that brings none.
    pub random_seed: i64,
}

impl Facts {
    /// Facts of an engine on the CPU that was started with these weights, without bounds of its own.
    pub fn new(launched: Weights, architecture: impl Into<String>) -> Self {
        Self {
            dialect: Dialect::default(),
            serving: launched.clone(),
            launched,
            model_type: String::new(),
            architecture: architecture.into(),
            dtype: "auto".into(),
            device: "cpu".into(),
            tp_size: 1,
            enable_memory_saver: false,
            incremental_streaming_output: true,
            vocabulary: i64::MAX,
            context: usize::MAX,
            eos: Vec::new(),
            max_running_requests: usize::MAX,
            max_total_tokens: usize::MAX,
            random_seed: 0,
        }
    }
}

/// The state of a server, which it shares with the program that runs it.
///
/// It holds new requests back while the engine is paused or an update waits for the running ones. The semantics
/// are those of SGLang's tokenizer manager: every request is a reader of one fair lock from admission to answer.
/// An update that finds the engine not paused takes the lock as the writer: it waits for all running requests,
/// while new ones queue up behind it.
#[derive(Debug)]
pub struct ServerState {
    facts: Mutex<Facts>,
    paused: watch::Sender<bool>,
    /// Requests hold it for reading.
    pub(super) lock: Arc<RwLock<()>>,
}

impl ServerState {
    /// The state of a server that is not paused.
    pub fn new(facts: Facts) -> Self {
        Self { facts: Mutex::new(facts), paused: watch::Sender::new(false), lock: Arc::default() }
    }

    /// What the server says of itself; a change shows in the next answer.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        // Plain values: whole whatever a panicking holder was doing.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether new requests are held back.
    pub fn is_paused(&self) -> bool {
        *self.paused.borrow()
    }

    /// Holds new requests back, or lets them pass. Requests that run are the generator's to pause.
    pub fn set_paused(&self, paused: bool) {
        self.paused.send_replace(paused);
    }

    /// Waits until the server is not paused, then enters as a reader.
    pub(super) async fn enter(&self) -> OwnedRwLockReadGuard<()> {
        let mut paused = self.paused.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        let _open = paused.wait_for(|paused| !paused).await.is_ok();
        Arc::clone(&self.lock).read_owned().await
    }
}

/// The request ids in use, at most `max`.
#[derive(Debug)]
pub(super) struct Registry {
    ids: Mutex<HashSet<String>>,
    max: usize,
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

    /// Takes all ids, or none: where another request bears one, or as many as allowed are under way.
    pub(super) fn lease(self: &Arc<Self>, ids: Vec<String>) -> Result<Lease, Refusal> {
        let mut taken = self.lock();
        if taken.len() + ids.len() > self.max {
            return Err(Refusal::message(StatusCode::SERVICE_UNAVAILABLE, "The request queue is full."));
        }
        if let Some(id) = ids.iter().find(|id| taken.contains(*id)) {
            return Err(Refusal::invalid(format!("Duplicate request ID detected: {id}")));
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
        let refused = |of: &[&str]| registry.lease(ids(of)).err().unwrap().body;
        assert!(refused(&["b", "a"]).contains("The request queue is full."));
        assert!(refused(&["a"]).contains("Duplicate request ID detected: a"));
        assert!(!registry.contains("b"), "all or none");
        drop(lease);
        assert!(registry.lease(ids(&["b", "a"])).is_ok());
        assert!(!registry.contains("a"));
    }
}
