#![doc = include_str!("../README.md")]

mod error;
mod ids;
mod key;
pub mod manifest;
mod store;

// Replica side.
mod dtype;
mod snapshot;

pub use error::{BoxError, Error, Result};
pub use ids::{ContentDigest, RunId, Version};
pub use key::Key;
pub use manifest::Manifest;
pub use store::{Disk, Entry, Memory, PutMode, Store, open, probe_conditional_put};

pub use dtype::Dtype;
pub use snapshot::{AUX_FILE_BYTES_MAX, AuxFile, Snapshot, TensorInfo};
