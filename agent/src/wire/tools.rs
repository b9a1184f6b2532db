//! Tools of requests. They are most of a body, and the same in all requests of an agent: what was read once is found by
//! the text that it was read of.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Call, Protocol};
use crate::message::{Json, Refusal, Tools};
use crate::recent::{Key, Recent};

/// Bytes of texts of which the tools are kept.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// Tools of a namespace by the name that the model knows, with the client's namespace and name.
pub(super) type Namespaces = BTreeMap<String, [String; 2]>;

/// What the tools of a request are read to.
#[derive(Debug, Clone, Default)]
pub(super) struct Toolbox {
    pub(super) tools: Tools,
    pub(super) namespaces: Namespaces,
}

/// Tools that were read lately.
#[derive(Debug)]
pub struct ToolCache(Recent<Toolbox>);

/// A body.
pub(super) struct Split {
    /// Its fields; without `tools` if they are known.
    pub(super) fields: Json,
    /// The tools' key and the length of their text.
    pub(super) key: Option<(Key, usize)>,
    pub(super) known: Option<Toolbox>,
}

/// A body whose tools are skipped.
#[derive(Deserialize)]
struct Skipped<'a> {
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    #[serde(flatten)]
    fields: Json,
}

impl Default for ToolCache {
    /// An empty one.
    fn default() -> Self {
        ToolCache(Recent::new(TEXT_BYTES_MAX))
    }
}

impl ToolCache {
    /// Parses a body. Only of tools that are known the text is skipped: all else is read, and refused, as JSON is.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] for what is no JSON object.
    pub(super) fn split(&self, protocol: Protocol, body: &[u8]) -> Result<Split, Refusal> {
        let skipped: Option<Skipped<'_>> = serde_json::from_slice(body).ok();
        let text = skipped.as_ref().and_then(|skipped| skipped.tools.map(RawValue::get));
        let key = text.map(|text| (key(protocol, text), text.len()));
        let known = key.and_then(|(key, _)| self.0.get(&key));
        let fields = match skipped {
            Some(skipped) if known.is_some() || text.is_none() => skipped.fields,
            _ => whole(body)?,
        };
        Ok(Split { fields, key, known })
    }

    /// Keeps the tools of a call.
    pub(super) fn put(&self, key: Key, bytes: usize, call: &Call) {
        let (tools, namespaces) = (call.ask.tools.clone(), call.form.namespaces.clone());
        // A client that lets the model call none has had none read.
        if !tools.is_empty() {
            self.0.put(key, Toolbox { tools, namespaces }, bytes);
        }
    }
}

fn key(protocol: Protocol, text: &str) -> Key {
    *blake3::Hasher::new().update(&[protocol as u8]).update(text.as_bytes()).finalize().as_bytes()
}

fn whole(body: &[u8]) -> Result<Json, Refusal> {
    let body: Json = serde_json::from_slice(body)
        .map_err(|error| Refusal::Invalid(format!("the body is not JSON: {error}")))?;
    match body.as_object().is_some() {
        true => Ok(body),
        false => Err(Refusal::Invalid("the body is not a JSON object".into())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::wire::Hints;

    const PIECES: [&str; 12] = [
        "",
        "\"",
        "\\ud800",
        "\u{e9}",
        ",\"tools\":null",
        ",\"tools\":[]",
        ",\"tool_choice\":\"none\"",
        "{",
        "]",
        "1e999",
        "null",
        " ",
    ];

    /// A body with tools as each protocol has them, before and behind its messages.
    fn body(protocol: Protocol, tools_first: bool) -> String {
        let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}});
        let tool = match protocol {
            Protocol::Chat => {
                json!({"type": "function", "function": {"name": "read", "description": "a file", "parameters": schema}})
            }
            Protocol::Responses => json!({"type": "namespace", "name": "fs", "tools":
                [{"type": "function", "name": "read", "parameters": schema}]}),
            Protocol::Messages => json!({"name": "read", "description": "a file", "input_schema": schema}),
        };
        let messages = if protocol == Protocol::Responses { "input" } else { "messages" };
        let said = json!([{"role": "user", "content": "hello"}]);
        match tools_first {
            true => format!("{{\"tools\":[{tool}],\"{messages}\":{said}}}"),
            false => format!("{{\"{messages}\":{said},\"tools\":[{tool}]}}"),
        }
    }

    fn read(protocol: Protocol, body: &[u8], cache: &ToolCache) -> Result<Call, Refusal> {
        protocol.read(body, &Hints::default(), cache)
    }

    proptest! {
        #[test]
        fn known_tools_change_nothing_of_what_is_read(
            edits in prop::collection::vec((any::<prop::sample::Index>(), 0..3_usize, prop::sample::select(PIECES.to_vec())), 0..4),
            tools_first: bool,
        ) {
            for protocol in [Protocol::Chat, Protocol::Responses, Protocol::Messages] {
                let cache = ToolCache::default();
                let mut body = body(protocol, tools_first);
                read(protocol, body.as_bytes(), &cache).unwrap();
                for (at, cut, piece) in &edits {
                    let at = at.index(body.len());
                    let range = body.floor_char_boundary(at)..body.ceil_char_boundary((at + cut).min(body.len()));
                    body.replace_range(range, piece);
                    // Known from the body before, and then from this one.
                    for _ in 0..2 {
                        let known = read(protocol, body.as_bytes(), &cache);
                        prop_assert_eq!(known, read(protocol, body.as_bytes(), &ToolCache::default()), "{}", &body);
                    }
                }
            }
        }
    }

    #[test]
    fn tools_are_read_once_and_shared() {
        for protocol in [Protocol::Chat, Protocol::Responses, Protocol::Messages] {
            let cache = ToolCache::default();
            let [first, again] = [true, false]
                .map(|first| read(protocol, body(protocol, first).as_bytes(), &cache).unwrap().ask.tools);
            assert!(std::ptr::eq(&*first, &*again), "{protocol:?}");
        }
    }
}
