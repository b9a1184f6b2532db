//! Clients that offer turns at times of their own, whether or not the server keeps up.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Connections, each of which has one request under way.
const CONNECTIONS: u32 = 32;
/// Bytes of tools, of the system's message and of a session's first question.
const TOOLS_BYTES: usize = 60_000;
const SYSTEM_BYTES: usize = 8_000;
const QUESTION_BYTES: usize = 11_000;
/// What the engine says.
pub(super) const ANSWER: &str = "The next step is to read the file.";

/// Conversations, each with its messages behind the system's as JSON.
pub(super) struct Talks {
    /// All of a body up to them.
    head: String,
    talks: Vec<Mutex<String>>,
}

fn words(bytes: usize, seed: usize) -> String {
    let line =
        |at: usize| format!("line {at} of {seed}: a tool has told this, with {} and more\n", at * 7 + seed);
    let mut text: String = (0..bytes / 40).map(line).collect();
    text.truncate(bytes);
    text
}

impl Talks {
    pub(super) fn new(count: usize) -> Self {
        let tool = |at: usize| {
            let path = json!({"type": "string", "description": words(200, at)});
            let parameters =
                json!({"type": "object", "properties": {"path": path, "limit": {"type": "integer"}}});
            json!({"type": "function", "function":
                {"name": format!("tool_{at}"), "description": words(2_500, at), "parameters": parameters}})
        };
        let tools: Vec<Value> = (0..TOOLS_BYTES / 3_000).map(tool).collect();
        let system = json!({"role": "system", "content": words(SYSTEM_BYTES, 0)});
        let head = format!("{{\"model\":\"m\",\"tools\":{},\"messages\":[{system}", json!(tools));
        let question = |at| Mutex::new(said("user", &words(QUESTION_BYTES, at)));
        Talks { head, talks: (1..=count).map(question).collect() }
    }

    pub(super) fn body(&self, at: usize) -> String {
        format!("{}{}]}}", self.head, self.talks[at].lock().unwrap())
    }

    /// Adds the answer, and what a tool has told then.
    fn go_on(&self, at: usize) {
        let mut talk = self.talks[at].lock().unwrap();
        let turn = talk.len();
        talk.push_str(&(said("assistant", ANSWER) + &said("user", &words(300, turn))));
    }
}

fn said(role: &str, content: &str) -> String {
    format!(",{}", json!({"role": role, "content": content}))
}

struct Connection(BufReader<TcpStream>);

impl Connection {
    fn open(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Connection(BufReader::new(stream))
    }

    /// The body of the reply.
    fn post(&mut self, session: usize, body: &str) -> Vec<u8> {
        let head = format!(
            "POST /s/session-{session}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.0.get_mut().write_all((head + body).as_bytes()).unwrap();
        let (mut length, mut line, mut status) = (0, String::new(), String::new());
        while line != "\r\n" {
            line.clear();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "the server hung up");
            if status.is_empty() {
                status.clone_from(&line);
            }
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut reply = vec![0; length];
        self.0.read_exact(&mut reply).unwrap();
        assert!(status.contains(" 200 "), "{status}{}", String::from_utf8_lossy(&reply));
        reply
    }
}

/// One turn by itself: how long it took, and the tokens of its conversation.
pub(super) fn one(addr: SocketAddr, talks: &Talks, at: usize) -> (Duration, u64) {
    let (mut connection, body) = (Connection::open(addr), talks.body(at));
    let begun = Instant::now();
    let reply = connection.post(at, &body);
    let took = begun.elapsed();
    talks.go_on(at);
    let reply: Value = serde_json::from_slice(&reply).unwrap();
    (took, reply["usage"]["total_tokens"].as_u64().unwrap())
}

/// Turns of `sessions`, `rate` a second: how long each took from when it was due, and how late it was sent.
pub(super) fn offered(
    addr: SocketAddr,
    talks: &mut Talks,
    sessions: usize,
    rate: u32,
    seconds: u32,
) -> (Vec<Duration>, Vec<Duration>) {
    let begun = Instant::now() + Duration::from_millis(100);
    let talks = &*talks;
    let offer = |first: u32| {
        let mut connection = Connection::open(addr);
        let mut times = Vec::new();
        for turn in (first..rate * seconds).step_by(CONNECTIONS as usize) {
            let session = turn as usize % sessions;
            let body = talks.body(session);
            let due = begun + Duration::from_secs(1) * turn / rate;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let late = due.elapsed();
            connection.post(session, &body);
            times.push((due.elapsed(), late));
            talks.go_on(session);
        }
        times
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CONNECTIONS).map(|first| scope.spawn(move || offer(first))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).unzip()
    })
}
