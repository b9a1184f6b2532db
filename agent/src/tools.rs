//! Tools that a model may call, and what tells JSON values apart.

use std::ops::Deref;
use std::sync::Arc;

use blake3::Hasher;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::json::Json;

/// What equal values have in common, and no others.
pub(crate) type Digest = [u8; 16];

/// Tools, each as OpenAI's `{"type": "function", "function": {…}}`. Clones share them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "Vec<Json>")]
pub struct Tools {
    tools: Arc<[Json]>,
    digest: Digest,
    bytes: usize,
}

impl Tools {
    /// The same of equal tools, whatever the order of their members.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// About how much memory they take.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl From<Vec<Value>> for Tools {
    fn from(tools: Vec<Value>) -> Self {
        tools.into_iter().map(Json::from).collect::<Vec<_>>().into()
    }
}

impl From<Vec<Json>> for Tools {
    fn from(tools: Vec<Json>) -> Self {
        let (digest, bytes) = (of(&tools), tools.iter().map(inside).sum());
        Tools { tools: tools.into(), digest, bytes }
    }
}

impl Default for Tools {
    fn default() -> Self {
        Vec::<Json>::new().into()
    }
}

impl Deref for Tools {
    type Target = [Json];

    fn deref(&self) -> &[Json] {
        &self.tools
    }
}

impl Serialize for Tools {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.tools.as_ref().serialize(serializer)
    }
}

/// Tools, whatever the order of their members.
fn of(tools: &[Json]) -> Digest {
    let mut hasher = Hasher::new();
    tools.iter().for_each(|tool| value(&mut hasher, tool));
    digest(&hasher)
}

pub(crate) fn digest(hasher: &Hasher) -> Digest {
    hasher.finalize().as_bytes().first_chunk().copied().unwrap_or_default()
}

/// Adds a text with its length.
pub(crate) fn text(hasher: &mut Hasher, text: &str) {
    hasher.update(&text.len().to_le_bytes()).update(text.as_bytes());
}

/// Adds a value, whatever the order of its members.
pub(crate) fn value(hasher: &mut Hasher, of: &Json) {
    match of {
        Json::Null => _ = hasher.update(b"0"),
        Json::Bool(is) => _ = hasher.update(if *is { b"t" } else { b"f" }),
        Json::Number(number) => text(hasher.update(b"n"), &number.to_string()),
        Json::String(string) => text(hasher.update(b"s"), string),
        Json::Array(elements) => {
            hasher.update(b"a").update(&elements.len().to_le_bytes());
            elements.iter().for_each(|element| value(hasher, element));
        }
        Json::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by_key(|(key, _)| *key);
            hasher.update(b"o").update(&members.len().to_le_bytes());
            for (key, member) in members {
                text(hasher, key);
                value(hasher, member);
            }
        }
    }
}

/// About how much memory a value takes.
pub(crate) fn inside(value: &Json) -> usize {
    size_of::<Json>()
        + match value {
            Json::String(text) => text.len(),
            Json::Array(elements) => elements.iter().map(inside).sum(),
            Json::Object(members) => members.iter().map(|(key, value)| key.len() + inside(value)).sum(),
            _ => 0,
        }
}
