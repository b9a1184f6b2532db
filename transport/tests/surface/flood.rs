//! More connections than there are descriptors: a host goes on with its work, and whoever has the token gets
//! in.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use driftless_http::listen::Limits;
use driftless_store::wait::Stop;
use driftless_store::{Disk, Key, Store};
use driftless_testkit::flood::Flood;
use driftless_transport::gc::Ack;
use driftless_transport::{Run, Version};

use super::{AUTHORISED, LONG, NEVER, follower, limits, publish, serve_here, serve_relay};
use driftless_testkit::process::Process;
use driftless_testkit::publications::{MODEL, RUN, named};

/// Tells the other process what it is and where it works.
const ROLE: &str = "DRIFTLESS_TEST_ROLE";
const DIR: &str = "DRIFTLESS_TEST_DIR";
/// Descriptors that the other process may have: a fraction of the connections that come.
const FILES: u64 = 96;
const CONNECTIONS: usize = 300;

/// Beginnings of requests that never end.
const BEGINNINGS: &[&str] = &[
    "",
    "G",
    "GET /status HTTP/1.1\r\nauthorization: Bearer the",
    "POST /prepare HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n{",
    "GET /health HTTP/1.1\r\nhost: x\r\n",
];

/// What an exchange brings, if the server takes part in it.
fn try_get(addr: SocketAddr, path: &str, headers: &str) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&addr, LONG).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n").ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    (!answer.is_empty()).then_some(answer)
}

/// What the other process runs. On its own, without a role, there is nothing to do.
#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let dir = PathBuf::from(std::env::var(DIR).unwrap());
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));
    let few = rustix::process::Rlimit { current: Some(FILES), maximum: Some(FILES) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    // No deadline helps it.
    let limits: Limits = limits(NEVER, NEVER);
    if role == "relay" {
        let server = serve_relay(&store, &dir, limits);
        println!("listening {}", server.addr());
        thread::park();
    }
    let follower = follower(&store, &dir);
    let server = serve_here(follower.clone(), limits);
    println!("listening {}", server.addr());
    follower.run_until(&Stop::new(), false).unwrap();
}

fn start(role: &str, dir: &Path) -> (Process, SocketAddr) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "flood::other_process", "--nocapture"]).env(ROLE, role).env(DIR, dir);
    let process = Process::start(&mut command);
    let addr = process.says("listening ").parse().unwrap();
    (process, addr)
}

#[test]
fn follower_goes_on_under_more_connections_than_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    publish(&store, dir.path());
    let (mut process, addr) = start("follower", dir.path());
    let lease: Key = Run::open(store.clone(), RUN).unwrap().follower_key("host-0").unwrap();
    let version = || {
        let ack: Ack = serde_json::from_slice(&store.get(&lease, None).ok()?).ok()?;
        Some(ack.version)
    };
    process.brings("version 0", || (version() == Some(Version(0))).then_some(()));
    let flood = Flood::of(addr, CONNECTIONS, BEGINNINGS);
    flood.reaches(CONNECTIONS as u64);
    assert_eq!(publish(&store, dir.path()), Version(1));
    process.brings("version 1", || (version() == Some(Version(1))).then_some(()));
    for _ in 0..3 {
        let before = store.head(&lease).unwrap().modified;
        process.brings("a renewed lease", || (store.head(&lease).ok()?.modified > before).then_some(()));
    }
    let status = process.brings("a status", || {
        let answer = String::from_utf8(try_get(addr, "/status", AUTHORISED)?).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(answer)
    });
    assert!(status.contains(r#""version":1"#) && status.contains(MODEL), "{status}");
    flood.reaches(2000);
    assert_eq!(publish(&store, dir.path()), Version(2));
    process.brings("version 2", || (version() == Some(Version(2))).then_some(()));
}

#[test]
fn a_relay_serves_under_more_connections_than_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let (mut process, addr) = start("relay", dir.path());
    let flood = Flood::of(addr, CONNECTIONS, BEGINNINGS);
    flood.reaches(CONNECTIONS as u64);
    for round in 0..3 {
        let object = named(&store, &format!("a/{round}"), 200_000 + round);
        let path = format!("/objects/{}?size={}&blake3={}", object.key, object.size, object.blake3);
        let headers = format!("{AUTHORISED}range: bytes=0-{}\r\n", object.size);
        let bytes = store.get(&object.key, None).unwrap();
        process.brings("the object", || try_get(addr, &path, &headers)?.ends_with(&bytes).then_some(()));
        let probe = || try_get(addr, "/health", "")?.ends_with(br#"{"ok":true}"#).then_some(());
        process.brings("an answered probe", probe);
        flood.reaches(1000 * (round + 1));
    }
}
