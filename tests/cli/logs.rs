//! The log on standard error: `--log-format`, and warnings that repeat.

use crate::Run;
use crate::common::{Process, code, driftless, output};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The objects of these lines, each of which is one, with a time, a level, a message and fields.
fn objects(lines: &str) -> Vec<Value> {
    let object = |line: &str| {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let time = object["time"].as_str().unwrap_or_default();
        assert!(time.len() == 27 && time.ends_with('Z'), "{line}");
        assert!(object["level"].is_string() && object["message"].is_string(), "{line}");
        assert!(object["fields"].is_object(), "{line}");
        object
    };
    lines.lines().map(object).collect()
}

#[test]
fn log_in_json_is_an_object_a_line() {
    let mut run = Run::new();
    run.publish();
    let mut follow = run.follow_once();
    follow.args(["--listen", "127.0.0.1:0", "--log-format", "json"]).env("RUST_LOG", "info");
    let said = output(&mut follow);
    assert!(said.status.success(), "{said:?}");
    let lines = objects(&String::from_utf8_lossy(&said.stderr));
    let line = lines.iter().find(|line| line["message"] == "listening").expect("the line");
    assert_eq!(line["level"], "INFO", "{line}");
    assert!(line["fields"]["address"].as_str().is_some_and(|at| at.starts_with("127.0.0.1:")), "{line}");
    assert!(line["target"].as_str().is_some_and(|target| target.starts_with("driftless")), "{line}");
}

#[test]
fn errors_are_objects_of_the_log_in_json() {
    let run = Run::new();
    let (status, said) = code(run.command("inspect").args(["--log-format", "json"]));
    let [error] = &objects(&said)[..] else { panic!("{said}") };
    assert_eq!((status, &error["level"], &error["fields"]["code"]), (Some(1), &"ERROR".into(), &1.into()));
    assert!(error["message"].as_str().is_some_and(|text| text.contains("no run named `test`")), "{said}");
    assert!(error["fields"]["hint"].as_str().is_some_and(|hint| hint.contains("--new-run")), "{said}");
    // Also what the parser refuses.
    let (status, said) = code(driftless().args(["--log-format=json", "inspect", "--nonsense"]));
    let [error] = &objects(&said)[..] else { panic!("{said}") };
    assert_eq!((status, &error["fields"]["code"]), (Some(2), &2.into()));
    // What ends a command that prints JSON is as it was.
    let (_, said) = code(run.command("inspect").args(["--json", "--log-format", "json"]));
    assert!(said.starts_with(r#"{"error":"#), "{said}");
}

#[test]
fn file_of_flags_may_say_the_format_of_the_log() {
    let run = Run::new();
    let file = run.path("run.toml");
    std::fs::write(&file, "log-format = \"json\"\n").expect("a file");
    let (status, said) = code(run.command("inspect").arg("--config").arg(&file));
    assert_eq!((status, objects(&said).len()), (Some(1), 1), "{said}");
}

/// A follower that closes each connection, and counts them.
fn closing() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address").to_string();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            drop(connection);
            counted.fetch_add(1, SeqCst);
        }
    });
    (address, count)
}

#[test]
fn repeated_warning_is_printed_once_and_counted() {
    for format in ["text", "json"] {
        let mut run = Run::new();
        run.publish();
        let (address, connections) = closing();
        let mut command = run.command("coordinate");
        command.args(["--follower", &address, "--poll-ms", "20", "--log-format", format]);
        let mut process = Process::start("coordinate", run.dir.path(), &mut command);
        process.until("some rounds", |_| (connections.load(SeqCst) > 20).then_some(()));
        let id = Pid::from_raw(process.id() as i32).expect("a process");
        kill_process(id, Signal::TERM).expect("it runs");
        process.wait();
        let said = process.output();
        let warnings: Vec<&str> = said.lines().filter(|line| line.contains("no progress")).collect();
        // One more where the machine is so slow that ten seconds pass.
        assert!((2..6).contains(&warnings.len()), "{said}");
        let mark = if format == "json" { "\"more_times\":" } else { " more time" };
        assert!(
            !warnings[0].contains(mark) && warnings[1..].iter().all(|line| line.contains(mark)),
            "{said}"
        );
    }
}
