//! The families of models, and what sets them apart.

use super::{llama, qwen2, qwen3};
use crate::config::Config;

/// A family of dense decoders.
///
/// All compute: embedding, then per layer RMSNorm, grouped-query attention with rotary positions, RMSNorm and
/// SwiGLU, each added to the residual stream, then RMSNorm and the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, and what is built like them, such as SmolLM2.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3.
    Qwen3,
}

/// What a family adds to that.
pub(crate) struct Traits {
    /// `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The one entry of `architectures`.
    pub(crate) architecture: &'static str,
    /// Options of the family's config that would change the computation, and are computed only when they are
    /// off.
    pub(crate) off: &'static [&'static str],
    /// Tensors of a layer beyond the seven matrices and two norms of every family. Where a projection has a
    /// bias or a norm here, the attention uses it.
    pub(crate) tensors: fn(&Config) -> LayerTensors,
}

/// Names within a layer, and shapes.
pub(crate) type LayerTensors = Vec<(&'static str, Vec<i64>)>;

impl Family {
    /// Every family.
    pub(crate) const ALL: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Qwen3];

    /// `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// The entry of `architectures` in `config.json`.
    #[must_use]
    pub fn architecture(self) -> &'static str {
        self.traits().architecture
    }

    /// The same of a model with these layers that classifies sequences.
    pub(crate) fn classifier(self) -> String {
        self.architecture().replace("ForCausalLM", "ForSequenceClassification")
    }

    pub(crate) fn traits(self) -> &'static Traits {
        match self {
            Family::Llama => &llama::TRAITS,
            Family::Qwen2 => &qwen2::TRAITS,
            Family::Qwen3 => &qwen3::TRAITS,
        }
    }
}
