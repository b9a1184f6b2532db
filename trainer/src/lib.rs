//! A thin libtorch trainer: models, losses, batches, and an embedded engine.
//!
//! Everything is token-in-token-out: the ids an engine sampled are the ids that are trained on. Weights travel
//! only as publications of `driftless-transport`; rollouts only through the log of `driftless-buffer`.

mod config;
mod error;
mod models;
mod torch;

pub use config::Config;
pub use error::{Error, Result};
pub use models::{KvCache, Parameter, Qwen3, Weights};
pub use torch::{Borrowed, Column, borrow, device, set_threads};
