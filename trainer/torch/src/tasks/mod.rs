//! What the models of the tasks look like, and plain text to train on.

pub mod arithmetic;
pub mod text;
