//! The two halves of a run as processes of their own: each dies and comes back, and the run ends as if nothing had happened.

use super::*;

/// What both halves are told.
const FLAGS: [&str; 3] = ["--max-staleness", "1", "--use-tis"];

/// The half that generates.
fn rollouts(stage: &Stage) -> Command {
    let trainer = stage.trainer("");
    let mut command = driftless();
    let given = trainer.get_args().map(|arg| if arg == "train" { OsStr::new("rollout") } else { arg });
    command.args(given);
    command
}

/// The half that trains.
fn trainer(stage: &Stage, faults: &str) -> Command {
    let mut command = stage.trainer(faults);
    command.arg("--rollouts").arg(stage.at("rl"));
    command
}

fn start(stage: &Stage, name: &str, command: &mut Command) -> Process {
    Process::start(name, stage.dir.path(), command)
}

/// What such a run leaves behind: every sample was learned from once, whatever the order in which groups were finished.
fn check(stage: &Stage, what: &str) {
    let recorded = steps(stage);
    let numbers: Vec<_> = recorded.iter().map(|step| step["rollout_id"].as_u64()).collect();
    assert_eq!(numbers, (0..STEPS).map(Some).collect::<Vec<_>>(), "{what}");
    let too_old = recorded.iter().any(|step| step["staleness_max"].as_u64() > Some(1));
    assert!(!too_old, "{what}: {recorded:?}");
    let state = learner::saved(&stage.at("rl/learner")).expect("a state of the learner");
    let consumed = state["consumed"].as_array().expect("samples").iter().filter_map(Value::as_u64);
    let mut consumed: Vec<_> = consumed.collect();
    consumed.sort_unstable();
    let log = Reader::open(stage.at("rl/log")).expect("a log");
    let dropped = log.prompts(PromptState::Done).len() as u64 - STEPS * GROUPS;
    assert_eq!(consumed.len() as u64, STEPS * GROUPS * SAMPLES, "{what}, {dropped} groups too old");
    assert!(consumed.windows(2).all(|pair| pair[0] < pair[1]), "{what}: {consumed:?}");
    for step in 0..STEPS {
        let learned = log.learned(step).expect("whole columns").expect("columns of each step");
        assert_eq!(learned.rows().len() as u64, GROUPS * SAMPLES, "{what}: step {step}");
    }
    let verified = common::json(driftless().arg("verify").arg(stage.at("rl")));
    assert_eq!(verified["faults"], 0, "{what}: {verified}");
    assert!(stage.engine.server().lies.is_empty(), "{what}");
}

#[test]
fn halves_are_processes_and_learn_from_every_sample_once() {
    let stage = Stage::new(&FLAGS);
    let _follower = stage.follower();
    let rollouts = start(&stage, "rollouts", &mut rollouts(&stage));
    let trainer = start(&stage, "trainer", &mut trainer(&stage, ""));
    trainer.succeed();
    rollouts.succeed();
    check(&stage, "undisturbed");
    let goodput: Vec<_> = steps(&stage).iter().map(|step| step["goodput"]["places_s"].as_f64()).collect();
    assert!(goodput.iter().flatten().any(|places| *places > 0.0), "the rollouts tell it: {goodput:?}");
}

#[test]
fn either_half_is_killed_and_comes_back() {
    for (half, point) in [
        ("trainer", "train.step:1"),
        ("trainer", "train.step:3"),
        ("rollouts", "log.append:1"),
        ("rollouts", "log.append:6"),
        ("rollouts", "log.commit:9"),
    ] {
        println!("{half} at {point}");
        let stage = Stage::new(&[&FLAGS[..], &["--save-interval", "2"]].concat());
        let _follower = stage.follower();
        let command = |name: &str| if name == "trainer" { trainer(&stage, "") } else { rollouts(&stage) };
        let other = if half == "trainer" { "rollouts" } else { "trainer" };
        let kept = start(&stage, other, &mut command(other));
        let mut doomed = start(&stage, half, command(half).env("DRIFTLESS_KILL_AT", point));
        let status = doomed.wait();
        assert_eq!(status.signal(), Some(9), "{half} at {point}: {status}:\n{}", doomed.output());
        start(&stage, half, &mut command(half)).succeed();
        kept.succeed();
        check(&stage, &format!("{half} killed at {point}"));
    }
}

#[test]
fn halves_that_do_not_fit_are_refused() {
    let stage = Stage::new(&FLAGS);
    let _follower = stage.follower();
    let mut alone = trainer(&stage, "");
    std::fs::create_dir(stage.at("rl")).expect("a directory");
    let (status, words) = code(alone.args(["--update-deadline", "1"]));
    assert!(status == Some(4) && words.contains("driftless rollout --save DIR"), "{status:?}: {words}");
    let mut first = start(&stage, "rollouts", &mut rollouts(&stage));
    first.until("its file", |_| stage.at("rl/rollouts.jsonl").exists().then_some(()));
    let (status, words) = code(&mut rollouts(&stage));
    assert!(status == Some(1) && words.contains("another process's"), "{status:?}: {words}");
    let mut other = trainer(&stage, "");
    other.args(["--rollout-temperature", "0.5"]);
    let (status, words) = code(&mut other);
    assert!(status == Some(3) && words.contains("--rollout-temperature"), "{status:?}: {words}");
    let elsewhere = stage.at("elsewhere");
    let (status, words) = code(stage.trainer("").arg("--rollouts").arg(elsewhere));
    assert!(status == Some(2) && words.contains("--rollouts"), "{status:?}: {words}");
    let mut turns = Stage::new(&[]);
    turns.flags.clear();
    let (status, words) = code(&mut rollouts(&turns));
    assert!(status == Some(2) && words.contains("--max-staleness"), "{status:?}: {words}");
}
