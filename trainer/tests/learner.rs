//! A learner in a process of its own: the suite of all learners, and what becomes of one that errs.

#![allow(clippy::unwrap_used, reason = "in a test, a failed expectation is the answer")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use driftless_testkit::learner;
use driftless_trainer::Error;
use driftless_trainer::learner::{Batch, Child, ChildOptions, Learner, Stepped, Workspace, conformance};
use driftless_trainer::options::LearnOptions;
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::{Dtype, Tensors};

/// Long enough for a loaded machine; only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(120);

#[test]
#[ignore = "the process of the fake learner, which other tests start"]
fn process_of_the_fake_learner() {
    learner::main();
}

fn child_of(command: String, deadline: Duration) -> Box<dyn Learner> {
    let learn = LearnOptions::default().with_lr(0.1);
    Box::new(Child::new(ChildOptions::new(command, learn).with_deadline(deadline).with_seed(7)))
}

fn child(faults: &str) -> Box<dyn Learner> {
    child_of(learner::command("process_of_the_fake_learner", faults), DEADLINE)
}

/// A checkpoint of one tensor, which the fake learner puts its biases in.
fn checkpoint(dir: &Path) -> PathBuf {
    let tensors = Tensors::new().tensor("biases", Dtype::F32, [16], vec![1; 64]).unwrap();
    let path = dir.join("hf");
    write_checkpoint(&path, &tensors.file("config.json", "{}").unwrap(), 1 << 20).unwrap();
    path
}

#[test]
fn child_learner_passes_the_suite_of_learners() {
    let dir = tempfile::tempdir().unwrap();
    conformance::suite(&checkpoint(dir.path()), || child(""));
}

/// Any learner: `DRIFTLESS_LEARNER_COMMAND` starts it, and it trains the model of the directory
/// `DRIFTLESS_LEARNER_CHECKPOINT`. Lane `learner` has that of the wheel take it.
#[test]
fn learner_of_the_environment_passes_the_suite_of_learners() {
    let [command, checkpoint] = ["DRIFTLESS_LEARNER_COMMAND", "DRIFTLESS_LEARNER_CHECKPOINT"]
        .map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    let (Some(command), Some(checkpoint)) = (command, checkpoint) else {
        println!("skipped: DRIFTLESS_LEARNER_COMMAND and DRIFTLESS_LEARNER_CHECKPOINT name no learner");
        return;
    };
    conformance::suite(Path::new(&checkpoint), || child_of(command.clone(), DEADLINE));
}

/// A place with an empty log.
fn place(dir: &Path) -> Workspace {
    let identity =
        driftless_buffer::Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
    drop(driftless_buffer::Log::open(dir.join("log"), driftless_buffer::Options::new(identity)).unwrap());
    Workspace {
        save: dir.join("rl"),
        hf_checkpoint: checkpoint(dir),
        log: dir.join("log"),
        store: "memory:".into(),
        run: "test".into(),
        run_id: "01".repeat(16),
        model: "policy".into(),
        baseline: dir.join("baseline"),
        keep: 1,
        anchor_every: None,
        anchor_share: None,
    }
}

#[test]
fn child_that_dies_is_lost_and_can_be_loaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = child("step:1:kill");
    let place = place(dir.path());
    child.load(&place).unwrap();
    let error = child.step(&Batch::default()).unwrap_err();
    assert!(error.is_learner_lost(), "{error}");
    let words = error.to_string();
    assert!(words.contains("`fake`") && words.contains("step") && words.contains("signal: 9"), "{words}");
    let error = child.step(&Batch::default()).unwrap_err();
    assert!(error.is_learner_lost(), "it stays lost until it is loaded: {error}");
    child.load(&place).unwrap();
    assert!(matches!(child.step(&Batch::default()).unwrap(), Stepped::Done(_)));
}

#[test]
fn child_that_says_what_no_reply_is_names_itself_and_its_words() {
    for (fault, expected) in [
        ("step:1:error", "errs on command"),
        ("step:1:nonsense", "found null"),
        ("step:1:endless", "more than 4194304 bytes"),
        ("step:1:protocol", "neither"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = child(fault);
        child.load(&place(dir.path())).unwrap();
        let error = child.step(&Batch::default()).unwrap_err();
        assert!(!error.is_learner_lost() && error.to_string().contains(expected), "{fault}: {error}");
        assert!(error.to_string().contains("`fake`"), "{error}");
    }
}

#[test]
fn words_of_a_child_are_cut_and_hold_no_escapes() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = child("step:1:escapes");
    child.load(&place(dir.path())).unwrap();
    let words = child.step(&Batch::default()).unwrap_err().to_string();
    assert!(words.contains("[2Jlong long") && !words.contains('\u{1b}'), "{words:?}");
    assert!(words.len() < 2000, "{}", words.len());
}

#[test]
fn child_of_another_protocol_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let error = child("hello:1:protocol").load(&place(dir.path())).unwrap_err();
    assert!(error.to_string().contains("expected protocol 3, found 1"), "{error}");
}

#[test]
fn step_that_is_not_finite_is_told_apart_from_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = child("step:1:not_finite");
    child.load(&place(dir.path())).unwrap();
    let stepped = child.step(&Batch::default()).unwrap();
    assert_eq!(stepped, Stepped::NotFinite("gradient norm is NaN".into()));
}

#[test]
fn child_that_does_not_answer_in_time_is_killed_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(dir.path());
    let deadline = Duration::from_millis(50);
    // It never connects, and leaves a process of its own behind it.
    let error = child_of("sleep 1000 & wait".into(), deadline).load(&place).unwrap_err();
    let words = error.to_string();
    assert!(words.contains("`sleep`") && words.contains("nothing after 0.05 s"), "{words}");
    assert!(words.contains("`ChildOptions::deadline`"), "{words}");
    assert!(!words.contains("1000"), "the rest of a command line may hold secrets: {words}");
    // Were it not killed, the lock would still be held.
    child("").load(&place).unwrap();
}

#[test]
fn child_that_ends_before_it_connects_says_how_it_ended() {
    let dir = tempfile::tempdir().unwrap();
    let error = child_of("exit 3".into(), DEADLINE).load(&place(dir.path())).unwrap_err();
    let words = error.to_string();
    assert!(words.contains("exit status: 3") && !words.contains("deadline"), "it was not late: {words}");
}

#[test]
fn learner_that_outlived_its_loop_is_waited_for_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(dir.path());
    let mut first = child("");
    first.load(&place).unwrap();
    let command = learner::command("process_of_the_fake_learner", "");
    let error = child_of(command, Duration::from_millis(50)).load(&place).unwrap_err();
    let Error::LearnerStillRuns { holder, .. } = &error else { panic!("{error}") };
    assert!(first.describe().contains(holder.as_str()), "{holder} of {}", first.describe());
    drop(first);
    child("").load(&place).unwrap();
}
