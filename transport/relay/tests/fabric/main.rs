//! Links over real UCX, between threads and between processes, one of which is killed. Without libucp the
//! tests say so and do nothing, unless `DRIFTLESS_UCX_REQUIRED` names the release that is to be there.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod memory;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use driftless_relay::fabric::ucx::{Bucket, INFLIGHT_MAX, Ucx, UcxLink, UcxOptions};
use driftless_relay::{Error, Result};
use driftless_testkit::process::Process;
use driftless_testkit::random::Random;

use memory::MemoryFabric;

/// Only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);
/// UCX's transports of which each must do: TCP, which watches its peers, and shared memory, which does not.
const WAYS: [&str; 2] = ["tcp", "posix,sysv,cma,self"];
/// Under which the other process finds what it has to do.
const ROLE: &str = "DRIFTLESS_TEST_FABRIC";

fn fabric(transports: &str) -> Option<Ucx> {
    let mut options = UcxOptions::default();
    options.settings = vec![("TLS".to_owned(), transports.to_owned())];
    common::fabric(&options)
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    Random(seed).bytes(length)
}

fn filled(fabric: &Ucx, content: &[u8]) -> Bucket {
    let mut bucket = fabric.bucket(content.len()).unwrap();
    bucket.copy_from_slice(content);
    bucket
}

fn nothing() -> std::result::Result<(), String> {
    Ok(())
}

fn send(link: &mut UcxLink, bucket: Bucket, tag: u64) -> Result<Bucket> {
    let range = 0..bucket.len();
    let ticket = link.send(bucket, range, tag)?;
    Ok(link.finish(ticket, LONG, &mut nothing)?.0)
}

fn receive(link: &mut UcxLink, bucket: Bucket, tag: u64) -> Result<(Bucket, usize)> {
    let range = 0..bucket.len();
    let ticket = link.receive(bucket, range, tag)?;
    link.finish(ticket, LONG, &mut nothing)
}

/// A document on a socket: its length, and its bytes.
fn tell(socket: &mut TcpStream, document: &[u8]) {
    socket.write_all(&(document.len() as u32).to_le_bytes()).unwrap();
    socket.write_all(document).unwrap();
}

fn hear(socket: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).unwrap();
    let mut document = vec![0; u32::from_le_bytes(length) as usize];
    socket.read_exact(&mut document).unwrap();
    document
}

/// Both sides connect to each other.
fn meet(fabric: &Ucx, socket: &mut TcpStream) -> UcxLink {
    let mut link = fabric.link("the other process").unwrap();
    tell(socket, &link.address().unwrap());
    link.connect(&hear(socket)).unwrap();
    link
}

/// This test program as another process, which plays `role`.
struct Other {
    process: Process,
    socket: TcpStream,
}

impl Other {
    fn start(role: &str, transports: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "other_process", "--nocapture"]);
        command.env(ROLE, format!("{role} {transports} {}", listener.local_addr().unwrap()));
        listener.set_nonblocking(true).unwrap();
        let mut process = Process::start(&mut command);
        let socket = process.brings("connection", || match listener.accept() {
            Ok((socket, _)) => Some(socket),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        });
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        Self { process, socket }
    }

    fn succeed(self) {
        self.process.succeed();
    }
}

/// What the other process runs. On its own, without a role, there is nothing to do.
#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [role, transports, address] = role.split(' ').collect::<Vec<_>>()[..] else { panic!("{role}") };
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let fabric = fabric(transports).unwrap();
    let mut link = meet(&fabric, &mut socket);
    match role {
        "mirror" => mirror(&fabric, &mut link),
        "flood" => flood(&fabric, &mut link),
        "still" => {
            send(&mut link, filled(&fabric, &bytes(1, FLOOD_BYTES)), 1).unwrap();
            thread::park();
        }
        _ => panic!("{role}"),
    }
}

#[test]
fn fabrics_conform() {
    conformance::check(&MemoryFabric::default());
    for transports in WAYS {
        let Some(fabric) = fabric(transports) else { return };
        println!("{transports}");
        conformance::check(&fabric);
    }
}

const SIZES: [usize; 5] = [1, 4000, 100_000, 1 << 20, 20 << 20];

/// Sends back what comes.
fn mirror(fabric: &Ucx, link: &mut UcxLink) {
    for (tag, size) in SIZES.into_iter().enumerate() {
        // Larger than the message: its length is learned.
        let (bucket, length) = receive(link, fabric.bucket(size + 10).unwrap(), tag as u64).unwrap();
        assert_eq!(length, size);
        let ticket = link.send(bucket, 0..length, 100 + tag as u64).unwrap();
        let _ = link.finish(ticket, LONG, &mut nothing).unwrap();
    }
}

#[test]
fn bytes_cross_between_processes_and_come_back() {
    for transports in WAYS {
        let Some(fabric) = fabric(transports) else { return };
        let mut other = Other::start("mirror", transports);
        let mut link = meet(&fabric, &mut other.socket);
        for (tag, size) in SIZES.into_iter().enumerate() {
            let expected = bytes(tag as u64, size);
            let bucket = send(&mut link, filled(&fabric, &expected), tag as u64).unwrap();
            drop(bucket);
            let (found, length) = receive(&mut link, fabric.bucket(size).unwrap(), 100 + tag as u64).unwrap();
            assert!(length == size && found[..] == expected[..], "{transports}: {size} bytes");
        }
        other.succeed();
    }
}

#[test]
fn a_range_outside_the_bucket_is_refused() {
    let Some(fabric) = fabric("tcp,self") else { return };
    let (mut near, far) = (fabric.link("far").unwrap(), fabric.link("near").unwrap());
    near.connect(&far.address().unwrap()).unwrap();
    let refused = near.send(fabric.bucket(10).unwrap(), 5..11, 1);
    assert!(matches!(refused, Err(Error::Link { .. })), "{refused:?}");
}

#[test]
fn links_of_one_fabric_work_on_threads() {
    let Some(fabric) = fabric("tcp,self") else { return };
    thread::scope(|scope| {
        for number in 0..4 {
            let fabric = fabric.clone();
            let (mut near, mut far) = (fabric.link("far").unwrap(), fabric.link("near").unwrap());
            near.connect(&far.address().unwrap()).unwrap();
            let mut expected = Vec::new();
            for message in 0..20u64 {
                expected.push(bytes(100 * number + message, 1 + (message as usize * 40_000)));
            }
            let buckets: Vec<Bucket> = expected.iter().map(|content| filled(&fabric, content)).collect();
            scope.spawn(move || {
                for (tag, bucket) in buckets.into_iter().enumerate() {
                    let _ = send(&mut near, bucket, tag as u64).unwrap();
                }
            });
            scope.spawn(move || {
                for (tag, expected) in expected.iter().enumerate() {
                    let bucket = fabric.bucket(expected.len()).unwrap();
                    let (bucket, length) = receive(&mut far, bucket, tag as u64).unwrap();
                    assert!(bucket[..length] == expected[..], "pair {number}, message {tag}");
                }
            });
        }
    });
}

#[test]
fn waits_end_and_name_the_peer_while_their_memory_stays() {
    let Some(fabric) = fabric("tcp,self") else { return };
    let mut link = fabric.link("10.0.0.9:7421").unwrap();
    let ticket = link.receive(fabric.bucket(1 << 20).unwrap(), 0..1 << 20, 1).unwrap();
    let outcome = link.finish(ticket, Duration::from_millis(50), &mut nothing);
    let Err(error @ Error::LinkTimeout { .. }) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("10.0.0.9:7421"), "{error}");
    let late = link.receive(fabric.bucket(10).unwrap(), 0..10, 2);
    assert!(matches!(late, Err(Error::LinkLost { .. })), "a link is of no use after that: {late:?}");

    let mut link = fabric.link("watched").unwrap();
    let ticket = link.receive(fabric.bucket(10).unwrap(), 0..10, 1).unwrap();
    let outcome = link.finish(ticket, LONG, &mut || Err("it hung up".to_owned()));
    assert!(matches!(&outcome, Err(Error::LinkLost { reason, .. }) if reason == "it hung up"), "{outcome:?}");
    let unconnected = fabric.link("nobody").unwrap().send(fabric.bucket(1).unwrap(), 0..1, 1);
    assert!(matches!(unconnected, Err(Error::Link { .. })));
    for address in [&[][..], &[0; 7], &vec![0; 1 << 20]] {
        assert!(matches!(fabric.link("nobody").unwrap().connect(address), Err(Error::Link { .. })));
    }
}

#[test]
fn what_is_in_flight_is_bounded_and_messages_must_fit() {
    let Some(fabric) = fabric("tcp,self") else { return };
    let (mut near, mut far) = (fabric.link("far").unwrap(), fabric.link("near").unwrap());
    near.connect(&far.address().unwrap()).unwrap();
    let mut tickets = Vec::new();
    for tag in 0..INFLIGHT_MAX {
        tickets.push(far.receive(fabric.bucket(10).unwrap(), 0..10, tag as u64).unwrap());
    }
    assert!(matches!(
        far.receive(fabric.bucket(10).unwrap(), 0..10, 99),
        Err(Error::Transport(driftless_transport::Error::Busy { .. }))
    ));
    // Another link's ticket finishes nothing.
    assert!(matches!(near.finish(tickets.remove(0), LONG, &mut nothing), Err(Error::Link { .. })));
    let sending = near.send(fabric.bucket(11).unwrap(), 0..11, 1).unwrap();
    let sender = thread::spawn(move || near.finish(sending, LONG, &mut nothing).map(drop));
    let outcome = far.finish(tickets.remove(0), LONG, &mut nothing);
    assert!(
        matches!(&outcome, Err(Error::Link { status, .. }) if status.contains("truncated")),
        "{outcome:?}"
    );
    // The sender's message has left it, or its peer has: both are fine.
    let _ = sender.join().unwrap();
}

const FLOOD_BYTES: usize = 4 << 20;

fn flood(fabric: &Ucx, link: &mut UcxLink) {
    let mut bucket = filled(fabric, &bytes(1, FLOOD_BYTES));
    for tag in 1.. {
        let Ok(back) = send(link, bucket, tag) else { return };
        bucket = back;
    }
}

#[test]
fn a_killed_peer_is_an_error_within_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(5);
    let expected = bytes(1, FLOOD_BYTES);
    for transports in WAYS {
        for (role, after) in [("still", 1), ("flood", 1), ("flood", 7)] {
            let Some(fabric) = fabric(transports) else { return };
            let mut other = Other::start(role, transports);
            let mut link = meet(&fabric, &mut other.socket);
            let mut bucket = fabric.bucket(FLOOD_BYTES).unwrap();
            let mut tag = 0;
            let error = loop {
                tag += 1;
                if tag > after {
                    // Of those that flood, somewhere in the middle of a message.
                    other.process.kill();
                }
                let ticket = link.receive(bucket, 0..FLOOD_BYTES, tag);
                match ticket.and_then(|ticket| link.finish(ticket, DEADLINE, &mut nothing)) {
                    Ok((back, length)) => {
                        assert!(length == FLOOD_BYTES && back[..] == expected[..], "message {tag} is whole");
                        bucket = back;
                    }
                    Err(error) => break error,
                }
            };
            println!("{transports}, {role} after {after}: {error}");
            assert!(
                matches!(error, Error::LinkLost { .. } | Error::LinkTimeout { .. } | Error::Link { .. }),
                "{error:?}"
            );
            assert!(error.to_string().contains("the other process"), "{error}");
        }
    }
}

#[test]
fn library_missing_is_an_error_that_says_what_to_install() {
    let mut options = UcxOptions::default();
    options.library = Some(PathBuf::from("/nonexistent/libucp.so.0"));
    let Err(error @ Error::Library { .. }) = Ucx::open(&options) else { panic!("there is none") };
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("libucx0"), "{source}");
}

#[test]
fn settings_that_ucx_does_not_take_are_errors() {
    let Some(_) = fabric("tcp") else { return };
    let mut options = UcxOptions::default();
    for (name, value) in [("RNDV_THRESH", "many"), ("TLS\0", "tcp")] {
        options.settings = vec![(name.to_owned(), value.to_owned())];
        let outcome = Ucx::open(&options).map(drop);
        assert!(
            matches!(outcome, Err(Error::Transport(driftless_transport::Error::BadSetting { .. }))),
            "{name}={value}: {outcome:?}"
        );
    }
    options.settings = vec![("TLS".to_owned(), "no_such_transport".to_owned())];
    let outcome = Ucx::open(&options).map(drop);
    assert!(matches!(outcome, Err(Error::Link { .. })), "{outcome:?}");
}
