#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! | Module | Is |
//! |---|---|
//! | [`engine`] | the trait that every kind of engine implements, and what all kinds share |
//! | [`sglang`], [`vllm`] | the kinds |
//! | [`activate`] | versions that engines load from disk, or are patched to |
//! | [`live`] | the other side of a patch, within an engine's process: host memory or a CUDA device |
//! | [`push`] | versions pushed into engines' memory: [`push::nccl`] over a network, [`push::colocate`] within a GPU |
//! | `nccl` | NCCL itself, for [`push::nccl`] and for learners of several GPUs (feature `nccl`) |
//! | [`fleet`] | requests to many engines |
//! | [`coordinate`] | many hosts that change versions together |

pub mod activate;
pub mod coordinate;
pub mod engine;
mod error;
mod events;
pub mod fleet;
mod http;
mod keys;
mod kinds;
pub mod live;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod push;
pub mod sglang;
mod tls;
pub mod vllm;

pub use engine::{ClientOptions, Engine, Expected, GenerateRequest, Generation, Label, Rid, SamplingParams};
pub use error::{Error, Result};
pub use fleet::Fleet;
pub use keys::Keys;
pub use kinds::connect;
