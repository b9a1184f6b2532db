#![doc = include_str!("../README.md")]

mod activate;
mod capabilities;
mod checksums;
mod client;
mod colocate;
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
mod pause;
mod push;
mod wire;

pub use activate::{DiskActivator, DiskOptions};
pub use capabilities::Capabilities;
pub use checksums::checksums;
pub use client::{Client, ClientOptions, Deadlines};
#[cfg(feature = "cuda")]
pub use colocate::CudaShare;
pub use colocate::{Colocation, ColocationOptions, CudaPlace, Place, Share};
pub use coordinate::{Coordinator, CoordinatorOptions, HostOutcome, Rolled};
pub use distributed::{Group, GroupOptions, Meeting, Rendezvous, RendezvousOptions, Root, UpdateMode};
#[cfg(feature = "nccl")]
pub use distributed::{NcclOptions, NcclRoot};
pub use engine::{Engine, LiveWeights};
pub use error::{Error, Result};
pub use fleet::{EngineStatus, Fleet, FleetOptions, Route};
pub use generate::{Finish, GenerateRequest, Generation, Rid, SamplingParams, VersionSpan};
pub use identity::Identity;
pub use keys::Keys;
pub use label::Label;
pub use model::{Expected, ModelConfig};
#[cfg(feature = "cuda")]
pub use push::DeviceWeights;
pub use push::{Bucket, Bytes, HostWeights, Member, Push, PushActivator, PushOptions, Pushed, Weights, plan};
pub use wire::{DiskUpdate, DiskUpdated, Load, MemoryTag, ModelInfo, PauseMode, RankChecksums, ServerInfo};
