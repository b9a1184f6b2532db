//! Calls in the text of an answer, whatever marks they stand between.

use super::Parted;
use crate::message::{Json, ToolCall};

/// Content of a text in which calls stand between two marks, and the calls, read from what stands there. Where `read`
/// finds no call, and where the second mark is missing, all is text.
pub(super) fn between(text: &str, marks: [&str; 2], read: impl Fn(&str) -> Vec<ToolCall>) -> Parted {
    let [open, close] = marks;
    let (mut content, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, after)) = rest.split_once(open) {
        let Some((inside, behind)) = after.split_once(close) else { break };
        content.push_str(before);
        let found = read(inside);
        if found.is_empty() {
            content.extend([open, inside, close]);
        }
        calls.extend(found);
        rest = behind;
    }
    content.push_str(rest);
    if !calls.is_empty() {
        content = content.trim().to_owned();
    }
    (content, calls)
}

/// Names and bodies of elements, each `open` NAME `named` BODY `close`. One that is cut is none.
pub(super) fn elements<'a>(
    text: &'a str,
    marks: [&'a str; 3],
) -> impl Iterator<Item = (&'a str, &'a str)> + 'a {
    let ([open, named, close], mut rest) = (marks, text);
    std::iter::from_fn(move || {
        let (name, body) = rest.split_once(open)?.1.split_once(named)?;
        let (body, behind) = body.split_once(close)?;
        rest = behind;
        Some((name, body))
    })
}

/// The same where each call is an element.
pub(super) fn within(
    text: &str,
    marks: [&str; 2],
    call: [&str; 3],
    read: impl Fn(&str, &str) -> Option<ToolCall>,
) -> Parted {
    between(text, marks, |inside| {
        elements(inside, call).filter_map(|(name, body)| read(name, body)).collect()
    })
}

/// A call without an id, if it has a name.
pub(super) fn call(name: &str, arguments: impl Into<Json>) -> Option<ToolCall> {
    let (name, arguments) = (name.trim(), arguments.into());
    (!name.is_empty()).then(|| ToolCall { id: String::new(), name: name.to_owned(), arguments })
}

/// A call that a model wrote as a JSON object.
pub(super) fn json_call(json: Json) -> Option<ToolCall> {
    let Json::Object(mut members) = json else { return None };
    let arguments = ["arguments", "parameters"].iter().find_map(|key| members.shift_remove(*key));
    let arguments = match arguments.unwrap_or_else(|| Json::object([])) {
        Json::String(text) => arguments_of(&text),
        object @ Json::Object(_) => object,
        other => Json::String(other.to_string()),
    };
    call(members.get("name")?.as_str()?, arguments)
}

/// Arguments that a model wrote as JSON. What is no object stays as it is.
pub(super) fn arguments_of(text: &str) -> Json {
    match serde_json::from_str(text) {
        Ok(Json::Object(members)) => Json::Object(members),
        _ if text.trim().is_empty() => Json::object([]),
        _ => Json::String(text.to_owned()),
    }
}

/// Arguments that a model wrote as text, each with the type that the tool's schema tells. A text is what it is, any
/// other argument is JSON, and what is no JSON is a text.
pub(super) fn typed<'a>(
    tools: &[Json],
    name: &str,
    written: impl Iterator<Item = (&'a str, &'a str)>,
) -> Json {
    let tool = tools.iter().find(|tool| tool["function"]["name"] == name.trim());
    let types = tool.map(|tool| &tool["function"]["parameters"]["properties"]);
    let read = |(key, text): (&str, &str)| {
        let is_text =
            types.is_some_and(|types| ["string", "[\"string\"]"].contains(&&*told(&types[key]["type"])));
        let json = (!is_text).then(|| serde_json::from_str(text).ok());
        (key.to_owned(), json.flatten().unwrap_or_else(|| Json::String(text.to_owned())))
    };
    Json::Object(written.map(read).collect())
}

/// A type as it stands in a schema.
fn told(of: &Json) -> String {
    of.as_str().map_or_else(|| of.to_string(), str::to_owned)
}

/// A call as elements: its name, and one for each argument.
pub(super) fn spelled(call: &ToolCall, marks: [&str; 3], argument: [&str; 3]) -> String {
    let mut body = String::new();
    for (key, value) in call.arguments.as_object().into_iter().flatten() {
        let [open, named, close] = argument;
        body.extend([open, key, named, &told(value), close]);
    }
    let [open, named, close] = marks;
    [open, &call.name, named, &body, close].concat()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_of_arguments_are_those_of_the_schema() {
        let properties =
            json!({"text": {"type": "string"}, "one": {"type": ["string"]}, "count": {"type": "integer"}});
        let tools = [json!({"function": {"name": "f", "parameters": {"properties": properties}}}).into()];
        let written = [
            ("text", "5"),
            ("one", "null"),
            ("count", "5"),
            ("other", "[1, {\"a\": true}]"),
            ("plain", " 1 or é"),
        ];
        let expected =
            json!({"text": "5", "one": "null", "count": 5, "other": [1, {"a": true}], "plain": " 1 or é"});
        assert_eq!(typed(&tools, " f", written.into_iter()), expected);
        assert_eq!(typed(&[], "f", [("text", "5")].into_iter()), json!({"text": 5}));
    }

    #[test]
    fn elements_end_where_one_is_cut() {
        let found = |text| elements(text, ["<a ", ">", "</a>"]).collect::<Vec<_>>();
        assert_eq!(found("x<a b>1</a> <a c></a><a d>"), [("b", "1"), ("c", "")]);
        assert_eq!(found("<a b"), []);
    }

    #[test]
    fn arguments_that_are_no_object_stay_text() {
        assert_eq!(arguments_of(" {\"a\": 1}"), json!({"a": 1}));
        assert_eq!(arguments_of("[1]"), json!("[1]"));
        assert_eq!(arguments_of("{\"a\": "), json!("{\"a\": "));
        assert_eq!(arguments_of("\n"), json!({}));
    }
}
