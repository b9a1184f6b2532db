//! When two messages are the same one.

use std::borrow::Cow;

use serde_json::Value;

use crate::message::{Message, Role, ToolCall};

/// Whether a client's messages are these, each as in [`is`].
pub(super) fn all(messages: &[Message], kept: &[Message]) -> bool {
    messages.len() == kept.len() && messages.iter().zip(kept).all(|(message, kept)| is(message, kept))
}

/// Whether a client's message is this one: ids and whatever else clients change as they like do not count. Clients of
/// OpenAI's protocol give no thoughts back, which is no edit.
pub(super) fn is(message: &Message, kept: &Message) -> bool {
    said(message, kept) && (thought(message).is_empty() || thoughts(message, kept))
}

/// Whether both thought the same.
pub(super) fn thoughts(a: &Message, b: &Message) -> bool {
    thought(a) == thought(b)
}

fn thought(message: &Message) -> &str {
    message.reasoning.as_deref().unwrap_or_default()
}

fn said(a: &Message, b: &Message) -> bool {
    let call = |(a, b): (&ToolCall, &ToolCall)| a.name == b.name && a.arguments == b.arguments;
    a.role == b.role
        && a.content == b.content
        && a.calls.len() == b.calls.len()
        && a.calls.iter().zip(&b.calls).all(call)
}

/// The messages with the answers of tools in the order of their calls. Clients send them as they come.
pub(super) fn in_order(messages: &[Message]) -> Cow<'_, [Message]> {
    let mut ordered = Cow::Borrowed(messages);
    for (at, message) in messages.iter().enumerate().filter(|(_, message)| message.calls.len() > 1) {
        let answers = messages[at + 1..].iter().take_while(|message| message.role == Role::Tool).count();
        let place = |answer: &Message| {
            let id = answer.call_id.as_ref();
            message.calls.iter().position(|call| Some(&call.id) == id).unwrap_or(message.calls.len())
        };
        let range = at + 1..=at + answers;
        if !messages[range.clone()].is_sorted_by_key(place) {
            ordered.to_mut()[range].sort_by_key(place);
        }
    }
    ordered
}

/// About how much memory they take.
pub(super) fn bytes(messages: &[Message], tools: &[Value]) -> usize {
    let message = |message: &Message| {
        let calls =
            message.calls.iter().map(|call| call.id.len() + call.name.len() + inside(&call.arguments));
        let id = message.call_id.as_ref().map_or(0, String::len);
        size_of::<Message>() + message.content.len() + thought(message).len() + id + calls.sum::<usize>()
    };
    messages.iter().map(message).sum::<usize>() + tools.iter().map(inside).sum::<usize>()
}

fn inside(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(elements) => elements.iter().map(inside).sum(),
            Value::Object(members) => members.iter().map(|(key, value)| key.len() + inside(value)).sum(),
            _ => 0,
        }
}
