//! Qwen3 dense (`Qwen3ForCausalLM`): queries and keys are normalised per head. Follows `modeling_qwen3.py`.

use super::family::Traits;

pub(super) const TRAITS: Traits = Traits {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    off: &["attention_bias", "use_sliding_window"],
    tensors: |config| {
        vec![
            ("self_attn.k_norm.weight", vec![config.head_dim]),
            ("self_attn.q_norm.weight", vec![config.head_dim]),
        ]
    },
};
