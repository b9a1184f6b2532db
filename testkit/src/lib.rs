//! What tests and benches of several crates need and no user does: servers that err on command, a network link
//! in user space, a flood of connections, and numbers that follow from a seed.
#![allow(clippy::unwrap_used, reason = "support for tests: a failed step is a failed test")]

pub mod compiler;
#[cfg(feature = "servers")]
pub mod flood;
#[cfg(feature = "servers")]
pub mod hook;
#[cfg(feature = "servers")]
pub mod http;
#[cfg(feature = "servers")]
pub mod learner;
#[cfg(feature = "servers")]
pub mod link;
#[cfg(feature = "log")]
pub mod log;
#[cfg(any(feature = "log", feature = "servers"))]
pub mod odd;
pub mod ports;
#[cfg(feature = "servers")]
pub mod process;
#[cfg(feature = "servers")]
pub mod publications;
pub mod random;
#[cfg(feature = "servers")]
pub mod s3;
#[cfg(feature = "servers")]
pub mod sglang;
pub mod stranger;
#[cfg(feature = "servers")]
pub mod tls;
#[cfg(feature = "servers")]
pub mod tree;
#[cfg(feature = "servers")]
pub mod vllm;
