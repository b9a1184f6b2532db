//! Dense decoders by Hugging Face's names: a file for what is particular to each family, over parts that all
//! share.

mod attention;
mod cache;
mod critic;
mod family;
mod flash;
mod gradients;
mod layer;
mod layout;
mod llama;
mod model;
mod parts;
mod pass;
mod qwen2;
mod qwen3;
mod rope;
#[cfg(test)]
pub(crate) mod tests;
mod weights;

pub use cache::KvCache;
pub use family::Family;
pub(crate) use gradients::Gradients;
pub use model::Model;
pub(crate) use pass::Pass;
pub use weights::Parameter;
pub(crate) use weights::{Places, Span, Weight};
