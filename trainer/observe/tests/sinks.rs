//! Event files, read back by TensorBoard itself, and what collectors get, by the classes of OpenTelemetry; lane `rewards` has
//! both.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use driftless_observe::{Otlp, TensorBoard};
use driftless_trainer::events::{Event, Fact, Sink};
use driftless_trainer::metrics::{PublicationMetrics, StepMetrics};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, SystemTime};

fn step(rollout_id: u64, reward: f64) -> Event {
    let publication = PublicationMetrics { density: 0.25, ..PublicationMetrics::default() };
    Event::Step(
        StepMetrics { rollout_id, reward, publication: Some(publication), ..StepMetrics::default() }.into(),
    )
}

/// What one process tells of a run.
fn tell(dir: &Path, at: u64, events: impl IntoIterator<Item = Event>) {
    let mut board = TensorBoard::new(dir);
    for event in events {
        board.take(&Fact::new(SystemTime::UNIX_EPOCH + Duration::from_secs(at), event));
    }
}

#[test]
fn tensorboard_reads_each_step_of_a_resumed_run_once() {
    let Some(python) = std::env::var_os("DRIFTLESS_REWARDS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_REWARDS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    tell(dir.path(), 100, [Event::Begin { step: 0, of: 4 }, step(0, 1.0), step(1, 2.0), step(2, 3.0)]);
    // It had its last checkpoint after one step; its clock goes back, and a piece of a record is left of it.
    let newest = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&newest, [std::fs::read(&newest).unwrap(), vec![9; 7]].concat()).unwrap();
    tell(dir.path(), 90, [Event::Begin { step: 1, of: 4 }, step(1, 20.0), step(2, 30.0), step(3, 40.0)]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/event_files.py");
    let read = Command::new(python).arg(script).arg(dir.path()).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let read: Value = serde_json::from_slice(&read.stdout).unwrap();
    let rewards = serde_json::json!([[0, 1.0, 100.0], [1, 20.0, 90.0], [2, 30.0, 90.0], [3, 40.0, 90.0]]);
    assert_eq!(read["reward"], rewards);
    assert_eq!(read["publication/density"].as_array().unwrap().len(), 4);
}

/// A collector that answers with these statuses, a request each, and says what it got: heads and bodies.
fn collect(statuses: &'static [u16]) -> (SocketAddr, Receiver<(String, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, (got, gets)) = (listener.local_addr().unwrap(), channel());
    std::thread::spawn(move || {
        for status in statuses {
            let (mut stream, _) = listener.accept().unwrap();
            got.send(request(&mut stream)).unwrap();
            let reply = format!("HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}");
            stream.write_all(reply.as_bytes()).unwrap();
        }
    });
    (addr, gets)
}

fn request(stream: &mut TcpStream) -> (String, String) {
    let (mut got, mut piece) = (String::new(), [0; 4096]);
    loop {
        if let Some((head, body)) = got.split_once("\r\n\r\n") {
            let length = head.to_lowercase().split_once("content-length: ").unwrap().1.to_owned();
            if body.len() >= length.split("\r\n").next().unwrap().parse().unwrap() {
                return (head.to_lowercase(), body.to_owned());
            }
        }
        let count = stream.read(&mut piece).unwrap();
        assert_ne!(count, 0, "the request ends within: {got}");
        got += std::str::from_utf8(&piece[..count]).unwrap();
    }
}

#[test]
fn collector_gets_each_step_also_after_it_refused_one() {
    let (addr, got) = collect(&[500, 200]);
    let mut otlp = Otlp::new("math", &format!("http://{addr}/otlp/"), "x-key=a%20b").unwrap();
    let begin = Event::Begin { step: 0, of: 3 };
    // It refuses the first step, and is left alone for 30 s.
    for (at, event) in [(9, begin), (9, step(0, 1.0)), (38, step(1, 1.5)), (39, step(2, 2.0))] {
        otlp.take(&Fact::new(SystemTime::UNIX_EPOCH + Duration::from_secs(at), event));
    }
    let sent = [(); 2].map(|()| got.recv_timeout(Duration::from_secs(60)).unwrap());
    let (told, bodies): (Vec<_>, Vec<_>) = sent.into_iter().unzip();
    assert!(told[1].starts_with("post /otlp/v1/metrics ") && told[1].contains("x-key: a b"), "{}", told[1]);
    check_by_opentelemetry(&bodies[1]);
    // Nobody listens any more, which ends nothing.
    otlp.take(&Fact::new(SystemTime::UNIX_EPOCH + Duration::from_secs(40), step(3, 3.0)));
}

/// What OpenTelemetry's own classes read of a body.
fn check_by_opentelemetry(body: &str) {
    let Some(python) = std::env::var_os("DRIFTLESS_REWARDS_PYTHON") else {
        eprintln!("skipped: DRIFTLESS_REWARDS_PYTHON is not set; `cargo xtask test rewards` sets it");
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/otlp.py");
    let mut read = Command::new(python);
    read.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut reading = read.spawn().unwrap();
    reading.stdin.take().unwrap().write_all(body.as_bytes()).unwrap();
    let read = reading.wait_with_output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let read: Value = serde_json::from_slice(&read.stdout).unwrap();
    assert_eq!(read["resource"], serde_json::json!({"service.name": "driftless", "driftless.run": "math"}));
    let reward = serde_json::json!({"kind": "gauge", "value": 2.0, "at": 39_000_000_000_u64});
    assert_eq!(read["metrics"]["driftless_trainer_reward"], reward);
    assert_eq!(read["metrics"]["driftless_trainer_learners_lost_total"]["kind"], "cumulative sum");
}
