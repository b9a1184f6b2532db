//! What the engine says about itself.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::Facts;
use crate::reply::unix_seconds;
use driftless_bridge::sglang::{Dialect, Feature, Load};

/// `/model_info`.
pub(super) fn model_info(facts: &Facts) -> Value {
    let serving = &facts.serving;
    let mut info = json!({
        "model_path": serving.model_path,
        "tokenizer_path": facts.launched.model_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": serving.weight_version,
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": facts.model_type,
        "architectures": [facts.architecture],
    });
    if facts.dialect.has(Feature::ShownLoadFormat) {
        info["load_format"] = json!(serving.load_format);
        info["served_model_name"] = json!(serving.model_path);
        info["reasoning_parser"] = json!(null);
        info["tool_call_parser"] = json!(null);
        info["disaggregation_mode"] = json!("null");
    }
    info
}

/// `/server_info`: how the engine was started. Keys that were given are not shown.
pub(super) fn server_info(facts: &Facts, address: SocketAddr) -> Value {
    let launched = &facts.launched;
    let mut info = json!({
        "model_path": launched.model_path,
        "tokenizer_path": launched.model_path,
        "served_model_name": launched.model_path,
        "skip_tokenizer_init": true,
        "load_format": launched.load_format,
        "context_length": null,
        "json_model_override_args": "{}",
        "dtype": facts.dtype,
        "quantization": null,
        "kv_cache_dtype": "auto",
        "device": facts.device,
        "host": address.ip().to_string(),
        "port": address.port(),
        "tp_size": facts.tp_size,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "nnodes": 1,
        "attn_dp_size": 1,
        "enable_dp_attention": false,
        "disaggregation_mode": "null",
        "speculative_algorithm": null,
        "speculative_draft_model_path": null,
        "enable_memory_saver": facts.enable_memory_saver,
        "incremental_streaming_output": facts.incremental_streaming_output,
        "custom_weight_loader": [],
        "is_embedding": false,
        "weight_version": launched.weight_version,
        "random_seed": facts.random_seed,
        "max_running_requests": facts.max_running_requests,
        "max_total_tokens": facts.max_total_tokens,
        "max_total_num_tokens": facts.max_total_tokens,
        "max_req_input_len": facts.context.min(facts.max_total_tokens).saturating_sub(1),
        "status": "ready",
        "internal_states": [{"weight_version": launched.weight_version}],
        "version": facts.dialect.to_string(),
    });
    if facts.dialect >= Dialect::V0_5_17 {
        info["weight_cache_mode"] = json!("off");
    }
    if facts.dialect >= Dialect::V0_5_23 {
        info["frontend"] = json!("python");
    }
    info
}

/// `/v1/models`.
pub(super) fn models(facts: &Facts) -> Value {
    let path = &facts.serving.model_path;
    let model = json!({
        "id": path,
        "object": "model",
        "created": unix_seconds() as u64,
        "owned_by": "sglang",
        "root": path,
        "parent": null,
        "max_model_len": facts.context,
    });
    json!({"object": "list", "data": [model]})
}

/// `/v1/loads`.
pub(super) fn loads(facts: &Facts, load: Load) -> Value {
    let usage = load.num_used_tokens as f64 / facts.max_total_tokens.max(1) as f64;
    let mut rank = json!({
        "timestamp": unix_seconds(),
        "dp_rank": 0,
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_used_tokens": load.num_used_tokens,
        "max_total_num_tokens": facts.max_total_tokens,
        "max_running_requests": facts.max_running_requests,
        "token_usage": usage,
    });
    let mut body = json!({"version": facts.dialect.to_string()});
    if facts.dialect == Dialect::V0_5_12 {
        rank["num_total_reqs"] = json!(load.num_running_reqs + load.num_waiting_reqs);
        body["dp_rank_count"] = json!(1);
    }
    body["loads"] = json!([rank]);
    body
}
