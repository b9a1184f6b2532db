//! The loop's modes: one step off, the two debugging modes, a longer run after a finished one, and what it
//! refuses.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

mod algorithms;
#[path = "../common/mod.rs"]
mod common;
mod evaluation;
mod fp8;
mod prompts;
mod ranks;
mod replay;
#[path = "../common/stage.rs"]
mod stage;

use common::{DEADLINE, Process, code, driftless, run};
use driftless::buffer::Reader;
use driftless::trainer::goodput::Goodput;
use serde::Deserialize as _;
use serde_json::Value;
use stage::{GROUPS, Role, SAMPLES, STEPS, Stage, cold_start};
use std::path::Path;
use std::time::{Duration, Instant};

/// The recorded steps.
fn steps(stage: &Stage) -> Vec<Value> {
    let text = std::fs::read_to_string(stage.dir.join("rl/metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a step")).collect()
}

/// Runs a trainer with more flags to its end.
fn train(stage: &Stage, flags: &[&str]) {
    let mut command = stage.command(Role::Trainer);
    Process::start("trainer", &stage.dir, command.args(flags)).succeed();
}

#[test]
fn one_step_off_trains_on_samples_one_step_old() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = Stage::new(dir.path(), &cold_start(dir.path()));
    // Several, as a rollout may by chance be generated after its engine has moved on.
    stage.steps = 8;
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    train(&stage, &["--train-async"]);
    let stale: Vec<_> = steps(&stage).iter().map(|step| step["staleness_max"].as_u64()).collect();
    assert_eq!(stale[0], Some(0), "the first rollout has nobody to lag behind");
    assert!(stale[1..].iter().all(|age| *age <= Some(1)), "{stale:?}");
    assert!(stale[1..].contains(&Some(1)), "generation and training overlapped: {stale:?}");
    let log = Reader::open(stage.dir.join("rl/log")).expect("a log");
    let furthest = |step| {
        let learned = log.learned(step).expect("whole columns").expect("columns of each step");
        learned.rows().iter().filter_map(|row| row.mismatch).reduce(f32::max)
    };
    let found: Vec<_> = (0..stage.steps).map(furthest).collect();
    // Reading JSON may move the last digit.
    let figure = |step: &Value| step["log_prob_diff_max"].as_f64().map(|figure| figure as f32);
    let told: Vec<_> = steps(&stage).iter().map(figure).collect();
    assert_eq!(found, told, "columns are what the figures are of");
    assert!(found.iter().any(|furthest| *furthest > Some(0.0)), "{found:?}");
}

/// Tokens of groups that others overtook are left out where they are too old.
#[test]
fn bounded_staleness_takes_each_group_once_and_no_older_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = Stage::new(dir.path(), &cold_start(dir.path()));
    stage.steps = 8;
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    train(&stage, &["--max-staleness", "2"]);
    let steps = steps(&stage);
    let oldest: Vec<_> = steps.iter().map(|step| step["staleness_max"].as_u64().expect("steps")).collect();
    assert!(oldest.iter().all(|age| *age <= 2), "{oldest:?}");
    let goodput =
        steps.last().map(|step| Goodput::deserialize(&step["goodput"]).expect("a ledger of places"));
    let goodput = goodput.expect("a step");
    assert!(goodput.remainder().abs() < 0.01, "{goodput:?}");
    let sum = |name: &str| steps.iter().map(|step| step[name].as_u64().expect("tokens")).sum::<u64>();
    let trained = sum("response_tokens") - sum("tokens_too_old");
    assert!(goodput.tokens.trained.abs_diff(trained) * 100 <= trained, "{trained}: {goodput:?}");
    let text = std::fs::read_to_string(stage.dir.join("rl/events.jsonl")).expect("events");
    let told = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("an event"));
    let told: Vec<_> = told.map(|fact| fact["event"].as_str().expect("its name").to_owned()).collect();
    let count = |name: &str| told.iter().filter(|event| *event == name).count() as u64;
    assert_eq!(
        (count("begin"), count("step"), count("published")),
        (1, stage.steps, stage.steps),
        "{told:?}"
    );
    assert!(count("served") > 0 && count("phase") > 0, "{told:?}");
    assert!(goodput.trained_s > 0.0 && goodput.idle_s.contains_key("no request"), "{goodput:?}");
    assert!(oldest.iter().any(|age| *age > 0), "generation and training overlapped: {oldest:?}");
    for step in &steps {
        let ages = step["staleness"]
            .as_array()
            .expect("counts")
            .iter()
            .map(|tokens| tokens.as_u64().expect("tokens"));
        let too_old = step["tokens_too_old"].as_u64().expect("tokens");
        assert_eq!(ages.sum::<u64>() + too_old, step["response_tokens"].as_u64().expect("tokens"), "{step}");
    }
    let told = steps.iter().flat_map(|step| {
        let waited = step["publication"]["convergence_ms"].as_f64().map(|_| &step["publication"]);
        waited.into_iter().chain(step["converged"].as_array().into_iter().flatten())
    });
    let mut told: Vec<_> = told.map(|version| version["version"].as_u64().expect("a number")).collect();
    told.sort_unstable();
    assert_eq!(told, [1, 2, 3, 4, 5, 6, 7, 8], "of each version, when engines served it");
    let taken = driftless_trainer::ledger::read(&stage.dir.join("rl")).expect("a ledger");
    assert!(taken.keys().copied().eq(0..8) && taken.values().all(|groups| groups.len() as u64 == GROUPS));
    let mut groups: Vec<u64> = taken.into_values().flatten().collect();
    groups.sort_unstable();
    groups.dedup();
    assert_eq!(groups.len() as u64, 8 * GROUPS, "no group is learned from twice");
    let (status, error) = code(stage.command(Role::Trainer).args(["--max-staleness", "2", "--train-async"]));
    assert_eq!(status, Some(2), "{error}");
    let often = ["--max-staleness", "1", "--update-weights-interval", "3"];
    let (status, error) = code(stage.command(Role::Trainer).args(often));
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("--update-weights-interval") && error.contains("at most 2"), "{error}");
}

#[test]
fn a_finished_run_goes_on_when_more_steps_are_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    train(&stage, &[]);
    let first = steps(&stage);
    stage.steps = STEPS + 2;
    train(&stage, &[]);
    let second = steps(&stage);
    assert_eq!(second.len() as u64, STEPS + 2);
    assert_eq!(second[..first.len()], first, "what was recorded stays");
    assert_eq!(second[STEPS as usize]["publication"]["version"], STEPS + 1);
    for step in &second {
        let figure = |name: &str| step[name].as_f64().unwrap_or_else(|| panic!("{name} of {step}"));
        assert!(figure("rollout_tokens_per_s") > 0.0 && figure("train_tokens_per_s") > 0.0);
        assert!(figure("train_wait_ms") > 0.0 && figure("rollout_wait_ms") >= 0.0);
        assert!((0.0..=figure("log_prob_diff_max")).contains(&figure("log_prob_diff_p99")));
        let by_engine: Vec<_> = step["log_prob_diff_by_engine"].as_object().into_iter().flatten().collect();
        let [(_, mean)] = by_engine[..] else { panic!("one engine of {step}") };
        let apart = mean.as_f64().expect("a number") - figure("log_prob_diff_mean");
        assert!(apart.abs() <= 0.01 * figure("log_prob_diff_mean"), "the only engine's are all: {step}");
        assert!((0.0..=1.0).contains(&figure("pass")) && figure("groups_zero_std") <= GROUPS as f64);
        assert_eq!(step["staleness"][0], step["response_tokens"], "weights are never old here");
        assert!(step.get("rewards").is_none() && figure("tokens") > figure("response_tokens"));
    }
}

/// The version that the store has of the step is of weights that the backup never had.
#[test]
fn a_backup_of_a_runs_directory_publishes_its_own_weights() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    train(&stage, &[]);
    let [rl, backup] = ["rl", "backup"].map(|name| stage.dir.join(name));
    run(std::process::Command::new("cp").arg("-a").args([&rl, &backup]));
    stage.steps = STEPS + 1;
    train(&stage, &[]);
    let published = |stage: &Stage| steps(stage)[STEPS as usize]["publication"]["version"].clone();
    assert_eq!(published(&stage), STEPS + 1);
    std::fs::remove_dir_all(&rl).expect("a directory");
    std::fs::rename(&backup, &rl).expect("a directory");
    train(&stage, &["--weight-decay", "1"]);
    assert_eq!(published(&stage), STEPS + 2);
}

/// Waits for the end of a trainer whose follower finds nothing by itself. A follower is told once, with 2 s
/// for its answer, which a busy machine may not give it: a failure says whether it was that.
fn told(mut trainer: Process, follower: &Process) {
    let begun = Instant::now();
    let ended = loop {
        match trainer.ended() {
            None if begun.elapsed() < DEADLINE => std::thread::sleep(Duration::from_millis(20)),
            ended => break ended,
        }
    };
    let words = trainer.output();
    let heard = if words.contains("not told of the version") { "was not told" } else { "was told" };
    assert!(
        ended.is_some_and(|status| status.success()),
        "{ended:?}; the follower {heard} of each version:\n{words}\nthe follower:\n{}",
        follower.output()
    );
}

/// A follower that by itself would look again in an hour, and believes nobody but the trainer's key.
#[test]
fn a_trainer_signs_its_versions_and_tells_its_followers() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut stage = Stage::new(dir.path(), &cold_start(dir.path()));
    stage.poll_ms = 3_600_000;
    let key = stage.dir.join("key");
    run(driftless().arg("keygen").arg(&key));
    let _engine = stage.start(Role::Engine, None);
    let port = common::free_port();
    let mut follow = stage.command(Role::Follower);
    follow.args(["--listen", &format!("127.0.0.1:{port}"), "--trust-key"]).arg(stage.dir.join("key.pub"));
    let mut follower = Process::start("follower", &stage.dir, &mut follow);
    follower.listening(port);
    let key = key.display().to_string();
    let mut trainer = stage.command(Role::Trainer);
    trainer.args(["--sign-key", &key, "--notify", &format!("http://127.0.0.1:{port}")]);
    told(Process::start("trainer", &stage.dir, &mut trainer), &follower);
    let published: Vec<_> =
        steps(&stage).iter().map(|step| step["publication"]["version"].as_u64()).collect();
    assert_eq!(published, (1..=STEPS).map(Some).collect::<Vec<_>>());

    // Another key does not go on from what this one has signed.
    let other = stage.dir.join("other");
    run(driftless().arg("keygen").arg(&other));
    stage.steps = STEPS + 1;
    let (status, error) = code(stage.command(Role::Trainer).arg("--sign-key").arg(&other));
    assert_eq!(status, Some(3), "{error}");
    assert!(error.contains("is not signed by a trusted key"), "{error}");
}

#[test]
fn rollouts_alone_can_be_trained_on_later() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let engine = stage.start(Role::Engine, None);
    train(&stage, &["--debug-rollout-only"]);
    assert_eq!(steps(&stage).len() as u64, STEPS);
    assert!(!stage.dir.join("store").exists(), "nothing is published");
    drop(engine);
    train(&stage, &["--debug-train-only"]);
    let trained = steps(&stage);
    assert!(trained.iter().all(|step| step["grad_norm"].as_f64() > Some(0.0)), "{trained:?}");
    assert!(stage.dir.join("final/model.safetensors").exists());
    let stat = common::json(driftless().args(["log", "stat"]).arg(stage.dir.join("rl/log")));
    assert_eq!(stat["samples"], STEPS * GROUPS * SAMPLES);
}

#[test]
fn an_engine_of_another_model_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let _engine = stage.start(Role::Engine, None);
    let other = other_model(&dir.path().join("other"));
    // Its own model it takes.
    run(stage.command(Role::Trainer).arg("--debug-rollout-only"));
    let wrong = Stage { dir: dir.path().join("wrong"), model: other, ..stage };
    std::fs::create_dir_all(&wrong.dir).expect("a directory");
    let (status, error) = code(wrong.command(Role::Trainer).arg("--debug-rollout-only"));
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("hidden_size") && error.contains(&wrong.port.to_string()), "{error}");
}

#[test]
fn an_object_store_is_wanted_where_it_was_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    // Nothing is loaded before the options are known to agree.
    std::fs::write(dir.path().join("model.safetensors"), "").expect("a file");
    let stage = Stage::new(dir.path(), dir.path());
    let mut command = stage.command(Role::Trainer);
    let (status, error) = code(command.args(["--update-weight-transport", "object"]));
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("--store of the kind `a path`"), "{error}");
}

/// The flags contradict each other, an address is none, or the machine has no GPU: nothing is loaded or made before that is said.
#[test]
fn way_of_the_weights_that_cannot_be_meant_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("model.safetensors"), "").expect("a file");
    let stage = Stage::new(dir.path(), dir.path());
    let nccl = ["--update-weight-transport", "nccl", "--nccl-library", "/nowhere/libnccl.so.2"];
    let cases: [(&[&str], &str); 8] = [
        (&["--rollout-external-engine-addrs", "ftp://a:1"], "engine address \"ftp://a:1\" is not usable"),
        (&["--update-weight-transport", "ucx"], "expected disk, object or nccl"),
        (&["--update-weight-transport", "nccl"], "--nccl-library"),
        (&["--colocate", "--update-weight-transport", "nccl"], "cannot be used with"),
        (&["--colocate-device", "1"], "--colocate"),
        (&["--colocate", "--learner", "true"], "expected no --learner"),
        (&["--colocate", "--colocate-device", "1", "--device", "cuda:0"], "--colocate-device: expected 0"),
        (&["--nccl-device", "0", "--device", "cuda:3"], "--nccl-device: expected 3"),
    ];
    for (flags, words) in cases {
        let mut command = stage.command(Role::Trainer);
        let pushed = if words.contains("--nccl-device") { &nccl[..] } else { &[] };
        let (status, error) = code(command.args(flags).args(pushed));
        assert_eq!(status, Some(2), "{flags:?}: {error}");
        assert!(error.contains(words), "{flags:?}: {error}");
    }
    assert!(!dir.path().join("rl").exists(), "nothing is made");
}

#[test]
fn push_without_its_library_says_what_it_looked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let mut command = stage.command(Role::Trainer);
    let flags = ["--update-weight-transport", "nccl", "--nccl-library", "/nowhere/libnccl.so.2"];
    let (status, error) = code(command.args(flags));
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("/nowhere/libnccl.so.2") && !stage.dir.join("rl").exists(), "{error}");
}

/// A model of another width.
fn other_model(dir: &Path) -> std::path::PathBuf {
    std::fs::create_dir_all(dir).expect("a directory");
    let config = dir.join("config.json");
    std::fs::write(&config, common::TINY_CONFIG.replace("\"hidden_size\": 64", "\"hidden_size\": 96"))
        .expect("a config");
    let model = dir.join("model");
    run(driftless()
        .args(["train", "--loss-type", "sft_loss", "--task", "arithmetic", "--num-rollout", "1", "--save"])
        .arg(dir)
        .arg("--model-config")
        .arg(&config)
        .arg("--save-hf")
        .arg(&model));
    model
}

#[test]
fn a_port_in_use_is_told_as_such() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let _engine = stage.start(Role::Engine, None);
    let (status, error) = code(&mut stage.command(Role::Engine));
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains(&format!("listen on 127.0.0.1:{}", stage.port)), "{error}");
}

#[test]
fn deterministic_training_gives_the_same_bytes_twice() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("config.json");
    std::fs::write(&config, common::TINY_CONFIG).expect("a config");
    let trained = |name: &str| {
        let model = dir.path().join(name).join("model");
        let mut command = driftless();
        command.args(["train", "--loss-type", "sft_loss", "--task", "arithmetic", "--deterministic"]);
        command
            .args(["--num-rollout", "3"])
            .arg("--model-config")
            .arg(&config)
            .arg("--save")
            .arg(dir.path().join(name));
        run(command.arg("--save-hf").arg(&model));
        std::fs::read(model.join("model.safetensors")).expect("weights")
    };
    assert!(trained("once") == trained("twice"));
    let kept = std::fs::read_to_string(dir.path().join("twice/run.toml")).expect("what it was told");
    assert!(kept.contains("loss-type = \"sft_loss\""), "{kept}");
    let (status, error) =
        code(driftless().args(["train", "--save", "x", "--learner", "x", "--deterministic"]));
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("--learner") && error.contains("--deterministic"), "{error}");
}

#[test]
fn mistakes_of_the_command_line_are_told_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let [file, fifo, save] = ["file", "fifo", "save"].map(|name| dir.path().join(name).display().to_string());
    std::fs::write(&file, "not a directory").expect("a file");
    run(std::process::Command::new("mkfifo").arg(&fifo));
    let sft = ["train", "--loss-type", "sft_loss", "--num-rollout", "1"];
    let cases: [(&[&str], &[&str]); 10] = [
        (&["serve"], &["--model-path", "/nope"]),
        (&["serve"], &["--model-path", &file]),
        (&["serve"], &["--model-path", "/", "--dialect", "0.4.0"]),
        (&sft, &["--save", &file]),
        (&sft, &["--save", &save, "--save-hf", &file]),
        (&sft, &["--save", &save, "--text", &fifo]),
        (&sft, &["--save", &save, "--text", "/dev/zero"]),
        (&sft, &["--save", &save, "--load", "/nope"]),
        (&sft, &["--save", &save, "--model-config", &fifo]),
        (&sft, &["--save", &save, "--task", "arithmetic", "--tensorboard-dir", "x"]),
    ];
    for (command, flags) in cases {
        let (status, error) = code(driftless().args(command).args(flags));
        assert_eq!(status, Some(2), "{flags:?}: {error}");
        assert!(error.contains(flags[flags.len() - 2]), "it names the flag: {error}");
    }
    assert!(!Path::new(&save).exists(), "nothing is made");
}

#[test]
fn a_checkpoint_that_is_damaged_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = cold_start(dir.path());
    let [config, weights] = ["config.json", "model.safetensors"].map(|name| model.join(name));
    let sound = [&config, &weights].map(|path| std::fs::read(path).expect("a file"));
    let half = sound[1].len() / 2;
    let other = String::from_utf8_lossy(&sound[0]).replace("\"hidden_size\": 64", "\"hidden_size\": 96");
    let deep = String::from_utf8_lossy(&sound[0])
        .replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 16777216");
    assert!([&other, &deep].iter().all(|config| config.as_bytes() != sound[0]));
    for (path, bytes, word) in [
        (&weights, &sound[1][..half], "model.safetensors"),
        (&weights, &sound[1][..4], "model.safetensors"),
        (&weights, b"", "model.safetensors"),
        (&config, b"\x00\xff garbage", "config.json"),
        (&config, b"{}", "config"),
        (&config, other.as_bytes(), "tensor"),
        (&config, deep.as_bytes(), "num_hidden_layers"),
    ] {
        std::fs::write(path, bytes).expect("a file");
        let (status, error) = code(driftless().args(["serve", "--port", "0", "--model-path"]).arg(&model));
        assert!(matches!(status, Some(1 | 3)), "{word}: {status:?}: {error}");
        assert!(error.contains(word) && !error.contains("panicked"), "{error}");
        std::fs::write(path, &sound[usize::from(path == &weights)]).expect("a file");
    }
}

#[test]
fn what_cannot_be_saved_is_not_trained_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    std::fs::write(&file, "not a directory".repeat(10)).expect("a file");
    let (below, save) = (file.join("below"), dir.path().join("save"));
    let hf = below.join("hf");
    for (save, hf) in [(&below, &save), (&save, &hf)] {
        // More steps than anybody waits for.
        let mut command = driftless();
        command
            .args(["train", "--loss-type", "sft_loss", "--num-rollout", "1000000000", "--text"])
            .arg(&file);
        let (status, error) = code(command.arg("--save").arg(save).arg("--save-hf").arg(hf));
        assert_eq!(status, Some(1), "{error}");
        assert!(error.contains("cannot create") && error.contains(&below.display().to_string()), "{error}");
    }
}
