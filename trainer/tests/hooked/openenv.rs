//! Environments of the package `openenv`, whose servers play with its own code; lane `rewards` has it.

use super::clients::checkpoint;
use super::environment::{python, task};
use super::tools::{Plays, TEMPLATE, between, call, played_of};
use super::turn;
use driftless_agent::Tokenizer;
use driftless_trainer::Error;
use driftless_trainer::sample::Turn;
use driftless_trainer::tasks::Task;
use serde_json::json;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The page whose environment is played.
const PAGE: &str = include_str!("../../../docs/agents.md");

/// A server with tools, which ends with a sum that is right, and one whose actions have no text.
const SUMS: &str = r#"
from fastmcp import FastMCP
from openenv.core.env_server import MCPEnvironment, Action, CallToolAction, CallToolObservation, Environment, Observation, State, create_app

class Sums(MCPEnvironment):
    state = State()

    def __init__(self):
        mcp = FastMCP("sums")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Adds."""
            if a < 0:
                raise ValueError("no debts")
            return a + b

        super().__init__(mcp)

    def reset(self, **_):
        return Observation()

    async def step_async(self, action, **_):
        seen = await super().step_async(action)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = (-0.25, False) if seen.error else (1.0, True)
        return seen

    def _step_impl(self, action, **_):
        raise ValueError("expected a tool")

class Move(Action):
    by: int

class Place(Observation):
    at: int
    goal: int = 2

class Walk(Environment):
    state = State()

    def reset(self, **_):
        self.at = 0
        return Place(at=0)

    def step(self, action, **_):
        self.at += action.by
        return Place(at=self.at, reward=self.at / 4, done=self.at == 2)

sums = create_app(Sums, CallToolAction, CallToolObservation)
walk = create_app(Walk, Move, Place)
"#;

/// A server that does what the policy writes: it dies, says what is no answer, falls silent, or forgets the episode.
const LIAR: &str = r#"
import asyncio, os
from fastapi import FastAPI, WebSocket

app = FastAPI()

@app.get("/schema")
def schema():
    return {"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}

def seen(**of):
    return {"type": "observation", "data": {"observation": {"text": "do"}, "reward": 1.0, "done": True, **of}}

@app.websocket("/ws")
async def session(socket: WebSocket):
    await socket.accept()
    while True:
        ask = await socket.receive_json()
        match ask["type"], ask.get("data", {}).get("text"):
            case "reset", _: await socket.send_json(seen(done=False))
            case "step", "die": os._exit(3)
            case "step", "garble": await socket.send_text("no JSON")
            case "step", "list": await socket.send_json([1])
            case "step", "odd": await socket.send_json(seen(reward="much"))
            case "step", "infinite": await socket.send_json(seen(reward=float("inf")))
            case "step", "none": await socket.send_json(seen(reward=None))
            case "step", "raise": await socket.send_json({"type": "error", "data": {"message": "why", "code": "EXECUTION_ERROR"}})
            case "step", "flood": await socket.send_json(seen(observation={"text": "x" * (17 << 20)}))
            case "step", "lose":
                await socket.send_json(seen(done=False))
                return await socket.close()
            case "step", "pause": await asyncio.Event().wait()
            case "step", _: await socket.send_json(seen())
            case "close", _: return await socket.close()
"#;

/// What a policy writes of all that it read.
type Says = fn(&str) -> String;

/// A server of the test's own, which ends with this.
struct Server(Child);

impl Server {
    /// Starts an app in `dir`; its URL is with it.
    fn start(dir: &Path, python: &str, app: &str) -> (Self, String) {
        let mut command = Command::new(python);
        command.args(["-m", "uvicorn", "--port", "0", app]).current_dir(dir).stderr(Stdio::piped());
        let mut server = Server(command.spawn().unwrap());
        let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
        let line = lines.find(|line| line.as_ref().unwrap().contains("running on ")).unwrap().unwrap();
        (server, between(&line, "running on ", " ").unwrap().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory with a checkpoint and these modules.
fn place(modules: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    std::fs::write(dir.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    modules.iter().for_each(|(name, text)| std::fs::write(dir.path().join(name), text).unwrap());
    dir
}

/// Halves what is left of the numbers below 100.
fn halves(text: &str) -> String {
    let (mut low, mut high, mut guess) = (0, 99, 0);
    for line in text.lines() {
        match line {
            "higher" => low = guess + 1,
            "lower" => high = guess - 1,
            other => guess = other.parse().unwrap_or(guess),
        }
    }
    ((low + high) / 2).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn game_of_the_page_is_played_until_it_is_won() {
    let Some(python) = python("DRIFTLESS_OPENENV_PYTHON") else { return };
    let example =
        PAGE.split("such as this guess.py:\n\n```python\n").nth(1).unwrap().split("```").next().unwrap();
    let dir = place(&[("guess.py", example)]);
    let (_server, url) = Server::start(dir.path(), &python, "guess:app");
    for name in ["openenv:guess:app", &format!("openenv:{url}")] {
        let task = task(dir.path(), &python, name, r#"{"sessions": 2}"#).await;
        for (text, reward) in played_of(dir.path(), task, halves).await {
            assert!(
                reward == 1.0 && text.contains("Guess my number") && text.contains("er"),
                "{reward}: {text}"
            );
        }
        std::fs::remove_dir_all(dir.path().join("log")).unwrap();
    }
}

/// Makes mistakes, and then adds.
fn adds(text: &str) -> String {
    match text.matches("<tool_response>").count() {
        0 => call("add", &json!({"a": -1, "b": 2})),
        1 => call("add", &json!({"c": 1})),
        _ => call("add", &json!({"a": 40, "b": 2})),
    }
}

/// Makes a mistake, and then walks by one.
fn walks(text: &str) -> String {
    call("step", &json!({"by": if text.contains("<tool_response>") { json!(1) } else { json!("far") }}))
}

/// Plays an app of the sums until it ends, whose reward is this and which tells this.
async fn called(app: &str, settings: &str, says: Says, sum: f32, told: &str) {
    let Some(python) = python("DRIFTLESS_OPENENV_PYTHON") else { return };
    let dir = place(&[("small.py", SUMS)]);
    let task = task(dir.path(), &python, &format!("openenv:small:{app}"), settings).await;
    for (text, reward) in played_of(dir.path(), task, says).await {
        assert!(reward == sum && text.contains("Error: ") && text.contains(told), "{reward}: {text}");
        assert!(text.trim_end().ends_with("</tool_call>"), "no turn behind the end: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_of_a_server_are_called_until_the_episode_ends() {
    called("sums", r#"{"prompt": "Add."}"#, adds, 0.5, "no debts").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn action_of_another_form_is_a_call_with_its_schema() {
    called("walk", r#"{"prompt": "Walk."}"#, walks, 0.75, r#"{"at": 1, "goal": 2}"#).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn last_reward_and_one_field_are_chosen_by_settings() {
    let settings = r#"{"prompt": "Walk.", "reward": "last", "observation": "at"}"#;
    called("walk", settings, walks, 0.5, r#"{"at": 1}"#).await;
}

/// A task whose answers are made with the liar.
async fn lied_to(dir: &Path, python: &str, settings: &str) -> Task {
    task(dir, python, "openenv:liar:app", settings).await
}

/// What becomes of an answer of a policy that writes this.
async fn answered(dir: &Path, task: &Task, says: Says) -> Result<(), Error> {
    let engines = Plays { tokenizer: Tokenizer::open(dir).unwrap(), says };
    let prompt = task.source.prompt(0).await.unwrap();
    task.generate(&prompt, &Turn { engines: &engines, ..turn(0) }).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_dies_or_lies_is_a_failure_of_its_kind() {
    let Some(python) = python("DRIFTLESS_OPENENV_PYTHON") else { return };
    let dir = place(&[("liar.py", LIAR)]);
    let able = lied_to(dir.path(), &python, "{}").await;
    let hasty = lied_to(dir.path(), &python, r#"{"deadline": 0.5}"#).await;
    let lies: [(Says, _, _, _); 10] = [
        (|_| "garble".into(), &able, "environment", "Expecting value"),
        (|_| "list".into(), &able, "environment", "liar:app"),
        (|_| "odd".into(), &able, "environment", "expected an observation, a reward"),
        (|_| "infinite".into(), &able, "environment", "expected a finite reward"),
        (|_| "none".into(), &able, "environment", "expected a reward of an episode"),
        (|_| "raise".into(), &able, "environment", "why (code: EXECUTION_ERROR)"),
        (|_| "flood".into(), &able, "environment", "liar:app"),
        (|_| "lose".into(), &able, "environment", "liar:app"),
        (|_| "pause".into(), &hasty, "deadline", "expected an answer within 0.5 s"),
        (|_| "die".into(), &able, "environment", "liar:app"),
    ];
    for (says, task, outcome, why) in lies {
        let error = answered(dir.path(), task, says).await.unwrap_err();
        assert!(error.failure().name() == outcome && error.to_string().contains(why), "{error}");
    }
    // Its connections end before its process does, which is then started again.
    let until = Instant::now() + Duration::from_secs(60);
    while let Err(error) = answered(dir.path(), &able, |_| "be fair".into()).await {
        assert!(error.is_made_again() && Instant::now() < until, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_not_there_is_told_before_it_plays() {
    let Some(python) = python("DRIFTLESS_OPENENV_PYTHON") else { return };
    let dir = place(&[]);
    for (name, settings, words) in [
        ("openenv:no-such", "{}", "`no_such`"),
        ("openenv:http://127.0.0.1:1", "{}", "expected the schema of a server's actions"),
        ("openenv:json:app", r#"{"session": 2}"#, "session"),
        ("openenv:json:app", r#"{"sessions": 1000}"#, "--environment"),
    ] {
        let refused = task(dir.path(), &python, name, settings).await.ready().await.unwrap_err().to_string();
        assert!(refused.contains("--environment") && refused.contains(words), "{refused}");
    }
}
