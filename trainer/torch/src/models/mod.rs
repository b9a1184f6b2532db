//! Dense decoders by Hugging Face's names: a file for what is particular to each family, over parts that all
//! share.

mod attention;
mod cache;
mod family;
mod llama;
mod model;
mod parts;
mod qwen2;
mod qwen3;
mod rope;
mod weights;

pub use cache::KvCache;
pub use family::Family;
pub use model::Model;
pub use weights::Parameter;
