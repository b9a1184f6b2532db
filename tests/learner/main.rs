//! The whole loop without libtorch: a learner as a process of its own, prompts from a file, a follower, and a
//! stand-in for an engine. kill -9 of the learner and of the loop at named points: the run has to end as if
//! nothing had happened, and the weights have to have learned from every sample exactly once.

#![allow(clippy::expect_used, reason = "a test ends where its set-up fails")]

mod apart;
#[path = "../common/mod.rs"]
mod common;
mod fleet;
mod watched;

use common::{Process, code, driftless};
use driftless_buffer::{PromptState, Reader};
use driftless_store::open;
use driftless_testkit::learner;
use driftless_testkit::vllm::Vllm;
use driftless_trainer::tasks::tiny;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::{Checkpoint, Dtype, Run, Snapshot, Tensors};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;

const STEPS: u64 = 4;
const GROUPS: u64 = 2;
const SAMPLES: u64 = 2;

/// A Qwen3 checkpoint of a few hundred bytes.
const CONFIG: &str = r#"{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
    "model_type": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 16, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16"}"#;

#[test]
#[ignore = "the process of the fake learner, which other tests start"]
fn process_of_the_fake_learner() {
    learner::main();
}

fn model() -> Tensors<'static> {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes = [
        ("model.embed_tokens.weight".to_owned(), vec![16, 4]),
        ("model.norm.weight".to_owned(), vec![4]),
        (layer("input_layernorm"), vec![4]),
        (layer("post_attention_layernorm"), vec![4]),
        (layer("self_attn.q_proj"), vec![4, 4]),
        (layer("self_attn.k_proj"), vec![2, 4]),
        (layer("self_attn.v_proj"), vec![2, 4]),
        (layer("self_attn.o_proj"), vec![4, 4]),
        (layer("self_attn.q_norm"), vec![2]),
        (layer("self_attn.k_norm"), vec![2]),
        (layer("mlp.gate_proj"), vec![6, 4]),
        (layer("mlp.up_proj"), vec![6, 4]),
        (layer("mlp.down_proj"), vec![4, 6]),
    ];
    let tensors = Tensors::new().file("config.json", CONFIG).expect("a name");
    let tensors = tensors.file("tokenizer.json", tiny::tokenizer().to_string()).expect("a name");
    shapes.into_iter().fold(tensors, |tensors, (name, shape)| {
        let bytes = vec![0x3c; 2 * shape.iter().product::<u64>() as usize];
        tensors.tensor(name, Dtype::Bf16, shape, bytes).expect("a tensor")
    })
}

/// A run: its directories, and the engine.
struct Stage {
    dir: tempfile::TempDir,
    engine: Vllm,
    /// Flags of the trainer beside those of all.
    flags: Vec<String>,
    save_hf: &'static str,
    /// Starts another learner than the fake one.
    learner: Option<String>,
}

impl Stage {
    fn new(flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        write_checkpoint(dir.path().join("model"), &model(), 1 << 20).expect("a checkpoint");
        let prompts = (0..100).map(|n| format!("{{\"q\": \"1{}+2{}=\", \"a\": \"4\"}}\n", n % 10, n % 10));
        std::fs::write(dir.path().join("prompts.jsonl"), prompts.collect::<String>()).expect("prompts");
        // vLLM loads the directory that it was started with, which the follower fills.
        std::fs::create_dir(dir.path().join("host")).expect("a directory");
        let engine = Vllm::start(&dir.path().join("host"));
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        Stage { dir, engine, flags, save_hf: "final", learner: None }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn follower(&self) -> Process {
        self.follower_of("host-0", "host", &self.engine)
    }

    /// The follower with this id, which keeps a directory for an engine.
    fn follower_of(&self, id: &str, host: &str, engine: &Vllm) -> Process {
        let mut command = driftless();
        command.args(["follow", "--run", "test", "--id", id, "--poll-ms", "20", "--engine-poll-ms", "20"]);
        command.args(["--engine", &engine.url()]);
        command.arg("--store").arg(self.at("store"));
        command.arg("--checkpoint-dir").arg(self.at(host));
        command.arg("--hf-checkpoint").arg(self.at("model"));
        Process::start(&format!("follower-{id}"), self.dir.path(), &mut command)
    }

    fn trainer(&self, faults: &str) -> Command {
        let mut command = driftless();
        command.args(["train", "--run", "test", "--seed", "3"]);
        let usual = [
            ("--lr", "0.1".to_owned()),
            ("--num-rollout", STEPS.to_string()),
            ("--save-interval", "1".to_owned()),
            ("--rollout-batch-size", GROUPS.to_string()),
            ("--n-samples-per-prompt", SAMPLES.to_string()),
        ];
        // A flag is given once.
        for (flag, value) in usual.iter().filter(|(flag, _)| !self.flags.iter().any(|given| given == flag)) {
            command.args([flag, value.as_str()]);
        }
        command.args(["--input-key", "q", "--label-key", "a", "--rm-type", "exact"]);
        command.args(["--rollout-external-engine-addrs", &self.engine.url()]);
        let fake = || learner::command("process_of_the_fake_learner", faults);
        command.args(["--learner", &self.learner.clone().unwrap_or_else(fake)]);
        command.arg("--prompt-data").arg(self.at("prompts.jsonl"));
        command.arg("--hf-checkpoint").arg(self.at("model"));
        command.arg("--store").arg(self.at("store"));
        command.arg("--save").arg(self.at("rl"));
        command.arg("--save-hf").arg(self.at(self.save_hf));
        command.args(&self.flags);
        command
    }

    /// The oldest version in the store.
    fn oldest(&self) -> u64 {
        let store = open(&self.at("store").to_string_lossy()).expect("a store");
        let run = Run::open(store, "test").expect("a run");
        run.oldest("policy").expect("a number").0
    }

    /// What a run leaves behind that nothing, or anything, has happened to. Returns its newest version.
    fn check(&self, what: &str) -> u64 {
        let text = std::fs::read_to_string(self.at("rl/metrics.jsonl")).expect("metrics");
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a step"));
        let steps: Vec<_> = lines.map(|step| step["rollout_id"].as_u64()).collect();
        assert_eq!(steps, (0..STEPS).map(Some).collect::<Vec<_>>(), "{what}: every step once, in order");

        if self.learner.is_none() {
            let state = learner::saved(&self.at("rl/learner")).expect("a state of the learner");
            let consumed = state["consumed"].as_array().expect("samples").iter().map(Value::as_u64);
            let all: Vec<_> = (0..STEPS * GROUPS * SAMPLES).map(Some).collect();
            assert_eq!(consumed.collect::<Vec<_>>(), all, "{what}: every sample once, in order");
        }
        let log = Reader::open(self.at("rl/log")).expect("a log");
        assert_eq!(log.prompts(PromptState::Done).len() as u64, STEPS * GROUPS, "{what}");
        assert!(log.prompts(PromptState::InFlight).is_empty(), "{what}");
        for step in 0..STEPS {
            let learned = log.learned(step).expect("whole columns").expect("columns of each step");
            assert_eq!(learned.rows().len() as u64, GROUPS * SAMPLES, "{what}: step {step}");
            for row in learned.rows() {
                let record = log.get(row.position).expect("a whole record").expect("a record");
                let log_probs = learned.log_probs(row.position).expect("a whole column").expect("a column");
                let is_trained = log_probs.iter().map(|value| u8::from(value.is_finite()));
                assert!(is_trained.eq(record.loss_mask().iter().copied()), "{what}: {log_probs:?}");
            }
        }

        let run =
            Run::open(open(&self.at("store").to_string_lossy()).expect("a store"), "test").expect("a run");
        let newest = run.newest("policy").expect("a chain").expect("a version").manifest;
        assert_eq!(newest.trainer_step, STEPS, "{what}");
        assert_eq!(self.engine.server().label, newest.label(), "{what}");
        assert!(self.engine.server().lies.is_empty(), "{what}");
        let [trained, host] =
            ["final", "host"].map(|name| Checkpoint::open_replica(self.at(name)).expect("a checkpoint"));
        for at in 0..trained.tensors().len() {
            assert!(
                trained.bytes(at).expect("bytes") == host.bytes(at).expect("bytes"),
                "{what}: tensor {at}"
            );
        }
        newest.version.0
    }
}

/// One run in which the learner meets `faults`, and the loop is killed at `point`, if at any, and started
/// again. Returns its newest version.
fn play(faults: &str, point: Option<&str>, flags: &[&str]) -> u64 {
    let what = format!("learner {faults:?}, loop {point:?}, {flags:?}");
    println!("{what}");
    let stage = Stage::new(flags);
    let mut follower = stage.follower();
    let mut command = stage.trainer(faults);
    if let Some(point) = point {
        command.env("DRIFTLESS_KILL_AT", point);
        let mut doomed = Process::start("trainer", stage.dir.path(), &mut command);
        let status = doomed.wait();
        assert_eq!(status.signal(), Some(9), "{what}: ended with {status}:\n{}", doomed.output());
        command.env_remove("DRIFTLESS_KILL_AT");
    }
    Process::start("trainer", stage.dir.path(), &mut command).succeed();
    assert!(follower.ended().is_none(), "the follower ended:\n{}", follower.output());
    stage.check(&what)
}

#[test]
fn loop_with_a_child_learner_learns_from_every_sample_once() {
    play("", None, &[]);
    play("", None, &["--train-async"]);
}

#[test]
fn learner_killed_anywhere_learns_from_every_sample_once() {
    for faults in [
        "hello:1:kill",
        "step:2:kill",
        "step:2:killed_after",
        "save:1:kill",
        "save:2:killed_after",
        "publish:1:kill",
        "publish:2:killed_after",
        "save_hf:1:kill",
        "step:1:kill,save:2:killed_after,publish:2:kill",
    ] {
        play(faults, None, &[]);
    }
    // Steps behind the last checkpoint are learned again from the log. No engine needs their weights again.
    assert_eq!(play("step:4:killed_after", None, &["--save-interval", "2"]), STEPS);
    assert_eq!(play("step:3:kill", None, &["--save-interval", "20", "--train-async"]), STEPS);
}

#[test]
fn loop_killed_anywhere_learns_from_every_sample_once() {
    for point in ["log.append:1", "log.append:5", "log.commit:9", "train.step:1", "train.step:3"] {
        play("", Some(point), &[]);
    }
    play("step:1:kill", Some("train.step:2"), &["--save-interval", "2", "--train-async"]);
}

/// `DRIFTLESS_LEARNER_COMMAND` starts it. Lane `learner` has that of the wheel go through it.
#[test]
fn loop_with_learner_of_the_environment_is_killed_and_goes_on() {
    let Some(command) = std::env::var("DRIFTLESS_LEARNER_COMMAND").ok().filter(|value| !value.is_empty())
    else {
        println!("skipped: DRIFTLESS_LEARNER_COMMAND names no learner");
        return;
    };
    let mut stage = Stage::new(&["--use-tis", "--use-kl-loss", "--kl-loss-coef", "0.01"]);
    stage.learner = Some(command);
    let _follower = stage.follower();
    let mut doomed = stage.trainer("");
    doomed.env("DRIFTLESS_KILL_AT", "train.step:2");
    let (status, words) = code(&mut doomed);
    assert_eq!(status, None, "{words}");
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    stage.check("with the learner of the environment");
    let moved = steps(&stage).iter().any(|step| step["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0));
    assert!(moved, "{words}");
}

#[test]
fn learner_that_always_dies_ends_the_run_with_its_name() {
    let stage = Stage::new(&[]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer("step:1:always_kill"));
    assert_eq!(status, Some(4), "{words}");
    assert_eq!(words.matches("is started again").count(), 3, "{words}");
    assert!(words.contains("error: learner `fake`") && words.contains("signal: 9"), "{words}");
    assert!(!words.contains(learner::FAULTS), "its command line may hold secrets: {words}");
}

#[test]
fn run_with_a_taken_name_begins_under_another() {
    let stage = Stage::new(&[]);
    let _follower = stage.follower();
    let mut other = driftless();
    other.args(["publish", "--run", "taken", "--new-run", "--checkpoint"]).arg(stage.at("model"));
    other.arg("--store").arg(stage.at("store")).arg("--baseline-dir").arg(stage.at("baseline"));
    common::run(&mut other);
    let mut trainer = stage.trainer("");
    let taken = trainer.get_args().map(|arg| if arg == "test" { OsStr::new("taken") } else { arg });
    let (status, words) = code(Command::new(trainer.get_program()).args(taken));
    assert!(status == Some(1) && words.contains("`taken` is taken"), "{status:?}: {words}");
    common::run(&mut trainer);
    stage.check("under another name");
}

#[test]
fn version_that_is_not_in_the_store_ends_the_run() {
    let stage = Stage::new(&[]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer("publish:1:told_wrong"));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("version 999, while the newest") && words.contains("`fake`"), "{words}");
}

#[test]
fn flags_that_a_learner_cannot_have_are_refused() {
    let (status, words) = code(&mut Stage::new(&["--check-weight-update-equal"]).trainer(""));
    assert_eq!(status, Some(2), "{words}");
    assert!(words.contains("--learner"), "{words}");
}

/// The recorded steps.
fn steps(stage: &Stage) -> Vec<Value> {
    let text = std::fs::read_to_string(stage.at("rl/metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a step")).collect()
}

#[test]
fn step_that_is_not_finite_is_left_out_and_counted() {
    let stage = Stage::new(&[]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer("step:2:not_finite"));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("step 1 is left out: gradient norm is NaN"), "{words}");
    let skipped: Vec<_> = steps(&stage).iter().map(|step| step["skipped"].as_bool()).collect();
    assert_eq!(skipped, [false, true, false, false].map(Some));
}

#[test]
fn too_many_steps_that_are_not_finite_end_the_run() {
    let stage = Stage::new(&["--max-skipped-steps", "1"]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer("step:2:not_finite,step:3:not_finite"));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("2 steps in a row") && words.contains("--max-skipped-steps"), "{words}");
    // The same command does not repeat the step that was left out, and has learned from the rest.
    assert_eq!(steps(&stage).len(), 2);
}

#[test]
fn changed_settings_are_said_or_refused_on_going_on() {
    let mut stage = Stage::new(&["--num-rollout", "2"]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(!words.contains("goes on with"), "{words}");
    stage.flags = ["--n-samples-per-prompt", "4"].map(str::to_owned).to_vec();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(3), "{words}");
    assert!(words.contains("has --n-samples-per-prompt 2, not 4"), "{words}");
    stage.flags = ["--lr", "0.05", "--rollout-max-response-len", "512"].map(str::to_owned).to_vec();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("goes on with --lr 0.05; it was 0.1"), "{words}");
    assert!(words.contains("goes on with --rollout-max-response-len 512; it was 1024 "), "{words}");
    stage.check("with other settings");
}

#[test]
fn run_whose_versions_were_collected_goes_on() {
    let stage = Stage::new(&["--save-interval", "20", "--anchor-every", "1"]);
    let _follower = stage.follower();
    let (status, words) = code(stage.trainer("").env("DRIFTLESS_KILL_AT", "train.step:4"));
    assert_eq!(status, None, "{words}");
    let mut gc = driftless();
    gc.args(["gc", "--run", "test", "--keep", "1", "--lease-ttl", "0", "--store"]).arg(stage.at("store"));
    common::run(&mut gc);
    assert!(stage.oldest() > 0, "the versions of the first steps are gone");
    // Steps are learned again whose samples name a version that is nowhere else.
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    stage.check("after a collection");
    assert_eq!(steps(&stage)[0]["staleness"], serde_json::json!([4]), "one token of each sample");
}

#[test]
fn train_removes_the_versions_that_no_follower_needs() {
    let stage = Stage::new(&["--anchor-every", "1", "--keep", "1"]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    stage.check("with old versions removed");
    assert!(stage.oldest() > 0, "{words}");
}

#[test]
fn data_that_have_changed_are_said_when_a_run_goes_on() {
    let mut stage = Stage::new(&["--num-rollout", "2"]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer(""));
    assert!(status == Some(0) && !words.contains("prompts"), "{status:?}: {words}");
    stage.flags = ["--num-rollout", "3", "--rollout-shuffle"].map(str::to_owned).to_vec();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("goes on with --rollout-shuffle true; it was false"), "{words}");
    assert!(words.contains("prompts, labels or their order have changed"), "{words}");
    let prompts = stage.at("prompts.jsonl");
    let other = std::fs::read_to_string(&prompts).expect("prompts").replace("\"a\": \"4\"", "\"a\": \"5\"");
    std::fs::write(&prompts, other).expect("prompts");
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("prompts, labels or their order have changed"), "{words}");
    let (_, words) = code(&mut stage.trainer(""));
    assert!(!words.contains("changed"), "it was said: {words}");
}

#[test]
fn run_whose_log_was_removed_says_that_prompts_come_again() {
    let mut stage = Stage::new(&["--num-rollout", "2"]);
    let _follower = stage.follower();
    common::run(&mut stage.trainer(""));
    std::fs::remove_dir_all(stage.at("rl/log")).expect("a log");
    stage.flags = ["--num-rollout", "3"].map(str::to_owned).to_vec();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("none of the prompts that 2 steps were trained on"), "{words}");
}

#[test]
fn learner_with_steps_that_the_run_never_did_is_refused() {
    let first = Stage::new(&["--num-rollout", "1"]);
    let _follower = first.follower();
    common::run(&mut first.trainer(""));
    let stage = Stage::new(&[]);
    std::fs::create_dir_all(stage.at("rl/learner")).expect("a directory");
    std::fs::copy(first.at("rl/learner/state.json"), stage.at("rl/learner/state.json")).expect("a state");
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(3), "{words}");
    assert!(words.contains("`fake`") && words.contains("has done 1 steps"), "{words}");
}

#[test]
fn metrics_that_are_no_text_do_not_end_the_run() {
    let stage = Stage::new(&[]);
    let _follower = stage.follower();
    let (status, words) = code(stage.trainer("").env("DRIFTLESS_KILL_AT", "train.step:3"));
    assert_eq!(status, None, "{words}");
    let metrics = stage.at("rl/metrics.jsonl");
    let whole = std::fs::read(&metrics).expect("metrics");
    std::fs::write(&metrics, [b"\xff\xfe\n", whole.as_slice(), whole.as_slice()].concat()).expect("metrics");
    common::run(&mut stage.trainer(""));
    stage.check("with spoiled metrics");
}

#[test]
fn run_of_no_steps_only_measures() {
    let mut stage = Stage::new(&[]);
    stage.flags = ["--num-rollout", "0", "--eval-prompt-data", "test"].map(str::to_owned).to_vec();
    stage.flags.push(stage.at("prompts.jsonl").display().to_string());
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("rl: step 0: test: reward"), "{words}");
    assert_eq!(Reader::open(stage.at("rl/log")).expect("a log").next_prompt(), 0);
}

#[test]
fn steps_are_lines_where_there_is_no_terminal() {
    let stage = Stage::new(&[]);
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    assert!(words.contains("rl: begins: 4 steps"), "{words}");
    for step in 1..=STEPS {
        let line = words.lines().find(|line| line.starts_with(&format!("rl: step {step}/{STEPS} reward ")));
        let line = line.unwrap_or_else(|| panic!("step {step}: {words}"));
        // The fake engine has no plugin, and its family is not known.
        assert!(line.ends_with(&format!(" v{step} not compared")), "{line}");
    }
}

#[test]
fn run_that_is_interrupted_says_what_is_done_and_goes_on() {
    let mut stage = Stage::new(&["--num-rollout", "2"]);
    let follower = stage.follower();
    common::run(&mut stage.trainer(""));
    // Without it the third step waits for the engine.
    drop(follower);
    stage.flags.clear();
    let mut doomed = Process::start("trainer", stage.dir.path(), &mut stage.trainer(""));
    let begun = |process: &mut Process| process.output().contains("rl: going on at step 2").then_some(());
    doomed.until("its start", begun);
    let id = rustix::process::Pid::from_raw(doomed.id().cast_signed()).expect("a process");
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it runs");
    let (status, words) = (doomed.wait(), doomed.output());
    assert_eq!(status.signal(), Some(15), "{words}");
    let said = "the run, with 2 of 4 steps done, was interrupted by SIGTERM; the same command goes on";
    assert!(words.contains(said), "{words}");
    let _follower = stage.follower();
    common::run(&mut stage.trainer(""));
    stage.check("after an interruption");
}

#[test]
fn engines_that_no_follower_brings_the_run_to_are_named() {
    let stage = Stage::new(&["--update-deadline", "1"]);
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(4), "{words}");
    for part in [
        "is a follower of it beside each",
        &stage.engine.address.to_string(),
        "driftless follow --store",
        "--run test",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[test]
fn state_directory_that_was_removed_leaves_another_name() {
    let stage = Stage::new(&["--num-rollout", "1"]);
    let _follower = stage.follower();
    common::run(&mut stage.trainer(""));
    std::fs::remove_dir_all(stage.at("rl")).expect("a directory");
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("`test` is taken") && words.contains("--run NAME"), "{words}");
    assert!(!words.contains("--resume"), "train has no such flag: {words}");
}

#[test]
fn series_has_one_beside_each_training_checkpoint() {
    let mut stage = Stage::new(&["--save-interval", "2"]);
    stage.save_hf = "hf-{rollout_id}";
    let _follower = stage.follower();
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    let there: Vec<_> =
        (0..=STEPS).filter(|step| stage.at(&format!("hf-{step}/config.json")).exists()).collect();
    assert_eq!(there, [2, 4]);
}

#[test]
fn too_large_log_gives_back_what_was_learned_and_no_more() {
    let mut stage = Stage::new(&[]);
    let _follower = stage.follower();
    let log = |stage: &Stage| Reader::open(stage.at("rl/log")).expect("a log");
    // Each process that opens the log begins a segment.
    for until in 1..=STEPS {
        stage.flags =
            ["--num-rollout", &until.to_string(), "--rollout-log-gib-max", "0"].map(str::to_owned).to_vec();
        let (status, words) = code(&mut stage.trainer(""));
        assert_eq!(status, Some(0), "{words}");
        let log = log(&stage);
        assert_eq!(log.next_prompt(), until * GROUPS, "the prompts that were taken are known");
        assert_eq!(log.groups(until - 1, SAMPLES as usize).len() as u64, GROUPS);
    }
    assert!(log(&stage).oldest().0 > 0, "the first rollouts are gone");
    let learned = log(&stage).learned_steps().expect("a directory");
    assert!(
        !learned.contains_key(&0) && learned.contains_key(&(STEPS - 1)),
        "and what they taught: {learned:?}"
    );
    let state = learner::saved(&stage.at("rl/learner")).expect("a state of the learner");
    let consumed = state["consumed"].as_array().expect("samples").iter().map(Value::as_u64);
    assert_eq!(consumed.collect::<Vec<_>>(), (0..STEPS * GROUPS * SAMPLES).map(Some).collect::<Vec<_>>());
}
