//! What all kinds of engines have in common: requests, finished samples, and the labels of versions.

mod generate;
mod label;

pub use generate::{Finish, GenerateRequest, Generation, Rid, SamplingParams, VersionSpan};
pub use label::Label;
