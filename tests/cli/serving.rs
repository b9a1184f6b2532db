//! A publisher that serves what it publishes over UCX.

use crate::Run;
use crate::common::{Process, code, driftless, json};
use crate::signed::without_ucx;
use std::process::Command;

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

/// Starts it, and returns it with where it serves, once it has published this version.
fn start(run: &mut Run, more: &[&str], version: u64) -> (Process, String) {
    let mut command = run.serve(more);
    let mut process = Process::start("publisher", run.dir.path(), &mut command);
    let url = process.says(0).expect("where it serves")["ucx_url"].as_str().expect("a URL").to_owned();
    assert_eq!(process.says(1).expect("what it published")["version"], version);
    (process, url)
}

/// How it says that its time was up before everybody had the version.
const TIME_IS_UP: &str = "ends before all followers";

#[test]
fn a_publisher_serves_until_its_followers_have_the_version() {
    let mut run = Run::new();
    if !run.has_ucx() {
        return;
    }
    assert_eq!(json(&mut run.follow_once())["applied"]["version"], 0, "a follower with a lease");
    // Longer than the test waits for its end.
    let (mut publisher, url) = start(&mut run, &["--until-followed", "600"], 1);
    assert!(publisher.ended().is_none(), "the follower does not have it yet");
    let over = ["--update-weight-transport", "ucx", "--relay", &url];
    assert_eq!(json(run.follow_once().args(over))["applied"]["version"], 1);
    run.assert_host_is_current();
    assert!(
        std::fs::read_dir(run.path("cache/objects")).expect("a cache").count() > 0,
        "through the publisher"
    );
    let (ended, words) = (publisher.wait(), publisher.output());
    assert!(ended.success() && !words.contains(TIME_IS_UP), "{ended}: {words}");

    // Nobody follows: it waits no longer than it should, and has published all the same.
    run.published += 1;
    let (status, words) = code(&mut run.serve(&["--until-followed", "1"]));
    assert!(status == Some(0) && words.contains(TIME_IS_UP), "{status:?}: {words}");
    assert!(words.contains("host"), "it names who is behind: {words}");
    assert_eq!(json(&mut run.follow_once())["applied"]["version"], 2);
}

#[test]
fn a_publisher_serves_until_it_is_interrupted() {
    let mut run = Run::new();
    if !run.has_ucx() {
        return;
    }
    let (publisher, _) = start(&mut run, &[], 1);
    // The baseline is free again while it serves.
    run.published += 1;
    run.made.step(100);
    assert_eq!(run.publish()["version"], 2);
    let kill = Command::new("kill").arg(publisher.id().to_string()).status().expect("kill");
    assert!(kill.success());
    publisher.succeed();
}
