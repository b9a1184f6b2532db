//! The RL loop: tasks, rollouts, advantages, the schedule, updates of the fleet, over one trait for what
//! trains.
//!
//! Nothing here links libtorch. `driftless-torch` is a [`learner::Learner`] in this process;
//! [`learner::Child`] is any other trainer, as a process of its own.

pub mod advantage;
mod chat;
pub mod data;
mod error;
pub mod hook;
pub mod learner;
pub mod lr;
pub mod metrics;
pub mod reward;
pub mod rollout;
mod schedule;
pub mod tasks;
mod train;

pub use advantage::Estimator;
pub use chat::ChatTemplate;
pub use error::{Error, Result};
pub use schedule::{Mode, Schedule};
pub use train::{
    Debug, Dtype, Evaluation, Event, Kl, KlLoss, LearnOptions, Observer, Outcome, Tis, TrainOptions,
    UpdateWeightMode, train,
};
