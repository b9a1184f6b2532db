//! `driftless eval`: what training measured at a version, measured again without training.

use crate::common::{Process, code, driftless, free_port, json, output, run};
use crate::stage::{Role, STEPS, Stage, cold_start};
use crate::{other_model, steps, train};
use serde_json::Value;
use std::process::Command;

/// Makes the file that it is given once it is asked of samples, and does not answer that.
const WITHHOLDS: &str = "
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask['samples']:
        open(sys.argv[1], 'w').close()
    else:
        print(json.dumps({'id': ask['id'], 'rewards': []}), flush=True)
";

/// An engine that no follower of the run has.
fn engine_apart(stage: &Stage) -> (u16, Process) {
    let own = Stage {
        port: free_port(),
        model: stage.model.clone(),
        dir: stage.dir.join("apart"),
        ..Stage::new(&stage.dir, &stage.model)
    };
    (own.port, own.start(Role::Engine, None))
}

/// An evaluation on the engine at `port`, with temporary directories in `tmp` of the stage.
fn eval(stage: &Stage, port: u16, of: &[&str]) -> Command {
    let tmp = stage.dir.join("tmp");
    std::fs::create_dir_all(&tmp).expect("a directory");
    let mut command = driftless();
    command.env("TMPDIR", tmp).arg("eval").args(of);
    command.args([
        "--task",
        "arithmetic",
        "--rollout-max-response-len",
        "4",
        "--n-eval-prompts",
        "4",
        "--seed",
        "3",
    ]);
    command.args(["--engine", &format!("http://127.0.0.1:{port}")]);
    command
}

/// The same of versions of the stage's run.
fn eval_run(stage: &Stage, port: u16, versions: &str) -> Command {
    let store = stage.dir.join("store").display().to_string();
    let model = stage.model.display().to_string();
    eval(stage, port, &[&store, "test", "--versions", versions, "--hf-checkpoint", &model])
}

fn lines(command: &mut Command) -> Vec<Value> {
    let said = run(command.arg("--json"));
    said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Nothing of an evaluation is left in the directory for temporary files.
fn left_nothing(stage: &Stage) -> bool {
    std::fs::read_dir(stage.dir.join("tmp")).expect("a directory").next().is_none()
}

#[test]
fn eval_of_versions_measures_what_training_measured() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let _engine = stage.start(Role::Engine, None);
    let _follower = stage.start(Role::Follower, None);
    train(&stage, &["--eval-interval", "1"]);
    let record = std::fs::read(stage.dir.join("rl/run.json")).expect("a record");
    let record: Value = serde_json::from_slice(&record).expect("JSON");
    let mut trained = vec![record["eval_start"]["sets"].clone()];
    trained.extend(steps(&stage).iter().map(|step| step["eval"]["sets"].clone()));

    let (port, _apart) = engine_apart(&stage);
    let log = stage.dir.join("answers");
    let measured = lines(eval_run(&stage, port, "0..").arg("--log").arg(&log));
    let versions: Vec<_> = measured.iter().map(|line| line["version"].as_u64().expect("a number")).collect();
    assert_eq!(versions, (0..=STEPS).collect::<Vec<_>>());
    for (line, trained) in measured.iter().zip(&trained) {
        assert_eq!(line["eval"]["sets"], *trained, "{line}");
        assert_eq!(
            (&line["step"], line["engines"][0]["label"] == line["label"]),
            (&line["version"], true),
            "{line}"
        );
        assert!(line["engines"][0]["paused"] == false && line["seconds"].as_f64() > Some(0.0), "{line}");
    }
    assert!(left_nothing(&stage));
    let status = json(driftless().args(["status", "--run", "test", "--store"]).arg(stage.dir.join("store")));
    let followers = status["followers"].as_array().expect("followers");
    assert!(followers.len() == 1 && followers[0]["follower"] == "host-0", "its lease is withdrawn: {status}");
    let mut show = driftless();
    let shown = run(show
        .args(["log", "show", "--evaluation", "--step", "1", "--hf-checkpoint"])
        .arg(&stage.model)
        .arg(&log));
    assert!(shown.contains("by version 1 at"), "{shown}");

    // The same engine again, back at an older version, for people.
    let told = output(&mut eval_run(&stage, port, "latest,1"));
    let [table, told] = [told.stdout, told.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let rows: Vec<_> =
        table.lines().map(|row| row.split_whitespace().take(3).collect::<Vec<_>>().join(" ")).collect();
    let expected =
        ["version step set", "1 1 held-out", "1 1 held-out-greedy", "3 3 held-out", "3 3 held-out-greedy"];
    assert_eq!(rows, expected, "{table}{told}");
    assert!(told.contains("eval: version 1 (step 1, loaded): held-out-greedy: reward"), "{told}");

    // An engine of the run is not taken, unless that is asked for; nor one of a run that nothing is known of.
    let (status, words) = code(&mut eval_run(&stage, stage.port, "0"));
    assert_eq!(status, Some(1), "{words}");
    assert!(words.contains("follower `host-0` keeps it") && words.contains("--engines-in-use"), "{words}");
    let last = stage.dir.join("final").display().to_string();
    let checkpoint = ["--checkpoint", last.as_str()];
    let (status, words) = code(&mut eval(&stage, port, &checkpoint));
    assert!(status == Some(1) && words.contains("nothing here says whether that run goes on"), "{words}");
    let measured = lines(eval(&stage, port, &checkpoint).arg("--engines-in-use"));
    assert_eq!(measured[0]["eval"]["sets"], trained[STEPS as usize], "the checkpoint of the last step");
    assert!(left_nothing(&stage));
}

#[test]
fn eval_refuses_by_name_before_an_engine_is_touched() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let engine = stage.start(Role::Engine, None);
    let follower = stage.start(Role::Follower, None);
    train(&stage, &["--anchor-every", "2"]);
    drop(follower);
    run(driftless().args(["gc", "--run", "test", "--keep", "1", "--store"]).arg(stage.dir.join("store")));
    // Nobody listens there.
    let port = free_port();
    let refused = |command: &mut Command, exit: i32, words: &[&str]| {
        let (status, said) = code(command);
        assert!(status == Some(exit) && words.iter().all(|word| said.contains(word)), "{status:?}: {said}");
        assert!(left_nothing(&stage));
    };
    let gone =
        ["--versions: ", "from 2 on, the oldest that can still be built", "0, 1, which were collected"];
    refused(&mut eval_run(&stage, port, "0.."), 2, &gone);
    refused(&mut eval_run(&stage, port, "9"), 2, &["--versions: ", "the newest of which is 3, found 9"]);
    refused(&mut eval_run(&stage, port, "2..1"), 2, &["--versions: expected a list such as", "found 2..1"]);
    refused(&mut eval_run(&stage, port, "3"), 4, &[&port.to_string()]);
    let nowhere = stage.dir.join("nowhere").display().to_string();
    let model = stage.model.display().to_string();
    refused(
        &mut eval(&stage, port, &[&nowhere, "test", "--hf-checkpoint", &model]),
        1,
        &["no run named `test`"],
    );
    let mut bare = driftless();
    bare.args(["eval", &nowhere, "test", "--hf-checkpoint", &model, "--engine", "127.0.0.1:1"]);
    refused(bare.args(["--eval-prompt-data", "test", "/nowhere"]), 2, &["reward: expected --rm-type NAME"]);
    let vllm = ["--checkpoint", &*model, "--engine", "vllm+127.0.0.1:1"];
    refused(
        &mut eval(&stage, port, &vllm),
        2,
        &["--engine: ", "SGLang with --checkpoint", "vllm+127.0.0.1:1"],
    );
    let other = other_model(&dir.path().join("other")).display().to_string();
    let stage_port = stage.port.to_string();
    refused(&mut eval(&stage, stage.port, &["--checkpoint", &other]), 1, &["hidden_size", &stage_port]);
    drop(engine);
}

#[test]
fn interrupted_eval_leaves_the_engine_generating() {
    let dir = tempfile::tempdir().expect("a directory");
    let stage = Stage::new(dir.path(), &cold_start(dir.path()));
    let (port, _engine) = engine_apart(&stage);
    // A reward that says nothing of samples: the evaluation waits for it.
    let (asked, reward) = (stage.dir.join("asked"), stage.dir.join("reward.py"));
    std::fs::write(&reward, WITHHOLDS).expect("a file");
    let hook = format!("python3 {} {}", reward.display(), asked.display());
    let model = stage.model.display().to_string();
    let mut waits = eval(&stage, port, &["--checkpoint", &model, "--custom-rm-command", &hook]);
    let mut process = Process::start("eval", &stage.dir, &mut waits);
    process.until("the reward", |process| {
        assert!(process.ended().is_none(), "{}", process.output());
        asked.exists().then_some(())
    });
    let id = process.id().to_string();
    run(Command::new("kill").args(["-INT", &id]));
    let status = process.wait();
    assert_eq!(status.code(), Some(130), "{}", process.output());
    assert!(process.output().contains("the evaluation was interrupted by SIGINT"), "{}", process.output());
    assert!(left_nothing(&stage));
    let again = lines(eval(&stage, port, &["--checkpoint", &model]).arg("--engines-in-use"));
    assert_eq!(again[0]["eval"]["sets"]["held-out"]["failed"], 0, "it generates");
}
