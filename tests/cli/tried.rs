//! One prompt through hook, reward and engine.

use crate::common::{driftless, json, output, run};
use crate::gateway::{id, model};
use driftless_testkit::sglang::Fake;
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
