//! What the protocols read in the same way.

use serde_json::json;

use crate::message::{Json, Message, Refusal, Role};

/// Refuses a field.
pub(super) fn invalid(field: impl std::fmt::Display, why: impl std::fmt::Display) -> Refusal {
    Refusal::Invalid(format!("{field}: {why}"))
}

/// A message of text alone.
pub(super) fn said(role: Role, content: String) -> Message {
    Message { role, content, reasoning: None, calls: Vec::new(), call_id: None }
}

/// A field that is there and not `null`.
pub(super) fn given<'a>(object: &'a Json, field: &str) -> Option<&'a Json> {
    object.get(field).filter(|value| !value.is_null())
}

/// A field's text, if it is given.
pub(super) fn text<'a>(object: &'a Json, field: &str, at: &str) -> Result<Option<&'a str>, Refusal> {
    let Some(value) = given(object, field) else { return Ok(None) };
    value.as_str().map(Some).ok_or_else(|| invalid(join(at, field), "expected a string"))
}

/// A field's text that has to be there.
pub(super) fn needed<'a>(object: &'a Json, field: &str, at: &str) -> Result<&'a str, Refusal> {
    text(object, field, at)?.ok_or_else(|| invalid(join(at, field), "expected a string, found none"))
}

/// A field's list; empty if it is not given.
pub(super) fn list<'a>(object: &'a Json, field: &str, at: &str) -> Result<&'a [Json], Refusal> {
    let Some(value) = given(object, field) else { return Ok(&[]) };
    value.as_array().ok_or_else(|| invalid(join(at, field), "expected a list"))
}

/// A field's switch; off if it is not given.
pub(super) fn flag(object: &Json, field: &str) -> Result<bool, Refusal> {
    let Some(value) = given(object, field) else { return Ok(false) };
    value.as_bool().ok_or_else(|| invalid(field, "expected true or false"))
}

/// The first of these bounds on new tokens that is given.
pub(super) fn bound(object: &Json, fields: &[&str]) -> Result<Option<u32>, Refusal> {
    let first = fields.iter().find_map(|field| Some((field, given(object, field)?)));
    let Some((field, value)) = first else { return Ok(None) };
    let tokens = value.as_u64().filter(|tokens| *tokens > 0);
    let tokens = tokens.ok_or_else(|| invalid(field, format!("expected a count from 1, found {value}")))?;
    Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX)))
}

/// Refuses those of these fields that are given.
pub(super) fn none_of(object: &Json, fields: &[(&str, &str)]) -> Result<(), Refusal> {
    match fields.iter().find(|(field, _)| given(object, field).is_some_and(is_set)) {
        None => Ok(()),
        Some((field, why)) => Err(invalid(field, why)),
    }
}

/// Whether a field asks for anything.
fn is_set(value: &Json) -> bool {
    !matches!(value, Json::Bool(false)) && value.as_array().is_none_or(|list| !list.is_empty())
}

/// Refuses formats other than text.
pub(super) fn text_format(format: Option<&Json>, field: &str) -> Result<(), Refusal> {
    match format.and_then(|format| format["type"].as_str()) {
        None | Some("text") => Ok(()),
        Some(other) => Err(invalid(field, format!("`{other}` cannot be had; `text` can"))),
    }
}

/// Texts that end an answer: one, or a list of them.
pub(super) fn stops(object: &Json, field: &str) -> Result<Vec<String>, Refusal> {
    let values = match given(object, field) {
        None => return Ok(Vec::new()),
        Some(Json::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let one = |value: &Json| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    values.iter().map(|value| one(value).ok_or_else(|| invalid(field, "expected texts"))).collect()
}

/// Text that is a string, or a list of parts of these types. Parts are joined by line breaks.
pub(super) fn content(value: Option<&Json>, types: &[&str], at: &str) -> Result<String, Refusal> {
    let parts = match value {
        None | Some(Json::Null) => return Ok(String::new()),
        Some(Json::String(text)) => return Ok(text.clone()),
        Some(Json::Array(parts)) => parts,
        Some(_) => return Err(invalid(at, "expected a string, or a list of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        let kind = needed(part, "type", &at)?;
        if !types.contains(&kind) {
            return Err(invalid(at, format!("parts of type `{kind}` cannot be had; text can")));
        }
        texts.push(needed(part, if kind == "refusal" { kind } else { "text" }, &at)?);
    }
    Ok(texts.join("\n"))
}

/// A call's arguments, which OpenAI has in a string: what the model wrote, where that is no object.
pub(super) fn arguments(value: Option<&Json>, at: &str) -> Result<Json, Refusal> {
    match value {
        None | Some(Json::Null) => Ok(Json::object([])),
        Some(object @ Json::Object(_)) => Ok(object.clone()),
        Some(Json::String(text)) if text.trim().is_empty() => Ok(Json::object([])),
        Some(Json::String(text)) => {
            let object = serde_json::from_str(text).ok().filter(|json: &Json| json.as_object().is_some());
            Ok(object.unwrap_or_else(|| Json::String(text.clone())))
        }
        Some(_) => Err(invalid(at, "expected a string of JSON")),
    }
}

/// A function that may be called, by itself: its name, its description and the schema of its arguments.
pub(super) fn signature(name: &str, tool: &Json, schema: &str) -> Json {
    let parameters = given(tool, schema).cloned();
    let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}).into());
    match given(tool, "description").cloned() {
        Some(description) => {
            Json::object([("name", name.into()), ("description", description), ("parameters", parameters)])
        }
        None => Json::object([("name", name.into()), ("parameters", parameters)]),
    }
}

/// A tool as `Ask` has it.
pub(super) fn function(signature: Json) -> Json {
    Json::object([("type", "function".into()), ("function", signature)])
}

/// What a client has the model do with its tools: whether it may call them at all.
pub(super) fn may_call(choice: Option<&Json>) -> Result<bool, Refusal> {
    let choice = choice.filter(|choice| !choice.is_null());
    let word = choice.map(|choice| choice.as_str().or_else(|| choice["type"].as_str()).unwrap_or("another"));
    match word {
        None | Some("auto") => Ok(true),
        Some("none") => Ok(false),
        Some(other) => {
            let why =
                format!("`{other}` cannot be had, as it would not be the model's own choice; `auto` can");
            Err(invalid("tool_choice", why))
        }
    }
}

fn join(at: &str, field: &str) -> String {
    if at.is_empty() { field.to_owned() } else { format!("{at}.{field}") }
}
