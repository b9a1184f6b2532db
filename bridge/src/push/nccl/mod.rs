//! Weights pushed over a network: rank 0 of SGLang's weight-update group.
//!
//! A [`Group`] is told its engines, forms (rendezvous, `init_weights_update_group`), and pushes: it announces
//! a bucket to every engine by HTTP, broadcasts it once, and gathers the next one while the engines load.
//! What moves the bytes is a [`Root`]: NCCL (feature `nccl`), or whatever a test puts there.

#[cfg(feature = "nccl")]
mod communicator;
mod group;
mod rendezvous;
mod root;

#[cfg(feature = "nccl")]
pub use communicator::{NcclOptions, NcclRoot};
pub use group::{Group, GroupOptions, UpdateMode};
pub use rendezvous::{Rendezvous, RendezvousOptions};
pub use root::{Meeting, Root};
