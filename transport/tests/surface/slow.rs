//! Deadlines: who is slow before a request is authorised, and who falls silent behind one.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use driftless_store::{Memory, Store};

use super::{
    AUTHORISED, LONG, NEVER, answer, ask, connect, limits, publish, rest, serve_follower, serve_relay,
};
use driftless_testkit::hook::Hook;

/// Long enough for a request to come on a busy machine.
const SHORT: Duration = Duration::from_secs(1);

/// Says `begin`, then a byte every few milliseconds, until the server closes the connection: what it said.
fn drip(addr: SocketAddr, begin: &str) -> String {
    let mut stream = connect(addr);
    stream.write_all(begin.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let (mut said, mut part) = (Vec::new(), [0; 1024]);
    for _ in 0..LONG.as_millis() / 5 {
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

#[test]
fn strangers_have_a_deadline_that_no_byte_moves() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&store, dir.path());
    let follower = serve_follower(&store, dir.path(), limits(SHORT, NEVER));
    let relay = serve_relay(&store, dir.path(), limits(SHORT, NEVER));
    for addr in [follower.addr(), relay.addr()] {
        let mut known = connect(addr);
        assert!(ask(&mut known, "GET /status").starts_with("HTTP/1.1 200"));
        // The head tells who asks; nobody waits for a body.
        let post = "POST /prepare HTTP/1.1\r\nhost: x\r\n";
        let (body, chunked) = ("content-length: 4000\r\n\r\n", "transfer-encoding: chunked\r\n\r\n4000\r\n");
        let refused = "HTTP/1.1 401";
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(rest(&mut connect(addr)), "", "who says nothing is told nothing"));
            scope.spawn(|| assert_eq!(drip(addr, ""), ""));
            scope.spawn(|| assert_eq!(drip(addr, "GET /status HTTP/1.1\r\nhost: x\r\nx-slow: "), ""));
            scope.spawn(|| assert!(drip(addr, &format!("{post}{body}")).starts_with(refused)));
            scope.spawn(|| assert!(drip(addr, &format!("{post}{chunked}")).starts_with(refused)));
        });
        // A probe is answered, and is the last request of its connection.
        let mut probe = connect(addr);
        write!(probe, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let answer = rest(&mut probe);
        assert!(answer.contains("connection: close") && answer.ends_with(r#"{"ok":true}"#), "{answer}");
        assert!(ask(&mut known, "GET /status").starts_with("HTTP/1.1 200"), "who has the token stays");
        assert!(ask(&mut known, "GET /health").starts_with("HTTP/1.1 200"), "and may probe");
        assert!(ask(&mut known, "GET /status").starts_with("HTTP/1.1 200"));
    }
}

#[test]
fn stopped_body_and_silent_connection_end_though_authorised() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&store, dir.path());
    let server = serve_follower(&store, dir.path(), limits(NEVER, SHORT));
    let mut silent = connect(server.addr());
    assert!(ask(&mut silent, "GET /status").starts_with("HTTP/1.1 200"));
    assert_eq!(rest(&mut silent), "");
    let mut stopped = connect(server.addr());
    write!(stopped, "POST /prepare HTTP/1.1\r\nhost: x\r\n{AUTHORISED}content-length: 30\r\n\r\n{{").unwrap();
    let said = rest(&mut stopped);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{said}");
}

#[test]
fn a_request_that_takes_longer_than_every_deadline_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&store, dir.path());
    let (asked, was_asked) = channel();
    let (open, opened) = channel::<()>();
    let (opened, waits) = (Mutex::new(opened), AtomicBool::new(true));
    let gate = Hook::before(&store, move |_| {
        if waits.swap(false, SeqCst) {
            asked.send(()).unwrap();
            opened.lock().unwrap().recv_timeout(LONG).unwrap();
        }
    });
    let server = serve_follower(&gate, dir.path(), limits(SHORT, SHORT));
    let addr = server.addr();
    let prepare = thread::spawn(move || ask(&mut connect(addr), "POST /prepare"));
    was_asked.recv_timeout(LONG).unwrap();
    // These came later, and have reached their deadlines.
    let mut silent = connect(addr);
    assert!(ask(&mut silent, "GET /status").starts_with("HTTP/1.1 200"));
    assert_eq!(rest(&mut silent) + &rest(&mut connect(addr)), "");
    open.send(()).unwrap();
    let answer = prepare.join().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""version":0"#), "{answer}");
}

#[test]
fn authorised_connections_are_waited_for_and_never_closed() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&store, dir.path());
    let mut limits = limits(NEVER, NEVER);
    limits.connections = 2;
    let server = serve_follower(&store, dir.path(), limits);
    let (mut first, mut second) = (connect(server.addr()), connect(server.addr()));
    assert!(ask(&mut first, "GET /status").starts_with("HTTP/1.1 200"));
    assert!(ask(&mut second, "GET /status").starts_with("HTTP/1.1 200"));
    let mut third: TcpStream = connect(server.addr());
    write!(third, "GET /status HTTP/1.1\r\nhost: x\r\n{AUTHORISED}\r\n").unwrap();
    for known in [&mut first, &mut second] {
        assert!(ask(known, "GET /status").starts_with("HTTP/1.1 200"), "{known:?}");
    }
    drop(first);
    assert!(answer(&mut third).starts_with("HTTP/1.1 200"));
    assert!(ask(&mut second, "GET /status").starts_with("HTTP/1.1 200"));
}
