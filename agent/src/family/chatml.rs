//! ChatML: Qwen3, SmolLM2, and what is shaped like them.

use super::{Parted, Rules, calls};
use crate::message::{Json, ToolCall};

pub(super) const MARKS: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// Calls are Hermes': JSON between marks. Thoughts stand before the answer, between marks of their own.
pub(super) const RULES: Rules = Rules {
    name: "ChatML (Qwen3, SmolLM2)",
    signs: &["<|im_start|>"],
    asks: "<|im_start|>user",
    next: &["<|im_end|>"],
    end: "<|im_end|>",
    stops: &["<|im_end|>", "<|endoftext|>"],
    marks: &MARKS,
    variables: &[],
    many_calls: true,
    calls,
    spell,
};

fn calls(text: &str, _: &[Json]) -> Parted {
    let read = |inside: &str| serde_json::from_str(inside).ok().and_then(calls::json_call);
    calls::between(text, MARKS, |inside| read(inside).into_iter().collect())
}

fn spell(call: &ToolCall) -> String {
    let (name, [open, close]) = (Json::from(call.name.as_str()), MARKS);
    format!("\n{open}\n{{\"name\": {name}, \"arguments\": {}}}\n{close}", call.arguments)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::calls::call;

    #[test]
    fn calls_stand_between_marks_and_all_else_is_text() {
        let one = r#"{"name": "ls", "arguments": {"path": "/"}}"#;
        let two = r#"{"name": "pwd"}"#;
        let text = format!("First.\n<tool_call>\n{one}\n</tool_call>\n<tool_call>{two}</tool_call>");
        let found = |text: &str| calls(text, &[]);
        let expected = [call("ls", json!({"path": "/"})), call("pwd", json!({}))];
        assert_eq!(found(&text), ("First.".to_owned(), expected.into_iter().flatten().collect()));
        for text in
            ["<tool_call>{no json}</tool_call>", "<tool_call>{\"name\": \"cut", "no call </tool_call>", " a "]
        {
            assert_eq!(found(text), (text.to_owned(), Vec::new()));
        }
        let arguments = |text: &str| found(text).1[0].arguments.clone();
        let text = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#;
        assert_eq!(arguments(text), json!({"a": 1}));
        let text = r#"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#;
        assert_eq!(arguments(text), json!("[1]"));
    }
}
