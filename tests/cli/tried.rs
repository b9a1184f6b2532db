//! One prompt through hook, reward and engine.

use crate::common::{driftless, json, output, run};
use crate::gateway::{id, model};
use driftless_testkit::sglang::Fake;
use std::path::Path;
use std::process::Command;

/// The mark that ends a turn.
const END: i32 = 2;

/// A hook that says this of each question.
fn says(reply: &str) -> String {
    format!("while read -r line; do n=${{line#*:}}; n=${{n%%,*}}; echo '{{\"id\": '$n', {reply}}}'; done")
}

/// An environment of the wheel without the wheel: its modules lie in the tree, and its packages beside this Python.
fn with_package(command: &mut Command, dir: &Path, python: &Path) {
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/python/python/driftless_rl");
    std::fs::create_dir(dir.join("driftless_rl")).expect("a directory");
    let init = dir.join("driftless_rl/__init__.py");
    std::fs::write(init, format!("__path__ = [{package:?}]\n")).expect("a file");
    let bin = python.parent().expect("a directory").display();
    let path = format!("{bin}:{}", std::env::var("PATH").unwrap_or_default());
    command.current_dir(dir).env("PYTHONPATH", dir).env("PATH", path);
}

fn try_in(dir: &Path, model: &Path, fake: &Fake) -> Command {
    let mut command = try_unrewarded(dir, model, fake);
    command.args(["--rm-type", "exact", "--label-key", "label"]);
    command
}

fn try_unrewarded(dir: &Path, model: &Path, fake: &Fake) -> Command {
    let prompts = dir.join("prompts.jsonl");
    std::fs::write(&prompts, "{\"input\": \"hi\", \"label\": \"a\"}\n").expect("a file");
    let mut command = driftless();
    command.args(["try", "--prompt-data"]).arg(prompts);
    command.arg("--hf-checkpoint").arg(model);
    command.args(["--rollout-max-response-len", "2", "--rollout-external-engine-addrs"]);
    command.arg(fake.address.to_string());
    command
}

#[test]
fn a_prompt_is_tried_and_shown_token_by_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    fake.engine().tokens = vec![id('a')];
    let shown = json(&mut try_in(dir.path(), &model, &fake));
    assert_eq!((&shown["outcome"], &shown["reward"]), (&serde_json::Value::Null, &1.0.into()), "{shown}");
    let sample = &shown["samples"][0];
    assert_eq!(sample["tokens"], serde_json::json!(['h', 'i', 'a'].map(id)));
    assert_eq!(sample["loss_mask"], serde_json::json!([1]));
    let text = run(&mut try_in(dir.path(), &model, &fake));
    assert!(text.contains("2 tokens of prompt, 1 of response, 1 of them trained"), "{text}");
    assert!(text.contains("\n  > hi\n  < a\n") && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_try_that_fails_names_its_outcome_and_ends_with_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    for (outcome, again) in [("parser", 0), ("environment", 2)] {
        let hook = says(&format!("\"error\": \"why\", \"outcome\": \"{outcome}\""));
        let ended = output(try_in(dir.path(), &model, &fake).arg("--custom-generate-command").arg(hook));
        let text = String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("reward none, failed: {outcome}")), "{text}");
        assert!(text.contains("its error: why") && text.matches("made again").count() == again, "{text}");
    }
}

#[test]
fn a_hook_that_gives_the_reward_needs_no_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let fake = Fake::start(&model);
    let tokens = ['h', 'i', 'a'].map(id);
    let hook = says(&format!("\"samples\": [{{\"tokens\": {tokens:?}, \"reward\": 0.75}}]"));
    for mut command in [try_in(dir.path(), &model, &fake), try_unrewarded(dir.path(), &model, &fake)] {
        let shown = json(command.arg("--custom-generate-command").arg(&hook));
        assert_eq!(shown["reward"], 0.75, "{shown}");
    }
    let mut unrewarded = try_unrewarded(dir.path(), &model, &fake);
    let hook = says(&format!("\"samples\": [{{\"tokens\": {tokens:?}}}]"));
    let failed = output(unrewarded.arg("--custom-generate-command").arg(hook));
    let told = String::from_utf8_lossy(&[failed.stdout, failed.stderr].concat()).into_owned();
    assert!(told.contains("expected a `reward` of the hook that made the answer, found none"), "{told}");
    let refused = output(&mut try_unrewarded(dir.path(), &model, &fake));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--rm-type NAME"), "{refused:?}");
}

/// Prompt 0 of the environment is a sum. Lane `rewards` has the package that it asks with.
#[test]
fn an_environment_is_tried_with_its_own_prompt_and_reward() {
    let Some(python) = std::env::var_os("DRIFTLESS_TOOLS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_TOOLS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    let template = include_str!("../../agent/tests/templates/qwen3.jinja");
    std::fs::write(model.join("chat_template.jinja"), template).expect("a file");
    std::fs::write(dir.path().join("notes.md"), "The tide comes in at noon.\n").expect("a file");
    let fake = Fake::start(&model);
    let sum = "467798 * 366219 - 953217";
    let call = format!(
        "<tool_call>\n{{\"name\": \"calculate\", \"arguments\": {{\"expression\": \"{sum}\"}}}}\n</tool_call>"
    );
    let turns = [call.as_str(), "<answer>171315562545</answer>"];
    fake.engine().turns = turns.map(|turn| turn.chars().map(id).chain([END]).collect()).into();
    let mut command = driftless();
    command.args(["try", "--environment", "tools:.", "--rollout-max-response-len", "256"]);
    command.arg("--rollout-external-engine-addrs").arg(fake.address.to_string());
    with_package(command.arg("--hf-checkpoint").arg(&model), dir.path(), Path::new(&python));
    let text = run(&mut command);
    assert!(
        text.contains("prompt 0, answer 0: reward 1; ") && text.contains(&format!("What is {sum}?")),
        "{text}"
    );
    assert!(text.contains("  | 171315562545\n"), "what the tool says is not trained on: {text}");
    assert!(text.contains("  < <answer>171315562545</answer>"), "{text}");
}
