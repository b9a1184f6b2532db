//! What the engine says about itself.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::dialect::Dialect;
use super::reply::unix_seconds;
use super::worker::Load;
use crate::models::Family;

/// What stays as it was at start.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) dialect: Dialect,
    pub(super) family: Family,
    pub(super) address: SocketAddr,
    pub(super) model_path: String,
    /// `float32` or `bfloat16`.
    pub(super) dtype: &'static str,
    /// `cpu` or `cuda`.
    pub(super) device: &'static str,
    pub(super) weight_version: String,
    pub(super) context: usize,
    pub(super) max_running: usize,
    pub(super) max_total_tokens: usize,
    pub(super) seed: i64,
}

/// What updates change.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    pub(super) model_path: String,
    pub(super) load_format: String,
    pub(super) weight_version: String,
}

/// `/model_info`.
pub(super) fn model_info(facts: &Facts, shown: &Shown) -> Value {
    let mut info = json!({
        "model_path": shown.model_path,
        "tokenizer_path": facts.model_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": shown.weight_version,
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": facts.family.model_type(),
        "architectures": [facts.family.architecture()],
    });
    if facts.dialect >= Dialect::V0_5_23 {
        info["load_format"] = json!(shown.load_format);
        info["served_model_name"] = json!(shown.model_path);
        info["reasoning_parser"] = json!(null);
        info["tool_call_parser"] = json!(null);
        info["disaggregation_mode"] = json!("null");
    }
    info
}

/// `/server_info`: how the engine was started. Keys that were given are not shown.
pub(super) fn server_info(facts: &Facts) -> Value {
    let mut info = json!({
        "model_path": facts.model_path,
        "tokenizer_path": facts.model_path,
        "served_model_name": facts.model_path,
        "skip_tokenizer_init": true,
        "load_format": "auto",
        "context_length": null,
        "json_model_override_args": "{}",
        "dtype": facts.dtype,
        "quantization": null,
        "kv_cache_dtype": "auto",
        "device": facts.device,
        "host": facts.address.ip().to_string(),
        "port": facts.address.port(),
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "nnodes": 1,
        "attn_dp_size": 1,
        "enable_dp_attention": false,
        "disaggregation_mode": "null",
        "speculative_algorithm": null,
        "speculative_draft_model_path": null,
        "enable_memory_saver": false,
        "custom_weight_loader": [],
        "is_embedding": false,
        "weight_version": facts.weight_version,
        "random_seed": facts.seed,
        "max_running_requests": facts.max_running,
        "max_total_tokens": facts.max_total_tokens,
        "max_total_num_tokens": facts.max_total_tokens,
        "max_req_input_len": facts.context.min(facts.max_total_tokens).saturating_sub(1),
        "status": "ready",
        "internal_states": [{"weight_version": facts.weight_version}],
        "version": facts.dialect.version(),
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
pub(super) fn models(facts: &Facts, shown: &Shown) -> Value {
    let model = json!({
        "id": shown.model_path,
        "object": "model",
        "created": unix_seconds() as u64,
        "owned_by": "sglang",
        "root": shown.model_path,
        "parent": null,
        "max_model_len": facts.context,
    });
    json!({"object": "list", "data": [model]})
}

/// `/v1/loads`.
pub(super) fn loads(facts: &Facts, load: Load) -> Value {
    let usage = load.used_tokens as f64 / facts.max_total_tokens.max(1) as f64;
    let mut rank = json!({
        "timestamp": unix_seconds(),
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_used_tokens": load.used_tokens,
        "max_total_num_tokens": facts.max_total_tokens,
        "max_running_requests": facts.max_running,
        "token_usage": usage,
    });
    let mut body = json!({"version": facts.dialect.version()});
    if facts.dialect == Dialect::V0_5_12 {
        rank["num_total_reqs"] = json!(load.running + load.waiting);
        body["dp_rank_count"] = json!(1);
    }
    body["loads"] = json!([rank]);
    body
}
