//! SIGINT, SIGTERM and SIGHUP end every command, whatever it waits for.

use crate::Run;
use crate::common::{Process, driftless};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};

/// Starts it, sends it the signal as soon as `ready`, and returns how it ended and what it printed.
fn interrupt(
    run: &Run,
    command: &mut Command,
    signal: Signal,
    ready: impl Fn() -> bool,
) -> (ExitStatus, String) {
    let mut process = Process::start("interrupted", run.dir.path(), command);
    process.until("the wait", |process| {
        assert!(process.ended().is_none(), "it ended by itself: {}", process.output());
        ready().then_some(())
    });
    let id = Pid::from_raw(process.id() as i32).expect("a process");
    kill_process(id, signal).expect("it runs");
    (process.wait(), process.output())
}

/// Whether a file of this name is somewhere below `dir`, while others come and go.
fn holds(dir: &Path, name: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    entries.flatten().any(|entry| entry.file_name() == name || holds(&entry.path(), name))
}

/// A bucket whose server takes connections and never answers.
struct Dead(TcpListener);

impl Dead {
    fn new() -> Dead {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        listener.set_nonblocking(true).expect("a socket");
        Dead(listener)
    }

    fn command(&self, name: &str, args: &[&str]) -> Command {
        let mut command = driftless();
        let at = self.0.local_addr().expect("an address");
        command.arg(name).arg("--store").arg(format!("s3://bucket/root?endpoint=http://{at}&region=r"));
        command.args(args).env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "key");
        command
    }

    /// Whether somebody asks.
    fn is_asked(&self) -> bool {
        self.0.accept().is_ok()
    }
}

#[test]
fn a_rank_that_waits_ends_at_a_signal_and_leaves_the_run_alone() {
    let mut run = Run::new();
    run.publish();
    let checkpoint = run.made.write(&run.path("checkpoint"));
    for (signal, code, rank) in [(Signal::TERM, 143, "1"), (Signal::INT, 130, "0")] {
        let attempt = format!("attempt-{code}");
        let mut command = run.command("publish");
        command.args(["--resume", "--rank", rank, "--ranks", "2", "--attempt", &attempt]).arg("--checkpoint");
        command.arg(&checkpoint).arg("--baseline-dir").arg(run.path(&attempt));
        let part = format!("part-{attempt}-0000{rank}");
        let waits = || holds(&run.path("store"), &part);
        let (ended, words) = interrupt(&run, &mut command, signal, waits);
        assert_eq!(ended.code(), Some(code), "{words}");
        assert!(words.contains("the wait for") && words.contains("was interrupted by SIG"), "{words}");
    }
    run.made.step(100);
    assert_eq!(run.publish()["version"], 1);
}

#[test]
fn commands_that_wait_for_a_dead_bucket_end_at_a_signal() {
    let mut run = Run::new();
    let checkpoint = run.made.write(&run.path("checkpoint")).display().to_string();
    run.made.step(1);
    let [baseline, host] = ["baseline", "host"].map(|name| run.path(name).display().to_string());
    // The first two hold a directory, and have some seconds to let go of it; the others hold nothing.
    let commands: [(&str, &[&str], bool); 5] = [
        (
            "publish",
            &["--run", "r", "--new-run", "--checkpoint", &checkpoint, "--baseline-dir", &baseline],
            true,
        ),
        ("follow", &["--run", "r", "--checkpoint-dir", &host, "--once"], true),
        ("inspect", &[], false),
        ("gc", &["--run", "r"], false),
        ("status", &["--run", "r"], false),
    ];
    for (name, args, holds) in commands {
        let bucket = Dead::new();
        let mut command = bucket.command(name, args);
        let (ended, words) = interrupt(&run, &mut command, Signal::TERM, || bucket.is_asked());
        let expected = if holds { (Some(143), None) } else { (None, Some(Signal::TERM.as_raw())) };
        assert_eq!((ended.code(), ended.signal()), expected, "{name}: {words}");
    }
}

#[test]
fn a_service_that_is_asked_to_end_has_done_what_it_is_for() {
    let run = Run::new();
    let [host, cache] = ["host", "cache"].map(|name| run.path(name).display().to_string());
    let services: [(&str, &[&str]); 3] = [
        ("follow", &["--run", "r", "--checkpoint-dir", &host, "--listen", "127.0.0.1:0"]),
        ("coordinate", &["--run", "r", "--follower", "127.0.0.1:1"]),
        ("relay", &["--cache-dir", &cache, "--listen", "127.0.0.1:0"]),
    ];
    for (name, args) in services {
        for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
            // Whoever runs the tests may have them ignore SIGHUP, which a service then does as well.
            let mut command = std::process::Command::new("env");
            command.arg("--default-signal=HUP").arg(driftless().get_program()).arg(name).arg("--store");
            command.arg(run.path("store")).args(args).env("RUST_LOG", "debug");
            let mut process = Process::start(name, run.dir.path(), &mut command);
            let id = Pid::from_raw(process.id() as i32).expect("a process");
            // It has handlers once there is a thread for them.
            process.until("its handlers", |process| has_thread(process.id(), "signals").then_some(()));
            kill_process(id, signal).expect("it runs");
            assert_eq!(process.wait().code(), Some(0), "{name}: {}", process.output());
        }
    }
}

#[test]
fn hangup_under_nohup_does_not_end_a_service() {
    let run = Run::new();
    let host = run.path("host").display().to_string();
    // What nohup does, and nothing else.
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(driftless().get_program());
    command.args(["follow", "--run", "r", "--checkpoint-dir", &host, "--listen", "127.0.0.1:0", "--store"]);
    command.arg(run.path("store")).env("RUST_LOG", "info");
    let mut process = Process::start("follow", run.dir.path(), &mut command);
    let id = Pid::from_raw(process.id() as i32).expect("a process");
    process.until("its handlers", |process| has_thread(process.id(), "signals").then_some(()));
    kill_process(id, Signal::HUP).expect("it runs");
    kill_process(id, Signal::TERM).expect("it runs still");
    assert_eq!(process.wait().code(), Some(0), "{}", process.output());
    assert!(!process.output().contains("SIGHUP came"), "{}", process.output());
}

/// An engine that somebody left paused and fenced. It answers one look, and nothing in the activation that
/// follows; it tells when that asks.
fn fenced_engine() -> (String, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let look = [
        ("200 OK", r#"{"model_path": "/m", "weight_version": "r:0?partial"}"#),
        ("503 Service Unavailable", "not ready"),
    ];
    let (asked, was_asked) = channel();
    std::thread::spawn(move || {
        let mut streams = listener.incoming().flatten();
        for ((status, body), mut stream) in look.into_iter().zip(streams.by_ref()) {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("a request");
                head.extend(byte);
            }
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all((head + body).as_bytes()).expect("it is read");
        }
        let mut unanswered = Vec::new();
        for stream in streams {
            unanswered.push(stream);
            // A test that has ended does not listen.
            let _ = asked.send(());
        }
    });
    (url, was_asked)
}

#[test]
fn second_signal_to_a_follower_names_engines_maybe_paused() {
    let mut run = Run::new();
    run.publish();
    let (url, was_asked) = fenced_engine();
    let mut command = run.command("follow");
    command.args(["--engine", &url, "--checkpoint-dir"]).arg(run.path("host")).env("RUST_LOG", "info");
    let mut process = Process::start("follower", run.dir.path(), &mut command);
    let id = Pid::from_raw(process.id() as i32).expect("a process");
    process.until("an activation", |_| was_asked.try_recv().ok());
    kill_process(id, Signal::TERM).expect("it runs");
    process.until("the first signal", |process| process.output().contains("SIGTERM came").then_some(()));
    // It may have ended by the first one, on a busy machine, and with the same.
    let _ = kill_process(id, Signal::INT);
    let (ended, words) = (process.wait(), process.output());
    assert_eq!(ended.code(), Some(5), "{words}");
    assert!(words.contains(&format!("paused, or inside an activation: {url};")), "{words}");
}

/// Whether the process has a thread of this name.
fn has_thread(process: u32, name: &str) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return false };
    threads.flatten().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|found| found.trim() == name)
    })
}
