//! What a page, Prometheus and TensorBoard get of a run that is killed and goes on.

use crate::common::{Process, code, driftless, json};
use crate::{GROUPS, SAMPLES, STEPS, Stage};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// What is at a path of an address.
fn page(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the trainer listens");
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// A collector of OpenTelemetry, and the requests that come to it whole.
fn collector() -> (SocketAddr, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (addr, (got, gets)) = (listener.local_addr().expect("an address"), channel());
    std::thread::spawn(move || {
        // One of a trainer that is killed may end anywhere.
        for stream in listener.incoming().flatten() {
            if let Some(body) = receive(stream)
                && got.send(body).is_err()
            {
                return;
            }
        }
    });
    (addr, gets)
}

fn receive(stream: TcpStream) -> Option<Value> {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let line = line.trim().to_lowercase();
        if line.is_empty() {
            break;
        }
        length = line.strip_prefix("content-length: ").and_then(|text| text.parse().ok()).unwrap_or(length);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let reply = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
    // A trainer that is killed does not read it.
    let _ = reader.get_mut().write_all(reply.as_bytes());
    serde_json::from_slice(&body).ok()
}

/// What a request to a collector says of a gauge or counter without labels.
fn value(request: &Value, name: &str) -> Option<f64> {
    let metrics = request["resourceMetrics"][0]["scopeMetrics"][0]["metrics"].as_array()?;
    let metric = metrics.iter().find(|metric| metric["name"] == name)?;
    let data = metric.get("gauge").or_else(|| metric.get("sum"))?;
    data["dataPoints"][0]["asDouble"].as_f64()
}

#[test]
fn run_is_watched_while_it_goes_and_drawn_afterwards() {
    let mut stage = Stage::new(&["--save-interval", "2", "--metrics-listen", "127.0.0.1:0"]);
    stage.flags.extend(["--dashboard", "127.0.0.1:0"].map(str::to_owned));
    stage.flags.extend(["--tensorboard-dir".to_owned(), stage.at("board").display().to_string()]);
    let (collector, sent) = collector();
    stage.flags.extend(["--otlp-endpoint".to_owned(), format!("http://{collector}")]);
    let mut doomed = stage.trainer("");
    let mut doomed =
        Process::start("trainer", stage.dir.path(), doomed.env("DRIFTLESS_KILL_AT", "train.step:4"));
    // Nobody brings the engine to a version yet: the run does not end before it was looked at.
    let (dashboard, metrics) = doomed.until("the addresses of its pages", |trainer| {
        let output = trainer.output();
        let (_, rest) = output.split_once("dashboard at http://")?;
        let (dashboard, rest) = rest.split_once('\n')?;
        let (_, rest) = rest.split_once("metrics at http://")?;
        Some((dashboard.trim().to_owned(), rest.split_once("/metrics")?.0.to_owned()))
    });
    let answer = page(&dashboard, "/api/runs");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"name\":\"rl\""), "{answer}");
    let answer = page(&metrics, "/metrics");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("driftless_trainer_info{run=\"test\"} 1"),
        "{answer}"
    );
    let _follower = stage.follower();
    assert!(!doomed.wait().success(), "{}", doomed.output());
    let (status, words) = code(&mut stage.trainer(""));
    assert_eq!(status, Some(0), "{words}");
    stage.check("watched");
    // What the first process did not come to send stays unsent; the second one sends each of its steps.
    let mut done = Vec::new();
    while done.last() != Some(&(STEPS as f64)) {
        let request = sent.recv_timeout(Duration::from_secs(60)).expect("the last step's figures");
        done.extend(value(&request, "driftless_trainer_steps_done"));
    }
    assert!(done.ends_with(&[STEPS as f64 - 1.0, STEPS as f64]), "{done:?}");

    let files =
        std::fs::read_dir(stage.at("board")).expect("a directory").map(|file| file.expect("a file").path());
    let files: Vec<_> = files.map(|file| std::fs::read(file).expect("a file")).collect();
    assert_eq!(files.len(), 2, "one for each start");
    assert!(files.iter().all(|file| file.windows(13).any(|part| part == b"brain.Event:2")));
    let trace = stage.at("trace.json");
    let counts = json(driftless().arg("trace").arg(stage.at("rl")).arg("-o").arg(&trace));
    assert_eq!(counts["steps"], STEPS, "{counts}");
    assert_eq!(counts["samples"], STEPS * GROUPS * SAMPLES, "{counts}");
    assert!(counts["events"].as_u64() > Some(STEPS) && counts["damaged_lines"] == 0, "{counts}");
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(trace).expect("a file")).expect("JSON");
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 100), "{trace}");
}

#[test]
fn metrics_beyond_loopback_without_a_token_are_refused() {
    let stage = Stage::new(&["--metrics-listen", "0.0.0.0:0"]);
    let (status, words) = code(stage.trainer("").env_remove("DRIFTLESS_TOKEN"));
    assert!(
        status == Some(2) && words.contains("--metrics-listen") && words.contains("token"),
        "{status:?}: {words}"
    );
}
