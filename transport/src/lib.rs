#![doc = include_str!("../README.md")]

pub mod activate;
pub mod chain;
pub mod checkpoint;
mod dtype;
mod error;
pub mod follow;
pub mod foreign;
pub mod gc;
mod ids;
pub mod manifest;
pub mod prepared;
pub mod publish;
pub mod replica;
pub mod run;
pub mod sign;
pub mod snapshot;
pub mod source;
pub mod tied;

pub use checkpoint::Checkpoint;
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use follow::Follower;
pub use ids::{RunId, Version};
pub use publish::Publisher;
pub use replica::Replica;
pub use run::Run;
pub use snapshot::{Snapshot, Tensors};
