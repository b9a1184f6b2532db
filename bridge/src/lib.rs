#![doc = include_str!("../README.md")]

mod activate;
mod capabilities;
mod checksums;
mod client;
#[cfg(feature = "conformance")]
pub mod conformance;
mod coordinate;
mod distributed;
mod engine;
mod error;
mod fleet;
mod generate;
mod http;
mod identity;
mod keys;
mod label;
mod model;
mod wire;

pub use activate::{DiskActivator, DiskOptions};
pub use capabilities::Capabilities;
pub use checksums::checksums;
pub use client::{Client, ClientOptions, Deadlines};
pub use coordinate::{Coordinator, CoordinatorOptions, HostOutcome, Rolled};
pub use distributed::{
    Bucket, Bytes, DistributedActivator, DistributedOptions, Group, GroupOptions, HostWeights, Meeting,
    Member, Pushed, Rendezvous, RendezvousOptions, Root, UpdateMode, Weights, plan,
};
#[cfg(feature = "nccl")]
pub use distributed::{DeviceWeights, NcclOptions, NcclRoot};
pub use engine::{Engine, LiveWeights};
pub use error::{Error, Result};
pub use fleet::{EngineStatus, Fleet, FleetOptions, Route};
pub use generate::{Finish, GenerateRequest, Generation, Rid, SamplingParams, VersionSpan};
pub use identity::Identity;
pub use keys::Keys;
pub use label::Label;
pub use model::{Expected, ModelConfig};
pub use wire::{
    DiskUpdate, DiskUpdated, DistributedUpdate, GroupInit, Load, ModelInfo, PauseMode, RankChecksums,
    ServerInfo,
};
