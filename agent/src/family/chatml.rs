//! ChatML: Qwen3, SmolLM2, and what is shaped like them.

use super::{Parted, Rules, called};
use crate::message::ToolCall;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Calls are Hermes': JSON between marks. Thoughts stand before the answer, between marks of their own.
pub(super) const RULES: Rules = Rules {
    name: "ChatML (Qwen3, SmolLM2)",
    sign: "<|im_start|>",
    end: "<|im_end|>",
    stops: &["<|im_end|>", "<|endoftext|>"],
    seam: "\n",
    variables: &[],
    many_calls: true,
    calls,
    spell,
};

fn calls(text: &str) -> Parted {
    let (mut content, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, after)) = rest.split_once(OPEN) {
        let Some((inside, behind)) = after.split_once(CLOSE) else { break };
        content.push_str(before);
        match serde_json::from_str(inside).ok().and_then(called) {
            Some(call) => calls.push(call),
            // What is no call is text.
            None => content.extend([OPEN, inside, CLOSE]),
        }
        rest = behind;
    }
    content.push_str(rest);
    if !calls.is_empty() {
        content = content.trim().to_owned();
    }
    (content, calls)
}

fn spell(call: &ToolCall) -> String {
    let json = serde_json::json!({"name": call.name, "arguments": call.arguments});
    format!("\n{OPEN}\n{json}\n{CLOSE}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn calls_stand_between_marks_and_all_else_is_text() {
        let one = r#"{"name": "ls", "arguments": {"path": "/"}}"#;
        let two = r#"{"name": "pwd"}"#;
        let text = format!("First.\n<tool_call>\n{one}\n</tool_call>\n<tool_call>{two}</tool_call>");
        let expected = vec![("ls".to_owned(), json!({"path": "/"})), ("pwd".to_owned(), json!({}))];
        assert_eq!(calls(&text), ("First.".to_owned(), expected));
        for text in
            ["<tool_call>{no json}</tool_call>", "<tool_call>{\"name\": \"cut", "no call </tool_call>", " a "]
        {
            assert_eq!(calls(text), (text.to_owned(), Vec::new()));
        }
        let text = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#;
        assert_eq!(calls(text).1, [("f".to_owned(), json!({"a": 1}))]);
        let text = r#"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#;
        assert_eq!(calls(text).1, [("f".to_owned(), json!("[1]"))]);
    }
}
