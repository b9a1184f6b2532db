//! The bridge against an engine that hangs, lies, refuses and dies.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod activation;
mod behind;
mod calls;
mod colocate;
mod coordinate;
mod fleet;
mod group;
mod hostile;
#[path = "../common/inline.rs"]
mod inline;
mod patch;
mod proxy;
mod vllm;
mod vllm_patch;
