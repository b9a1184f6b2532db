//! `driftless status`: what a trainer and its followers left in a store.

use crate::Run;
use crate::common::{code, driftless, json, run};
use crate::dashboard::{Dashboard, file};
use driftless_testkit::sglang::{Fake, checkpoint};
use driftless_testkit::tree::tree;
use std::path::PathBuf;

/// Publishes a Qwen3 checkpoint that the fake engine loads.
fn publish(run: &Run, seed: u8, more: &str) -> serde_json::Value {
    let mut publish = run.command("publish");
    publish.arg("--checkpoint").arg(checkpoint(&run.path(&format!("version-{seed}")), seed, 4));
    json(publish.arg("--baseline-dir").arg(run.path("baseline")).args([
        "--step",
        &(8 * seed).to_string(),
        more,
    ]))
}

#[test]
fn status_shows_the_trainer_each_follower_and_its_engines() {
    let run = Run::new();
    let start = checkpoint(&run.path("start"), 1, 4);
    let engine = Fake::start(&start);
    let url = format!("http://{}", engine.address);
    let label = publish(&run, 2, "--new-run")["label"].clone();
    let mut follow = run.follow_once();
    json(follow.args(["--engine", &url, "--hf-checkpoint"]).arg(&start));
    let newest = publish(&run, 3, "--resume");

    let before = tree(&run.path("store"));
    let shown = json(&mut run.command("status"));
    assert_eq!(tree(&run.path("store")), before, "nothing is written");
    let trainer = &shown["trainer"];
    assert_eq!((&trainer["version"], &trainer["kind"]), (&1.into(), &"delta".into()), "{shown}");
    assert_eq!(trainer["trainer_step"], 24, "{shown}");
    assert_eq!(trainer["bytes"], newest["publication_bytes"], "{shown}");
    assert!(trainer["age_seconds"].as_f64() >= Some(0.0), "{shown}");
    let host = &shown["followers"][0];
    assert_eq!((&host["follower"], &host["live"]), (&"host".into(), &true.into()), "{shown}");
    let ack = &host["acknowledged"];
    assert_eq!((&ack["version"], &ack["lag"], &ack["label"]), (&0.into(), &1.into(), &label), "{shown}");
    let seen = &ack["engines"][0];
    assert_eq!(
        (&seen["url"], &seen["in_step"], &seen["up"]),
        (&url.as_str().into(), &true.into(), &true.into())
    );
    assert!(seen["how"]["loaded"].is_object() && seen["compared"].is_object(), "{shown}");

    hosts_of_the_page_are_the_same(&run, ack);
    let text = status(&run);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(rows[1].starts_with(&["version", "1:", "delta,"]), "{text}");
    assert!(
        rows[4].starts_with(&["host", "0", "1", "live,"]) && rows[4].ends_with(&["1", "of", "1"]),
        "{text}"
    );
    let row = rows.iter().find(|row| row.first() == Some(&url.as_str())).expect(&text);
    assert!(row[1..].starts_with(&["in", "step"]) && row.contains(&"loaded"), "{text}");
}

#[test]
fn status_of_leases_that_tell_nothing_says_which_and_why() {
    let mut run = Run::new();
    run.publish();
    json(&mut run.follow_once());
    let host = lease(&run);
    std::fs::write(host.with_file_name("fresh"), r#"{"model": "policy", "needs": 0}"#).expect("a lease");
    std::fs::write(host.with_file_name("broken"), b"\x1b[2J").expect("a lease");
    std::fs::write(host.with_file_name("a@b"), r#"{"model": "critic", "needs": 0}"#).expect("a lease");
    let shown = json(&mut run.command("status"));
    let followers = shown["followers"].as_array().expect("followers");
    let names: Vec<_> = followers.iter().map(|follower| &follower["follower"]).collect();
    assert_eq!(names, ["broken", "fresh", "host"], "{shown}");
    assert!(followers[0]["unreadable"].is_string() && followers[0]["acknowledged"].is_null(), "{shown}");
    assert!(followers[1]["unreadable"].is_null() && followers[1]["acknowledged"].is_null(), "{shown}");
    let text = status(&run);
    assert!(text.contains("the lease of broken cannot be read: ") && text.contains("none yet"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

#[test]
fn store_and_run_are_given_as_words_or_as_flags() {
    let mut run = Run::new();
    run.publish();
    let by_flags = json(&mut run.command("status"));
    let words = || {
        let mut words = driftless();
        words.arg("status").arg(run.path("store")).arg("test");
        words
    };
    // What is given goes before a file of flags.
    let file = run.path("run.toml");
    std::fs::write(&file, "store = \"memory:\"\nrun = \"other\"\n").expect("a file");
    for shown in [json(&mut words()), json(words().arg("--config").arg(&file))] {
        assert_eq!((&shown["run_id"], &shown["run"]), (&by_flags["run_id"], &"test".into()), "{shown}");
    }
    let (status, said) = code(driftless().args(["status", "store"]));
    assert!(status == Some(2) && said.contains("RUN"), "{status:?}: {said}");
    let (status, said) = code(run.command("status").args(["other", "words"]));
    assert!(status == Some(2) && said.contains("--store"), "{status:?}: {said}");
}

/// What the page of the run's directory says of its hosts.
fn hosts_of_the_page_are_the_same(run: &Run, ack: &serde_json::Value) {
    let save = tempfile::tempdir().expect("a directory");
    let told = format!("[train]\nstore = '{}'\nrun = 'test'\n", run.path("store").display());
    file(save.path(), "run.toml", told.as_bytes());
    let mut board = Dashboard::of(save.path(), &[save.path()], None);
    let answer = board.until("/api/store", |answer| !answer["found"].is_null());
    let host = &answer["found"]["hosts"][0];
    assert_eq!((&host["host"], &host["live"]), (&"host".into(), &true.into()), "{answer}");
    assert_eq!((&host["version"], &host["label"]), (&ack["version"], &ack["label"]), "{answer}");
    for name in ["url", "how", "compared", "pause_ms", "up", "paused"] {
        assert_eq!(host["engines"][0][name], ack["engines"][0][name], "{name} of {answer}");
    }
}

/// As people see it.
fn status(of: &Run) -> String {
    run(&mut of.command("status"))
}

/// The file with the lease of the follower.
fn lease(run: &Run) -> PathBuf {
    let id = json(&mut run.command("status"))["run_id"].as_str().expect("an id").to_owned();
    run.path("store").join(id).join("followers/host")
}
