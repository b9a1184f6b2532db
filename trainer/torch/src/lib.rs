//! libtorch as a learner of the loop: models, losses, batches, and an embedded engine.
//!
//! Everything is token-in-token-out: the ids an engine sampled are the ids that are trained on. Weights
//! travel only as publications of `driftless-transport`; rollouts only through the log of `driftless-buffer`.

mod batch;
pub mod checkpoint;
mod config;
mod dispatcher;
pub mod engine;
mod error;
mod head;
mod learner;
mod loss;
mod models;
mod optimizer;
mod policy;
mod sft;
mod snapshot;
pub mod tasks;
mod torch;

pub use batch::{Batch, Reduction, Sample, micro_batches, token_weights};
pub use config::{Config, RopeScaling};
pub use driftless_trainer::{Kl, Tis};
pub use error::{Error, Result};
pub use learner::{TorchLearner, TorchOptions};
pub use loss::{PolicyLoss, PolicyTerms, Surrogate, Tokens, Watched, kl, policy_loss};
pub use models::{Family, KvCache, Model, Parameter};
pub use optimizer::{AdamW, AdamWOptions};
pub use policy::{Policy, StepStats};
pub use sft::{SftOptions, SftSummary, SftTask, sft};
pub use snapshot::PolicySnapshot;
pub use tch::Kind;
pub use torch::{Borrowed, Column, borrow, device, set_threads};
