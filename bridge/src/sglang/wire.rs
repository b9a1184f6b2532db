//! Requests and replies of the information, weight and lifecycle calls, as SGLang 0.5.12 to 0.5.23 speak
//! them.
//!
//! Fields that one of those versions lacks are `Option`; fields that this crate does not use are left out.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::live::{Compared, PatchDone, PatchRefused};

/// Reply of `GET /model_info`: what the engine serves now.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct ModelInfo {
    /// Where the weights came from last; an update from disk changes it.
    pub model_path: String,
    /// Where the tokenizer came from; an update leaves it.
    pub tokenizer_path: Option<String>,
    /// Label of the weights, `default` until somebody sets it.
    pub weight_version: Option<String>,
    /// How the engine was told to load weights: `auto`, `dummy`, `safetensors` …; not said before 0.5.18.
    pub load_format: Option<String>,
    /// `null` (the word), `prefill` or `decode`.
    pub disaggregation_mode: Option<String>,
    /// `model_type` of the engine's config.
    pub model_type: Option<String>,
    /// `architectures` of the engine's config.
    pub architectures: Option<Vec<String>>,
    /// False for embedding and reward models.
    pub is_generation: Option<bool>,
}

/// Reply of `GET /server_info`: how the engine was started. Values that an update changes are stale here.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct ServerInfo {
    /// Release of the engine, for people; behaviour is probed.
    pub version: Option<String>,
    /// `python`, or another for the embedded Rust server, which has no weight calls.
    pub frontend: Option<String>,
    /// Directory that the engine was started with.
    pub model_path: String,
    /// Directory of its tokenizer.
    pub tokenizer_path: Option<String>,
    /// Tensor-parallel ranks.
    pub tp_size: Option<u32>,
    /// Pipeline-parallel ranks.
    pub pp_size: Option<u32>,
    /// Data-parallel replicas behind the one address.
    pub dp_size: Option<u32>,
    /// `cpu`, `cuda` …
    pub device: Option<String>,
    /// `auto` (the config's) or the dtype that weights are cast to.
    pub dtype: Option<String>,
    /// Quantisation that was asked for at start; a checkpoint can bring its own in its config.
    pub quantization: Option<String>,
    /// Whether its NCCL maps memory so that peers can be given it: sets its `NCCL_CUMEM_ENABLE`.
    pub enable_symm_mem: Option<bool>,
    /// Whether it can give memory back and take it again.
    pub enable_memory_saver: Option<bool>,
    /// Whether a piece of a stream has new tokens only.
    pub incremental_streaming_output: Option<bool>,
    /// How weights were loaded at start.
    pub load_format: Option<String>,
    /// `null` (the word), `prefill` or `decode`.
    pub disaggregation_mode: Option<String>,
    /// `off`, or the weight-cache role that refuses every update.
    pub weight_cache_mode: Option<String>,
    /// Speculative decoding, which brings a draft model along.
    pub speculative_algorithm: Option<String>,
    /// The draft model.
    pub speculative_draft_model_path: Option<String>,
    /// Overrides of the config, as JSON text.
    pub json_model_override_args: Option<String>,
}

/// One entry of `GET /v1/loads?include=core`: one data-parallel rank.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Load {
    /// Requests being generated.
    pub num_running_reqs: u64,
    /// Requests queued, those retracted by a pause included.
    pub num_waiting_reqs: u64,
    /// Tokens held in the KV cache.
    pub num_used_tokens: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Loads {
    pub(crate) loads: Vec<Load>,
}

/// Body of `POST /update_weights_from_disk`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskUpdate {
    /// Checkpoint directory as the engine sees it.
    pub model_path: PathBuf,
    /// `auto` for an engine started with `dummy`; `None` keeps the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_format: Option<String>,
    /// Label to carry from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_version: Option<String>,
    /// Whether the engine drops its KV cache afterwards. Before 0.5.22 an engine that still holds a request
    /// then ends altogether.
    pub flush_cache: bool,
    /// What only the plugin is to do, while the engine generates; `None`: what it can, or else the engine.
    #[serde(skip)]
    pub only: Option<OnlyPlugin>,
}

/// What an engine's plugin is to do, or nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnlyPlugin {
    /// To patch the engine, or to leave it as it is.
    Patch,
    /// To compare its weights with the checkpoint.
    Compare {
        /// The number of the sample; `None` is all.
        sample: Option<u64>,
    },
}

/// Body of `POST /init_weights_update_group`: the engine's ranks become `rank_offset`, `rank_offset + 1` … of
/// a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct GroupInit {
    /// Host of the group's TCPStore, as the engine reaches it.
    pub(crate) master_address: String,
    /// Its port.
    pub(crate) master_port: u16,
    /// Rank of the engine's first rank.
    pub(crate) rank_offset: u32,
    /// Ranks of the whole group, rank 0 included.
    pub(crate) world_size: u32,
    /// Name of the group.
    pub(crate) group_name: String,
    /// `nccl`, or `gloo` on a CPU.
    pub(crate) backend: String,
}

/// Body of `POST /update_weights_from_distributed`: what rank 0 is about to broadcast.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct DistributedUpdate {
    /// Hugging Face names, in the order of the bytes.
    pub(crate) names: Vec<String>,
    /// torch's names of their dtypes.
    pub(crate) dtypes: Vec<&'static str>,
    /// Their shapes.
    pub(crate) shapes: Vec<Vec<u64>>,
    /// Name of the group.
    pub(crate) group_name: String,
    /// `flattened_bucket`: one broadcast of all bytes, without gaps. `None`: one broadcast a tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_format: Option<&'static str>,
    /// Label to carry from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight_version: Option<String>,
    /// Whether the engine drops its KV cache afterwards. Before 0.5.22 an engine that still holds a request
    /// then ends altogether.
    pub(crate) flush_cache: bool,
}

/// Body of `POST /update_weights_from_tensor`: a bucket that the engine's ranks find in memory of their host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct TensorUpdate {
    /// One pickle for each tensor-parallel rank, in base64.
    pub(crate) serialized_named_tensors: Vec<String>,
    /// `flattened_bucket`. A word that the engine does not know ends it.
    pub(crate) load_format: &'static str,
    /// Label to carry from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight_version: Option<String>,
    /// Whether the engine drops its KV cache afterwards. Before 0.5.22 an engine that still holds a request
    /// then ends altogether.
    pub(crate) flush_cache: bool,
}

/// Memory of an engine that was started with `--enable-memory-saver`, by the names that `POST
/// /release_memory_occupation` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryTag {
    /// The KV cache.
    KvCache,
    /// The weights. What they were is lost, unless the engine was told to keep a copy in host memory.
    Weights,
    /// CUDA graphs.
    CudaGraph,
}

impl MemoryTag {
    /// The engine's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::KvCache => "kv_cache",
            Self::Weights => "weights",
            Self::CudaGraph => "cuda_graph",
        }
    }

    /// The tag that the engine has this word for.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        [Self::KvCache, Self::Weights, Self::CudaGraph].into_iter().find(|tag| tag.as_str() == word)
    }
}

/// What an update from disk did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskUpdated {
    /// The weights are live, and so is the label.
    Done,
    /// The weights are live, but the cache was not flushed and the label reported by `/model_info` did not
    /// change: both are still owed.
    Unflushed,
}

/// What became of an update from disk at an engine with our plugin.
#[derive(Debug)]
pub(crate) enum PluginUpdated {
    /// The plugin patched it.
    Done {
        done: PatchDone,
        /// What the engine says behind the plugin's reply.
        behind: String,
    },
    /// The plugin compared, and nothing has changed.
    Compared(Compared),
    /// The plugin could not, and nothing has changed.
    Refused(PatchRefused),
    /// The engine did it, without a word of the plugin.
    Engine(DiskUpdated),
}

#[derive(Debug, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) success: bool,
    pub(crate) message: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChecksumReply {
    pub(crate) success: bool,
    pub(crate) message: String,
    #[serde(default)]
    pub(crate) ranks: Vec<RankChecksums>,
}

/// Checksums of one rank's tensors, from `POST /weights_checker`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct RankChecksums {
    /// The engine's fused tensor name → 16 hex digits. On the CPU the first 8 bytes of the SHA-256 of the
    /// tensor's bytes; another hash elsewhere.
    pub checksums: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_engines_lack_fields() {
        let info: ModelInfo = serde_json::from_str(r#"{"model_path":"/m","is_generation":true}"#).unwrap();
        assert_eq!(info.weight_version, None);
        let server: ServerInfo =
            serde_json::from_str(r#"{"model_path":"/m","tp_size":1,"quantization":null,"other":[]}"#)
                .unwrap();
        assert_eq!((server.tp_size, server.quantization), (Some(1), None));
        assert!(serde_json::from_str::<ServerInfo>(r#"{"model_path":"/m","tp_size":"one"}"#).is_err());
    }
}
