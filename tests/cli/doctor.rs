//! `driftless doctor`: what it looks at, what it says of others, and what it leaves alone.

use crate::Run;
use crate::common::{driftless, output};
use driftless_bridge::live::Rank;
use driftless_testkit::s3::{Fault, Server};
use driftless_testkit::sglang::{Fake, checkpoint};
use driftless_testkit::tree::tree;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// What it finds, of which others' machines must not decide: the exit code has to be that of the findings.
fn found(command: &mut Command) -> Value {
    let done = output(command.arg("--json"));
    let found: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    let problems = states(&found, |_| true).iter().filter(|state| **state == "problem").count();
    assert_eq!(found["problems"], problems, "{found}");
    assert_eq!(done.status.code(), Some(i32::from(problems > 0)), "{found}");
    for finding in found["findings"].as_array().expect("findings") {
        assert_eq!(finding["advice"].is_string(), finding["state"] != "ok", "{finding}");
    }
    found
}

fn states(found: &Value, wanted: impl Fn(&Value) -> bool) -> Vec<&str> {
    let findings = found["findings"].as_array().expect("findings").iter();
    findings
        .filter(|finding| wanted(finding))
        .map(|finding| finding["state"].as_str().expect("text"))
        .collect()
}

fn of_group<'a>(found: &'a Value, group: &str) -> Vec<&'a str> {
    states(found, |finding| finding["group"] == group)
}

/// What was found under a name, and what to do.
fn said(found: &Value, name: &str) -> String {
    let findings = found["findings"].as_array().expect("findings");
    let finding = findings.iter().find(|finding| finding["name"] == name).expect(name);
    format!("{}: {}", finding["found"], finding["advice"])
}

fn doctor() -> Command {
    let mut command = driftless();
    command.arg("doctor");
    command
}

#[test]
fn doctor_alone_looks_at_build_libraries_and_machine() {
    let found = found(&mut doctor());
    assert_eq!(
        ["build", "libraries", "machine", "store", "engines"].map(|group| of_group(&found, group).len()),
        [2, 4, 3, 0, 0],
        "{found}"
    );
    let done = output(&mut doctor());
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        text.starts_with("build\n  release    ok       driftless ") && text.contains("\nmachine\n"),
        "{text}"
    );
    let sum = text.lines().last().expect("a line");
    assert!(sum.contains(" problem") && sum.contains(" note"), "{text}");
    let words = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(words.contains("found, see above"), done.status.code() == Some(1), "{words}");
}

#[test]
fn doctor_tries_a_store_and_leaves_nothing_there() {
    let mut run = Run::new();
    run.publish();
    let names = || tree(&run.path("store")).into_iter().map(|(path, ..)| path).collect::<Vec<_>>();
    let before = names();
    let found_there = found(doctor().arg("--store").arg(run.path("store")));
    assert_eq!(of_group(&found_there, "store"), ["ok"; 4], "{found_there}");
    assert!(said(&found_there, "reach").contains("runs: 1"), "{found_there}");
    assert_eq!(names(), before);

    let absent = found(doctor().arg("--store").arg(run.path("absent")));
    assert_eq!(of_group(&absent, "store"), ["note"], "{absent}");
    assert!(said(&absent, "reach").contains("mkdir -p") && !run.path("absent").exists(), "{absent}");
    std::fs::write(run.path("file"), b"").expect("a file");
    let file = found(doctor().arg("--store").arg(run.path("file")));
    assert!(of_group(&file, "store").contains(&"problem"), "{file}");
}

#[test]
fn doctor_tells_a_store_that_refuses_from_one_that_is_away() {
    let server = Server::start();
    let at = |address: &str| {
        let mut command = doctor();
        command.args(["--store", &format!("s3://bucket?endpoint=http://{address}&region=r")]);
        found(command.env("AWS_ACCESS_KEY_ID", "a").env("AWS_SECRET_ACCESS_KEY", "b"))
    };
    let address = server.addr.to_string();
    let good = at(&address);
    // The test's server dates everything alike, days ago.
    assert_eq!(of_group(&good, "store"), ["ok", "ok", "problem"], "{good}");
    assert!(said(&good, "clock").contains("ahead of the store's"), "{good}");
    server.with(|bucket| bucket.faults.push_back(("PUT", Fault::Before(403))));
    let reads = at(&address);
    assert_eq!(of_group(&reads, "store"), ["ok", "note"], "{reads}");
    assert!(said(&reads, "creates").contains("Grant access"), "{reads}");
    server.with(|bucket| bucket.faults.push_back(("GET", Fault::Before(403))));
    let refused = at(&address);
    assert_eq!(of_group(&refused, "store"), ["problem"], "{refused}");
    let away = at("127.0.0.1:1");
    assert_eq!(of_group(&away, "store"), ["problem"], "{away}");
    assert!(said(&away, "reach").contains("s3://bucket"), "{away}");
}

#[test]
fn doctor_says_what_an_engine_is_and_gets() {
    let run = Run::new();
    let start = checkpoint(&run.path("start"), 1, 4);
    let engine = Fake::start(&start);
    engine.engine().set_label("3f0c9a12b7de:7");
    let url = format!("http://{}", engine.address);
    let plugins = run.path("plugins");
    let ask = || found(doctor().args(["--engine", &url, "--plugin-dir"]).arg(&plugins));
    let without = ask();
    assert_eq!(of_group(&without, "engines"), ["note", "ok", "note"], "{without}");
    let about = said(&without, "engine");
    for word in [url.as_str(), "sglang 0.", "3f0c9a12b7de:7", &start.display().to_string()] {
        assert!(about.contains(word), "{word}: {about}");
    }
    assert!(said(&without, "versions").contains("not patched"), "{without}");
    let rank = Rank { port: engine.address.port(), number: 0, of: 1 };
    rank.refuse(&plugins, "weights\u{1b} are packed").expect("a file");
    let unable = ask();
    assert_eq!(of_group(&unable, "engines"), ["ok", "ok", "note"], "{unable}");
    assert!(said(&unable, "versions").contains("are packed"), "{unable}");
    assert_eq!(engine.changes(), Vec::<String>::new(), "nothing changes there");
    engine.kill();
    let gone = ask();
    assert_eq!(of_group(&gone, "engines"), ["ok", "problem"], "{gone}");
    assert!(said(&gone, "engine").contains(&url), "{gone}");
}

#[test]
fn doctor_judges_a_checkpoint_directory_and_a_python() {
    let mut run = Run::new();
    run.publish();
    let python = run.path("python");
    let says = r#"{"python": "3.12.1", "versions": {"torch": "2.11\u001b[2J"}, "nccl": null}"#;
    let script = format!("#!/bin/sh\necho a start\necho '{says}'\n");
    // By another process: one that is started meanwhile would hold the file open for writing.
    let write = r#"printf '%s' "$1" > "$0" && chmod +x "$0""#;
    assert!(Command::new("sh").args(["-c", write]).arg(&python).arg(script).status().expect("sh").success());
    let look = |dir: &Path| found(doctor().arg("--checkpoint-dir").arg(dir).arg("--python").arg(&python));
    let fresh = look(&run.path("fresh/host"));
    assert_eq!(of_group(&fresh, "checkpoint")[0], "ok", "{fresh}");
    assert!(!run.path("fresh").exists());
    assert_eq!(of_group(&fresh, "python"), ["ok", "note"], "{fresh}");
    assert!(said(&fresh, "python").contains("torch 2.11 [2J"), "{fresh}");
    let foreign = look(&run.path("checkpoint"));
    assert_eq!(of_group(&foreign, "checkpoint")[0], "problem", "{foreign}");
    crate::common::json(&mut run.follow_once());
    assert_eq!(of_group(&look(&run.path("host")), "checkpoint")[0], "ok");
    std::fs::remove_file(run.path("host/config.json")).expect("a file");
    let torn = look(&run.path("host"));
    assert_eq!(of_group(&torn, "checkpoint")[0], "note", "{torn}");
    assert!(said(&torn, "directory").contains("driftless repair"), "{torn}");
}
