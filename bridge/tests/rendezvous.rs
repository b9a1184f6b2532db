//! The store of a weight-update group: with torch's own client, where `DRIFTLESS_SGLANG_PYTHON` names a
//! Python that has torch, and with clients that mean harm.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use driftless_bridge::Error;
use driftless_bridge::push::nccl::{Rendezvous, RendezvousOptions};

const GREETING: [u8; 5] = [0x00, 0xce, 0xf7, 0x85, 0x3c];

fn start(options: RendezvousOptions) -> Rendezvous {
    Rendezvous::start(SocketAddr::from(([127, 0, 0, 1], 0)), options).unwrap()
}

fn connect(rendezvous: &Rendezvous) -> TcpStream {
    let stream = TcpStream::connect(rendezvous.address()).unwrap();
    // A test that fails ends, too.
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn text(bytes: &str) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes.as_bytes()].concat()
}

/// A client that is served answers a ping.
fn served(stream: &mut TcpStream) -> bool {
    let mut reply = [0; 4];
    stream.write_all(&[13, 1, 2, 3, 4]).is_ok()
        && stream.read_exact(&mut reply).is_ok()
        && reply == [1, 2, 3, 4]
}

/// The other end has closed the connection; what it said before is of no interest.
fn closed(stream: &mut TcpStream) -> bool {
    let mut bytes = [0; 64];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// Until it is so; a test that waits in vain fails.
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn torchs_own_client_and_a_gloo_group() {
    let Ok(python) = std::env::var("DRIFTLESS_SGLANG_PYTHON") else {
        println!("skipped: DRIFTLESS_SGLANG_PYTHON is not set");
        return;
    };
    let rendezvous = start(RendezvousOptions::default());
    rendezvous.set("/group/from-the-server", b"hello").unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_store.py");
    let address = rendezvous.address();
    let mut command = Command::new(python);
    command.arg(script).arg(address.ip().to_string()).arg(address.port().to_string());
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("OK"), "{out}\n{err}");
    println!("{out}");
}

/// The bytes that SGLang's rank was seen to exchange with torch's server.
#[test]
fn the_recorded_exchange() {
    let rendezvous = start(RendezvousOptions::default());
    let mut rank = connect(&rendezvous);
    rank.write_all(&GREETING).unwrap();
    assert!(served(&mut rank));
    rank.write_all(&[&[4][..], &text("init/"), &1i64.to_le_bytes()].concat()).unwrap();
    let mut reply = [0; 8];
    rank.read_exact(&mut reply).unwrap();
    assert_eq!(i64::from_le_bytes(reply), 1);
    rank.write_all(&[&[6][..], &1u64.to_le_bytes(), &text("/G/G//cuda//0")].concat()).unwrap();
    eventually("it waits", || rendezvous.waited_for() == ["/G/G//cuda//0"]);
    rendezvous.set("/G/G//cuda//0", &[7; 128]).unwrap();
    let mut stop = [9];
    rank.read_exact(&mut stop).unwrap();
    assert_eq!(stop, [0]);
    assert_eq!(rendezvous.waited_for(), [""; 0]);
    rank.write_all(&[&[3][..], &text("/G/G//cuda//0")].concat()).unwrap();
    let mut id = [0; 136];
    rank.read_exact(&mut id).unwrap();
    assert_eq!(id[..8], 128u64.to_le_bytes());
    assert_eq!(id[8..], [7; 128]);
}

#[test]
fn who_breaks_the_protocol_harms_only_himself() {
    let rendezvous = start(RendezvousOptions::default());
    let mut good = connect(&rendezvous);
    good.write_all(&GREETING).unwrap();
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![13, 0, 0, 0, 0],
        vec![0, 1, 2, 3, 4],
        [&GREETING[..], &[99]].concat(),
        [&GREETING[..], &[1], &u64::MAX.to_le_bytes()].concat(),
        [&GREETING[..], &[3], &text("nobody set it")].concat(),
        [&GREETING[..], &[6], &1u64.to_le_bytes(), &text("k"), &[7]].concat(),
        [&GREETING[..], &[1], &text("n"), &text("word"), &[4], &text("n"), &1i64.to_le_bytes()].concat(),
    ] {
        let mut bad = connect(&rendezvous);
        bad.write_all(&bytes).unwrap();
        assert!(closed(&mut bad), "{bytes:?}");
        assert!(served(&mut good));
    }
    eventually("the others are gone", || rendezvous.clients() == 1);
}

#[test]
fn half_a_request_closes_its_connection_and_silence_does_not() {
    let rendezvous = start(RendezvousOptions::default().with_deadline(Duration::from_millis(100)));
    // On a busy machine a client may greet, or ask, too late; another one then is the silent one.
    let mut silent = None;
    eventually("a client is served in time", || {
        let mut client = connect(&rendezvous);
        let in_time = client.write_all(&GREETING).is_ok() && served(&mut client);
        silent = in_time.then_some(client);
        in_time
    });
    let mut silent = silent.unwrap();
    let mut half = connect(&rendezvous);
    half.write_all(&[&GREETING[..], &[1], &9u64.to_le_bytes(), b"abc"].concat()).unwrap();
    // A byte now and then does not help: the whole request has the deadline.
    let mut mute = connect(&rendezvous);
    assert!(closed(&mut half), "half a request");
    assert!(closed(&mut mute), "no greeting");
    assert!(served(&mut silent));
}

#[test]
fn a_slow_drip_is_one_request() {
    let rendezvous = start(RendezvousOptions::default().with_deadline(Duration::from_millis(100)));
    let mut drip = connect(&rendezvous);
    drip.write_all(&[&GREETING[..], &[1], &1000u64.to_le_bytes()].concat()).unwrap();
    eventually("it is closed", || {
        std::thread::sleep(Duration::from_millis(5));
        drip.write_all(&[0]).is_err()
    });
}

#[test]
fn who_does_not_read_is_closed() {
    let options = RendezvousOptions::default().with_deadline(Duration::from_millis(200));
    let rendezvous = start(options);
    rendezvous.set("/big", &vec![1; 1 << 20]).unwrap();
    let mut greedy = connect(&rendezvous);
    greedy.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    greedy.write_all(&GREETING).unwrap();
    let get = [&[3][..], &text("/big")].concat();
    eventually("it is closed", || greedy.write_all(&get).is_err() || rendezvous.clients() == 0);
    eventually("it is forgotten", || rendezvous.clients() == 0);
}

/// Asks how many keys there are, as only a rank does.
fn asks(stream: &mut TcpStream) -> bool {
    stream.write_all(&[7]).is_ok() && stream.read_exact(&mut [0; 8]).is_ok()
}

fn greeted(rendezvous: &Rendezvous) -> TcpStream {
    let mut stream = connect(rendezvous);
    stream.write_all(&GREETING).unwrap();
    stream
}

#[test]
fn connections_are_bounded() {
    let rendezvous = start(RendezvousOptions::default().with_connections_max(2));
    let (mut first, mut second) = (greeted(&rendezvous), greeted(&rendezvous));
    assert!(asks(&mut first) && asks(&mut second));
    let mut third = greeted(&rendezvous);
    third.write_all(&[7]).unwrap();
    assert!(asks(&mut first) && asks(&mut second), "who has asked for something stays");
    assert_eq!(rendezvous.clients(), 2);
    second.shutdown(Shutdown::Both).unwrap();
    third.read_exact(&mut [0; 8]).unwrap();
    assert!(asks(&mut first) && asks(&mut third), "and who waits is next");
}

#[test]
fn silent_connections_make_room_for_ranks() {
    let rendezvous = start(RendezvousOptions::default().with_connections_max(4));
    let mut rank = greeted(&rendezvous);
    assert!(asks(&mut rank));
    let mut strangers: Vec<TcpStream> = (0..200).map(|_| greeted(&rendezvous)).collect();
    let mut other = greeted(&rendezvous);
    assert!(asks(&mut other), "whoever is silent does not keep a rank out");
    assert!(asks(&mut rank), "nor drive one away");
    assert!(rendezvous.clients() <= 4);
    assert!(closed(&mut strangers[0]));
}

#[test]
fn a_port_that_is_taken_and_a_store_that_ends() {
    let rendezvous = start(RendezvousOptions::default());
    let taken = Rendezvous::start(rendezvous.address(), RendezvousOptions::default());
    assert!(matches!(taken, Err(Error::Listen { .. })));
    let mut client = connect(&rendezvous);
    client.write_all(&GREETING).unwrap();
    assert!(served(&mut client));
    drop(rendezvous);
    assert!(closed(&mut client));
}

#[test]
fn what_does_not_fit_is_refused() {
    let rendezvous = start(RendezvousOptions::default());
    let large = vec![0; 40 << 20];
    rendezvous.set("/a", &large).unwrap();
    let refused = rendezvous.set("/b", &large).unwrap_err();
    assert!(matches!(&refused, Error::Rendezvous { key, .. } if key == "/b"), "{refused}");
}
