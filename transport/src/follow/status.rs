//! What a follower reports about itself over HTTP.

use serde::{Deserialize, Serialize};

use super::Prepared;
use crate::gc::Ack;
use crate::ids::{RunId, Version};

/// A follower's whole status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The follower's name.
    pub id: String,
    /// The run's name in the store.
    pub run: String,
    /// The run's identity, once it was seen.
    pub run_id: Option<RunId>,
    /// The model within the run.
    pub model: String,
    /// The newest version that the store was seen to have.
    pub newest: Option<Version>,
    /// The version on disk and the engines, once there is one.
    pub applied: Option<Ack>,
    /// Why the last prepare failed, if it did; errors of an engine are in its entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The reply to `POST /prepare`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrepareReply {
    /// The version on disk.
    pub version: Version,
    /// The label that engines are given for it.
    pub label: String,
    /// Versions applied by this call; `links` in JSON.
    #[serde(rename = "links")]
    pub versions: u64,
    /// Bytes fetched by this call.
    pub bytes: u64,
    /// Elements changed by this call.
    pub changed: u64,
}

impl From<Prepared> for PrepareReply {
    fn from(prepared: Prepared) -> Self {
        let advanced = prepared.advanced;
        Self {
            version: prepared.version,
            label: prepared.label,
            versions: advanced.versions,
            bytes: advanced.bytes,
            changed: advanced.changed,
        }
    }
}
