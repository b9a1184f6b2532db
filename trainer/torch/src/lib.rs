//! libtorch as a learner of the loop: models, losses, batches, and an embedded engine.
//!
//! Everything is token-in-token-out: the ids an engine sampled are the ids that are trained on. Weights
//! travel only as publications of `driftless-transport`; rollouts only through the log of `driftless-buffer`.

mod apart;
pub mod batch;
pub mod checkpoint;
mod config;
mod critic;
mod dispatcher;
pub mod engine;
mod error;
mod head;
mod learn;
mod learner;
mod lent;
pub mod libtorch;
pub mod loss;
pub mod models;
mod ops;
pub mod optimizer;
mod policy;
pub mod quantize;
mod ranks;
mod settings;
pub mod sft;
mod snapshot;
pub mod tasks;
mod trained;

pub use batch::Batch;
pub use config::{Config, RopeScaling};
pub use critic::Critic;
pub use driftless_trainer::learner::Sample;
pub use error::{Error, Result};
pub use learner::{TorchLearner, TorchOptions, check_ranks, serve_rank};
pub use models::{Family, Model, Parameter};
pub use policy::Policy;
pub use ranks::RankOptions;
pub use settings::Settings;
pub use snapshot::{policy_snapshot, quantize_checkpoint};
pub use tch::Kind;
