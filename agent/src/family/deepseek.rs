//! DeepSeek V3, V3.1, V3.2 and R1.

use super::{Parted, Rules, calls};
use crate::message::{Json, ToolCall};

const END: &str = "<｜end▁of▁sentence｜>";
const SECTION: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
const CALL: [&str; 3] = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"];
/// V3 writes that it calls a function, then its name, and the arguments in a fence.
const FUNCTION: &str = "function";
const FENCE: [&str; 2] = ["```json", "```"];
/// V3.2 has elements. An argument tells whether it is a text.
const SECTION32: [&str; 2] = ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"];
const CALL32: [&str; 3] = ["<｜DSML｜invoke name=\"", "\">", "</｜DSML｜invoke>"];
const ARGUMENT32: [&str; 3] = ["<｜DSML｜parameter name=\"", ">", "</｜DSML｜parameter>"];
const TEXT32: &str = "\" string=\"true\"";

/// A user's message has no end. Behind answers of tools the model goes on without a mark.
pub(super) const RULES: Rules = Rules {
    name: "DeepSeek V3",
    signs: &["<｜User｜>"],
    asks: "<｜User｜>",
    next: &[END],
    end: END,
    stops: &[END],
    marks: &[SECTION[0], SECTION[1], CALL[0], CALL[1], CALL[2], "｜DSML｜"],
    variables: &[],
    many_calls: true,
    calls,
    spell,
};

fn calls(text: &str, _: &[Json]) -> Parted {
    match text.contains(SECTION32[0]) {
        true => calls::within(text, SECTION32, CALL32, |name, body| calls::call(name, arguments32(body))),
        false => calls::within(text, SECTION, CALL, read),
    }
}

/// A call of V3.1, or of V3.
fn read(name: &str, body: &str) -> Option<ToolCall> {
    let fenced = body.split_once('\n').filter(|_| name == FUNCTION);
    let Some((name, fenced)) = fenced else { return calls::call(name, calls::arguments_of(body)) };
    let [open, close] = FENCE;
    let json = fenced.trim().strip_prefix(open).and_then(|json| json.strip_suffix(close));
    calls::call(name, calls::arguments_of(json.unwrap_or(fenced)))
}

fn arguments32(body: &str) -> Json {
    let argument = |(key, text): (&str, &str)| match key.strip_suffix(TEXT32) {
        Some(key) => (key.to_owned(), Json::String(text.to_owned())),
        None => {
            let key = key.split_once('"').map_or(key, |(key, _)| key);
            let json = serde_json::from_str(text);
            (key.to_owned(), json.unwrap_or_else(|_| Json::String(text.to_owned())))
        }
    };
    Json::Object(calls::elements(body, ARGUMENT32).map(argument).collect())
}

fn spell(call: &ToolCall) -> String {
    let [open, named, close] = CALL;
    [SECTION[0], open, &call.name, named, &call.arguments.to_string(), close, SECTION[1]].concat()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::family::calls::call;

    fn expected(arguments: serde_json::Value) -> Parted {
        let calls = [call("put", arguments), call("pwd", json!({}))];
        ("First.".to_owned(), calls.into_iter().flatten().collect())
    }

    #[test]
    fn calls_are_read_as_each_release_writes_them() {
        let json = r#"{"at": {"a": [1]}, "text": "é `日`"}"#;
        let of = |json: &str| {
            format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n```json\n{json}\n```<｜tool▁call▁end｜>\n\
                 <｜tool▁call▁begin｜>function<｜tool▁sep｜>pwd\n```json\n{{}}\n```<｜tool▁call▁end｜>"
            )
        };
        let v3 = format!("First.{}{}{}", SECTION[0], of(json), SECTION[1]);
        let v31 = format!(
            "First.{}<｜tool▁call▁begin｜>put<｜tool▁sep｜>{json}<｜tool▁call▁end｜><｜tool▁call▁begin｜>pwd\
             <｜tool▁sep｜>{{}}<｜tool▁call▁end｜>{}",
            SECTION[0], SECTION[1]
        );
        let v32 = "First.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"put\">\n<｜DSML｜parameter name=\"at\" \
                   string=\"false\">{\"a\": [1]}</｜DSML｜parameter>\n<｜DSML｜parameter name=\"text\" string=\"true\">\
                   é `日`</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"pwd\">\n</｜DSML｜invoke>\n\
                   </｜DSML｜function_calls>";
        for text in [v3.as_str(), &v31, v32] {
            assert_eq!(calls(text, &[]), expected(serde_json::from_str(json).unwrap()), "{text}");
        }
        let broken = v3.replace(json, "{\"at\": ");
        assert_eq!(calls(&broken, &[]).1[0].arguments, json!("\n{\"at\": \n"));
        let put = call("put", json!({"a": 1})).unwrap();
        assert_eq!(calls(&spell(&put), &[]).1, [put]);
    }

    #[test]
    fn sections_that_are_cut_or_hold_no_call_are_text() {
        for text in [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>put<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>put<｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜DSML｜function_calls><｜DSML｜invoke name=\"put\"></｜DSML｜function_calls>",
            " a ",
        ] {
            assert_eq!(calls(text, &[]), (text.to_owned(), Vec::new()));
        }
    }
}
