//! The loop against an unmodified SGLang server: our trainer saves the model, SGLang serves it, a follower
//! beside it moves it from version to version, and after every step the server's own checksums have to be
//! those of the trainer's bytes.
//!
//! `cargo xtask test sglang` installs SGLang and passes its interpreter in DRIFTLESS_SGLANG_PYTHON.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

#[path = "../common/mod.rs"]
mod common;
mod fp8;

use common::{Process, driftless, free_port};
use driftless::bridge::ClientOptions;
use driftless::bridge::sglang::Client;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Of the steps that are not synchronous.
const STALENESS_MAX: &str = "2";
/// Steps of a language model take both cores for minutes.
const RUN_DEADLINE: Duration = Duration::from_secs(600);

#[test]
fn five_steps_in_bf16() {
    // bf16 has 8 bits of mantissa: log-probs of two implementations differ by some thousandths.
    five_steps("bfloat16", 1e-2, 0);
}

/// And three more, in which SGLang generates while the trainer learns and patches it.
#[test]
fn five_steps_in_f32_and_three_of_bounded_staleness() {
    five_steps("float32", 1e-4, 3);
}

fn five_steps(dtype: &str, log_prob_diff_mean_max: f64, bounded: usize) {
    let Some(python) = variable("DRIFTLESS_SGLANG_PYTHON") else { return };
    // One server at a time: each takes a gigabyte and both cores while it starts.
    let _one = common::exclusive();
    let dir = tempfile::tempdir().expect("a directory");
    let model = common::cold_start(dir.path(), 20, dtype);
    let task = ["--task", "arithmetic", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"];
    let more = ["--rollout-max-response-len", "8", "--lr", "1e-3"];
    let counts = Counts { synchronous: 5, bounded };
    steps(&python, dir.path(), &model, dtype, counts, |command| command.args(task).args(more));
    check(dir.path(), counts, log_prob_diff_mean_max);
    check_versions(dir.path(), counts);
}

/// The first run that docs/loop.md describes, with fewer and shorter samples.
#[test]
fn language_model_trains_three_steps_on_own_prompts_and_reward() {
    let Some(python) = variable("DRIFTLESS_SGLANG_PYTHON") else { return };
    let Some(model) = variable("DRIFTLESS_REAL_CHECKPOINT") else { return };
    let _one = common::exclusive();
    let dir = tempfile::tempdir().expect("a directory");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let data = ["--input-key", "question", "--label-key", "answer", "--apply-chat-template"];
    let rollout = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--lr", "1e-5"];
    let counts = Counts { synchronous: 3, bounded: 0 };
    steps(&python, dir.path(), &model, "bfloat16", counts, |command| {
        command.arg("--prompt-data").arg(examples.join("prompts.jsonl")).args(data).args(rollout);
        command.args(["--rollout-max-response-len", "8", "--custom-rm-command"]);
        command.arg(format!("python3 {}", examples.join("reward.py").display()))
    });
    // Thirty layers round thirty times, in another order of sums than ours.
    check(dir.path(), counts, 1e-1);
}

fn variable(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).map(PathBuf::from);
    if value.is_none() {
        eprintln!("skipped: {name} is not set; `cargo xtask test sglang` sets it");
    }
    value
}

/// Steps of a run: of the first trainer, and of the one that goes on.
#[derive(Clone, Copy)]
struct Counts {
    synchronous: usize,
    bounded: usize,
}

/// So many steps with a server, a follower beside it and a trainer; `of` adds what is trained on.
fn steps(
    python: &Path,
    dir: &Path,
    model: &Path,
    dtype: &str,
    counts: Counts,
    of: impl Fn(&mut Command) -> &mut Command,
) {
    let port = free_port();
    let mut server = Process::start("sglang", dir, &mut server(python, model, port, dtype));
    ready(&mut server, port);
    let mut follower = follow(dir, model, port);
    let run = |count, more: &[&str]| {
        let mut command = trainer(dir, model, port, count);
        of(command.arg("--check-weight-update-equal")).args(more);
        Process::start("trainer", dir, &mut command).within(RUN_DEADLINE).succeed();
    };
    run(counts.synchronous, &[]);
    if counts.bounded > 0 {
        run(counts.synchronous + counts.bounded, &["--max-staleness", STALENESS_MAX]);
    }
    assert!(follower.ended().is_none(), "the follower ended:\n{}", follower.output());
    assert!(server.ended().is_none(), "the server ended:\n{}", server.output());
}

/// A stock server whose processes are forked from the first one. As users start it, each of three imports SGLang, which
/// takes half a minute of a processor; the engine suite has a server that is started so.
fn server(python: &Path, model: &Path, port: u16, dtype: &str) -> Command {
    let placeholders =
        std::env::var_os("DRIFTLESS_SGLANG_PYTHONPATH").expect("set beside DRIFTLESS_SGLANG_PYTHON");
    let mut command = Command::new(python);
    command
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/tests/fork_sglang.py"))
        .args(["--device", "cpu", "--skip-tokenizer-init"])
        .args(["--disable-overlap-schedule", "--max-total-tokens", "65536", "--sleep-on-idle"])
        // `auto` would load an f32 model in f16.
        .args(["--dtype", dtype, "--port", &port.to_string()])
        .arg("--model-path")
        .arg(model)
        .env("PYTHONPATH", placeholders)
        .env("SGLANG_USE_CPU_ENGINE", "1")
        .env("HF_HUB_OFFLINE", "1");
    command
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

fn trainer(dir: &Path, model: &Path, port: u16, steps: usize) -> Command {
    let mut command = driftless();
    command
        .args(["train", "--run", "test", "--seed", "7", "--num-rollout", &steps.to_string()])
        // The entropy term moves the weights also where all rewards are equal.
        .args(["--entropy-coef", "0.01", "--update-weight-mode", "delta"])
        .args(["--rollout-external-engine-addrs", &format!("127.0.0.1:{port}")])
        .arg("--hf-checkpoint")
        .arg(model)
        .arg("--store")
        .arg(dir.join("store"))
        .arg("--save")
        .arg(dir.join("rl"));
    command
}

/// Every token of a step has a version, and none is older than the run allows.
fn check_versions(dir: &Path, counts: Counts) {
    let taken = driftless::trainer::ledger::read(&dir.join("rl")).expect("a ledger");
    let versions = std::fs::read_to_string(dir.join("rl/versions.jsonl")).expect("versions");
    let made = |version: u64| {
        let lines =
            versions.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a version"));
        lines
            .filter(|line| line["version"] == version)
            .find_map(|line| line["step"].as_u64())
            .expect("a step")
    };
    let log = driftless::buffer::Reader::open(dir.join("rl/log")).expect("a log");
    let all = (counts.synchronous + counts.bounded) as u64;
    assert!(taken.keys().copied().eq(0..all), "{taken:?}");
    let mut oldest = 0;
    for (step, groups) in taken {
        for answer in groups.iter().flat_map(|group| group * 4..(group + 1) * 4) {
            let record = log.sample(answer).expect("no damage").expect("a sample");
            let mut end = 0;
            for span in record.spans() {
                assert_eq!(span.start, end, "a token of answer {answer} has no version");
                end = span.end;
                oldest = oldest.max(step - made(span.version));
            }
            assert_eq!(end as usize, record.response().len(), "a token of answer {answer} has no version");
        }
    }
    println!("the oldest token was {oldest} steps old");
    assert_eq!(oldest > 0, counts.bounded > 0, "generation and training overlap");
}

/// What the trainer recorded of every step.
fn check(dir: &Path, counts: Counts, log_prob_diff_mean_max: f64) {
    let text = std::fs::read_to_string(dir.join("rl/metrics.jsonl")).expect("metrics");
    let steps: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a step")).collect();
    assert_eq!(steps.len(), counts.synchronous + counts.bounded);
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
        let phases = publication["hosts"]["host-0"].as_array().and_then(|all| all.last()).expect("phases");
        println!("  encode {} put {} {phases}", publication["encode_ms"], publication["put_ms"]);
        assert_eq!(phases["version"], publication["version"]);
        assert!(phases["patch_ms"].as_f64() > Some(0.0), "the engine came to it in the first round");
        let [weights, wall] = ["weights_ms", "wall_ms"].map(|name| step[name].as_f64().expect("a time"));
        println!("  weights cost {:.1} % of {wall:.0} ms", 100.0 * weights / wall);
        assert!(weights >= publication["convergence_ms"].as_f64().expect("a time") && weights < wall);
        assert!(publication["density"].as_f64() > Some(0.0), "the weights moved");
        assert_eq!(publication["engines_checked"], 1, "checksums were compared on the one engine");
        if index >= counts.synchronous {
            assert!(step["staleness_max"].as_u64() <= STALENESS_MAX.parse().ok(), "{step}");
            continue;
        }
        assert_eq!(step["staleness_max"], 0, "every token's span names the newest version");
        assert!(step["log_prob_diff_mean"].as_f64().expect("a mean") <= log_prob_diff_mean_max);
    }
}
