#![doc = include_str!("../README.md")]

pub mod activate;
mod coordinate;
pub mod engine;
mod error;
pub mod fleet;
mod http;
mod keys;
mod kinds;
pub mod live;
mod model;
pub mod push;
pub mod sglang;
pub mod vllm;

pub use activate::{DiskActivator, DiskOptions, PluginOptions};
pub use coordinate::{Coordinator, CoordinatorOptions, HostOutcome, Rolled};
pub use engine::{
    Attached, ClientOptions, Deadlines, Engine, Finish, GenerateRequest, Generation, Identity, Label,
    LiveWeights, Patched, PauseMode, Rid, SamplingParams, VersionSpan,
};
pub use error::{Error, Result};
pub use fleet::{EngineStatus, Fleet, FleetOptions, Route};
pub use keys::Keys;
pub use kinds::connect;
pub use model::{Expected, ModelConfig};
pub use push::{
    Bucket, Bytes, Colocation, ColocationOptions, CudaPlace, Group, GroupOptions, HostWeights, Meeting,
    Member, Place, Push, PushActivator, PushOptions, Pushed, Rendezvous, RendezvousOptions, Root, Share,
    UpdateMode, Weights, plan,
};
#[cfg(feature = "cuda")]
pub use push::{CudaShare, DeviceWeights};
#[cfg(feature = "nccl")]
pub use push::{NcclOptions, NcclRoot};
#[cfg(feature = "conformance")]
pub use sglang::conformance;
pub use sglang::{
    Capabilities, Client, DiskUpdate, DiskUpdated, Load, MemoryTag, ModelInfo, RankChecksums, ServerInfo,
    checksums,
};
