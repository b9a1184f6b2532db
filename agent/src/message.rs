//! What clients and models say to each other, whatever protocol it came in.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

pub use crate::json::Json;
pub use crate::tools::Tools;

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions; OpenAI's `developer` too.
    System,
    /// Who asks.
    User,
    /// The model.
    Assistant,
    /// What a tool returned.
    Tool,
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// Its text; empty if there is none.
    #[serde(default)]
    pub content: String,
    /// Of the assistant: what it thought before, without the marks around it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Of the assistant: tools that it calls, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ToolCall>,
    /// Of a tool: the id of the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<String>,
}

/// A tool that is called.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Its id, which the tool's answer names.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Its arguments, as the model wrote them: a JSON object; a JSON string where the model wrote no object.
    pub arguments: Json,
}

/// One call of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The whole conversation so far, in order. Its last message is not the assistant's, or is continued.
    pub messages: Vec<Message>,
    /// Tools that may be called.
    pub tools: Tools,
    /// The client's bound on new tokens. The session's own bound holds too.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// What the client says of the branch that it is on: an agent's id, a window's number.
    pub branch: Option<String>,
    /// Whether it is a client's own housekeeping, such as a title for a conversation, which is not trained.
    pub is_auxiliary: bool,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The model ended its turn.
    Stop,
    /// The model calls tools.
    ToolCalls,
    /// A text of [`Ask::stop`] came.
    StopText,
    /// Its bound on tokens.
    Length,
}

/// What a model answers to an [`Ask`].
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The assistant's message.
    pub message: Message,
    /// Why it ended.
    pub ended: Ended,
    /// Tokens that the engine read.
    pub prompt_tokens: u64,
    /// Of these, how many were in the session before, token for token.
    pub cached_tokens: u64,
    /// Tokens that were drawn.
    pub completion_tokens: u64,
    /// Of these, how many are thoughts, with the marks around them.
    pub reasoning_tokens: u64,
}

/// Why an [`Ask`] gets no answer, for a client to see.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The conversation cannot be what it is. HTTP 400.
    #[error("{0}")]
    Invalid(String),
    /// There is no such session, or its key is another. HTTP 401.
    #[error("{0}")]
    Unknown(String),
    /// The conversation has no room left in the model's context. HTTP 400, with the code that clients compact on.
    #[error("the conversation has {tokens} tokens, and the model's context {limit}")]
    ContextFull {
        /// Tokens of the conversation.
        tokens: u64,
        /// Tokens that it may have.
        limit: u64,
    },
    /// The session has ended: its time is up, or its answer was taken. HTTP 410.
    #[error("{0}")]
    Over(String),
    /// No engine can be asked now. HTTP 503; clients try again.
    #[error("{0}")]
    Busy(String),
    /// What should not happen. HTTP 500.
    #[error("{0}")]
    Broken(String),
}

/// What answers clients: sessions over a fleet, or what stands in for them in tests.
#[async_trait]
pub trait Converse: Send + Sync {
    /// Answers. Asked twice for the same conversation, it answers the same, and draws once.
    ///
    /// # Errors
    /// [`Refusal`].
    async fn ask(&self, session: &str, ask: Ask) -> Result<Answer, Refusal>;

    /// Tokens that `ask` has before an answer.
    ///
    /// # Errors
    /// [`Refusal`].
    async fn count(&self, session: &str, ask: Ask) -> Result<u64, Refusal>;

    /// Closes a session for whoever has the key to that: it takes no further asks, and forgets what it has.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] where sessions end by themselves, and any other [`Refusal`].
    async fn close(&self, _session: &str, _key: Option<&str>) -> Result<(), Refusal> {
        Err(Refusal::Invalid("a session ends with its answer, and not before".to_owned()))
    }

    /// Whether it can answer at all.
    ///
    /// # Errors
    /// [`Refusal::Broken`], and why.
    fn check(&self) -> Result<(), Refusal> {
        Ok(())
    }

    /// Whether `key` opens `session`.
    fn opens(&self, session: &str, key: Option<&str>) -> bool;

    /// Name of the model, as clients see it.
    fn model(&self) -> &str;
}
