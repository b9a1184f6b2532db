//! ATIF, Harbor's format of trajectories: what was said, step by step, with the tokens that the policy read and drew.

mod check;
mod steps;
#[cfg(test)]
mod tests;

pub use check::{Checker, Fault, Report, Unchecked};
pub use steps::Sampled;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version that is written.
pub const VERSION: &str = "ATIF-v1.7";

/// One document. What is read of others' is what can be checked; fields that are not named here pass.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Trajectory<'a> {
    /// [`VERSION`], or another one of ATIF.
    pub schema_version: String,
    /// The run of the agent, which several documents may be of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// The document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trajectory_id: Option<String>,
    /// Who acts.
    pub agent: Agent,
    /// What was said, in order.
    pub steps: Vec<Step<'a>>,
    /// What else the writer knows; not read, as each writer has another.
    #[serde(default, skip_deserializing, skip_serializing_if = "Value::is_null")]
    pub extra: Value,
    /// Documents of agents that this one asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subagent_trajectories: Option<Vec<Trajectory<'a>>>,
}

/// Who acts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Agent {
    /// Name of the program.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The model behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_name: Option<String>,
}

/// Something that was said.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step<'a> {
    /// Its number, from 1.
    pub step_id: u64,
    /// Who said it.
    pub source: Source,
    /// What was said.
    pub message: Message,
    /// What the model thought, where that is kept apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tokens of an agent's step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics<'a>>,
    /// Whether it stands here for context only, from another document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_copied_context: Option<bool>,
    /// Requests to the model that the step is made of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub llm_call_count: Option<u64>,
    /// What ATIF has no field for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Extra<'a>>,
}

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Instructions.
    System,
    /// Whoever asks, or an environment.
    User,
    /// The policy.
    Agent,
}

/// What is said.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a text or a list of content parts")]
pub enum Message {
    /// A text.
    Text(String),
    /// Texts, images and sounds.
    Parts(Vec<Value>),
}

/// The tokens of a turn.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Metrics<'a> {
    /// Tokens that the model read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Tokens that it drew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// All ids that it read, those of earlier turns included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Cow<'a, [i32]>>,
    /// The ids that it drew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_token_ids: Option<Cow<'a, [i32]>>,
    /// Of each of these, its log-probability when it was drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Cow<'a, [f32]>>,
}

/// The `extra` of a step, by the program that it is of.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Extra<'a> {
    /// Ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driftless: Option<Own<'a>>,
}

/// What this project says of a step. Places are counted in `completion_token_ids`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Own<'a> {
    /// Which version of the weights drew which tokens: version, first, and one past the last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub weight_versions: Vec<(u64, u32, u32)>,
    /// 1 for each token that is trained on, else 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_mask: Option<Cow<'a, [u8]>>,
    /// Digests of the engines' replies that the tokens are of, as the rollout log has them, in hex.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replies: Vec<String>,
    /// The ids of a step behind the last turn, which no turn read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Cow<'a, [i32]>>,
}
