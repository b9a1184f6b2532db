//! One prompt through hook, reward and engine.

use crate::common::{driftless, output, run};
use crate::gateway::{id, model};
use driftless_testkit::sglang::Fake;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// A hook that says this of each question.
fn says(reply: &str) -> String {
    format!("while read -r line; do n=${{line#*:}}; n=${{n%%,*}}; echo '{{\"id\": '$n', {reply}}}'; done")
}

fn try_in(dir: &Path, model: &Path, fake: &Fake) -> Command {
    let prompts = dir.join("prompts.jsonl");
    std::fs::write(&prompts, "{\"input\": \"hi\", \"label\": \"a\"}\n").expect("a file");
    let mut command = driftless();
    command.args(["try", "--rm-type", "exact", "--label-key", "label", "--prompt-data"]).arg(prompts);
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
    let shown = crate::common::json(&mut try_in(dir.path(), &model, &fake));
    assert_eq!((&shown["outcome"], &shown["reward"]), (&Value::Null, &1.0.into()), "{shown}");
    let sample = &shown["samples"][0];
    assert_eq!(sample["tokens"], json!(['h', 'i', 'a'].map(id)));
    assert_eq!(sample["loss_mask"], json!([1]));
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

/// Has the model write these texts as a token each, in place of letters that nobody writes.
fn with_words(model: &Path, words: &[&str]) -> Vec<i32> {
    let file = model.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&file).expect("a file")).expect("JSON");
    let ids: Vec<_> = (1..).map(|letter| id(char::from(letter))).take(words.len()).collect();
    for (id, word) in ids.iter().zip(words) {
        let added = json!({"id": id, "content": word, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false});
        tokenizer["added_tokens"].as_array_mut().expect("tokens").push(added);
    }
    std::fs::write(&file, tokenizer.to_string()).expect("a file");
    ids
}

/// Lane `rewards` has the package that the environment asks with.
#[test]
fn tools_are_tried_with_their_own_prompts_and_rewards() {
    let Some(python) = std::env::var_os("DRIFTLESS_TOOLS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_TOOLS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    let model = model(&dir.path().join("model"));
    std::fs::write(
        model.join("chat_template.jinja"),
        include_str!("../../agent/tests/templates/qwen3.jinja"),
    )
    .expect("a file");
    std::fs::write(dir.path().join("notes.md"), "The tide comes in at noon.\n").expect("a file");
    // The module as the wheel has it, without the extension of the wheel.
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/python/python/driftless_rl");
    std::fs::create_dir(dir.path().join("driftless_rl")).expect("a directory");
    std::fs::write(dir.path().join("driftless_rl/__init__.py"), format!("__path__ = [{package:?}]\n"))
        .expect("a file");
    let call = "<tool_call>\n{\"name\": \"calculate\", \"arguments\": {\"expression\": \"467798 * 366219 - 953217\"}}\n</tool_call>";
    let fake = Fake::start(&model);
    fake.engine().tokens = with_words(&model, &[call, "<answer>171315562545</answer>"]);
    let bin = Path::new(&python).parent().expect("a directory");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = driftless();
    command.args(["try", "--environment", "tools:.", "--rollout-external-engine-addrs"]);
    command.arg(fake.address.to_string()).arg("--hf-checkpoint").arg(&model);
    let text = run(command.current_dir(&dir).env("PYTHONPATH", dir.path()).env("PATH", path));
    assert!(text.contains("prompt 0, answer 0: reward 1; "), "{text}");
    assert!(text.contains("2 of them trained") && text.contains("  | 171315562545\n"), "{text}");
}
