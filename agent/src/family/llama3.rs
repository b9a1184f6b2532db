//! Llama 3.1 and later: headers, and calls that are the whole answer.

use super::{Parted, Rules, calls};
use crate::message::{Json, ToolCall};

/// Calls are JSON objects, one after the other, without text around them.
pub(super) const RULES: Rules = Rules {
    name: "Llama 3",
    signs: &["<|start_header_id|>"],
    asks: "<|start_header_id|>user",
    next: &["<|eot_id|>"],
    end: "<|eot_id|>",
    stops: &["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
    marks: &[],
    // Tools stand in the message of the system: the template takes whatever message is first for the user's.
    variables: &[("tools_in_user_message", false)],
    many_calls: false,
    calls,
    spell,
};

fn calls(text: &str, _: &[Json]) -> Parted {
    let (mut found, mut rest) = (Vec::new(), text.trim());
    while rest.starts_with('{') {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Json>();
        let call = values.next().and_then(Result::ok).and_then(calls::json_call);
        let end = values.byte_offset();
        let Some(call) = call else { break };
        found.push(call);
        rest = rest[end..].trim_start_matches([';', ' ', '\n']);
    }
    if rest.is_empty() && !found.is_empty() {
        return (String::new(), found);
    }
    (text.to_owned(), Vec::new())
}

fn spell(call: &ToolCall) -> String {
    Json::object([("name", call.name.as_str().into()), ("parameters", call.arguments.clone())]).to_string()
        + "\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::calls::call;

    #[test]
    fn an_answer_is_calls_or_it_is_text() {
        let (ls, pwd) =
            (r#"{"name": "ls", "parameters": {"path": "/"}}"#, r#"{"name": "pwd", "parameters": {}}"#);
        let expected = [call("ls", json!({"path": "/"})), call("pwd", json!({}))];
        let expected: Vec<_> = expected.into_iter().flatten().collect();
        let calls = |text: &str| calls(text, &[]);
        for between in ["; ", "\n", ""] {
            assert_eq!(calls(&format!("{ls}{between}{pwd}")), (String::new(), expected.clone()));
        }
        for text in
            ["{\"a\": 1}", "{\"name\": \"cut", "I call {\"name\": \"ls\"}", "", "{\"name\": \"ls\"} now"]
        {
            assert_eq!(calls(text), (text.to_owned(), Vec::new()));
        }
    }
}
