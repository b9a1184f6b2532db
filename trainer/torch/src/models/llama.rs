//! Llama (`LlamaForCausalLM`): the decoder that all families share, and nothing more. Llama 3.1 and later
//! stretch the rotary frequencies, see [`crate::RopeScaling`]. Follows `modeling_llama.py`.

use super::family::Traits;

pub(super) const TRAITS: Traits = Traits {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    off: &["attention_bias", "mlp_bias"],
    tensors: |_| Vec::new(),
};
