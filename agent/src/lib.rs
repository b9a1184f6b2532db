//! Conversations as tokens: chat templates, tokenizers, and what clients and models say to each other.

pub mod chat;
mod error;
pub mod message;
mod tokenizer;

pub use error::{Error, Result};
pub use tokenizer::Tokenizer;
