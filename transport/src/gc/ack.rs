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
    /// How it came by the version that it was brought to last, if that was by this follower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub how: Option<How>,
    /// What was compared of its weights then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
    /// Why it does not serve the follower's version, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What earlier releases did not say.
fn yes() -> bool {
    true
}

/// How an engine came by the weights of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// Its plugin wrote what changed.
    Patched,
    /// It loaded the checkpoint.
    Loaded {
        /// Why it was not patched; `None` where nobody wanted it to be.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// They were written into its memory.
    Pushed,
}

/// What was compared of the weights that are live, after an engine was brought to a version. Nothing differed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compared {
    /// Every element, by the plugin's own map of the model.
    Plugin {
        /// How many tensors of the checkpoint.
        tensors: u64,
        /// Tensors that the map does not have, by name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        without: Option<String>,
    },
    /// Checksums that the engine reports.
    Checksums {
        /// How many, of the engine's tensors.
        tensors: u64,
    },
    /// The old values of what was changed, in weights that were compared with an earlier version.
    Changes,
    /// Nothing, or nothing that tells of all weights.
    Not {
        /// Why.
        why: String,
    },
}

impl Compared {
    /// Whether anything was, as opposed to [`Compared::Not`].
    #[must_use]
    pub fn is_any(&self) -> bool {
        !matches!(self, Self::Not { .. })
    }
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
