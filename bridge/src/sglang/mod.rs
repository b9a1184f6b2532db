//! Everything that only SGLang has.
//!
//! | File | Is |
//! |---|---|
//! | `client` | every call, with its deadline |
//! | `wire` | bodies and replies of the information, weight and lifecycle calls |
//! | `generate` | the body of `/generate`, and what its reply must satisfy |
//! | `identity` | what an engine says it is, compared with what was expected |
//! | `capabilities` | what an engine can do, found by asking it |
//! | `dialect` | what differs between releases |
//! | `engine` | [`Client`] as an [`Engine`](crate::engine::Engine) |
//! | `checksums` | what `/weights_checker` should report for a checkpoint |
//! | `conformance` | the suite that SGLang, and whatever stands in for it, must pass |

mod capabilities;
mod checksums;
mod client;
#[cfg(feature = "conformance")]
pub mod conformance;
mod dialect;
mod engine;
mod generate;
mod identity;
pub(crate) mod wire;

pub use capabilities::Capabilities;
pub use checksums::{checksums, checksums_of};
pub use client::Client;
pub use dialect::{Dialect, Feature};
pub use wire::{DiskUpdate, DiskUpdated, Load, MemoryTag, ModelInfo, OnlyPlugin, RankChecksums, ServerInfo};
