#![doc = include_str!("../README.md")]

mod activate;
mod chain;
mod checkpoint;
#[cfg(feature = "client")]
mod client;
#[cfg(feature = "conformance")]
pub mod conformance;
mod dtype;
mod error;
#[cfg(feature = "ucx")]
pub mod fabric;
mod follow;
pub mod gc;
pub mod http;
mod ids;
mod key;
pub mod listen;
pub mod manifest;
mod pool;
mod publish;
mod regular;
pub mod relay;
mod replica;
mod run;
mod sign;
#[cfg(feature = "slime")]
pub mod slime;
mod snapshot;
mod spool;
mod store;
#[doc(hidden)]
pub mod watch;
pub mod wrap;

pub use activate::{Activate, Activated, Limit, Target};
pub use chain::Chain;
pub use checkpoint::{Checkpoint, Place, write_checkpoint};
#[cfg(feature = "client")]
pub use client::notify;
pub use driftless_delta::Profile;
pub use dtype::Dtype;
pub use error::{BoxError, Error, Result};
pub use follow::{Ack, EngineStatus, Follower, FollowerOptions, Prepared, Status, Stop};
pub use ids::{ContentDigest, RunId, Version};
pub use key::Key;
pub use manifest::Manifest;
pub use publish::{
    FullBecause, Mode, Progress, ProgressFn, Published, PublishedPart, Publisher, PublisherOptions, Rank,
    Shard, Slice, Start, Step,
};
pub use replica::{Advanced, Applied, FetchObject, Plan, PlannedLink, Repaired, Replica};
pub use run::{Committed, Run};
pub use sign::{SignKey, TrustKey};
pub use snapshot::{AUX_FILE_BYTES_MAX, AUX_FILES_BYTES_MAX, AuxFile, Snapshot, TensorInfo};
pub use spool::SpoolOptions;
pub use store::{
    Arrived, Disk, Entry, Memory, PutMode, Store, open, open_with, probe_conditional_put, redact,
};
