//! `driftless dashboard` as a server of MCP: what agents ask of a run.

use crate::common::run;
use crate::dashboard::{Dashboard, file, step};
use crate::log::run_with_samples;
use driftless_testkit::http::exchange;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Has the package `mcp` ask the server as an agent does, and prints what it got.
const AGENT: &str = r#"
import asyncio, json, sys
from mcp import Client

async def main():
    async with Client(sys.argv[1]) as client:
        tools = (await client.list_tools()).tools
        said = {tool.name: list(tool.input_schema["properties"]) for tool in tools}
        calls = {}
        for name, arguments in json.loads(sys.argv[2]):
            result = await client.call_tool(name, arguments)
            calls[name] = [result.is_error, result.content[0].text]
        print(json.dumps({"tools": said, "calls": calls}))

asyncio.run(main())
"#;

/// What a page of this run answers to a message.
fn say(board: &Dashboard, message: &str) -> (u16, Value) {
    let headers = format!("host: {}\r\ncontent-type: application/json\r\n", board.addr);
    let (status, body) = exchange(board.addr, "POST /mcp", &headers, message);
    (status, serde_json::from_str(&body).unwrap_or_default())
}

fn request(method: &str, params: &Value) -> String {
    json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params }).to_string()
}

/// What a tool says, and whether that is an error.
fn call(board: &Dashboard, name: &str, arguments: &Value) -> (String, bool) {
    let (status, answer) =
        say(board, &request("tools/call", &json!({ "name": name, "arguments": arguments })));
    assert_eq!((status, &answer["id"]), (200, &json!(7)), "{answer}");
    let text = answer["result"]["content"][0]["text"].as_str().expect("a text").to_owned();
    (text, answer["result"]["isError"] == true)
}

/// A run with answers and two steps, and its page.
fn board(dir: &Path) -> Dashboard {
    let run_dir = run_with_samples(dir);
    file(&run_dir, "metrics.jsonl", (step(6, 0.5) + &step(7, 0.75)).as_bytes());
    Dashboard::of(dir, &[&run_dir], None)
}

#[test]
fn tools_of_mcp_say_what_the_page_gets() {
    let dir = tempfile::tempdir().expect("a directory");
    let board = board(dir.path());
    for (name, arguments, path) in [
        ("runs", json!({}), "runs"),
        ("metrics", json!({ "prefix": "goodput." }), "metrics?prefix=goodput."),
        (
            "samples",
            json!({ "step": 7, "order": "best", "reward_max": 0.9 }),
            "samples?step=7&order=best&reward_max=0.9",
        ),
        ("fleet", json!({ "run": 0 }), "fleet"),
        ("time", json!({ "steps": 1 }), "time?steps=1"),
    ] {
        let (text, is_error) = call(&board, name, &arguments);
        let said: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((said, is_error), (board.get(&format!("/api/{path}")), false), "{name}");
    }
    let columns = board.get("/api/metrics?prefix=goodput.")["columns"].clone();
    assert_eq!(columns, json!({ "goodput.began_at_ms": [1, 1], "goodput.idle_s.no request": [2.5, 2.5] }));
}

#[test]
fn agents_read_why_a_tool_of_mcp_refuses() {
    let dir = tempfile::tempdir().expect("a directory");
    let board = board(dir.path());
    for (name, arguments, why) in [
        ("sample", json!({ "position": 99 }), "expected that of an answer in the log, found 99"),
        ("runs", json!({ "run": 0 }), "expected arguments of [], found `run`"),
        ("samples", json!({ "order": "odd" }), "unknown variant `odd`, expected one of `log`, `best`"),
        ("fleet", json!([1]), "expected an object of arguments, found [1]"),
        ("fleet", json!({ "run": 1 }), "run: expected one of 1, found 1"),
    ] {
        let (text, is_error) = call(&board, name, &arguments);
        assert!(is_error && text.contains(why), "{name}: {text}");
    }
}

#[test]
fn answers_of_mcp_that_are_too_long_are_asked_in_parts() {
    let dir = tempfile::tempdir().expect("a directory");
    let figures: String = (0..300).map(|number| format!(",\"f{number}\":1")).collect();
    let steps: String = (0..2500).map(|number| format!("{{\"rollout_id\":{number}{figures}}}\n")).collect();
    file(dir.path(), "metrics.jsonl", steps.as_bytes());
    let board = Dashboard::of(dir.path(), &[dir.path()], None);
    let (text, is_error) = call(&board, "metrics", &json!({}));
    assert!(
        is_error && text.contains("expected at most 1048576 bytes") && text.contains("ask for less"),
        "{text}"
    );
    let (text, is_error) = call(&board, "metrics", &json!({ "prefix": "f10" }));
    let some: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((is_error, &some["rows"]), (false, &json!(2500)));
    let last = json!({ "from": 2499, "epoch": some["epoch"] });
    let (text, is_error) = call(&board, "metrics", &last);
    let last: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((is_error, &last["columns"]["f299"]), (false, &json!([1])));
}

#[test]
fn messages_that_are_no_request_of_mcp_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let token = file(dir.path(), "token", b"secret\n");
    let open = Dashboard::of(dir.path(), &[dir.path()], None);
    let code = |message: &str| say(&open, message).1["error"]["code"].clone();
    assert_eq!(code("{"), -32700);
    assert_eq!(code("[]"), -32600);
    assert_eq!(code(&request("resources/list", &json!({}))), -32601);
    assert_eq!(code(&request("tools/call", &json!({ "name": "rm" }))), -32602);
    let heard = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }).to_string();
    assert_eq!(say(&open, &heard), (202, Value::Null));
    assert_eq!(say(&open, &" ".repeat(70_000)).0, 413);
    for (asked, told) in [("2025-06-18", "2025-06-18"), ("1999-01-01", "2025-11-25")] {
        let (_, answer) = say(&open, &request("initialize", &json!({ "protocolVersion": asked })));
        assert_eq!(answer["result"]["protocolVersion"], told);
    }
    let from = |headers: &str| exchange(open.addr, "POST /mcp", headers, &request("ping", &json!({}))).0;
    let own = format!("host: {}\r\n", open.addr);
    assert_eq!(from(&own), 200);
    assert_eq!(from("host: evil.example\r\n"), 403);
    assert_eq!(from(&(own.clone() + "origin: http://evil.example\r\n")), 403);
    assert_eq!(from(&(own.clone() + "mcp-protocol-version: 2025-06-18\r\n")), 200);
    assert_eq!(from(&(own.clone() + "mcp-protocol-version: 1999-01-01\r\n")), 400);
    assert_eq!(exchange(open.addr, "GET /mcp", &own, "").0, 405, "there is no stream");
    let guarded = Dashboard::of(dir.path(), &[dir.path()], Some(&token));
    assert_eq!(say(&guarded, &request("ping", &json!({}))).0, 401);
}

#[test]
fn package_mcp_lists_and_calls_the_tools_of_a_page() {
    let Some(python) = std::env::var_os("DRIFTLESS_TOOLS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_TOOLS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    let board = board(dir.path());
    let position = board.get("/api/samples?step=7&order=best")["rows"][0]["position"].clone();
    let calls =
        json!([["runs", {}], ["sample", { "position": position }], ["store", {}], ["time", { "run": 9 }]]);
    let url = format!("http://{}/mcp", board.addr);
    let said = run(Command::new(python).args(["-c", AGENT, &url, &calls.to_string()]));
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["tools"].as_object().map(serde_json::Map::len), Some(7), "{said}");
    assert_eq!(said["tools"]["sample"], json!(["position", "run"]));
    let text = |name: &str| said["calls"][name][1].as_str().expect("a text");
    let sample: Value = serde_json::from_str(text("sample")).expect("JSON");
    assert_eq!((&sample["reward"], &sample["position"]), (&json!(1.0), &position));
    assert_eq!(serde_json::from_str::<Value>(text("store")).expect("JSON")["found"], Value::Null);
    assert_eq!(said["calls"]["time"][0], true, "a run that is not there: {}", text("time"));
}
