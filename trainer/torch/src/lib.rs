//! libtorch as a learner of the loop: models, losses, batches, and an embedded engine.
//!
//! Everything is token-in-token-out: the ids an engine sampled are the ids that are trained on. Weights
//! travel only as publications of `driftless-transport`; rollouts only through the log of `driftless-buffer`.

mod batch;
pub mod checkpoint;
mod config;
mod critic;
mod dispatcher;
pub mod engine;
mod error;
mod gradients;
mod head;
mod learn;
mod learner;
mod loss;
mod models;
mod ops;
mod optimizer;
mod policy;
mod ranks;
mod sft;
mod snapshot;
pub mod tasks;
mod torch;
mod trained;

pub use batch::{Batch, Reduction, Sample, micro_batches, steps, token_weights};
pub use config::{Config, RopeScaling};
pub use critic::Critic;
pub use error::{Error, Result};
pub use learner::{TorchLearner, TorchOptions, check_ranks, serve_rank};
pub use loss::{PolicyTerms, Sequence, Tokens, Watched, kl, policy_loss, value_loss};
pub use models::{Family, KvCache, Model, Parameter};
pub use optimizer::{AdamW, AdamWOptions};
pub use policy::Policy;
pub use ranks::{RANKS_MAX, RankOptions};
pub use sft::{SftOptions, SftSummary, SftTask, sft};
pub use snapshot::PolicySnapshot;
pub use tch::Kind;
pub use torch::{Borrowed, Column, borrow, device, set_threads};
