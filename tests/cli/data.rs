//! `driftless data`: prompts as a run reads them, and rows that are refused.

use crate::common::{code, driftless, json};
use driftless_trainer::tasks::tiny;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A tokenizer of single characters with a template that knows them.
pub(crate) fn checkpoint(dir: &Path) -> PathBuf {
    let checkpoint = dir.join("checkpoint");
    std::fs::create_dir_all(&checkpoint).expect("a directory");
    let mut config = tiny::tokenizer_config();
    config["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}=\n{% endfor %}".into();
    for (name, value) in [("tokenizer.json", tiny::tokenizer()), ("tokenizer_config.json", config)] {
        std::fs::write(checkpoint.join(name), value.to_string()).expect("a file");
    }
    checkpoint
}

fn data(dir: &Path, lines: &str) -> std::process::Command {
    let file = dir.join("prompts.jsonl");
    std::fs::write(&file, lines).expect("a file");
    let mut command = driftless();
    command.arg("data").arg(file).arg("--hf-checkpoint").arg(checkpoint(dir));
    command
}

#[test]
fn a_file_is_shown_as_a_run_reads_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let lines = "{\"q\": \"1+2\", \"a\": 3, \"metadata\": {\"level\": 1}}\n\
                 {\"q\": [{\"role\": \"user\", \"content\": \"3+4\"}], \"a\": \"7\"}\n\
                 {\"q\": \"1+2+3+4\", \"a\": 10}\n";
    let mut command = data(dir.path(), lines);
    command.args(["--input-key", "q", "--label-key", "a", "--apply-chat-template"]);
    command.args(["--rollout-max-prompt-len", "6"]);
    let shown: Value = json(&mut command);
    assert_eq!((&shown["prompts"], &shown["too_long"], &shown["bad"]), (&json!(2), &json!(1), &json!(0)));
    let first = &shown["examples"][0];
    assert_eq!(first["text"], "<bos>1+2=\n");
    // The template's newline is no character of this tokenizer.
    assert_eq!(first["tokens"], json!([1, 4, 13, 5, 14, 15]));
    assert_eq!((&first["label"], &first["metadata"]), (&json!(3), &json!({ "level": 1 })));
    assert!(shown["refused"][0].as_str().is_some_and(|why| why.contains("prompts.jsonl:3")), "{shown}");
    let (status, words) = code(&mut command);
    assert_eq!(status, Some(0), "{words}");
}

#[test]
fn a_broken_line_is_named_with_its_reason_or_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let good = "{\"input\": \"1+2\"}\n";
    let broken = [
        ("\n", "an empty line"),
        ("{\"input\": \"1+2\"\n", "a JSON object"),
        ("[1]\n", "a JSON object"),
        ("{\"inputs\": \"1+2\"}\n", "`input`"),
        ("{\"input\": 12}\n", "`input`"),
        ("{\"input\": [{\"role\": \"user\", \"content\": \"1\"}]}\n", "--apply-chat-template"),
        ("{\"input\": \"\"}\n", "no tokens"),
        ("{\"input\": \"1\", \"metadata\": 7}\n", "`metadata`"),
    ];
    for (line, expected) in broken {
        let lines = format!("{good}{line}{good}");
        let (status, words) = code(&mut data(dir.path(), &lines));
        assert_eq!(status, Some(1), "{line}: {words}");
        let named = words.contains("prompts.jsonl:2") && words.contains("--skip-bad-prompts");
        assert!(named && words.contains(expected), "{line}: {words}");
        let shown: Value = json(data(dir.path(), &lines).arg("--skip-bad-prompts"));
        assert_eq!((&shown["prompts"], &shown["bad"]), (&json!(2), &json!(1)), "{line}");
    }
    let (status, words) = code(&mut data(dir.path(), ""));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("there are no rows"), "{words}");
}

#[test]
fn first_row_without_the_field_names_what_the_row_has() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = data(dir.path(), "{\"q\": \"1\", \"a\": \"\\u001b[2J\"}\n{\"q\": \"2\"}\n");
    let (status, words) = code(&mut command);
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("prompts.jsonl:1") && words.contains("the row has `a`, `q`"), "{words}");
    assert!(!words.contains("skip"), "leaving such rows out would leave nothing: {words}");
    let (_, words) = code(&mut data(dir.path(), "{\"input\": \"1\"\n"));
    assert!(words.contains(":1: ") && words.contains(" at column ") && !words.contains("line 2"), "{words}");
    assert!(!words.contains("--input-key"), "the line has no fields yet: {words}");
}

#[test]
fn file_that_is_no_jsonl_is_said_to_be_what_it_is() {
    let dir = tempfile::tempdir().expect("a directory");
    let files: [(&str, &[u8], &str); 6] = [
        ("a.jsonl", b"\xef\xbb\xbf{\"input\": \"1\"}\n", "byte-order mark"),
        ("b.jsonl", b"\x1f\x8b\x08\x00rest", "gzip"),
        ("c.jsonl.gz", b"\x1f\x8b\x08\x00rest", "gzip"),
        ("d.json", b"[\n{\"input\": \"1\"}]\n", "a JSON list"),
        ("e.csv", b"q,a\n1,2\n", "`q,a`"),
        ("f.jsonl", b"PAR1rest", "Parquet"),
    ];
    for (name, bytes, expected) in files {
        let file = dir.path().join(name);
        std::fs::write(&file, bytes).expect("a file");
        let mut command = driftless();
        let (status, words) =
            code(command.arg("data").arg(&file).arg("--hf-checkpoint").arg(checkpoint(dir.path())));
        assert_eq!(status, Some(2), "{words}");
        let said = words.contains(name) && words.contains("expected JSONL or Parquet");
        assert!(said && words.contains(expected), "{name}: {words}");
    }
}

#[test]
fn checkpoint_that_is_a_hub_name_says_how_to_fetch_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = driftless();
    command.current_dir(dir.path()).args(["data", "-", "--hf-checkpoint", "Qwen/Qwen3-0.6B"]);
    let (status, words) = code(&mut command);
    assert_eq!(status, Some(2), "{words}");
    assert!(words.contains("hf download Qwen/Qwen3-0.6B --local-dir"), "{words}");
}

#[test]
fn what_the_checkpoint_lacks_is_said_with_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let lines = "{\"input\": \"1+2\"}\n";
    let mut command = data(dir.path(), lines);
    command.arg("--apply-chat-template");
    std::fs::remove_file(dir.path().join("checkpoint/tokenizer_config.json")).expect("a file");
    let (status, words) = code(&mut command);
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("chat_template.jinja") && words.contains("leave out"), "{words}");
    std::fs::remove_file(dir.path().join("checkpoint/tokenizer.json")).expect("a file");
    let (status, words) = code(&mut command);
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("tokenizer.json") && words.contains("save_pretrained"), "{words}");
}

#[test]
fn fifo_in_place_of_a_tokenizer_file_is_named_not_waited_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = data(dir.path(), "{\"input\": \"1+2\"}\n");
    command.arg("--apply-chat-template");
    for name in ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json"] {
        let path = dir.path().join("checkpoint").join(name);
        let _ = std::fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
        let (status, words) = code(&mut command);
        assert!(status == Some(1) && words.contains(name), "{status:?}: {words}");
        std::fs::remove_file(&path).expect("a FIFO");
    }
}

#[test]
fn the_example_of_the_documentation_is_whole() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = driftless();
    command.args(["data", "examples/prompts.jsonl", "--input-key", "question", "--label-key", "answer"]);
    command.args(["--show", "20", "--hf-checkpoint"]).arg(checkpoint(dir.path()));
    let shown: Value = json(&mut command);
    assert_eq!((&shown["prompts"], &shown["bad"]), (&json!(20), &json!(0)));
    let examples = shown["examples"].as_array().expect("examples");
    assert!(examples.iter().all(|example| example["label"].is_string()), "{shown}");
}
