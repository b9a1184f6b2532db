#![doc = include_str!("../README.md")]

mod activate;
mod chain;
mod checkpoint;
#[cfg(feature = "client")]
pub mod client;
mod dtype;
mod error;
mod follow;
pub mod foreign;
pub mod gc;
pub mod http;
mod ids;
pub mod listen;
pub mod manifest;
mod pool;
pub mod prepared;
mod publish;
mod replica;
mod run;
pub mod server;
mod sign;
mod snapshot;
pub mod source;
pub mod spool;

pub use activate::{Activate, Activated, Limit, Target};
pub use chain::Chain;
pub use checkpoint::{Checkpoint, Place, write_checkpoint};
#[cfg(feature = "client")]
pub use client::notify;
pub use driftless_delta::Profile;
#[cfg(feature = "conformance")]
pub use driftless_store::conformance;
#[doc(hidden)]
pub use driftless_store::os::watch;
pub use driftless_store::wait::Stop;
pub use driftless_store::{
    self as store, Arrived, BoxError, ContentDigest, Disk, Entry, Key, Memory, PutMode, Store, open,
    open_with, probe_conditional_put, redact, wrap,
};
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use follow::{Follower, FollowerOptions, Prepared, Status};
pub use gc::{Ack, EngineStatus};
pub use ids::{RunId, Version};
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
