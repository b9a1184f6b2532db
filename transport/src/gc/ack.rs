//! What a follower acknowledges: a part of its lease.

use driftless_store::ContentDigest;
use serde::{Deserialize, Serialize};

use crate::ids::Version;

/// One engine, as its follower last saw it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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

/// Versions whose phases an acknowledgement keeps.
pub const PHASES_MAX: usize = 64;

/// How long a version's way took on a host, in milliseconds by the host's clock. A phase begins where the one before
/// ends, so that they add up; what goes on beside another belongs to the one that ends last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phases {
    /// The version; of those that were applied together, the last.
    pub version: Version,
    /// When the look at the store began that found it, in milliseconds since 1970.
    pub began_at_ms: u64,
    /// Reading its manifest, and those between it and what the host had.
    pub see_ms: f64,
    /// Waiting until the version before was durable in its place.
    pub sync_ms: f64,
    /// Until the last of its bytes had arrived.
    pub fetch_ms: f64,
    /// Until every tensor was decoded and checked.
    pub decode_ms: f64,
    /// Until the journal was durable.
    pub journal_ms: f64,
    /// Until engines could be asked to take it: what changes was offered to plugins, or the files were written.
    pub offer_ms: f64,
    /// Until the last engine could take it at once: its plugin had copied what changes, or the files were there.
    /// `None` without an engine that was brought to it in the first round; likewise `patch_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_ms: Option<f64>,
    /// Until that engine served it: patched, or loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch_ms: Option<f64>,
}

impl Phases {
    /// Those until engines could be asked, by name and in order, in milliseconds.
    #[must_use]
    pub fn of_host(&self) -> [(&'static str, f64); 6] {
        let Self { see_ms, sync_ms, fetch_ms, decode_ms, journal_ms, offer_ms, .. } = *self;
        [
            ("see", see_ms),
            ("sync", sync_ms),
            ("fetch", fetch_ms),
            ("decode", decode_ms),
            ("journal", journal_ms),
            ("offer", offer_ms),
        ]
    }

    /// Those of the engine that was last; none without one.
    pub fn of_engine(&self) -> impl Iterator<Item = (&'static str, f64)> + use<> {
        let engine = [("copy", self.copy_ms), ("patch", self.patch_ms)];
        engine.into_iter().filter_map(|(name, ms)| Some((name, ms?)))
    }

    /// Keeps the phases of the engine that was last.
    pub(crate) fn served(&mut self, copy_ms: f64, patch_ms: f64) {
        let before = self.copy_ms.zip(self.patch_ms).map_or(0.0, |(copy, patch)| copy + patch);
        if copy_ms + patch_ms >= before {
            (self.copy_ms, self.patch_ms) = (Some(copy_ms), Some(patch_ms));
        }
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
    /// The phases of the versions that this process brought here, at most the last [`PHASES_MAX`], oldest first.
    /// Earlier releases did not tell them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phases>,
}
