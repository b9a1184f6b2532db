//! Algorithms through the command: a critic over a kill, and conversations.

use crate::common::{Process, driftless, json, run};
use crate::stage::{Role, Stage, cold_start};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

/// Copies the state that rollouts have left, for a trainer of its own.
pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        match entry.file_type().expect("a type").is_dir() {
            true => copy(&entry.path(), &target),
            false => std::fs::copy(entry.path(), target).map(drop).expect("a copy"),
        }
    }
}

#[test]
fn killed_run_with_a_critic_ends_in_the_same_weights() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = cold_start(dir.path());
    let stage = Stage::new(&dir.path().join("rollouts"), &model);
    let engine = stage.start(Role::Engine, None);
    run(stage.command(Role::Trainer).arg("--debug-rollout-only"));
    drop(engine);
    let trainer = |stage: &Stage| {
        let mut command = stage.command(Role::Trainer);
        command.args(["--debug-train-only", "--advantage-estimator", "ppo", "--num-steps-per-rollout", "2"]);
        command.args([
            "--kl-coef",
            "0.05",
            "--ref-update-interval",
            "2",
            "--lambd",
            "0.9",
            "--critic-lr",
            "1e-2",
        ]);
        command.arg("--critic-save").arg(stage.dir.join("critic"));
        command
    };
    let files = ["final/model.safetensors", "critic/model.safetensors"];
    let ends = ["straight", "killed"].map(|name| {
        let stage = Stage::new(&dir.path().join(name), &model);
        copy(&dir.path().join("rollouts/rl"), &stage.dir.join("rl"));
        std::fs::remove_file(stage.dir.join("rl/metrics.jsonl")).expect("the rollouts' lines");
        if name == "killed" {
            let mut command = trainer(&stage);
            let mut doomed =
                Process::start("trainer", &stage.dir, command.env("DRIFTLESS_KILL_AT", "train.checkpoint:2"));
            let status = doomed.until("the kill", Process::ended);
            assert_eq!(status.signal(), Some(9), "{}", doomed.output());
        }
        run(&mut trainer(&stage));
        files.map(|file| std::fs::read(stage.dir.join(file)).expect("weights"))
    });
    assert!(ends[0] == ends[1], "policy and critic");
    let before = std::fs::read(model.join("model.safetensors")).expect("weights");
    assert_ne!(ends[0][0], before);
    let text = std::fs::read_to_string(dir.path().join("killed/rl/metrics.jsonl")).expect("metrics");
    let steps: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a step")).collect();
    assert_eq!(steps.len(), 3);
    // The reference is the policy of the start of the first rollout, and again of that of the third.
    let of = |name: &str| steps.iter().map(|step| step[name].as_f64() != Some(0.0)).collect::<Vec<_>>();
    assert_eq!(of("kl"), [false, true, false], "{steps:?}");
    assert_eq!(of("value_loss"), [false, true, true], "{steps:?}");
    assert_eq!(of("grad_norm"), [true; 3], "{steps:?}");
}

#[test]
fn conversations_are_shown_and_learned() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = cold_start(dir.path());
    let template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\
                    {% else %}{{ m.content }}{% endif %}{% endfor %}";
    std::fs::write(model.join("chat_template.jinja"), template).expect("a template");
    let file = dir.path().join("chats.jsonl");
    let row = |a: u32, b: u32| {
        let turns =
            format!(r#"{{"role":"user","content":"{a}+{b}="}},{{"role":"assistant","content":"{}"}}"#, a + b);
        format!(
            r#"{{"messages":[{turns},{{"role":"user","content":"{b}+{b}="}},{{"role":"assistant","content":"9","step_loss_mask":0}}]}}"#
        )
    };
    let rows: Vec<String> = (10..26).map(|a| row(a, 40)).collect();
    std::fs::write(&file, rows.join("\n")).expect("rows");

    let mut show = driftless();
    show.arg("data").arg(&file).arg("--hf-checkpoint").arg(&model);
    let shown = json(show.args(["--input-key", "messages", "--loss-mask-type", "generation", "--show", "1"]));
    let example = &shown["examples"][0];
    assert_eq!(example["text"], "10+40=5040+40=9");
    assert_eq!(example["loss_mask"], serde_json::json!([0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]));

    let mut train = driftless();
    train.args([
        "train",
        "--loss-type",
        "sft_loss",
        "--input-key",
        "messages",
        "--lr",
        "3e-3",
        "--num-epoch",
        "8",
    ]);
    train.args([
        "--rollout-batch-size",
        "8",
        "--lr-warmup-iters",
        "2",
        "--rollout-shuffle",
        "--num-threads",
        "1",
    ]);
    train
        .arg("--prompt-data")
        .arg(&file)
        .arg("--hf-checkpoint")
        .arg(&model)
        .arg("--save")
        .arg(dir.path().join("chat"));
    let said = json(&mut train);
    let losses: Vec<f64> =
        said["losses"].as_array().expect("losses").iter().filter_map(serde_json::Value::as_f64).collect();
    assert_eq!(losses.len(), 16);
    assert!(losses[15] < 0.8 * losses[0], "{losses:?}");
}
