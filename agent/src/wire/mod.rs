//! What clients send and are sent, without I/O: one file a protocol.
//!
//! Reading is lenient: a field that is not known, or that changes nothing here, is left alone. A field that would change
//! what is asked, and cannot be had, is refused by its name.

mod chat;
mod messages;
mod read;
mod responses;
mod tools;

use serde_json::{Value, json};

use crate::message::{Answer, Ask, Ended, Json, Refusal, Role};
pub(crate) use chat::{one as message, spoken};
pub use tools::ToolCache;
use tools::{Namespaces, Split};

/// Letters of a system message that say what it is about.
const HEAD: usize = 1500;
/// Bytes that a probe for a single token has at most. Claude Code's is a word.
const PROBE_BYTES: usize = 64;
/// Words of which a sentence that asks for the title of a conversation has one of each.
const TITLE: [&[&str]; 3] = [
    &["title"],
    &["conversation", "session", "thread", "chat"],
    &[
        "write", "generate", "create", "output", "give", "make", "suggest", "extract", "provide", "propose",
        "return",
    ],
];

/// The protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// OpenAI's Chat Completions.
    Chat,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

/// What clients say in headers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// `x-claude-code-agent-id`: a subagent's.
    pub agent_id: Option<String>,
    /// `x-codex-turn-metadata`: JSON.
    pub turn_metadata: Option<String>,
}

/// A request that was understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// What it asks.
    pub ask: Ask,
    /// How the answer is wanted.
    pub form: Form,
}

/// How an answer is wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Form {
    /// Whether as a stream of events.
    pub stream: bool,
    /// Of Chat Completions: whether a stream ends with the usage.
    include_usage: bool,
    /// Of Responses: tools of a namespace by the name that the model knows, with the client's namespace and name.
    namespaces: Namespaces,
    /// Of Messages: the text that ends an answer, where there is only one.
    stop: Option<String>,
}

/// What a reply says besides the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Digits that no other reply has.
    pub id: String,
    /// The model's name.
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
}

/// An event of a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, in protocols that name events.
    pub name: Option<&'static str>,
    /// Its data: JSON, or a word.
    pub data: String,
}

impl Event {
    /// Its bytes in a stream of server-sent events. JSON has no line breaks.
    #[must_use]
    pub fn to_text(&self) -> String {
        let name = self.name.map(|name| format!("event: {name}\n")).unwrap_or_default();
        format!("{name}data: {}\n\n", self.data)
    }

    fn named(name: &'static str, data: &Value) -> Self {
        Self { name: Some(name), data: data.to_string() }
    }
}

/// A refusal as a client sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// The HTTP status.
    pub status: u16,
    /// The body, in the vendor's shape.
    pub body: Value,
}

impl Protocol {
    /// What the body of a request asks. Tools that `cache` has are not read again.
    ///
    /// # Errors
    /// [`Refusal::Invalid`], with the field.
    pub fn read(self, body: &[u8], hints: &Hints, cache: &ToolCache) -> Result<Call, Refusal> {
        let Split { fields, key, known } = cache.split(self, body)?;
        let is_known = known.is_some();
        let mut call = match self {
            Self::Chat => chat::read(&fields, known),
            Self::Responses => responses::read(&fields, known),
            Self::Messages => messages::read(&fields, known),
        }?;
        if let Some((key, bytes)) = key.filter(|_| !is_known) {
            cache.put(key, bytes, &call);
        }
        if call.ask.messages.is_empty() {
            return Err(Refusal::Invalid("the conversation has no messages".into()));
        }
        call.ask.branch = branch(hints);
        call.ask.is_auxiliary = is_auxiliary(&call.ask);
        Ok(call)
    }

    /// The body of a whole reply.
    #[must_use]
    pub fn reply(self, form: &Form, answer: &Answer, frame: &Frame) -> Value {
        match self {
            Self::Chat => chat::reply(answer, frame),
            Self::Responses => responses::reply(form, answer, frame),
            Self::Messages => messages::reply(form, answer, frame),
        }
    }

    /// The reply as a stream's events, the last one included.
    #[must_use]
    pub fn events(self, form: &Form, answer: &Answer, frame: &Frame) -> Vec<Event> {
        match self {
            Self::Chat => chat::events(form, answer, frame),
            Self::Responses => responses::events(form, answer, frame),
            Self::Messages => messages::events(form, answer, frame),
        }
    }

    /// What keeps a stream alive, as text.
    #[must_use]
    pub fn ping(self) -> &'static str {
        match self {
            Self::Messages => "event: ping\ndata: {\"type\": \"ping\"}\n\n",
            Self::Chat | Self::Responses => ": ping\n\n",
        }
    }

    /// A refusal in the vendor's shape.
    #[must_use]
    pub fn refused(self, refusal: &Refusal) -> Fault {
        let is_anthropic = self == Self::Messages;
        match refusal {
            Refusal::Invalid(words) => self.fault(400, None, words),
            Refusal::Unknown(words) => self.fault(401, Some("invalid_api_key"), words),
            // What clients compact on.
            Refusal::ContextFull { tokens, limit } if is_anthropic => {
                self.fault(400, None, &format!("prompt is too long: {tokens} tokens > {limit} maximum"))
            }
            Refusal::ContextFull { .. } => {
                self.fault(400, Some("context_length_exceeded"), &refusal.to_string())
            }
            Refusal::Over(words) => self.fault(410, Some("session_over"), words),
            Refusal::Busy(words) => self.fault(if is_anthropic { 529 } else { 503 }, Some("busy"), words),
            Refusal::Broken(words) => self.fault(500, None, words),
        }
    }

    /// A status with words, in the vendor's shape. `code` is what OpenAI's clients tell causes apart by.
    #[must_use]
    pub fn fault(self, status: u16, code: Option<&str>, words: &str) -> Fault {
        let body = match self {
            Self::Messages => {
                json!({"type": "error", "error": {"type": anthropic_kind(status), "message": words}})
            }
            Self::Chat | Self::Responses => {
                let kind = if status < 500 { "invalid_request_error" } else { "server_error" };
                json!({"error": {"message": words, "type": kind, "param": null, "code": code}})
            }
        };
        Fault { status, body }
    }

    /// A refusal in a stream that has begun, as its last event.
    #[must_use]
    pub fn refused_late(self, refusal: &Refusal) -> Event {
        let body = self.refused(refusal).body;
        match self {
            Self::Chat => Event { name: None, data: body.to_string() },
            Self::Messages => Event::named("error", &body),
            Self::Responses => {
                let code = body["error"]["code"].as_str().unwrap_or("server_error");
                let error = json!({"type": "error", "code": code, "message": body["error"]["message"],
                    "param": null, "sequence_number": 0});
                Event::named("error", &error)
            }
        }
    }
}

/// Anthropic's name of a status.
fn anthropic_kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 | 405 | 410 => "not_found_error",
        413 => "request_too_large",
        400..500 => "invalid_request_error",
        529 => "overloaded_error",
        _ => "api_error",
    }
}

/// Where clients say that a request stands among their agents and windows.
fn branch(hints: &Hints) -> Option<String> {
    if let Some(agent) = &hints.agent_id {
        return Some(agent.clone());
    }
    let metadata: Value = serde_json::from_str(hints.turn_metadata.as_deref()?).ok()?;
    let agent = metadata["agent_name"].as_str().unwrap_or_default();
    Some(format!("{agent}/{}", metadata["window_number"].as_u64()?))
}

/// Whether a request looks like a client's own: it has no tools and no history, and is a short probe for a single token, or
/// a sentence of its system message asks for the title of a conversation. A session has the last word:
/// [`crate::session::Tree::samples`].
fn is_auxiliary(ask: &Ask) -> bool {
    let has_history = ask.messages.iter().any(|message| matches!(message.role, Role::Assistant | Role::Tool));
    if has_history || !ask.tools.is_empty() {
        return false;
    }
    let bytes: usize = ask.messages.iter().map(|message| message.content.len()).sum();
    let mut system = ask.messages.iter().filter(|message| message.role == Role::System);
    (ask.max_tokens == Some(1) && bytes <= PROBE_BYTES) || system.any(|message| asks_title(&message.content))
}

/// Whether a sentence at the beginning of a text asks for the title of a conversation.
fn asks_title(text: &str) -> bool {
    let head: String = text.chars().take(HEAD).flat_map(char::to_lowercase).collect();
    head.split(['.', '!', '?', '\n']).any(|sentence| {
        let words: Vec<&str> = sentence.split(|letter: char| !letter.is_alphanumeric()).collect();
        TITLE.iter().all(|any| words.iter().any(|word| any.contains(word)))
    })
}

/// OpenAI's word for how an answer to Chat Completions ended.
fn finish_reason(ended: Ended) -> &'static str {
    match ended {
        Ended::Stop | Ended::StopText => "stop",
        Ended::ToolCalls => "tool_calls",
        Ended::Length => "length",
    }
}

/// A call's arguments as OpenAI has them: in a string.
fn arguments_text(arguments: &Json) -> String {
    match arguments {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
