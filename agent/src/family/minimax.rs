//! MiniMax M2.

use super::{Parted, Rules, calls};
use crate::message::{Json, ToolCall};

const SECTION: [&str; 2] = ["<minimax:tool_call>", "</minimax:tool_call>"];
const CALL: [&str; 3] = ["<invoke name=\"", "\">", "</invoke>"];
const ARGUMENT: [&str; 3] = ["<parameter name=\"", "\">", "</parameter>"];

/// The start of an answer begins its thoughts.
pub(super) const RULES: Rules = Rules {
    name: "MiniMax M2",
    signs: &["]~b]", "<minimax:tool_call>"],
    asks: "]~b]user",
    next: &["[e~["],
    end: "[e~[",
    stops: &["[e~["],
    marks: &SECTION,
    variables: &[],
    many_calls: true,
    calls,
    spell,
};

fn calls(text: &str, tools: &[Json]) -> Parted {
    calls::within(text, SECTION, CALL, |name, body| {
        calls::call(name, calls::typed(tools, name, calls::elements(body, ARGUMENT)))
    })
}

fn spell(call: &ToolCall) -> String {
    let ([open, close], [begins, named, ends]) = (SECTION, ARGUMENT);
    let call = calls::spelled(
        call,
        ["<invoke name=\"", "\">\n", "</invoke>"],
        [begins, named, &format!("{ends}\n")],
    );
    format!("\n{open}\n{call}\n{close}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::calls::call;

    #[test]
    fn several_calls_stand_between_one_pair_of_marks() {
        let tools = [Json::from(
            json!({"function": {"name": "put", "parameters": {"properties": {"text": {"type": "string"}}}}}),
        )];
        let text = "First.\n<minimax:tool_call>\n<invoke name=\"put\">\n<parameter name=\"text\">1\n\"é\" 日\
                    </parameter>\n<parameter name=\"at\">{\"a\": [1, null]}</parameter>\n</invoke>\n\
                    <invoke name=\"pwd\">\n</invoke>\n</minimax:tool_call>";
        let put = call("put", json!({"text": "1\n\"é\" 日", "at": {"a": [1, null]}}));
        let expected: Vec<_> = [put, call("pwd", json!({}))].into_iter().flatten().collect();
        assert_eq!(calls(text, &tools), ("First.".to_owned(), expected.clone()));
        assert_eq!(calls(&spell(&expected[0]), &tools).1, expected[..1]);
    }

    #[test]
    fn sections_that_are_cut_or_hold_no_call_are_text() {
        for text in [
            "<minimax:tool_call>\n<invoke name=\"put\">\n</invoke>",
            "<minimax:tool_call>\n<invoke name=\"put\">\n</minimax:tool_call>",
            "<minimax:tool_call><invoke name=\"\"></invoke></minimax:tool_call>",
            "<invoke name=\"put\"></invoke>",
            " a ",
        ] {
            assert_eq!(calls(text, &[]), (text.to_owned(), Vec::new()));
        }
    }
}
