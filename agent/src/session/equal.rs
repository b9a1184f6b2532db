//! When two messages are the same one: by digests, so that a session needs not keep what clients wrote.

use std::borrow::Cow;

use blake3::Hasher;

use crate::message::{Message, Role};
use crate::tools::{Digest, digest, inside, text, value};

/// A message, as far as it matters which one it is: ids and whatever else clients change as they like do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    said: Digest,
    /// None without thoughts.
    thoughts: Option<Digest>,
}

impl Mark {
    pub(super) fn of(message: &Message) -> Self {
        let mut said = Hasher::new();
        said.update(&[message.role as u8]);
        text(&mut said, &message.content);
        for call in &message.calls {
            text(&mut said, &call.name);
            value(&mut said, &call.arguments);
        }
        let thoughts = Some(thought(message)).filter(|thoughts| !thoughts.is_empty());
        let thoughts = thoughts.map(|thoughts| digest(Hasher::new().update(thoughts.as_bytes())));
        Mark { said: digest(&said), thoughts }
    }

    /// Whether a client's message is this one. Clients of OpenAI's protocol give no thoughts back, which is no edit.
    pub(super) fn is(&self, kept: &Self) -> bool {
        self.said == kept.said && (self.thoughts.is_none() || self.thoughts == kept.thoughts)
    }

    /// Whether both thought the same.
    pub(super) fn thinks(&self, kept: &Self) -> bool {
        self.thoughts == kept.thoughts
    }
}

pub(super) fn marks(messages: &[Message]) -> Vec<Mark> {
    messages.iter().map(Mark::of).collect()
}

/// Whether a client's messages are these, each as in [`Mark::is`].
pub(super) fn all(messages: &[Mark], kept: &[Mark]) -> bool {
    messages.len() == kept.len() && messages.iter().zip(kept).all(|(message, kept)| message.is(kept))
}

fn thought(message: &Message) -> &str {
    message.reasoning.as_deref().unwrap_or_default()
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
pub(super) fn bytes(messages: &[Message]) -> usize {
    let message = |message: &Message| {
        let calls =
            message.calls.iter().map(|call| call.id.len() + call.name.len() + inside(&call.arguments));
        let id = message.call_id.as_ref().map_or(0, String::len);
        size_of::<Message>() + message.content.len() + thought(message).len() + id + calls.sum::<usize>()
    };
    messages.iter().map(message).sum()
}
