//! What a follower acknowledges: a part of its lease.

use driftless_store::ContentDigest;
use serde::{Deserialize, Serialize};

use crate::ids::Version;

/// One engine, as its follower last saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The engine's name, its URL.
    pub url: String,
    /// The version label it serves; `None` if unknown or not one of ours.
    pub label: Option<String>,
    /// Whether it answered when it was last asked.
    #[serde(default = "yes")]
    pub up: bool,
    /// Whether it was paused when it was last polled, by the follower or by others; of one that does not answer nothing
    /// is known.
    #[serde(default)]
    pub paused: bool,
    /// How long the last activation kept it from generating, in milliseconds.
    pub pause_ms: Option<f64>,
    /// Why it does not serve the follower's version, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What earlier releases did not say.
fn yes() -> bool {
    true
}

/// What a follower leaves in the store under `<run_id>/followers/<id>`, beside its lease: which version it
/// holds, and which engines serve it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ack {
    /// The version that the host has: in its page cache and durable in the replica's journal, if not yet in
    /// its place on the disk.
    pub version: Version,
    /// The label engines are given for it.
    pub label: String,
    /// Its identity.
    pub manifest_digest: ContentDigest,
    /// Milliseconds of the prepare that led to it: fetch, verify, apply, until engines could load it; 0 after
    /// a restart.
    pub prepare_ms: f64,
    /// Bytes fetched by that prepare.
    pub bytes: u64,
    /// The engines beside the follower.
    pub engines: Vec<EngineStatus>,
}
