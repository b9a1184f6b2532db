//! The RL loop without a learner: tasks, advantages, the schedule, and what is measured of a step.
//!
//! Nothing here links libtorch. `driftless-torch` is the learner, and runs the loop with it.

pub mod advantage;
mod chat;
pub mod data;
mod error;
pub mod metrics;
pub mod reward;
pub mod rollout;
mod schedule;
pub mod tasks;

pub use chat::ChatTemplate;
pub use error::{Error, Result};
pub use schedule::{Mode, Schedule};
