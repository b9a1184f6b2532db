//! Tools that the policy calls: those of the environment `tools`, and those of servers of MCP; lane `rewards` has the packages.

use super::clients::checkpoint;
use super::environment::{check_drawn, command, python, task};
use super::{ANSWERS, drawn_in_place, generate, of_engines, records, turn};
use async_trait::async_trait;
use driftless_agent::Tokenizer;
use driftless_bridge::engine::Tell;
use driftless_bridge::{GenerateRequest, Generation, Label};
use driftless_trainer::Error;
use driftless_trainer::hook::{Hook, HookOptions};
use driftless_trainer::sample::{Engines, Prompt, Turn};
use driftless_trainer::tasks::Task;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A conversation with tools, as Qwen3 writes it.
pub(super) const TEMPLATE: &str = include_str!("../../../agent/tests/templates/qwen3.jinja");

/// A server of the package, for integers.
const SUMS: &str = r#"
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    if a < 0:
        raise ToolError("no debts")
    return a + b

server.run()
"#;

/// A server that dies, writes what is no message or more than anyone reads, or falls silent, once its tool is called.
const LIAR: &str = r#"
import json, sys

def tell(**said):
    print(json.dumps({"jsonrpc": "2.0", **said}), flush=True)

for line in sys.stdin:
    ask = json.loads(line)
    match ask.get("method"):
        case "initialize":
            server = {"name": "liar", "version": "1"}
            tell(id=ask["id"], result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server})
        case "tools/list":
            tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("die", "garble", "flood", "pause", "odd")]
            tell(id=ask["id"], result={"tools": tools})
        case "tools/call":
            match ask["params"]["name"]:
                case "die": sys.exit(3)
                case "garble": print("listening on 7000", flush=True)
                case "flood": tell(id=ask["id"], result={"content": [{"type": "text", "text": "x" * (5 << 20)}]})
                case "odd": tell(id=ask["id"], result={"content": 7})
        case _ if "id" in ask:
            tell(id=ask["id"], error={"code": -32601, "message": "Method not found"})
"#;

/// Has the tools of the liar, and waits for the one that pauses in a test's time.
const HOOK: &str = r#"
import sys
from driftless_rl.hook import Turn, generate, run_tools
from driftless_rl.hook.mcp import mcp_tools

@generate
async def answer(turn: Turn) -> None:
    async with mcp_tools([sys.executable, "-S", sys.argv[1]]) as tools:
        await run_tools(turn, tools, call_deadline=0.1 if turn.prompt == "pause" else 300)
"#;

/// Writes what a function makes of all that it read, with the place of each token as log-probability.
pub(super) struct Plays {
    pub(super) tokenizer: Tokenizer,
    pub(super) says: fn(&str) -> String,
}

#[async_trait]
impl Engines for Plays {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        _told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        let text = self.tokenizer.decode(&request.input_ids).unwrap();
        let output_ids = self.tokenizer.encode(&(self.says)(&text)).unwrap();
        Ok(drawn_in_place(request, output_ids))
    }
}

/// A folder of two texts in which the same words go on in two ways.
pub(super) fn notes(dir: &Path) -> std::path::PathBuf {
    let notes = dir.join("notes");
    std::fs::create_dir(&notes).unwrap();
    std::fs::write(notes.join("sea.md"), "the tide comes in at noon\n").unwrap();
    std::fs::write(notes.join("land.txt"), "\nthe tide comes in  at dusk, they say\n").unwrap();
    std::fs::write(dir.join("secret.txt"), "a secret line of more than six words\n").unwrap();
    std::os::unix::fs::symlink(dir.join("secret.txt"), notes.join("link.txt")).unwrap();
    std::os::unix::fs::symlink(dir, notes.join("up")).unwrap();
    notes
}

/// The environment, with such a folder.
async fn tools(dir: &Path, python: &str) -> Task {
    let notes = notes(dir);
    checkpoint(dir);
    std::fs::write(dir.join("chat_template.jinja"), TEMPLATE).unwrap();
    task(dir, python, &format!("tools:{}", notes.display()), r#"{"seed": 3}"#).await
}

pub(super) fn call(name: &str, arguments: &serde_json::Value) -> String {
    format!("<tool_call>\n{}\n</tool_call>", json!({"name": name, "arguments": arguments}))
}

pub(super) fn between<'a>(text: &'a str, before: &str, behind: &str) -> Option<&'a str> {
    text.rsplit_once(before)?.1.split(behind).next()
}

/// Calls the tool that helps, and says what it found.
pub(super) fn able(text: &str) -> String {
    let (sum, words) = (between(text, "What is ", "?"), between(text, "follows “", "”"));
    match (between(text, "<tool_response>\n", "\n</tool_response>"), sum, words) {
        (None, Some(sum), _) => call("calculate", &json!({"expression": sum})),
        (None, None, Some(words)) => call("search", &json!({"text": words})),
        (Some(found), Some(_), _) => format!("It is <answer>{found}</answer>."),
        (Some(found), None, Some(words)) => {
            let word = found.split_once(words).unwrap().1.split_whitespace().next().unwrap();
            format!("<answer>{word}</answer>")
        }
        _ => panic!("{text}"),
    }
}

/// Calls what is not there or is wrong, looks for what lies outside, and guesses.
fn unable(text: &str) -> String {
    match text.matches("<tool_response>").count() {
        0 => call("shell", &json!({"command": "ls"})),
        1 => call("calculate", &json!({"text": 1})),
        2 => call("calculate", &json!({"expression": format!("{}1", "(".repeat(20))})),
        3 => call("search", &json!({"text": "secret"})),
        _ => "<answer>7</answer>".to_owned(),
    }
}

/// Text and reward of the answers to the first two prompts.
async fn played(dir: &Path, python: &str, says: fn(&str) -> String) -> Vec<(String, f32)> {
    played_of(dir, tools(dir, python).await, says).await
}

/// The same of any task, whose answers are conversations.
pub(super) async fn played_of(dir: &Path, task: Task, says: fn(&str) -> String) -> Vec<(String, f32)> {
    let tokenizer = Tokenizer::open(dir).unwrap();
    let rollouts =
        of_engines(dir, task, Arc::new(Plays { tokenizer: Tokenizer::open(dir).unwrap(), says }), 1024, 2);
    rollouts.task.ready().await.unwrap();
    generate(&rollouts).await.unwrap();
    let records: Vec<_> = [0, 1].into_iter().flat_map(|group| records(&rollouts, group)).collect();
    assert_eq!(records.len(), 2 * ANSWERS as usize, "an answer is one sample");
    records.iter().for_each(check_drawn);
    let shown = |record: &driftless_buffer::Record| {
        (tokenizer.decode(record.tokens()).unwrap(), record.scalars().reward)
    };
    records.iter().map(shown).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_that_uses_the_tools_is_right() {
    let Some(python) = python("DRIFTLESS_TOOLS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    for (text, reward) in played(dir.path(), &python, able).await {
        assert!(reward == 1.0 && text.contains("<tool_response>"), "{reward}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_of_the_policy_are_told_to_it() {
    let Some(python) = python("DRIFTLESS_TOOLS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    for (text, reward) in played(dir.path(), &python, unable).await {
        assert!(reward == 0.0 && !text.contains("a secret line"), "{reward}: {text}");
        assert_eq!(text.matches("<tool_response>\nError: ").count(), 3, "{text}");
        assert!(text.contains("no tool has this name") && text.contains("Unexpected keyword"), "{text}");
        assert!(text.contains("a closing bracket") && text.contains("0 lines have it"), "{text}");
    }
}

/// Calls the tool that the user names, and once more with a debt; then says what it was told.
fn named(text: &str) -> String {
    match text.matches("<tool_response>").count() {
        0 => call(between(text, "user\n", "\n").unwrap(), &json!({"a": 20, "b": 22})),
        1 => call("add", &json!({"a": -1, "b": 22})),
        _ => "Done".to_owned(),
    }
}

/// What becomes of an answer of this command to a prompt of one word.
async fn answered(dir: &Path, task: &Task, at: String, word: &str) -> Result<String, Error> {
    let options = HookOptions::new(at).with_deadline(Duration::from_secs(300)).with_clients(dir.to_owned());
    let open = move || Hook::open("--custom-generate-command", &options).unwrap();
    let hook = tokio::task::spawn_blocking(open).await.unwrap();
    let task = Task { generate: Some(Arc::new(hook)), ..task.clone() };
    let tokenizer = Tokenizer::open(dir).unwrap();
    let engines = Plays { tokenizer: Tokenizer::open(dir).unwrap(), says: named };
    let prompt = Prompt { text: word.to_owned(), ..task.source.prompt(0).await.unwrap() };
    let samples = task.generate(&prompt, &Turn { engines: &engines, ..turn(0) }).await?;
    assert_eq!(samples.len(), 1);
    Ok(tokenizer.decode(&samples[0].tokens).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_mcp_is_asked_and_says_what_is_wrong() {
    let Some(python) = python("DRIFTLESS_TOOLS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    let task = tools(dir.path(), &python).await;
    let file = dir.path().join("sums.py");
    std::fs::write(&file, SUMS).unwrap();
    let at = command(dir.path(), &python, ".hook.mcp", &format!("'{python}' '{}'", file.display()));
    let text = answered(dir.path(), &task, at, "add").await.unwrap();
    assert!(text.contains("<tool_response>\n42\n</tool_response>"), "{text}");
    assert!(text.contains("Error: ") && text.contains("no debts") && text.contains("Done"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_lies_is_a_failure_of_its_kind() {
    let Some(python) = python("DRIFTLESS_TOOLS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    let task = tools(dir.path(), &python).await;
    let [server, hook] = ["liar.py", "hook.py"].map(|name| dir.path().join(name));
    std::fs::write(&server, LIAR).unwrap();
    std::fs::write(&hook, HOOK).unwrap();
    for (word, outcome, why) in [
        ("die", "environment", "its output ended"),
        ("garble", "environment", "expected a message of JSON-RPC, found b'listening on 7000"),
        ("flood", "environment", "expected lines of at most 4 MiB"),
        ("odd", "environment", "expected an answer as MCP has it"),
        ("pause", "deadline", "expected an answer within 0.1 s"),
    ] {
        let arguments = format!("'{}' '{}'", hook.display(), server.display());
        let at = command(dir.path(), &python, ".hook", &arguments);
        let error = answered(dir.path(), &task, at, word).await.unwrap_err();
        assert!(error.failure().name() == outcome && error.to_string().contains(why), "{word}: {error}");
    }
}
