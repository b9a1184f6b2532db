//! A publisher that serves what it publishes over UCX.

use crate::Run;
use crate::common::{driftless, json};
use crate::signed::{Relay as Process, code, without_ucx};
use std::io::{BufRead as _, BufReader};
use std::process::{ChildStdout, Command, ExitStatus, Stdio};

impl Run {
    /// The next version, by a process that serves it.
    fn serve(&mut self, more: &[&str]) -> Command {
        self.made.step(100);
        let mut command = driftless();
        command.args(["--json", "--die-with-parent", "publish", "--run", "test", "--store"]);
        command.arg(self.path("store")).arg(if self.published == 0 { "--new-run" } else { "--resume" });
        command.arg("--checkpoint").arg(self.made.write(&self.path("checkpoint")));
        command.arg("--baseline-dir").arg(self.path("baseline"));
        command.args(["--listen-ucx", "127.0.0.1:0", "--relay-cache-dir"]).arg(self.path("cache")).args(more);
        command
    }

    /// Whether there is a UCX; without one a publisher says so before it publishes.
    fn has_ucx(&mut self) -> bool {
        let until = ["--until-followed", "0"];
        let (status, words) = code(&mut self.serve(&until));
        if status == Some(0) {
            self.published += 1;
            return true;
        }
        without_ucx(&words);
        assert!(!self.path("store").exists(), "nothing is published");
        false
    }
}

/// Starts it, and returns what it says first, where it serves, and its other lines.
fn start(mut command: Command) -> (Process, String, BufReader<ChildStdout>) {
    let mut process = Process(command.stdout(Stdio::piped()).spawn().expect("a publisher"));
    let mut lines = BufReader::new(process.0.stdout.take().expect("its output"));
    let said = line(&mut lines);
    let url = said["ucx_url"].as_str().expect("a URL").to_owned();
    (process, url, lines)
}

fn line(lines: &mut BufReader<ChildStdout>) -> serde_json::Value {
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    serde_json::from_str(&line).expect("JSON")
}

fn end(process: &mut Process) -> ExitStatus {
    process.0.wait().expect("it ends")
}

#[test]
fn a_publisher_serves_until_its_followers_have_the_version() {
    let mut run = Run::new();
    if !run.has_ucx() {
        return;
    }
    assert_eq!(json(&mut run.follow_once())["applied"]["version"], 0, "a follower with a lease");
    let (mut publisher, url, mut lines) = start(run.serve(&["--until-followed", "600"]));
    assert_eq!(line(&mut lines)["version"], 1);
    assert!(publisher.0.try_wait().expect("asked").is_none(), "the follower does not have it yet");
    let over = ["--update-weight-transport", "ucx", "--relay", &url];
    assert_eq!(json(run.follow_once().args(over))["applied"]["version"], 1);
    run.assert_host_is_current();
    assert!(
        std::fs::read_dir(run.path("cache/objects")).expect("a cache").count() > 0,
        "through the publisher"
    );
    assert!(end(&mut publisher).success());

    // Nobody follows: it waits no longer than it should, and has published all the same.
    run.published += 1;
    let output = run.serve(&["--until-followed", "1"]).output().expect("it ends");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && words.contains("ends before all followers"), "{words}");
    assert!(words.contains("host"), "it names who is behind: {words}");
    assert_eq!(json(&mut run.follow_once())["applied"]["version"], 2);
}

#[test]
fn a_publisher_serves_until_it_is_interrupted() {
    let mut run = Run::new();
    if !run.has_ucx() {
        return;
    }
    let (mut publisher, _, mut lines) = start(run.serve(&[]));
    assert_eq!(line(&mut lines)["version"], 1);
    // The baseline is free again while it serves.
    run.published += 1;
    run.made.step(100);
    assert_eq!(run.publish()["version"], 2);
    let kill = Command::new("kill").arg(publisher.0.id().to_string()).status().expect("kill");
    assert!(kill.success() && end(&mut publisher).success());
}
