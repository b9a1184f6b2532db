//! Environments of the package `verifiers`, which play with their own clients; lane `rewards` has it.

use super::clients::checkpoint;
use super::{drawn_in_place, generate, of_engines, records};
use async_trait::async_trait;
use driftless_agent::Tokenizer;
use driftless_bridge::engine::Tell;
use driftless_bridge::{GenerateRequest, Generation, Label};
use driftless_trainer::data::{DataOptions, RowReader};
use driftless_trainer::hook::{Hook, HookOptions, Rm};
use driftless_trainer::sample::Engines;
use driftless_trainer::tasks::{Sourced, Task};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// An environment of its own agents: two turns, and a reward for the word that the task names.
const ECHO: &str = r#"
import verifiers.v1 as vf

class Data(vf.TaskData):
    word: str

class EchoTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def said(self, trace) -> float:
        return float(trace.transcript.count(self.data.word))

class Config(vf.TasksetConfig):
    words: list[str] = []

class Echo(vf.Taskset[EchoTask, Config]):
    def load(self):
        for word in self.config.words:
            yield EchoTask(Data(prompt=f"Say {word}", word=word), self.config.task)

class Settings(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Twice(vf.Env[Settings]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Again")

__all__ = ["Echo", "Twice"]
"#;

/// The module as the wheel has it, without the extension of the wheel.
const START: &str = "import runpy, sys, types\nname = 'driftless_rl'\nsys.modules[name] = types.ModuleType(name)\n\
                     sys.modules[name].__path__ = [sys.argv.pop(1)]\n\
                     runpy.run_module(name + sys.argv.pop(1), run_name='__main__', alter_sys=True)\n";

/// Writes the same text whenever it is asked, and tells as log-probability of each token how many it had read.
struct Says(Vec<i32>);

#[async_trait]
impl Engines for Says {
    async fn generate(
        &self,
        request: GenerateRequest,
        _minimum: Option<&Label>,
        _told: Tell<'_>,
    ) -> driftless_bridge::Result<Generation> {
        Ok(drawn_in_place(request, self.0.clone()))
    }
}

/// The interpreter that this variable names, which has what tests need, if there is one.
pub(super) fn python(variable: &str) -> Option<String> {
    let python = std::env::var(variable).ok();
    if python.is_none() {
        eprintln!("skipped: {variable} is not set; `cargo xtask test rewards` sets it");
    }
    python
}

/// A command that runs this module of the wheel, with other modules from `dir`.
pub(super) fn command(dir: &Path, python: &str, module: &str, arguments: &str) -> String {
    std::fs::write(dir.join("start.py"), START).unwrap();
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../python/python/driftless_rl");
    let (bin, place) = (Path::new(python).parent().unwrap().display(), dir.display());
    format!(
        "PATH='{bin}':$PATH HOME='{place}' PYTHONPATH='{place}' NLTK_DATA='{place}' exec '{python}' '{place}/start.py' '{package}' \
         {module} {arguments}"
    )
}

/// The hooks of an environment, whose modules lie in `dir` beside a checkpoint.
pub(super) async fn task(dir: &Path, python: &str, name: &str, settings: &str) -> Task {
    let at = command(dir, python, ".environment", &format!("'{name}' --args '{settings}'"));
    let clients = dir.to_owned();
    let open = move || {
        let options = HookOptions::new(at).with_deadline(Duration::from_secs(300));
        let hook = |options: &HookOptions| Hook::open("--environment", options).unwrap();
        [hook(&options), hook(&options), hook(&options.clone().with_clients(clients))]
    };
    let [source, reward, generate] = tokio::task::spawn_blocking(open).await.unwrap();
    let reader = RowReader::open(DataOptions::default(), dir).unwrap();
    let source = Arc::new(Sourced::new(source, reader));
    Task { generate: Some(Arc::new(generate)), ..Task::new(source, Arc::new(Rm::new(reward))) }
}

/// Each token that is trained on was drawn behind exactly the tokens before it, by an engine that tells how many it had read.
pub(super) fn check_drawn(record: &driftless_buffer::Record) {
    let prompt = record.tokens().len() - record.log_probs().len();
    for (at, drawn) in record.loss_mask().iter().enumerate() {
        let log_prob = if *drawn == 1 { -((prompt + at) as f32) } else { 0.0 };
        assert_eq!(record.log_probs()[at], log_prob, "token {at}");
    }
}

/// The text of the one sample of each answer to prompt 0, and its rewards: twice the answer's, and its parts.
async fn played(dir: &Path, task: Task, says: &str) -> Vec<(String, Vec<f32>)> {
    let tokenizer = Tokenizer::open(dir).unwrap();
    let says = tokenizer.encode(says).unwrap();
    let rollouts = of_engines(dir, task, Arc::new(Says(says.clone())), 1024, 1);
    rollouts.task.ready().await.unwrap();
    generate(&rollouts).await.unwrap();
    let sample = |record: &driftless_buffer::Record| {
        check_drawn(record);
        let tokens = record.tokens();
        let prompt = tokens.len() - record.log_probs().len();
        let drawn: Vec<i32> = record
            .loss_mask()
            .iter()
            .zip(&tokens[prompt..])
            .filter(|(mask, _)| **mask == 1)
            .map(|(_, id)| *id)
            .collect();
        assert!(
            drawn.len() >= 2 * says.len() && drawn.chunks(says.len()).all(|turn| turn == says),
            "{drawn:?}"
        );
        (tokenizer.decode(tokens).unwrap(), record.rewards().to_vec())
    };
    records(&rollouts, 0).iter().map(sample).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn game_of_verifiers_is_played_and_scored_by_its_own() {
    let Some(python) = python("DRIFTLESS_VERIFIERS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    // The package has its games look for words where nltk keeps them.
    std::fs::create_dir_all(dir.path().join("corpora/words")).unwrap();
    ["en", "en-basic"]
        .iter()
        .for_each(|name| std::fs::write(dir.path().join("corpora/words").join(name), "eve\n").unwrap());
    let settings =
        r#"{"taskset": {"game": "Hangman-v0"}, "player": {"harness": {"id": "null"}, "max_turns": 6}}"#;
    let task = task(dir.path(), &python, "verifiers:textarena", settings).await;
    for (text, rewards) in played(dir.path(), task, "[e]").await {
        let reward = rewards[0];
        assert!(text.contains("playing Hangman") && text.matches("[e]").count() >= 2, "{text}");
        assert!((0.0..1.0).contains(&reward) && reward > 0.6, "two of three letters: {reward}, {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_of_ones_own_trains_both_of_its_turns() {
    let Some(python) = python("DRIFTLESS_VERIFIERS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    std::fs::write(dir.path().join("echo_twice.py"), ECHO).unwrap();
    let settings = r#"{"taskset": {"words": ["yes"]}, "player": {"harness": {"id": "null"}}}"#;
    let task = task(dir.path(), &python, "verifiers:echo-twice", settings).await;
    let answers = played(dir.path(), task, "yes").await;
    assert_eq!(answers.len(), super::ANSWERS as usize);
    for (text, rewards) in answers {
        assert!(text.contains("Say yes") && text.contains("Again"), "{text}");
        assert_eq!(rewards, [1.5; 3], "half of what the transcript has, and its one part: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_environment_lacks_is_told_before_it_plays() {
    let Some(python) = python("DRIFTLESS_VERIFIERS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    std::fs::write(dir.path().join("echo_twice.py"), ECHO).unwrap();
    for (name, settings, words) in [
        ("verifiers:no-such", "{}", "pip install no-such"),
        ("verifiers:echo-twice", r#"{"taskset": {"words": ["yes"]}}"#, "runs code that the policy writes"),
        ("verifiers:echo-twice", r#"{"taskset": {"word": 1}}"#, "word"),
    ] {
        let refused = task(dir.path(), &python, name, settings).await.ready().await.unwrap_err().to_string();
        assert!(refused.contains("--environment") && refused.contains(words), "{refused}");
    }
}

/// The taskset of `examples/`, with the prompts and the tools of `tools:FOLDER`. Its server imports the wheel's modules too.
#[tokio::test(flavor = "multi_thread")]
async fn tools_of_the_example_are_called_by_an_agent_of_verifiers() {
    let Some(python) = python("DRIFTLESS_VERIFIERS_PYTHON") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (root, place) = (concat!(env!("CARGO_MANIFEST_DIR"), "/.."), dir.path());
    checkpoint(place);
    std::fs::write(place.join("chat_template.jinja"), super::tools::TEMPLATE).unwrap();
    let example = format!("{root}/examples/tools_verifiers.py");
    std::fs::copy(example, place.join("tools_verifiers.py")).unwrap();
    std::fs::create_dir(place.join("driftless_rl")).unwrap();
    let init = format!("__path__ = [{:?}]\n", format!("{root}/python/python/driftless_rl"));
    std::fs::write(place.join("driftless_rl/__init__.py"), init).unwrap();
    let folder = super::tools::notes(place);
    let settings = format!(
        r#"{{"taskset": {{"task": {{"tools": {{"folder": {folder:?}, "seed": 3}}}}}}, "agent": {{"harness": {{"id": "null"}}}}}}"#
    );
    let task = task(place, &python, "verifiers:tools-verifiers", &settings).await;
    for (text, reward) in super::tools::played_of(place, task, super::tools::able).await {
        assert!(reward == 1.0 && text.contains("<tool_response>"), "{reward}: {text}");
    }
}
