//! A thin libtorch trainer: models, losses, batches, and an embedded engine.
//!
//! Everything is token-in-token-out: the ids an engine sampled are the ids that are trained on. Weights travel
//! only as publications of `driftless-transport`; rollouts only through the log of `driftless-buffer`.

mod batch;
pub mod checkpoint;
mod config;
pub mod engine;
mod error;
mod loss;
mod models;
mod optimizer;
mod policy;
mod sft;
mod snapshot;
pub mod tasks;
mod torch;
mod train;

pub use batch::{Batch, Reduction, Sample, micro_batches, token_weights};
pub use config::{Config, RopeScaling};
pub use error::{Error, Result};
pub use loss::{Kl, PolicyLoss, PolicyTerms, entropy, kl, log_probs, policy_loss, sft_loss};
pub use models::{Family, KvCache, Model, Parameter};
pub use optimizer::{AdamW, AdamWOptions};
pub use policy::{Policy, StepStats};
pub use sft::{SftOptions, SftSummary, SftTask, sft};
pub use snapshot::PolicySnapshot;
pub use tch::Kind;
pub use torch::{Borrowed, Column, borrow, device, set_threads};
pub use train::{
    Debug, Estimator, Evaluation, Event, LearnOptions, Observer, Outcome, TrainOptions, UpdateWeightMode,
    train,
};
