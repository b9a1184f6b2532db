//! driftless keeps a fleet of inference engines in step with an RL trainer: lossless weight deltas,
//! crash-safe publications, a durable rollout log.
//!
//! This package re-exports the crates of the workspace, each behind a feature:
//!
//! | Feature | Module | What it is | Default |
//! |---|---|---|---|
//! | `delta` | [`delta`] | the codec: bytes in, bytes out | yes |
//! | `transport` | [`transport`], [`store`] | publications: publish, follow; the stores that hold them | yes |
//! | `buffer` | [`buffer`] | the rollout log | yes |
//! | `bridge` | `bridge` | inference engines: attach, generate, activate | no |
//! | `agent` | `agent` | conversations as tokens, and the gateway for OpenAI's and Anthropic's clients | no |
//! | `trainer` | `observe` | where a run is watched: Prometheus, TensorBoard | no |
//! | `trainer` | `verify` | whether a run trained on what its engines drew | no |
//! | `trainer` | `trainer` | the loop: tasks, rollouts, schedule, learners behind one trait | no |
//! | `object` | – | stores on S3, Google Cloud Storage and Azure | no |
//! | `arrow` | – | the log as Arrow IPC and Parquet | no |
//! | `nccl` | – | weights pushed over NCCL, which is opened at run time | no |
//! | `cuda` | – | tensors on CUDA devices are encoded there when they are published; CUDA is opened at run time | no |
//! | `http` | `http` | followers told of versions; what clients and servers are made of | no |
//! | `follower` | `follower` | a follower over HTTP, for coordinators and operators | no |
//! | `relay` | `relay` | a cache of objects for the followers of a region, and its clients | no |
//! | `ucx` | – | objects over UCX, which is opened at run time | no |
//! | `slime` | `slime` | slime's delta directories, followed and written | no |
//! | `cli` | – | the `driftless` command, with all of the above | no |
//! | `torch` | `torch` | libtorch as a learner, the embedded engine; links libtorch 2.11 | no |
//! | `failpoints` | – | crash points, for kill tests | no |
//!
//! The default features build without a C compiler. Everything runs on Linux.

// The command names the crates as its users do.
#[cfg(feature = "cli")]
extern crate self as driftless;

#[cfg(feature = "cli")]
mod cli;

#[cfg(feature = "agent")]
pub use driftless_agent as agent;
#[cfg(feature = "bridge")]
pub use driftless_bridge as bridge;
#[cfg(feature = "buffer")]
pub use driftless_buffer as buffer;
#[cfg(feature = "delta")]
pub use driftless_delta as delta;
#[cfg(feature = "trainer")]
pub use driftless_evaluate as evaluate;
#[cfg(feature = "follower")]
pub use driftless_follower as follower;
#[cfg(feature = "http")]
pub use driftless_http as http;
#[cfg(feature = "trainer")]
pub use driftless_observe as observe;
#[cfg(feature = "relay")]
pub use driftless_relay as relay;
#[cfg(feature = "slime")]
pub use driftless_slime as slime;
#[cfg(feature = "transport")]
pub use driftless_store as store;
#[cfg(feature = "torch")]
pub use driftless_torch as torch;
#[cfg(feature = "trainer")]
pub use driftless_trainer as trainer;
#[cfg(feature = "transport")]
pub use driftless_transport as transport;
#[cfg(feature = "trainer")]
pub use driftless_verify as verify;

/// The `driftless` command, for programs that are it under another name, and the rules of its that they
/// share.
#[cfg(feature = "cli")]
pub mod command {
    pub use crate::cli::{bridge_code, buffer_code, default_baseline, main, open_store, transport_code};
}
