//! Those who connect without a key: more of them than there are descriptors, slow ones, and what is no
//! request.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use driftless_bridge::Keys;
use driftless_testkit::flood::Flood;
use driftless_torch::engine::EngineOptions;
use serde_json::{Value, json};

use crate::client::Client;
use crate::model::{Fixture, config, greedy, ids, write_checkpoint};

const KEY: &str = "the key";
const AUTHORISED: &str = "authorization: Bearer the key\r\n";
/// Long enough for a request to come on a busy machine.
const SHORT: Duration = Duration::from_secs(1);
/// Only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);
/// A deadline that no test reaches.
const NEVER: Duration = Duration::from_secs(24 * 3600);
/// Tells the other process where its checkpoint is.
const MODEL: &str = "DRIFTLESS_TEST_MODEL";
/// Descriptors that the other process may have: a fraction of the connections that come.
const FILES: u64 = 192;
const CONNECTIONS: usize = 300;

fn locked(options: &mut EngineOptions, authorise: Duration, idle: Duration) {
    options.server.keys = Keys::new(Some(KEY), None).unwrap();
    let limits = &mut options.server.limits;
    (limits.authorise, limits.idle) = (authorise, idle);
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// All that comes until the server closes the connection.
fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    // A server that hangs up on what it has not read resets the connection, behind what it said.
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// What is answered to these bytes, up to the end of the connection.
fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = connect(address);
    // The server may hang up before it has read all.
    let _ = stream.write_all(bytes);
    rest(&mut stream)
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// Says `begin`, then a byte every few milliseconds, until the server closes the connection: what it said.
fn drip(address: SocketAddr, begin: &str) -> String {
    let mut stream = connect(address);
    stream.write_all(begin.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let (mut said, mut part) = (Vec::new(), [0; 1024]);
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        match stream.read(&mut part) {
            Ok(0) => return String::from_utf8_lossy(&said).into_owned(),
            Ok(length) => said.extend_from_slice(&part[..length]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                // The next read tells of the end.
                let _ = stream.write_all(b"a");
            }
            Err(_) => return String::from_utf8_lossy(&said).into_owned(),
        }
    }
    panic!("after `{begin}` a byte now and then keeps the connection");
}

/// Beginnings of requests that never end.
const BEGINNINGS: &[&str] = &[
    "",
    "G",
    "GET /model_info HTTP/1.1\r\nauthorization: Bearer the",
    "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n{",
    "GET /health HTTP/1.1\r\nhost: x\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

/// The other process, which serves with few descriptors.
struct Other(Child);

impl Other {
    fn start(model: &std::path::Path) -> (Other, SocketAddr) {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {FILES} && exec \"$0\" \"$@\"")]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "strangers::other_process", "--nocapture"]);
        let mut child = command.env(MODEL, model).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let other = Other(child);
        let address = lines.find_map(|line| Some(line.unwrap().split_once("listening ")?.1.parse().unwrap()));
        (other, address.unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It has ended, or does now.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the other process runs. On its own, without a model, there is nothing to do.
#[test]
fn other_process() {
    let Ok(model) = std::env::var(MODEL) else { return };
    let mut options = EngineOptions::new(model);
    (options.threads, options.weight_version) = (Some(1), "a".to_owned());
    // No deadline helps it.
    locked(&mut options, NEVER, NEVER);
    let server = driftless_torch::engine::serve(options).unwrap();
    println!("listening {}", server.address());
    thread::park();
}

/// The reply to a request of whoever has the key; tried again while the connection fails, which a machine
/// under a flood may have it do.
fn ask(address: SocketAddr, method: &str, path: &str, body: &Value) -> Value {
    let body = body.to_string();
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LONG, "{path} is not answered");
        let Ok(mut stream) = TcpStream::connect_timeout(&address, LONG) else { continue };
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORISED}");
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let mut answer = String::new();
        let asked = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut answer));
        if asked.is_ok() && !answer.is_empty() {
            assert_eq!(status(&answer), 200, "{path}: {answer}");
            return serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        }
    }
}

#[test]
fn engine_serves_under_more_connections_than_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    for (name, seed) in [("a", 1), ("b", 2)] {
        write_checkpoint(&dir.path().join(name), &config(), seed);
    }
    let (_other, address) = Other::start(&dir.path().join("a"));
    let generate = || ids(&ask(address, "POST", "/generate", &greedy(&[1, 2, 3], 8)));
    let label = || ask(address, "GET", "/model_info", &Value::Null)["weight_version"].clone();
    let before = generate();
    let flood = Flood::of(address, CONNECTIONS, BEGINNINGS);
    for round in 1..=3 {
        flood.reaches(1000 * round);
        assert_eq!((generate(), label()), (before.clone(), json!("a")));
    }
    let update = json!({"model_path": dir.path().join("b").display().to_string(), "weight_version": "b"});
    assert_eq!(ask(address, "POST", "/update_weights_from_disk", &update)["success"], true);
    let after = generate();
    assert_eq!(label(), "b");
    drop(flood);
    assert_eq!((generate(), label()), (after, json!("b")));
}

#[test]
fn slow_client_stays_only_with_the_key() {
    let fixture = Fixture::with(|options| locked(options, SHORT, NEVER));
    let address = fixture.server.address();
    let mut known = connect(address);
    let get = format!("GET /model_info HTTP/1.1\r\nhost: x\r\n{AUTHORISED}\r\n");
    let mut still_there = || {
        known.write_all(get.as_bytes()).unwrap();
        let mut begin = [0; 12];
        known.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200");
        // The rest of the answer.
        let mut seen = Vec::new();
        while !seen.ends_with(b"}") {
            let mut byte = [0];
            known.read_exact(&mut byte).unwrap();
            seen.extend(byte);
        }
    };
    still_there();
    let post = "POST /generate HTTP/1.1\r\nhost: x\r\n";
    let (body, chunked) = ("content-length: 4000\r\n\r\n", "transfer-encoding: chunked\r\n\r\n4000\r\n");
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(rest(&mut connect(address)), "", "who says nothing is told nothing"));
        scope.spawn(|| assert_eq!(drip(address, ""), ""));
        scope.spawn(|| assert_eq!(drip(address, "GET /model_info HTTP/1.1\r\nhost: x\r\nx-slow: "), ""));
        scope.spawn(|| assert_eq!(status(&drip(address, &format!("{post}{body}"))), 401));
        scope.spawn(|| assert_eq!(status(&drip(address, &format!("{post}{chunked}"))), 401));
    });
    // A probe is answered, and is the last request of its connection.
    let probe = raw(address, b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n");
    assert!(status(&probe) == 200 && probe.contains("connection: close"), "{probe}");
    still_there();
}

#[test]
fn generation_outlasts_deadlines_that_a_stopped_body_does_not() {
    let fixture = Fixture::with(|options| locked(options, SHORT, SHORT));
    let (address, client) = (fixture.server.address(), fixture.client.with_key(KEY));
    client.ok("/pause_generation", &json!({"mode": "in_place"}));
    let waiting = client.later("/generate", greedy(&[1, 2, 3], 4));
    let begin = format!("POST /generate HTTP/1.1\r\nhost: x\r\n{AUTHORISED}content-length: 4000\r\n\r\n{{");
    let said = raw(address, begin.as_bytes());
    assert!(said.is_empty() || (400..500).contains(&status(&said)), "{said}");
    assert_eq!(rest(&mut connect(address)), "");
    client.ok("/continue_generation", &json!({}));
    assert_eq!(ids(&waiting.join().unwrap().json).len(), 4, "these deadlines were not its own");
}

#[test]
fn without_the_key_nothing_is_changed_whatever_is_sent() {
    let fixture = Fixture::with(|options| locked(options, NEVER, NEVER));
    let (address, client) = (fixture.server.address(), fixture.client.with_key(KEY));
    let before = client.ok("/generate", &greedy(&[1, 2, 3], 8));
    let update = fixture.update("b").to_string();
    let length = update.len();
    let nears = [
        "",
        "authorization: the key\r\n",
        "authorization: Bearer\r\n",
        "authorization: Bearer the ke\r\n",
        "authorization: Bearer the key2\r\n",
        "authorization: Bearer The key\r\n",
        "authorization: Bearer  the key\r\n",
        "authorization: Basic dGhlIGtleQ==\r\n",
        "x-authorization: Bearer the key\r\n",
        "authorization: Bearer wrong\r\nauthorization: Bearer the key\r\n",
    ];
    for near in nears {
        for path in ["/update_weights_from_disk", "/pause_generation", "/update_weight_version", "/generate"]
        {
            let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{near}content-length: {length}\r\n\r\n");
            let answer = raw(address, (head + &update).as_bytes());
            assert_eq!(status(&answer), 401, "{path} with `{near}`: {answer}");
        }
    }
    let info = client.get("/model_info").json;
    assert_eq!((&info["weight_version"], &info["model_path"]), (&json!("a"), &json!(fixture.path("a"))));
    assert_eq!(ids(&client.ok("/generate", &greedy(&[1, 2, 3], 8))), ids(&before));
}

#[test]
fn malformed_request_is_refused_and_the_engine_goes_on() {
    let fixture = Fixture::with(|options| locked(options, NEVER, NEVER));
    let address = fixture.server.address();
    let head = format!("POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORISED}");
    let with = |headers: &str| format!("{head}{headers}\r\n").into_bytes();
    let wide = format!("GET /model_info HTTP/1.1\r\nhost: x\r\nx-wide: {}\r\n\r\n", "w".repeat(1 << 20));
    let cases = [
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(50), 400..500),
        (
            "HTTP/2",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00".to_vec(),
            400..500,
        ),
        ("a long header", wide.into_bytes(), 400..500),
        (
            "more than any body may have",
            [with("content-length: 67108865\r\n"), vec![b'x'; (64 << 20) + 1]].concat(),
            413..414,
        ),
        ("a length past 64 bits", with("content-length: 18446744073709551616\r\n"), 400..401),
        ("two lengths", with("content-length: 1\r\ncontent-length: 2\r\n"), 400..401),
        (
            "a chunk past 64 bits",
            [with("transfer-encoding: chunked\r\n"), b"fffffffffffffffff\r\n".to_vec()].concat(),
            400..401,
        ),
    ];
    for (what, bytes, expected) in cases {
        let answer = raw(address, &bytes);
        assert!(answer.is_empty() || expected.contains(&status(&answer)), "{what}: {answer}");
        assert!(answer.matches("HTTP/1.1 ").count() <= 1, "{what}: {answer}");
    }
    fixture.client.with_key(KEY).ok("/generate", &greedy(&[1], 2));
}

#[test]
fn many_health_probes_cost_one_token() {
    let fixture = Fixture::with(|options| options.max_running_requests = 1);
    let client: &Client = &fixture.client;
    let mut endless = greedy(&[1, 2, 3], 2000);
    endless["rid"] = json!("r");
    let running = client.later("/generate", endless);
    client.until_load(1, 0);
    let probes: Vec<_> = (0..40).map(|_| client.start("GET", "/health", "")).collect();
    client.until_load(1, 1);
    for _ in 0..100 {
        let waiting = client.get("/v1/loads?include=core").json["loads"][0]["num_waiting_reqs"].clone();
        assert!(waiting == json!(1) || running.is_finished(), "{waiting} probes wait for a token each");
    }
    client.post("/abort_request", &json!({"rid": "r"}));
    running.join().unwrap();
    for probe in probes {
        assert_eq!(crate::client::finish(probe).status, 200);
    }
}
