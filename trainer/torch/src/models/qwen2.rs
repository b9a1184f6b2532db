//! Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): queries, keys and values have a bias. Follows `modeling_qwen2.py`.

use super::family::Traits;

pub(super) const TRAITS: Traits = Traits {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    off: &["use_sliding_window"],
    tensors: |config| {
        vec![
            ("self_attn.k_proj.bias", vec![config.key_width()]),
            ("self_attn.q_proj.bias", vec![config.query_width()]),
            ("self_attn.v_proj.bias", vec![config.key_width()]),
        ]
    },
};
