//! A proxy in front of an engine that misbehaves below HTTP, at the calls and in the way it is told.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What a call gets instead of its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bad {
    /// The connection ends before a byte.
    Close,
    /// It ends in the middle of the body.
    Cut,
    /// The page of a proxy, with status 200.
    Html,
    /// Bytes that are no HTTP.
    Garbage,
    /// JSON that is another call's.
    Other,
    /// `success` is false, with status 200.
    NoSuccess,
    /// These statuses.
    Status(u16),
    /// To a place that must not be asked.
    Redirect,
    InfiniteBody,
    InfiniteHeaders,
    /// A byte now and then, for ever.
    Drip,
    /// Nothing, for ever.
    Hang,
}

pub(crate) const ALL: [Bad; 15] = [
    Bad::Close,
    Bad::Cut,
    Bad::Html,
    Bad::Garbage,
    Bad::Other,
    Bad::NoSuccess,
    Bad::Status(400),
    Bad::Status(404),
    Bad::Status(500),
    Bad::Status(502),
    Bad::Redirect,
    Bad::InfiniteBody,
    Bad::InfiniteHeaders,
    Bad::Drip,
    Bad::Hang,
];

/// The call that misbehaves, how, and whether the engine does what it was told all the same.
pub(crate) type Plan = (&'static str, Bad, bool);

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    plan: Arc<Mutex<Option<Plan>>>,
    /// Requests that followed a redirect.
    trapped: Arc<Mutex<usize>>,
    over: Arc<AtomicBool>,
}

impl Drop for Proxy {
    /// Its connections end with their peers.
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.address);
    }
}

impl Proxy {
    pub(crate) fn start(engine: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (plan, trapped) = (Arc::<Mutex<Option<Plan>>>::default(), Arc::<Mutex<usize>>::default());
        let (shared, seen) = (plan.clone(), trapped.clone());
        let over = Arc::<AtomicBool>::default();
        let ends = over.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                let (plan, trapped) = (shared.clone(), seen.clone());
                // A peer that went away is what many of the tests are about.
                std::thread::spawn(move || drop(serve(connection, engine, &plan, &trapped)));
            }
        });
        Self { address, plan, trapped, over }
    }

    /// From now on every such call misbehaves; none does with `None`.
    pub(crate) fn set(&self, plan: Option<Plan>) {
        *self.plan.lock().unwrap() = plan;
    }

    pub(crate) fn trapped(&self) -> usize {
        *self.trapped.lock().unwrap()
    }
}

/// One request a connection.
fn serve(
    mut client: TcpStream,
    engine: SocketAddr,
    plan: &Mutex<Option<Plan>>,
    trapped: &Mutex<usize>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let call: Vec<_> = line.split_whitespace().take(2).map(str::to_owned).collect();
    let (mut head, mut length) = (line, 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? <= 2 {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    if call.get(1).is_some_and(|path| path == "/trap") {
        *trapped.lock().unwrap() += 1;
    }
    let plan = *plan.lock().unwrap();
    let forward = || -> std::io::Result<Vec<u8>> {
        let mut upstream = TcpStream::connect(engine)?;
        upstream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes())?;
        upstream.write_all(&body)?;
        let mut reply = Vec::new();
        upstream.read_to_end(&mut reply)?;
        Ok(reply)
    };
    match plan {
        Some((bad_call, bad, does)) if call.join(" ") == bad_call => {
            if does {
                forward()?;
            }
            misbehave(&mut client, bad)
        }
        _ => client.write_all(&forward()?),
    }
}

fn misbehave(client: &mut TcpStream, bad: Bad) -> std::io::Result<()> {
    let reply = |status: u16, more: &str, body: &str| {
        format!(
            "HTTP/1.1 {status} X\r\nconnection: close\r\n{more}content-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let whole = match bad {
        Bad::Close => return Ok(()),
        Bad::Cut => "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"success\": true".to_owned(),
        Bad::Html => reply(200, "", "<html>ok</html>"),
        Bad::Garbage => "\u{1}\u{2}garbage\r\n\r\n".to_owned(),
        Bad::Other => reply(200, "", r#"{"loads": []}"#),
        Bad::NoSuccess => reply(200, "", r#"{"success": false, "message": "no", "status": "no"}"#),
        Bad::Status(status) => reply(status, "", r#"{"success": false, "message": "no"}"#),
        Bad::Redirect => reply(307, "location: /trap\r\n", ""),
        Bad::InfiniteBody => {
            client.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
            loop {
                client.write_all(&[b' '; 1 << 16])?;
            }
        }
        Bad::InfiniteHeaders => {
            client.write_all(b"HTTP/1.1 200 OK\r\n")?;
            loop {
                client.write_all(b"x-more: and more\r\n")?;
            }
        }
        Bad::Drip => {
            client.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")?;
            loop {
                client.write_all(b" ")?;
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        Bad::Hang => {
            // Until the peer gives up.
            return client.read_to_end(&mut Vec::new()).map(drop);
        }
    };
    client.write_all(whole.as_bytes())
}
