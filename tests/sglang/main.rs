//! The loop against an unmodified SGLang server: our trainer saves the model, SGLang serves it, a follower
//! beside it moves it from version to version, and after every step the server's own checksums have to be
//! those of the trainer's bytes.
//!
//! `cargo xtask test sglang` installs SGLang and passes its interpreter in DRIFTLESS_SGLANG_PYTHON.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

#[path = "../common/mod.rs"]
mod common;

use common::{Process, driftless, free_port};
use driftless::bridge::{Client, ClientOptions};
use std::path::Path;
use std::process::Command;

const STEPS: usize = 5;

#[test]
fn five_steps_in_bf16() {
    // bf16 has 8 bits of mantissa: log-probs of two implementations differ by some thousandths.
    five_steps("bfloat16", 1e-2);
}

#[test]
fn five_steps_in_f32() {
    five_steps("float32", 1e-4);
}

fn five_steps(dtype: &str, log_prob_diff_mean_max: f64) {
    let Some(python) = std::env::var_os("DRIFTLESS_SGLANG_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_SGLANG_PYTHON is not set; `cargo xtask test sglang` sets it");
        return;
    };
    // One server at a time: each takes a gigabyte and both cores while it starts.
    let _one = common::exclusive();
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let model = common::cold_start(dir, 20, dtype);
    let port = free_port();
    let mut server = serve(Path::new(&python), dir, &model, port, dtype);
    ready(&mut server, port);
    let mut follower = follow(dir, &model, port);
    train(dir, &model, port);
    assert!(follower.ended().is_none(), "the follower ended:\n{}", follower.output());
    assert!(server.ended().is_none(), "the server ended:\n{}", server.output());
    check(dir, log_prob_diff_mean_max);
}

fn serve(python: &Path, dir: &Path, model: &Path, port: u16, dtype: &str) -> Process {
    let placeholders =
        std::env::var_os("DRIFTLESS_SGLANG_PYTHONPATH").expect("set beside DRIFTLESS_SGLANG_PYTHON");
    let mut command = Command::new(python);
    command
        .args(["-m", "sglang.launch_server", "--device", "cpu", "--skip-tokenizer-init"])
        .args(["--disable-overlap-schedule", "--max-total-tokens", "65536", "--sleep-on-idle"])
        // `auto` would load an f32 model in f16.
        .args(["--dtype", dtype, "--port", &port.to_string()])
        .arg("--model-path")
        .arg(model)
        .env("PYTHONPATH", placeholders)
        .env("SGLANG_USE_CPU_ENGINE", "1")
        .env("HF_HUB_OFFLINE", "1");
    Process::start("sglang", dir, &mut command)
}

/// Waits until it answers a request with a token.
fn ready(server: &mut Process, port: u16) {
    let client = Client::new(&format!("127.0.0.1:{port}"), ClientOptions::default()).expect("an address");
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    server.until("a healthy server", |process| {
        let ended = process.ended();
        assert!(ended.is_none(), "the server ended with {ended:?}:\n{}", process.output());
        runtime.block_on(client.health()).ok()
    });
}

fn follow(dir: &Path, model: &Path, port: u16) -> Process {
    let mut command = driftless();
    command
        .args(["follow", "--run", "test", "--id", "host-0", "--poll-ms", "50"])
        .args(["--engine", &format!("http://127.0.0.1:{port}")])
        .arg("--store")
        .arg(dir.join("store"))
        .arg("--checkpoint-dir")
        .arg(dir.join("host/checkpoint"))
        .arg("--hf-checkpoint")
        .arg(model);
    Process::start("follower", dir, &mut command)
}

fn train(dir: &Path, model: &Path, port: u16) {
    let mut command = driftless();
    command
        .args(["train", "--run", "test", "--seed", "7", "--num-rollout", &STEPS.to_string()])
        .args([
            "--task",
            "arithmetic",
            "--rollout-batch-size",
            "8",
            "--n-samples-per-prompt",
            "4",
            "--rollout-max-response-len",
            "8",
        ])
        // The entropy term moves the weights also where all rewards are equal.
        .args([
            "--lr",
            "1e-3",
            "--entropy-coef",
            "0.01",
            "--update-weight-mode",
            "delta",
            "--check-weight-update-equal",
        ])
        .args(["--rollout-external-engine-addrs", &format!("127.0.0.1:{port}")])
        .arg("--hf-checkpoint")
        .arg(model)
        .arg("--store")
        .arg(dir.join("store"))
        .arg("--save")
        .arg(dir.join("rl"));
    Process::start("trainer", dir, &mut command).succeed();
}

/// What the trainer recorded of every step.
fn check(dir: &Path, log_prob_diff_mean_max: f64) {
    let text = std::fs::read_to_string(dir.join("rl/metrics.jsonl")).expect("metrics");
    let steps: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a step")).collect();
    assert_eq!(steps.len(), STEPS);
    for (index, step) in steps.iter().enumerate() {
        let publication = &step["publication"];
        println!(
            "step {index}: version {}, {} bytes of {}, pause {:.1} ms, log-prob difference {:.1e} mean {:.1e} max",
            publication["version"],
            publication["publication_bytes"],
            publication["full_bytes"],
            publication["pause_ms"].as_f64().expect("a pause"),
            step["log_prob_diff_mean"].as_f64().expect("a mean"),
            step["log_prob_diff_max"].as_f64().expect("a maximum"),
        );
        assert_eq!(publication["version"], index as u64 + 1);
        assert!(publication["density"].as_f64() > Some(0.0), "the weights moved");
        assert_eq!(publication["engines_checked"], 1, "checksums were compared on the one engine");
        assert_eq!(step["staleness_max"], 0, "every token's span names the newest version");
        assert!(step["log_prob_diff_mean"].as_f64().expect("a mean") <= log_prob_diff_mean_max);
    }
}
