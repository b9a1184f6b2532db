//! `driftless init`, and what `--config` makes of its file.

use crate::common::{code, driftless, json};
use crate::data::checkpoint;
use driftless_testkit::vllm::Vllm;
use std::path::Path;
use std::process::Command;

/// A model and prompts, as `init` is given them.
pub(crate) fn init(dir: &Path) -> Command {
    let model = checkpoint(dir);
    let config = r#"{"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}"#;
    std::fs::write(model.join("config.json"), config).expect("a file");
    std::fs::write(model.join("model.safetensors"), b"").expect("a file");
    std::fs::write(dir.join("train.jsonl"), "{\"question\": \"1+2\", \"answer\": \"3\"}\n").expect("a file");
    let mut command = driftless();
    command.current_dir(dir).args(["init", "--hf-checkpoint", "checkpoint", "--prompt-data", "train.jsonl"]);
    command
}

#[test]
fn file_says_what_was_found_and_a_command_takes_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = Vllm::start(dir.path());
    let told =
        json(init(dir.path()).args(["--engine", &engine.url(), "--engine", "127.0.0.1:1", "--run", "sums"]));
    assert_eq!((told["prompts"].as_u64(), &told["silent"][0]), (Some(1), &"127.0.0.1:1".into()), "{told}");
    let text = std::fs::read_to_string(dir.path().join("run.toml")).expect("a file");
    for words in [
        "Qwen3ForCausalLM, 64 positions, a chat template",
        "input-key = \"question\"",
        "label-key = \"answer\"",
        "rm-type = \"math\"",
        "apply-chat-template = true",
        "rollout-max-context-len = 64",
        "127.0.0.1:1 did not answer",
        "release",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    // It ends where the versions of the run are looked for.
    let (status, said) = code(driftless().current_dir(dir.path()).args(["inspect", "--config", "run.toml"]));
    assert!(status == Some(1) && said.contains("no run named `sums`"), "{status:?}: {said}");
    let (status, said) = code(init(dir.path()).args(["--engine", "127.0.0.1:1"]));
    assert!(status == Some(2) && said.contains("--out"), "{status:?}: {said}");
}

#[test]
fn prompts_without_a_field_like_one_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = init(dir.path());
    std::fs::write(dir.path().join("train.jsonl"), "{\"foo\": \"1+2\", \"bar\": 1}\n").expect("a file");
    let (status, said) = code(&mut command);
    assert!(
        status == Some(2) && said.contains("--input-key") && said.contains("bar, foo"),
        "{status:?}: {said}"
    );
    assert!(!dir.path().join("run.toml").exists());
}
