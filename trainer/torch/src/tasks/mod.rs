//! What models of fresh weights look like, and plain text to train on.

pub mod text;
pub mod tiny;
