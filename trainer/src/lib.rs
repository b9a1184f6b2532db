//! The RL loop: tasks, rollouts, advantages, the schedule, updates of the fleet, over one trait for what
//! trains.
//!
//! Nothing here links libtorch. `driftless-torch` is a [`learner::Learner`] in this process;
//! [`learner::Child`] is any other trainer, as a process of its own.

pub mod advantage;
pub mod data;
pub mod door;
mod error;
pub mod events;
mod failure;
pub mod goodput;
pub mod hook;
pub mod learner;
pub mod ledger;
mod lines;
pub mod lr;
pub mod metrics;
pub mod options;
pub mod push;
pub mod reward;
pub mod rollout;
pub mod sample;
mod schedule;
pub mod seed;
mod service;
pub mod tasks;
mod train;

pub use driftless_agent::chat::{ChatTemplate, LossMask};
pub use error::{Error, Result};
pub use failure::Failure;
pub use train::{Outcome, TrainOptions, replay, rollout, train};
