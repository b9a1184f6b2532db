//! What follower and relay answer to those who may not ask, to requests that are none, and to more
//! connections than there are descriptors.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod flood;
mod requests;
mod slow;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use driftless_follower::{ServeOptions, serve};
use driftless_http::Server;
use driftless_http::listen::Limits;
use driftless_relay::RelayOptions;
use driftless_store::Store;
use driftless_testkit::publications::{MODEL, RUN, Weights, publisher, step};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Follower, Version};

const TOKEN: &str = "the token";
const AUTHORISED: &str = "authorization: Bearer the token\r\n";
/// Only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);
/// A deadline that no test reaches.
const NEVER: Duration = Duration::from_secs(24 * 3600);

fn limits(authorise: Duration, idle: Duration) -> Limits {
    Limits::default().with_authorise(authorise).with_idle(idle)
}

/// A run with version 0 in `dir`'s store, or a version more.
fn publish(store: &Arc<dyn Store>, dir: &Path) -> Version {
    let start = if dir.join("baseline").exists() { Start::Resume } else { Start::NewRun };
    let mut publisher = publisher(store, start, &dir.join("baseline"));
    let mut weights = Weights::small(1);
    let number = publisher.version().map_or(0, |version| version.0 + 1);
    (1..=number).for_each(|number| weights.step(number, 40));
    publisher.publish(&weights, step(number), Mode::Full).unwrap().version
}

fn follower(store: &Arc<dyn Store>, dir: &Path) -> Follower {
    let mut options = FollowerOptions::new(RUN, dir.join("host"), "host-0");
    options.model = MODEL.to_owned();
    (options.poll, options.renew) = (Duration::from_millis(10), Duration::from_millis(50));
    (options.backoff_max, options.coordinated) = (Duration::from_millis(50), false);
    Follower::open(store.clone(), options, vec![]).unwrap()
}

fn serve_follower(store: &Arc<dyn Store>, dir: &Path, limits: Limits) -> Server {
    serve_here(follower(store, dir), limits)
}

fn serve_here(follower: Follower, limits: Limits) -> Server {
    let options = ServeOptions::new(([127, 0, 0, 1], 0)).with_token(TOKEN).with_limits(limits);
    serve(follower, options).unwrap()
}

fn serve_relay(store: &Arc<dyn Store>, dir: &Path, limits: Limits) -> driftless_relay::Server {
    let mut options = RelayOptions::new("127.0.0.1:0".parse().unwrap(), dir.join("cache"));
    (options.token, options.limits) = (Some(TOKEN.to_owned()), limits);
    driftless_relay::serve(store.clone(), options).unwrap()
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// All that comes until the server closes the connection.
fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    // A server that hangs up on what it has not read resets the connection, behind what it said.
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// What is answered to these bytes, up to the end of the connection.
fn raw(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = connect(addr);
    // The server may hang up before it has read all.
    let _ = stream.write_all(bytes);
    rest(&mut stream)
}

/// One answer on a connection that goes on; its body is that of a small JSON document.
fn ask(stream: &mut TcpStream, request: &str) -> String {
    write!(stream, "{request} HTTP/1.1\r\nhost: x\r\n{AUTHORISED}\r\n").unwrap();
    answer(stream)
}

fn answer(stream: &mut TcpStream) -> String {
    let (mut head, mut byte) = (String::new(), [0]);
    while !head.ends_with("\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        head.push(char::from(byte[0]));
    }
    let length = head.to_lowercase().split("content-length: ").nth(1).unwrap().to_owned();
    let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    head + std::str::from_utf8(&body).unwrap()
}
