//! Engines of a run that goes on: listed, added, taken away, and remembered by its next start.

use super::*;
use driftless_testkit::vllm::Fault;
use serde_json::json;

/// What `driftless fleet` prints of the run, once it answers.
fn fleet(stage: &Stage, what: &str, address: Option<&str>) -> Vec<Value> {
    let mut command = driftless();
    command.args(["fleet", what]).arg(stage.at("rl")).args(address);
    let shown = common::json(&mut command);
    shown.as_array().expect("engines").clone()
}

/// The engines of the run, once they are so.
fn until(stage: &Stage, trainer: &mut Process, are: impl Fn(&[Value]) -> bool) {
    trainer.until("the engines", |trainer| {
        assert!(trainer.ended().is_none(), "the trainer ended:\n{}", trainer.output());
        let listed = common::output(driftless().args(["--json", "fleet", "list"]).arg(stage.at("rl")));
        // Not before it has attached its engines.
        assert!(matches!(listed.status.code(), Some(0 | 4)), "{listed:?}");
        let engines: Vec<Value> = serde_json::from_slice(&listed.stdout).ok()?;
        are(&engines).then_some(())
    });
}

#[test]
fn engine_added_takes_over_from_one_that_is_removed_for_good() {
    let stage = Stage::new(&[]);
    let follower = stage.follower();
    // It answers no generation, ever.
    (0..64).for_each(|_| stage.engine.fault("POST /v1/completions", Fault::Hang));
    let mut trainer = Process::start("trainer", stage.dir.path(), &mut stage.trainer(""));
    let first = stage.engine.url().replace("vllm+", "");
    until(&stage, &mut trainer, |engines| {
        engines[0]["address"] == json!(first) && engines[0]["in_flight"].as_u64() > Some(0)
    });
    std::fs::create_dir(stage.at("second")).expect("a directory");
    let second = Vllm::start(&stage.at("second"));
    let _other = stage.follower_of("host-1", "second", &second);
    assert_eq!(fleet(&stage, "add", Some(&second.url())).len(), 2);
    until(&stage, &mut trainer, |engines| engines[1]["phase"] == json!("serving"));
    let left = fleet(&stage, "remove", Some(&stage.engine.url()));
    assert_eq!(left.len(), 1, "{left:?}");
    trainer.succeed();
    assert_eq!(steps(&stage).len() as u64, STEPS);
    // It has an engine generate, to see whether weights are sound.
    drop(follower);
    let asked = stage.engine.server().generations.len();
    assert!(!second.server().generations.is_empty());
    let (status, words) = code(driftless().args(["fleet", "list"]).arg(stage.at("rl")));
    assert!(status == Some(4) && words.contains("fleet.sock"), "{status:?}: {words}");

    // The run as it was told, whose list still has the one and not the other.
    let mut again = driftless();
    again.args(["train", "--num-rollout", "6", "--config"]).arg(stage.at("rl/run.toml"));
    Process::start("trainer", stage.dir.path(), &mut again).succeed();
    assert_eq!(steps(&stage).len(), 6);
    assert_eq!(stage.engine.server().generations.len(), asked, "it is asked no more");
}

#[test]
fn engine_that_a_watched_file_names_later_is_added() {
    let mut stage = Stage::new(&[]);
    let file = stage.at("engines");
    let flag = ["--rollout-external-engines-file", file.to_str().expect("a name")];
    stage.flags = flag.map(str::to_owned).to_vec();
    // The list of the command has it too.
    std::fs::write(&file, format!("# ours\n{}\n", stage.engine.url())).expect("a file");
    let _follower = stage.follower();
    (0..64).for_each(|_| stage.engine.fault("POST /v1/completions", Fault::Hang));
    let mut trainer = Process::start("trainer", stage.dir.path(), &mut stage.trainer(""));
    until(&stage, &mut trainer, |engines| engines.len() == 1 && engines[0]["in_flight"].as_u64() > Some(0));
    std::fs::create_dir(stage.at("second")).expect("a directory");
    let second = Vllm::start(&stage.at("second"));
    let _other = stage.follower_of("host-1", "second", &second);
    std::fs::write(&file, second.url()).expect("a file");
    trainer.until("a word on the half-written file", |trainer| {
        trainer.output().contains("half-written").then_some(())
    });
    std::fs::write(&file, second.url() + "\n").expect("a file");
    until(&stage, &mut trainer, |engines| engines.len() == 2 && engines[1]["phase"] == json!("serving"));
    fleet(&stage, "remove", Some(&stage.engine.url()));
    trainer.succeed();
    assert_eq!(steps(&stage).len() as u64, STEPS);
}

#[test]
fn engines_at_the_addresses_of_a_name_are_attached() {
    let mut stage = Stage::new(&[]);
    std::fs::create_dir(stage.at("second")).expect("a directory");
    let second = Vllm::start(&stage.at("second"));
    let port = second.url().rsplit_once(':').expect("a port").1.to_owned();
    let name = format!("vllm+localhost:{port}");
    let flags = ["--rollout-external-engines-dns", &*name, "--fleet-listen", "127.0.0.1:0"];
    stage.flags = flags.map(str::to_owned).to_vec();
    let _followers = (stage.follower(), stage.follower_of("host-1", "second", &second));
    (0..64).for_each(|_| stage.engine.fault("POST /v1/completions", Fault::Hang));
    let mut trainer = Process::start("trainer", stage.dir.path(), &mut stage.trainer(""));
    // A host may have a second address of its own, at which no engine listens.
    let address = json!(format!("http://127.0.0.1:{port}"));
    until(&stage, &mut trainer, |engines| {
        engines.iter().any(|engine| engine["address"] == address && engine["phase"] == json!("serving"))
    });
    let url = trainer.until("the address that it got", |_| {
        let events = std::fs::read_to_string(stage.at("rl/events.jsonl")).ok()?;
        let mut events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let listens = events.find(|event| event["event"] == "listening")?;
        Some(format!("http://{}", listens["addr"].as_str()?))
    });
    let at_url = common::json(driftless().args(["fleet", "list", &url]));
    assert!(at_url.as_array().is_some_and(|engines| engines.len() > 1), "{at_url}");
    fleet(&stage, "remove", Some(&stage.engine.url()));
    trainer.succeed();
    assert_eq!(steps(&stage).len() as u64, STEPS);
}
