//! A data path in this process: what a rank 0 broadcasts, the fake engines take off it, byte by byte as they
//! were told.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router};
use driftless_bridge::Result;
use driftless_bridge::push::Bucket;
use driftless_bridge::push::nccl::{Meeting, Root};
use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Checkpoint, Dtype, Snapshot, Tensors};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::fault::refusal;
use super::{Engine, Shared};

/// What was broadcast and not yet received, by rank less one.
#[derive(Debug, Default)]
pub struct Wire {
    /// By rank, what it has not taken yet.
    pub queues: Mutex<Vec<VecDeque<Vec<u8>>>>,
    /// Told when something was put there.
    pushed: Notify,
}

/// Rank 0 on such a wire.
#[derive(Debug)]
pub struct FakeRoot {
    /// What it broadcasts on.
    pub wire: Arc<Wire>,
    slots: [Vec<u8>; 2],
    /// Whether the ranks ever join.
    pub joins: bool,
    /// Whether they receive.
    pub delivers: bool,
    /// What it says of `NCCL_CUMEM_ENABLE`.
    pub cumem: Option<bool>,
    /// What was asked of it.
    pub log: Arc<Mutex<Vec<String>>>,
}

impl FakeRoot {
    /// Ranks join and receive.
    #[allow(clippy::new_without_default, reason = "tests begin with it by name")]
    pub fn new() -> Self {
        let (wire, log) = (Arc::default(), Arc::default());
        Self { wire, slots: Default::default(), joins: true, delivers: true, cumem: None, log }
    }

    fn note(&self, text: String) {
        self.log.lock().unwrap().push(text);
    }
}

impl Root for FakeRoot {
    fn backend(&self) -> &'static str {
        "fake"
    }

    fn cumem(&self) -> Option<bool> {
        self.cumem
    }

    fn open(&mut self, meeting: &Meeting<'_>) -> Result<()> {
        self.note(format!("open {} {}", meeting.group, meeting.world));
        meeting.rendezvous.set("/id", b"id")?;
        *self.wire.queues.lock().unwrap() = vec![VecDeque::new(); meeting.world as usize - 1];
        Ok(())
    }

    fn joined(&mut self) -> Result<bool> {
        Ok(self.joins)
    }

    fn gather(&mut self, slot: usize, weights: &dyn Snapshot, bucket: &Bucket) -> Result<()> {
        self.note(format!("gather {slot}"));
        self.slots[slot].clear();
        for &index in &bucket.tensors {
            self.slots[slot].extend_from_slice(&weights.bytes(index).unwrap());
        }
        Ok(())
    }

    fn broadcast(&mut self, slot: usize, lengths: &[u64]) -> Result<()> {
        self.note(format!("broadcast {slot} {}", lengths.len()));
        let mut rest = self.slots[slot].as_slice();
        for &length in lengths {
            let now = rest.split_off(..length as usize).unwrap();
            for queue in self.wire.queues.lock().unwrap().iter_mut().filter(|_| self.delivers) {
                queue.push_back(now.to_vec());
            }
            self.wire.pushed.notify_waiters();
        }
        assert!(rest.is_empty(), "the lengths are those of the bucket");
        Ok(())
    }

    fn sent(&mut self, _slot: usize) -> Result<bool> {
        Ok(self.delivers && self.wire.queues.lock().unwrap().iter().all(VecDeque::is_empty))
    }

    fn abort(&mut self) {
        self.note("abort".into());
        self.wire.queues.lock().unwrap().clear();
    }
}

/// An engine's end.
#[derive(Debug, Default)]
pub struct Receiver {
    /// What it receives from.
    pub wire: Option<Arc<Wire>>,
    /// Groups by name, with the engine's own rank.
    groups: BTreeMap<String, usize>,
    /// Whether a weight-update session is open.
    pub session: bool,
    tensors: BTreeMap<String, (TensorInfo, Vec<u8>)>,
}

impl Receiver {
    pub(super) fn take(&mut self, info: TensorInfo, bytes: Vec<u8>) {
        self.tensors.insert(info.name.clone(), (info, bytes));
    }

    /// What a new process of the engine knows.
    pub(super) fn restart(&mut self) {
        *self = Self { wire: self.wire.take(), ..Self::default() };
    }

    /// Joins a group, or leaves one.
    fn control(&mut self, path: &str, body: &Value) -> Response {
        let group = body["group_name"].as_str().unwrap();
        match (path, self.groups.contains_key(group)) {
            ("/init_weights_update_group", true) => {
                return refusal(400, "The specified group name has already been created");
            }
            ("/init_weights_update_group", false) => {
                self.groups.insert(group.to_owned(), body["rank_offset"].as_u64().unwrap() as usize);
            }
            (_, false) => return refusal(400, "The group to be destroyed does not exist."),
            (_, true) => drop(self.groups.remove(group)),
        }
        success()
    }

    /// The weights as they were received, once any were.
    pub(super) fn snapshot(&self, started_with: &Path) -> Option<Tensors<'static>> {
        if self.tensors.is_empty() {
            return None;
        }
        let started = Checkpoint::open(started_with).unwrap();
        let files = started.files().iter();
        let received = files.fold(Tensors::new(), |all, file| all.file(file.name(), file.bytes()).unwrap());
        Some(self.tensors.values().cloned().fold(received, |all, (info, bytes)| {
            all.tensor(info.name, info.dtype, info.shape, bytes).unwrap()
        }))
    }
}

/// The calls of weight-update groups.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/init_weights_update_group", post(control))
        .route("/destroy_weights_update_group", post(control))
        .route("/update_weights_from_distributed", post(update))
}

async fn control(State(engine): State<Shared>, uri: Uri, Json(body): Json<Value>) -> Response {
    engine.lock().unwrap().pushes.control(uri.path(), &body)
}

/// Takes part in the broadcasts that the body announces.
async fn update(State(engine): State<Shared>, Json(body): Json<Value>) -> Response {
    let (wire, rank) = {
        let engine = engine.lock().unwrap();
        let Some(&rank) = engine.pushes.groups.get(body["group_name"].as_str().unwrap()) else {
            return refusal(400, "Group not in []. Please call `init_weights_update_group` first.");
        };
        if !engine.pushes.session {
            return refusal(400, "update_weights_from_distributed must run between begin and end");
        }
        (engine.pushes.wire.clone().unwrap(), rank)
    };
    let list = |key: &str| body[key].as_array().unwrap().clone();
    let infos: Vec<_> = list("names")
        .iter()
        .zip(list("dtypes"))
        .zip(list("shapes"))
        .map(|((name, dtype), shape)| {
            assert_eq!(dtype, "bfloat16");
            let shape = serde_json::from_value(shape).unwrap();
            TensorInfo { name: name.as_str().unwrap().into(), dtype: Dtype::Bf16, shape }
        })
        .collect();
    let flattened = body.get("load_format").is_some();
    let broadcasts = if flattened { 1 } else { infos.len() };
    let mut bytes = Vec::new();
    for _ in 0..broadcasts {
        loop {
            // Asked for before the look, so that nothing is put there between the two.
            let push = wire.pushed.notified();
            let next = wire.queues.lock().unwrap().get_mut(rank - 1).and_then(VecDeque::pop_front);
            match next {
                Some(next) => break bytes.extend(next),
                None => push.await,
            }
        }
    }
    let mut engine = engine.lock().unwrap();
    let mut rest = bytes.as_slice();
    for info in infos {
        let bytes = rest.split_off(..info.byte_len().unwrap() as usize).unwrap();
        engine.pushes.take(info, bytes.to_vec());
    }
    assert!(rest.is_empty(), "as many bytes as were announced");
    loaded(&engine, &body)
}

/// Answers an update, whose label the engine takes.
pub(super) fn loaded(engine: &Engine, body: &Value) -> Response {
    if let Some(label) = body["weight_version"].as_str() {
        engine.set_label(label);
    }
    success()
}

fn success() -> Response {
    axum::Json(json!({"success": true, "message": ""})).into_response()
}
