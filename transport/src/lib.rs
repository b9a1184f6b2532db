#![doc = include_str!("../README.md")]

#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod ids;
mod key;
pub mod manifest;
mod publish;
mod run;
mod store;
pub mod wrap;

// Replica side.
mod activate;
mod checkpoint;
mod dtype;
mod follow;
pub mod http;
mod replica;
mod snapshot;

pub use error::{BoxError, Error, Result};
pub use ids::{ContentDigest, RunId, Version};
pub use key::Key;
pub use manifest::Manifest;
pub use publish::{
    Mode, Progress, ProgressFn, Published, Publisher, PublisherOptions, Start, Step,
};
pub use run::{Chain, Committed, Run};
pub use store::{Disk, Entry, Memory, PutMode, Store, open, probe_conditional_put};

pub use activate::{Activate, Activated, Target};
pub use checkpoint::{Checkpoint, Place, write_checkpoint};
pub use dtype::Dtype;
pub use follow::{Ack, EngineStatus, Follower, FollowerOptions, Prepared, Status, Stop};
pub use replica::{Advanced, Applied, FetchObject, Replica};
pub use snapshot::{AUX_FILE_BYTES_MAX, AuxFile, Snapshot, TensorInfo};
