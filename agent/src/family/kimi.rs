//! Kimi K2, K2.5 and K2.6.

use super::{Parted, Rules, calls};
use crate::message::{Json, ToolCall};

const SECTION: [&str; 2] = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"];
const CALL: [&str; 3] = ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"];
/// What ids begin with.
const FUNCTIONS: &str = "functions.";

/// The model gives its calls ids, `functions.NAME:N`. Answers of tools are told with them.
pub(super) const RULES: Rules = Rules {
    name: "Kimi K2",
    signs: &["<|im_middle|>"],
    asks: "<|im_user|>",
    next: &["<|im_end|>"],
    end: "<|im_end|>",
    stops: &["<|im_end|>", "[EOS]"],
    marks: &[SECTION[0], SECTION[1], CALL[0], CALL[1], CALL[2]],
    variables: &[],
    many_calls: true,
    calls,
    spell,
};

fn calls(text: &str, _: &[Json]) -> Parted {
    calls::within(text, SECTION, CALL, read)
}

fn read(id: &str, json: &str) -> Option<ToolCall> {
    let name = id.trim().rsplit_once(':').map_or(id.trim(), |(name, _)| name);
    let call = calls::call(name.strip_prefix(FUNCTIONS).unwrap_or(name), calls::arguments_of(json))?;
    Some(ToolCall { id: id.trim().to_owned(), ..call })
}

fn spell(call: &ToolCall) -> String {
    let ([open, told, close], json) = (CALL, call.arguments.to_string());
    let id = if call.id.is_empty() { format!("{FUNCTIONS}{}:0", call.name) } else { call.id.clone() };
    [SECTION[0], open, &id, told, &json, close, SECTION[1]].concat()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn calls_have_the_ids_that_the_model_wrote() {
        let text = "First.<|tool_calls_section_begin|><|tool_call_begin|>functions.a.put:3<|tool_call_argument_begin|>\
                    {\"at\": {\"a\": [1]}, \"text\": \"é 日\"}<|tool_call_end|><|tool_call_begin|> pwd \
                    <|tool_call_argument_begin|>{\"cut\": <|tool_call_end|><|tool_calls_section_end|>";
        let put = json!({"at": {"a": [1]}, "text": "é 日"});
        let call = |id: &str, name: &str, arguments: serde_json::Value| ToolCall {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        let expected = vec![call("functions.a.put:3", "a.put", put), call("pwd", "pwd", json!("{\"cut\": "))];
        assert_eq!(calls(text, &[]), ("First.".to_owned(), expected.clone()));
        assert_eq!(calls(&spell(&expected[0]), &[]).1, expected[..1]);
        assert_eq!(calls(&spell(&call("", "ls", json!({}))), &[]).1[0].id, "functions.ls:0");
    }

    #[test]
    fn sections_that_are_cut_or_hold_no_call_are_text() {
        for text in [
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_calls_section_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}<|tool_call_end|>\
             <|tool_calls_section_end|>",
            " a ",
        ] {
            assert_eq!(calls(text, &[]), (text.to_owned(), Vec::new()));
        }
    }
}
