//! Qwen3.5 and later: ChatML whose calls are elements with the arguments as text.

use super::{Parted, Rules, calls, chatml};
use crate::message::{Json, ToolCall};

const CALL: [&str; 3] = ["<function=", ">", "</function>"];
const ARGUMENT: [&str; 3] = ["<parameter=", ">", "</parameter>"];

/// The start of an answer begins its thoughts, or has empty ones.
pub(super) const RULES: Rules =
    Rules { name: "Qwen3.5", signs: &["<|im_start|>", "<function="], calls, spell, ..chatml::RULES };

fn calls(text: &str, tools: &[Json]) -> Parted {
    calls::within(text, chatml::MARKS, CALL, |name, body| {
        calls::call(name, calls::typed(tools, name, arguments(body)))
    })
}

/// A value stands in lines of its own. What else is blank is the value's.
fn arguments(body: &str) -> impl Iterator<Item = (&str, &str)> {
    calls::elements(body, ARGUMENT).map(|(key, value)| {
        let value = value.strip_prefix('\n').unwrap_or(value);
        (key, value.strip_suffix('\n').unwrap_or(value))
    })
}

fn spell(call: &ToolCall) -> String {
    let [open, close] = chatml::MARKS;
    let call = calls::spelled(
        call,
        ["<function=", ">\n", "</function>"],
        ["<parameter=", ">\n", "\n</parameter>\n"],
    );
    format!("\n{open}\n{call}\n{close}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::calls::call;

    #[test]
    fn arguments_are_text_as_it_stands_in_its_lines() {
        let tools = [Json::from(
            json!({"function": {"name": "put", "parameters": {"properties": {"text": {"type": "string"}}}}}),
        )];
        let put = "<tool_call>\n<function=put>\n<parameter=text>\n  if \"é\" < 日:\n\n    1\n\n</parameter>\n\
                   <parameter=at>\n{\"a\": [1, null]}\n</parameter>\n</function>\n</tool_call>";
        let text = format!("First.\n\n{put}\n<tool_call><function=pwd></function></tool_call>");
        let arguments = json!({"text": "  if \"é\" < 日:\n\n    1\n", "at": {"a": [1, null]}});
        let expected = [call("put", arguments.clone()), call("pwd", json!({}))];
        assert_eq!(calls(&text, &tools), ("First.".to_owned(), expected.into_iter().flatten().collect()));
        let again = spell(&call("put", arguments.clone()).unwrap());
        assert_eq!(calls(&again, &tools).1[0].arguments, arguments);
    }

    #[test]
    fn elements_that_are_cut_or_without_a_name_are_text() {
        for text in [
            "<tool_call>\n<function=put>\n<parameter=text>\n1",
            "<tool_call>\n<function=put>\n<parameter=text>\n1\n</tool_call>",
            "<tool_call><function=></function></tool_call>",
            "<tool_call>{\"name\": \"put\"}</tool_call>",
            "<function=put></function>",
            " a ",
        ] {
            assert_eq!(calls(text, &[]), (text.to_owned(), Vec::new()));
        }
    }
}
