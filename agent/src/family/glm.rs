//! GLM-4.5 to GLM-5.

use super::{Parted, Rules, calls};
use crate::message::{Json, ToolCall};

const MARKS: [&str; 2] = ["<tool_call>", "</tool_call>"];
/// An argument: its key, and its value behind [`VALUE`].
const ARGUMENT: [&str; 3] = ["<arg_key>", "</arg_key>", "</arg_value>"];
const VALUE: &str = "<arg_value>";

/// No token ends a turn: the model ends it with the mark of whoever speaks next.
pub(super) const RULES: Rules = Rules {
    name: "GLM-4.5",
    signs: &["<|observation|>", "<arg_key>"],
    asks: "<|user|>",
    next: &["<|user|>", "<|observation|>", "<|system|>"],
    end: "<|endoftext|>",
    stops: &["<|user|>", "<|observation|>", "<|endoftext|>"],
    marks: &[MARKS[0], MARKS[1], ARGUMENT[0], ARGUMENT[1], VALUE, ARGUMENT[2]],
    variables: &[],
    many_calls: true,
    calls,
    spell,
};

fn calls(text: &str, tools: &[Json]) -> Parted {
    calls::between(text, MARKS, |inside| {
        let name = inside.split(ARGUMENT[0]).next().unwrap_or_default().trim();
        // What is neither a name nor an argument makes it no call.
        let is_name = !name.contains(['\n', '<']);
        let call = is_name.then(|| calls::call(name, calls::typed(tools, name, arguments(inside))));
        call.flatten().into_iter().collect()
    })
}

fn arguments(inside: &str) -> impl Iterator<Item = (&str, &str)> {
    calls::elements(inside, ARGUMENT)
        .filter_map(|(key, value)| Some((key.trim(), value.trim_start().strip_prefix(VALUE)?)))
}

fn spell(call: &ToolCall) -> String {
    let argument = ["<arg_key>", "</arg_key><arg_value>", "</arg_value>"];
    calls::spelled(call, [MARKS[0], "", MARKS[1]], argument)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::calls::call;

    #[test]
    fn keys_and_values_are_arguments_whatever_stands_between() {
        let tools = [Json::from(
            json!({"function": {"name": "put", "parameters": {"properties": {"text": {"type": "string"}}}}}),
        )];
        let arguments = json!({"text": " 1\n\"é\" 日", "at": {"a": [1, null]}});
        for line in ["", "\n"] {
            let put = format!(
                "<tool_call>put{line}<arg_key>text</arg_key>{line}<arg_value> 1\n\"é\" 日</arg_value>{line}\
                 <arg_key>at</arg_key>{line}<arg_value>{{\"a\": [1, null]}}</arg_value>{line}</tool_call>"
            );
            let text = format!("First.\n{put}<tool_call>pwd{line}</tool_call>");
            let expected = [call("put", arguments.clone()), call("pwd", json!({}))];
            assert_eq!(calls(&text, &tools), ("First.".to_owned(), expected.into_iter().flatten().collect()));
        }
        let put = call("put", arguments).unwrap();
        assert_eq!(calls(&spell(&put), &tools).1, [put]);
    }

    #[test]
    fn blocks_that_are_cut_or_have_no_name_are_text() {
        for text in [
            "<tool_call>put<arg_key>a</arg_key><arg_value>1",
            "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            "<tool_call>\n</tool_call>",
            "<tool_call>put\n<arg_value>1</arg_value></tool_call>",
            " a ",
        ] {
            assert_eq!(calls(text, &[]), (text.to_owned(), Vec::new()));
        }
    }
}
