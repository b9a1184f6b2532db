//! Models by Hugging Face architecture.

mod cache;
mod qwen3;
mod rope;

pub use cache::KvCache;
pub use qwen3::{Parameter, Qwen3};
