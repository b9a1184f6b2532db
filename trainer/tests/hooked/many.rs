//! A process that has many answers open at once: what it is told, what becomes of one that lies, and the Python module.

use super::{task, turn};
use driftless_trainer::Error;
use driftless_trainer::hook::{Hook, HookOptions};
use driftless_trainer::sample::{Engines, Prompt, Trajectory, Turn};
use driftless_trainer::tasks::Task;
use serde_json::value::RawValue;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process that speaks the protocol, for which a test says how it differs from an honest one.
const FAKE: &str = r#"
import json, os, sys

turns = {}

def say(**line):
    print(json.dumps({"turn": turns.get(line.get("id"), 0), **line}), flush=True)

def asked(id, ask): say(id=id, generate={"append": "+"})
def told(id, ask): say(id=id, samples=[{}])
def cancelled(id, ask): say(id=id, cancelled=True)
announced = {"protocol": 2, "open": 4}
starts = open("starts", "a+")
starts.write("x")
starts.flush()
starts.seek(0)
first = len(starts.read()) == 1
DIFFERENCE
say(announced=announced)
for line in sys.stdin:
    ask = json.loads(line)
    turns[ask["id"]] = ask.get("turn", 0)
    if "cancel" in ask: cancelled(ask["id"], ask)
    elif "hook" in ask: asked(ask["id"], ask)
    else: told(ask["id"], ask)
"#;

pub(super) struct Room {
    dir: tempfile::TempDir,
    pub(super) task: Task,
    /// The token 3.
    prompt: Prompt,
}

impl Room {
    async fn new(command: &str, deadline: u64, clients: Option<&Path>) -> Arc<Self> {
        let dir = tempfile::tempdir().unwrap();
        let at = format!("cd {} && exec {command}", dir.path().display());
        let mut options = HookOptions::new(at).with_deadline(Duration::from_secs(deadline));
        options.clients = clients.map(Path::to_owned);
        options.variables = clients.map(|_| r#"{"mode": "(short)"}"#.to_owned());
        let open = move || Hook::open("--custom-generate-command", &options).unwrap();
        let hook = tokio::task::spawn_blocking(open).await.unwrap();
        let task = Task { generate: Some(Arc::new(hook)), ..task(dir.path()) };
        let prompt = task.source.prompt(0).await.unwrap();
        Arc::new(Room { dir, task, prompt })
    }

    pub(super) async fn fake(difference: &str, deadline: u64) -> Arc<Self> {
        let room = Room::new("python3 -S fake.py", deadline, None).await;
        std::fs::write(room.path("fake.py"), FAKE.replace("DIFFERENCE", difference)).unwrap();
        room
    }

    /// The module as the wheel has it, without the extension of the wheel.
    pub(super) async fn module(file: &Path, deadline: u64) -> Arc<Self> {
        Self::module_with(file, deadline, None).await
    }

    /// The same, with an address for clients, who are written to as this checkpoint has it.
    pub(super) async fn module_with(file: &Path, deadline: u64, clients: Option<&Path>) -> Arc<Self> {
        let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../python/python/driftless_rl");
        let start = format!(
            "import runpy, sys, types\nname = 'driftless_rl'\nsys.modules[name] = types.ModuleType(name)\n\
             sys.modules[name].__path__ = [{package:?}]\nrunpy.run_module(name + '.hook', run_name='__main__')\n"
        );
        let room = Room::new(&format!("python3 start.py {}", file.display()), deadline, clients).await;
        std::fs::write(room.path("start.py"), start).unwrap();
        room
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// An answer to the prompt, whose label is the last digit of its number.
    pub(super) async fn answer(&self, sample: u64) -> Result<Vec<Trajectory>, String> {
        self.answer_to(turn(sample)).await.map_err(|error| error.to_string())
    }

    /// The same in a turn of its own.
    pub(super) async fn answer_to(&self, turn: Turn<'_>) -> Result<Vec<Trajectory>, Error> {
        let label = RawValue::from_string(format!("\"{}\"", turn.sample % 10)).ok();
        let prompt = Prompt { label, ..self.prompt.clone() };
        self.task.generate(&prompt, &turn).await
    }

    /// The same, by other engines.
    pub(super) async fn answer_by(&self, engines: &dyn Engines) -> Result<Vec<Trajectory>, String> {
        let turn = Turn { engines, ..turn(0) };
        self.task.generate(&self.prompt, &turn).await.map_err(|error| error.to_string())
    }

    /// Answers that are open together, in order.
    pub(super) async fn answers(self: &Arc<Self>, samples: u64) -> Vec<Result<Vec<Trajectory>, String>> {
        let answer = |sample| {
            let room = self.clone();
            tokio::spawn(async move { room.answer(sample).await })
        };
        let mut found = Vec::new();
        for answer in (0..samples).map(answer).collect::<Vec<_>>() {
            found.push(answer.await.unwrap());
        }
        found
    }

    fn starts(&self) -> usize {
        std::fs::read_to_string(self.path("starts")).unwrap().len()
    }
}

/// Waits until a process has written this file.
async fn seen(path: &Path) {
    while !path.exists() {
        tokio::task::yield_now().await;
    }
}

/// The prompt, `+` behind it, and what the engine wrote of that.
fn is_right(answer: &Result<Vec<Trajectory>, String>) {
    let samples = answer.as_ref().unwrap();
    assert_eq!((samples[0].tokens.as_slice(), samples[0].prompt_len), (&[3, 13, 13, 13][..], 1));
    assert_eq!(samples[0].loss_mask, [0, 1, 1]);
    assert_eq!(samples[0].log_probs, [0.0, -2.0, -2.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_answer_is_told_what_is_new_alone() {
    let told = r#"
def told(id, ask):
    said = ask["generation"]
    new = {"appended_ids": [13], "output_ids": [13, 13], "log_probs": [-2, -2], "text": "++", "finish_reason": "stop"}
    say(id=id, samples=[{}], **{} if said == new and set(ask) == {"id", "turn", "generation"} else {"error": line})
"#;
    let room = Room::fake(told, 60).await;
    room.answers(9).await.iter().for_each(is_right);
    assert_eq!(room.starts(), 1, "four at a time, in one process");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_a_template_are_refused_and_told() {
    let asks = r#"
def asked(id, ask): say(id=id, generate={"append_messages": [{"role": "user", "content": "?"}]})
def told(id, ask):
    said = ask["generation"]
    say(id=id, error=f"{said['finish_reason']}, {said['output_ids']}: {said['error']}", outcome="parser")
"#;
    let words = Room::fake(asks, 60).await.answer(7).await.unwrap_err();
    let told =
        "refused, []: append_messages: expected a command, and a template of a known family, found none";
    assert!(words.contains(told), "{words}");
    let for_ever = r#"
def asked(id, ask): say(id=id, generate={"append_messages": [{"role": "user", "content": "?"}]})
told = asked
"#;
    let words = Room::fake(for_ever, 60).await.answer(7).await.unwrap_err();
    assert!(words.contains("at most 256 generations"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn process_that_lies_is_named_with_what_it_said() {
    for (difference, found) in [
        ("def asked(id, ask):\n for _ in 'ab': say(id=id, generate={})", ", a "),
        ("def asked(id, ask): say(id=999, generate={})", "but that answer is not open"),
        ("def told(id, ask): print('loading', flush=True)", "`loading`, which is no JSON"),
        ("def told(id, ask): say(samples=[{}])", "not a line with the \"id\" of an open answer"),
        ("def told(id, ask): sys.exit(3)", "its end, 2 times: exit status: 3"),
        ("def told(id, ask): say(id=id, error='no luck (mine.py:3)')", "its error: no luck (mine.py:3)"),
        ("def told(id, ask): say(id=id, cancelled=True)", "neither, or both"),
        ("def told(id, ask): say(id=id, samples=[{'tokens': [3, 4], 'loss_mask': [1]}])", "response token 0"),
        ("announced['protocol'] = 3", "protocol 3 with 4 open answers, not protocol 2"),
        ("announced['open'] = 0", "protocol 2 with 0 open answers"),
    ] {
        let words = Room::fake(difference, 60).await.answer(7).await.unwrap_err();
        assert!(words.contains(found), "{difference}: {words}");
        assert!(words.contains("--custom-generate-command") && words.contains("sample 7"), "{words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_that_comes_twice_is_taken_once() {
    let room = Room::fake("def told(id, ask):\n for _ in 'ab': say(id=id, samples=[{}])", 60).await;
    for sample in 0..3 {
        // A process that ends by it takes the next answer along, which another process then makes.
        is_right(&room.answer(sample).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn open_answers_of_a_process_that_dies_begin_again() {
    let dies = "
seen = set()
def told(id, ask):
    seen.add(id)
    if first and len(seen) == 4: os.kill(os.getpid(), 9)
    if not first: say(id=id, samples=[{}])
";
    let room = Room::fake(dies, 60).await;
    room.answers(4).await.iter().for_each(is_right);
    assert_eq!(room.starts(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_given_up_is_cancelled_and_the_process_stays() {
    let waits = "
def told(id, ask): open('told', 'w')
def cancelled(id, ask):
    open('cancelled', 'w')
    global told
    told = lambda id, ask: say(id=id, samples=[{}])
    # What was on the way is no lie.
    say(id=id, generate={})
    say(id=id, cancelled=True)
";
    let room = Room::fake(waits, 60).await;
    let asking = room.clone();
    let given_up = tokio::spawn(async move { asking.answer(0).await });
    seen(&room.path("told")).await;
    given_up.abort();
    assert!(given_up.await.unwrap_err().is_cancelled());
    seen(&room.path("cancelled")).await;
    room.answers(8).await.iter().for_each(is_right);
    assert_eq!(room.starts(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answer_is_cancelled_and_names_the_deadline() {
    let room = Room::fake("def told(id, ask):\n if id > 1: say(id=id, samples=[{}])", 10).await;
    let words = room.answer(0).await.unwrap_err();
    assert!(words.contains("nothing after 10 s") && words.contains("--custom-generate-command"), "{words}");
    is_right(&room.answer(1).await);
    assert_eq!(room.starts(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn process_that_ends_no_answer_given_up_is_killed() {
    let hangs = "
def told(id, ask):
    if not first: say(id=id, samples=[{}])
def cancelled(id, ask): pass
";
    let room = Room::fake(hangs, 8).await;
    assert!(room.answer(0).await.unwrap_err().contains("nothing after 8 s"));
    while room.starts() == 1 {
        // Those that wait for it are late with it, or begin again.
        let _ = room.answer(1).await;
    }
    is_right(&room.answer(2).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn python_functions_have_hundreds_of_answers_open() {
    const ANSWERS: u64 = 500;
    const TURNS: u32 = 20;
    let mine = "
import asyncio
from driftless_rl.hook import Turn, generate

together = []
everyone = asyncio.Event()

@generate
async def answer(turn: Turn) -> None:
    print('all of this goes to standard error')
    together.append(turn)
    if len(together) == 500:
        everyone.set()
    await everyone.wait()
    for nth in range(20):
        said = await turn.generate('+' if nth else None, max_new_tokens=1)
        assert turn.tokens[-1] == said.output_ids[0] and len(turn.tokens) == 2 + 2 * nth
";
    let file = tempfile::Builder::new().suffix(".py").tempfile().unwrap();
    std::fs::write(file.path(), mine).unwrap();
    let room = Room::module(file.path(), 60).await;
    let since = Instant::now();
    for answer in room.answers(ANSWERS).await {
        let samples = answer.unwrap();
        assert_eq!((samples.len(), samples[0].tokens.len()), (1, 2 * TURNS as usize));
        assert_eq!(samples[0].loss_mask.iter().filter(|mask| **mask == 1).count(), TURNS as usize);
    }
    let calls = u32::try_from(ANSWERS).unwrap() * TURNS;
    println!("{ANSWERS} open answers, {calls} calls: {:?} a call, with the start", since.elapsed() / calls);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_try_is_given_where_the_first_is_wrong() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/second_try.py");
    let room = Room::module(Path::new(file), 60).await;
    let right = room.answer(0).await.unwrap();
    assert_eq!(right[0].tokens, [3, 3, 3]);
    let wrong = room.answer(4).await.unwrap();
    assert_eq!(wrong[0].tokens[..3], [3, 3, 3]);
    let (mask, length) = (&wrong[0].loss_mask, wrong[0].loss_mask.len());
    assert_eq!((&mask[..3], &mask[length - 3..]), (&[1, 1, 0][..], &[0, 1, 1][..]));
}
