//! A minimal HTTP client: one request per connection, so that a test can also hang up in the middle.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use driftless_torch::engine::Server;
use serde_json::Value;

/// Longer than anything here takes; a test that hits it has found a hang.
const DEADLINE: Duration = Duration::from_secs(60);

/// A reply: status, body, and the body as JSON (null if it is none).
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) text: String,
    pub(crate) json: Value,
}

/// An engine's address and the key to show.
#[derive(Clone)]
pub(crate) struct Client {
    address: SocketAddr,
    key: Option<String>,
}

impl Client {
    pub(crate) fn new(server: &Server) -> Client {
        Client { address: server.address(), key: None }
    }

    pub(crate) fn with_key(&self, key: &str) -> Client {
        Client { key: Some(key.to_owned()), ..self.clone() }
    }

    /// Sends a request and leaves the connection open.
    pub(crate) fn start(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let key = self.key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!("{method} {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n{key}");
        let length = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{length}{body}").as_bytes()).unwrap();
        stream
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        finish(self.start("GET", path, ""))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        finish(self.start("POST", path, &body.to_string()))
    }

    /// Posts, expects 200, returns the JSON.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{path} {body}: {}", reply.text);
        reply.json
    }

    /// Posts on a thread of its own.
    pub(crate) fn later(&self, path: &'static str, body: Value) -> std::thread::JoinHandle<Reply> {
        let client = self.clone();
        std::thread::spawn(move || client.post(path, &body))
    }

    /// Asks until `done`; for states that arise in the engine's own time.
    pub(crate) fn poll(&self, path: &str, done: impl Fn(&Reply) -> bool) -> Reply {
        let started = std::time::Instant::now();
        loop {
            let reply = self.get(path);
            if done(&reply) {
                return reply;
            }
            assert!(started.elapsed() < DEADLINE, "{path} stays {}", reply.text);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until this many requests run and wait.
    pub(crate) fn until_load(&self, running: u64, waiting: u64) {
        self.poll("/v1/loads?include=core", |reply| {
            let load = &reply.json["loads"][0];
            load["num_running_reqs"] == running && load["num_waiting_reqs"] == waiting
        });
    }
}

/// Reads the reply to the end.
pub(crate) fn finish(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no reply: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    assert!(!chunked, "replies are whole");
    Reply { status, text: body.to_owned(), json: serde_json::from_str(body).unwrap_or(Value::Null) }
}
