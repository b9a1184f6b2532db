//! Conversations as tokens: chat templates, tokenizers, and what clients and models say to each other.

pub mod atif;
pub mod chat;
mod error;
mod family;
pub mod gateway;
mod journal;
mod json;
pub mod message;
mod recent;
pub mod session;
pub mod sessions;
mod tokenizer;
mod tools;
pub mod wire;

pub use error::{Error, Result};
pub use family::Family;
pub use journal::Journal;
pub use sessions::Sessions;
pub use tokenizer::Tokenizer;
