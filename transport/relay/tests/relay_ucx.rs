//! Relays that are asked over UCX: followers in other processes, over TCP, shared memory and between network
//! namespaces; relays that are killed in the middle, and relays that lie. Without libucp the tests say so and
//! do nothing, unless `DRIFTLESS_UCX_REQUIRED` names the release that is to be there.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use driftless_relay::fabric::ucx::{Ucx, UcxOptions};
use driftless_relay::{Recent, RelayOptions, Relays, RelaysOptions, Server, serve};
use driftless_store::wrap::Count;
use driftless_store::{Disk, Key, Memory, Store, conformance, no_progress};
use driftless_testkit::process::{Process, turn};
use driftless_testkit::publications::{
    MODEL, RUN, Weights, assert_reader, assert_same, named, options, step,
};
use driftless_testkit::random::Random;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Publisher, Replica, Run, Version};
use serde_json::{Value, json};

/// UCX's transports of which each must do.
const WAYS: [&str; 2] = ["tcp", "posix,sysv,cma,self"];
const LONG: Duration = Duration::from_secs(120);
/// Tells the other process what it is, where it works, whom it asks or where it listens, and where it dies.
const ROLE: &str = "DRIFTLESS_TEST_ROLE";
const DIR: &str = "DRIFTLESS_TEST_DIR";
const ADDRESS: &str = "DRIFTLESS_TEST_ADDRESS";
const KILL: &str = "DRIFTLESS_TEST_KILL";
const TOKEN: &str = "one token for all";

fn fabric() -> Option<Ucx> {
    common::fabric(&UcxOptions::default())
}

fn relay(fabric: &Ucx, origin: Arc<dyn Store>, dir: &Path, listen: SocketAddr) -> Server {
    let mut options = RelayOptions::new("127.0.0.1:0".parse().unwrap(), dir);
    options.fabric = Some((listen, Arc::new(fabric.clone())));
    options.token = Some(TOKEN.to_owned());
    serve(origin, options).unwrap()
}

fn here(fabric: &Ucx, origin: Arc<dyn Store>, dir: &Path) -> Server {
    relay(fabric, origin, dir, "127.0.0.1:0".parse().unwrap())
}

fn url(server: &Server) -> String {
    format!("ucx://{}", server.fabric_addr().unwrap())
}

fn behind(origin: &Arc<dyn Store>, relays: &[String]) -> Arc<dyn Store> {
    let mut options = RelaysOptions::default();
    options.token = Some(TOKEN.to_owned());
    Arc::new(Relays::new(origin.clone(), relays, options).unwrap())
}

/// A full version and a delta on top of it, which is all but whole: some megabytes.
fn publish(store: &Arc<dyn Store>, dir: &Path) -> Weights {
    publish_rows(store, dir, 3000, 4 << 20)
}

fn publish_rows(store: &Arc<dyn Store>, dir: &Path, rows: u64, object_bytes_max: u64) -> Weights {
    let mut random = Random(5);
    let mut weights = Weights::small(1);
    weights.set("x.large", Dtype::Bf16, &[rows, 1000], |_| random.next() as u8);
    let mut options = options(Start::NewRun, &dir.join("baseline"));
    options.object_bytes_max = object_bytes_max;
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    publisher.publish(&weights, step(0), Mode::Full).unwrap();
    weights.step(7, 3);
    publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    weights
}

/// This test program as another process.
fn other(role: &str, dir: &Path, address: &str, transports: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "other_process", "--nocapture"]);
    command.env(ROLE, role).env(DIR, dir).env(ADDRESS, address).env("UCX_TLS", transports);
    command
}

/// What the other process runs. On its own, without a role, there is nothing to do.
#[test]
fn other_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let variable = |name: &str| std::env::var(name).unwrap();
    let (dir, address) = (PathBuf::from(variable(DIR)), variable(ADDRESS));
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));
    if variable(ROLE) == "follow" {
        let direct = Arc::new(Count::new(store));
        let origin: Arc<dyn Store> = direct.clone();
        let run = Run::open(behind(&origin, &[format!("ucx://{address}")]), RUN).unwrap();
        Replica::open(dir.join("replica")).unwrap().advance(&run, MODEL, Version(1), None).unwrap();
        println!("direct {}", direct.counts().bytes_got);
        return;
    }
    let kill = std::env::var(KILL);
    if let Ok(passes) = &kill {
        let (passes, passed) = (passes.parse::<u64>().unwrap(), AtomicU64::new(0));
        let callback = move || {
            if passed.fetch_add(1, SeqCst) == passes {
                let this = rustix::process::getpid();
                rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
            }
        };
        fail::cfg_callback("relay.ucx.send", callback).unwrap();
    }
    let publishes = variable(ROLE) == "publish";
    let served: Arc<dyn Store> =
        if publishes { Arc::new(Recent::new(store.clone(), 1 << 30)) } else { store.clone() };
    let server = relay(&fabric().unwrap(), served.clone(), &dir.join("cache"), address.parse().unwrap());
    if publishes {
        publish(&served, &dir);
        if kill.is_err() {
            // Nobody can have them from the store.
            let run = Run::open(store.clone(), RUN).unwrap();
            let versions = [0, 1].map(|version| run.get(MODEL, Version(version)).unwrap().manifest);
            let objects = versions.iter().flat_map(|manifest| &manifest.objects);
            objects.for_each(|object| store.delete(&object.key).unwrap());
        }
    }
    println!("listening {}", server.fabric_addr().unwrap());
    thread::park();
}

/// A relay in another process.
struct Serving {
    process: Process,
    address: String,
}

impl Serving {
    fn start(command: &mut Command) -> Self {
        let process = Process::start(command);
        Self { address: process.says("listening "), process }
    }

    /// Whether it was killed by itself.
    fn was_killed(&mut self) -> bool {
        self.process.ended().is_some()
    }
}

/// Follows in another process; returns how many bytes that read from the store.
fn follow(command: &mut Command) -> u64 {
    let follower = Process::start(command);
    let direct = follower.says("direct ").parse().unwrap();
    follower.succeed();
    direct
}

/// Manifests and the like, of which a follower reads some kilobytes.
const DOCUMENTS: u64 = 100_000;

#[test]
fn a_follower_in_another_process_gets_a_delta_bit_equal() {
    if fabric().is_none() {
        return;
    }
    for transports in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
        let expected = publish(&store, dir.path());
        let relay = Serving::start(&mut other("relay", dir.path(), "127.0.0.1:0", transports));
        let direct = follow(&mut other("follow", dir.path(), &relay.address, transports));
        assert!(direct < DOCUMENTS, "{transports}: {direct} bytes came from the store");
        assert_same(Replica::open(dir.path().join("replica")).unwrap().checkpoint().unwrap(), &expected);
    }
}

/// What the other process publishes.
fn published(dir: &Path) -> Weights {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&store, &dir.join("expected"))
}

#[test]
fn a_follower_gets_a_delta_from_the_publishers_process() {
    if fabric().is_none() {
        return;
    }
    for transports in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let publisher = Serving::start(&mut other("publish", dir.path(), "127.0.0.1:0", transports));
        let direct = follow(&mut other("follow", dir.path(), &publisher.address, transports));
        assert!(direct < DOCUMENTS, "{transports}: {direct} bytes came from the store");
        let replica = Replica::open(dir.path().join("replica")).unwrap();
        assert_same(replica.checkpoint().unwrap(), &published(dir.path()));
    }
}

#[test]
fn publisher_killed_in_a_transfer_leaves_the_store() {
    if fabric().is_none() {
        return;
    }
    for (transports, passes) in [("tcp", 0), (WAYS[1], 1)] {
        let dir = tempfile::tempdir().unwrap();
        let mut command = other("publish", dir.path(), "127.0.0.1:0", transports);
        command.env(KILL, passes.to_string());
        let mut publisher = Serving::start(&mut command);
        let direct = follow(&mut other("follow", dir.path(), &publisher.address, transports));
        assert!(direct > DOCUMENTS, "{transports}: the rest came from the store, not {direct} bytes");
        assert!(publisher.was_killed(), "{transports}: the publisher was killed");
        let replica = Replica::open(dir.path().join("replica")).unwrap();
        assert_same(replica.checkpoint().unwrap(), &published(dir.path()));
    }
}

#[test]
fn a_relay_killed_in_the_middle_of_a_transfer_leaves_the_store() {
    if fabric().is_none() {
        return;
    }
    for (transports, passes) in [("tcp", 0), ("tcp", 1), (WAYS[1], 0), (WAYS[1], 1)] {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
        let expected = publish(&store, dir.path());
        let mut command = other("relay", dir.path(), "127.0.0.1:0", transports);
        let mut relay = Serving::start(command.env(KILL, passes.to_string()));
        let direct = follow(&mut other("follow", dir.path(), &relay.address, transports));
        assert!(direct > DOCUMENTS, "{transports}: the rest came from the store, not {direct} bytes");
        assert!(relay.was_killed(), "{transports}: the relay was killed");
        assert_same(Replica::open(dir.path().join("replica")).unwrap().checkpoint().unwrap(), &expected);
    }
}

/// Two network namespaces and a cable between them; gone with the value.
struct Namespaces([String; 2]);

impl Namespaces {
    fn new() -> Result<Self, String> {
        let ip = |line: &str| {
            let output = {
                let _turn = turn();
                Command::new("ip").args(line.split(' ')).output()
            };
            let output = output.map_err(|error| format!("ip: {error}"))?;
            let failed = || format!("ip {line}: {}", String::from_utf8_lossy(&output.stderr).trim());
            output.status.success().then_some(()).ok_or_else(failed)
        };
        let id = std::process::id();
        let names = [format!("dft{id}a"), format!("dft{id}b")];
        ip(&format!("netns add {}", names[0]))?;
        let these = Self(names);
        let [a, b] = &these.0;
        ip(&format!("netns add {b}"))?;
        ip(&format!("link add veth0 netns {a} type veth peer name veth0 netns {b}"))?;
        for (name, address) in [(a, "10.99.7.1/24"), (b, "10.99.7.2/24")] {
            ip(&format!("-n {name} addr add {address} dev veth0"))?;
            ip(&format!("-n {name} link set veth0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        these.0.iter().for_each(|name| await_cable(name));
        Ok(these)
    }

    fn inside(&self, index: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.0[index]]).arg(command.get_program()).args(command.get_args());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside.env("UCX_NET_DEVICES", "veth0");
        inside
    }
}

/// The kernel says that both ends are plugged in a while after they are, and UCX uses no device before that.
fn await_cable(name: &str) {
    let begun = Instant::now();
    loop {
        let turn = turn();
        let output = Command::new("ip").args(["-n", name, "-o", "link", "show", "veth0"]).output().unwrap();
        drop(turn);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains("state UP") {
            return;
        }
        assert!(begun.elapsed() < LONG, "the cable of {name} is not up: {text}");
        std::thread::yield_now();
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _turn = turn();
            // One that was not made.
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

#[test]
fn follower_in_another_namespace_gets_a_delta_bit_equal() {
    if fabric().is_none() {
        return;
    }
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(reason) => return println!("skipped: no network namespaces here: {reason}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    let expected = publish(&store, dir.path());
    let relay = Serving::start(&mut namespaces.inside(0, &other("relay", dir.path(), "10.99.7.1:0", "tcp")));
    let direct = follow(&mut namespaces.inside(1, &other("follow", dir.path(), &relay.address, "tcp")));
    assert!(direct < DOCUMENTS, "{direct} bytes came from the store");
    assert_same(Replica::open(dir.path().join("replica")).unwrap().checkpoint().unwrap(), &expected);
}

#[test]
fn a_store_behind_a_relay_over_ucx_is_a_store() {
    let Some(fabric) = fabric() else { return };
    let dir = tempfile::tempdir().unwrap();
    let origin: Arc<dyn Store> = Arc::new(Memory::new());
    let server = here(&fabric, origin.clone(), dir.path());
    conformance::check(&*behind(&origin, &[url(&server)]));
}

#[test]
fn a_relay_that_starts_again_is_found_again() {
    let Some(fabric) = fabric() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let objects = [named(&store, "a/first", 20 << 20), named(&store, "a/second", 1000)];
    let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
    let mut server = here(&fabric, store.clone(), dir.path());
    let (client, addr) = (behind(&nowhere, &[url(&server)]), server.fabric_addr().unwrap());
    for round in 0..3 {
        for object in &objects {
            let bytes = client.get_cached(object, 0..object.size, &no_progress()).unwrap();
            assert!(bytes == store.get(&object.key, None).unwrap(), "round {round}");
        }
        // A process that another test starts in between would hold the port and the lock of the cache a
        // moment longer.
        let _turn = turn();
        drop(server);
        server = relay(&fabric, store.clone(), dir.path(), addr);
    }
}

/// Speaks to a relay as a follower does.
struct Raw(TcpStream);

impl Raw {
    fn to(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self(stream)
    }

    fn tell(&mut self, document: &Value) {
        let body = serde_json::to_vec(document).unwrap();
        self.0.write_all(&(body.len() as u32).to_le_bytes()).unwrap();
        self.0.write_all(&body).unwrap();
    }

    /// What the other side says; nothing when it hangs up.
    fn hear(&mut self) -> Option<Value> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut body).ok()?;
        Some(serde_json::from_slice(&body).unwrap())
    }

    fn kind(&mut self) -> String {
        self.hear().unwrap()["error"]["kind"].as_str().unwrap_or("none").to_owned()
    }
}

#[test]
fn bad_requests_are_told_what_is_wrong() {
    let Some(fabric) = fabric() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let object = named(&store, "a/object", 1000);
    let server = here(&fabric, store.clone(), dir.path());
    let addr = server.fabric_addr().unwrap();
    let link = fabric.link("the relay").unwrap();
    let address = hex::encode(link.address().unwrap());
    let hello = |token: Option<&str>| json!({ "driftless_ucx": 1, "token": token, "address": address });
    for (greeting, kind) in [
        (json!({ "driftless_ucx": 2, "token": TOKEN, "address": address }), "bad_request"),
        (hello(None), "unauthorized"),
        (hello(Some("another")), "unauthorized"),
        (json!({ "driftless_ucx": 1, "token": TOKEN, "address": "no hex" }), "bad_request"),
        (json!({ "driftless_ucx": 1, "token": TOKEN, "address": "00" }), "bad_request"),
    ] {
        let mut raw = Raw::to(addr);
        raw.tell(&greeting);
        assert_eq!(raw.kind(), kind, "{greeting}");
        assert_eq!(raw.hear(), None, "and that is the end of it");
    }
    for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[3, 0, 0, 0, b'{', b'}', b'}'], &[255; 4]] {
        let mut raw = Raw::to(addr);
        raw.0.write_all(noise).unwrap();
        assert_eq!(raw.hear(), None);
    }
    let mut raw = Raw::to(addr);
    raw.tell(&hello(Some(TOKEN)));
    assert_eq!(raw.kind(), "none");
    let digest = object.blake3.to_string();
    for (key, blake3, size, start, bytes, kind) in [
        ("a/object", digest.as_str(), 1000, 990, 11, "range"),
        ("a/object", digest.as_str(), 1000, 1001, 1, "range"),
        ("a/object", digest.as_str(), 1000, 5, 0, "range"),
        ("a/object", digest.as_str(), 1000, 1, u64::MAX, "range"),
        ("a/object", digest.as_str(), 100 << 20, 0, 17 << 20, "range"),
        ("a/../object", digest.as_str(), 1000, 0, 10, "bad_request"),
        ("a/object", "digest", 1000, 0, 10, "bad_request"),
        ("a/object", &"0".repeat(64), 1000, 0, 10, "corrupt"),
        ("a/nothing", digest.as_str(), 1001, 0, 10, "not_found"),
    ] {
        raw.tell(
            &json!({ "key": key, "size": size, "blake3": blake3, "start": start, "bytes": bytes, "tag": 1 }),
        );
        assert_eq!(raw.kind(), kind, "{key} {blake3} {size} {start} {bytes}");
    }
    let mut options = RelayOptions::new("127.0.0.1:0".parse().unwrap(), dir.path().join("open"));
    options.fabric = Some(("0.0.0.0:0".parse().unwrap(), Arc::new(fabric.clone())));
    let open = serve(store.clone(), options).unwrap_err();
    assert!(
        matches!(open, driftless_relay::Error::Http(driftless_http::Error::BadSetting { .. })),
        "{open:?}"
    );
    for bad in
        ["ucx://", "ucx://host", "ucx://host:port", "ucx://user:secret@host:1", "ucx://host:1/?x=secret"]
    {
        let refused = Relays::new(store.clone(), &[bad.to_owned()], RelaysOptions::default()).unwrap_err();
        assert!(
            matches!(refused, driftless_relay::Error::Transport(Error::BadText { .. })),
            "{bad}: {refused:?}"
        );
        assert!(!refused.to_string().contains("secret"), "{refused}");
    }
}

#[test]
fn strangers_have_a_deadline_and_keep_no_follower_out() {
    let Some(fabric) = fabric() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let object = named(&store, "a/object", 100_000);
    let start = |name: &str, authorise: Duration| {
        let mut options = RelayOptions::new("127.0.0.1:0".parse().unwrap(), dir.path().join(name));
        options.fabric = Some(("127.0.0.1:0".parse().unwrap(), Arc::new(fabric.clone())));
        options.token = Some(TOKEN.to_owned());
        (options.limits.connections, options.limits.authorise) = (4, authorise);
        serve(store.clone(), options).unwrap()
    };
    let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
    let get = |server: &Server| {
        let client = behind(&nowhere, &[url(server)]);
        assert!(
            client.get_cached(&object, 0..object.size, &no_progress()).unwrap()
                == store.get(&object.key, None).unwrap()
        );
    };
    let server = start("full", Duration::from_secs(24 * 3600));
    let mut strangers: Vec<Raw> = (0..100).map(|_| Raw::to(server.fabric_addr().unwrap())).collect();
    get(&server);
    assert_eq!(strangers[0].hear(), None, "the oldest made room");
    let server = start("slow", Duration::from_secs(1));
    let mut slow = Raw::to(server.fabric_addr().unwrap());
    slow.0.write_all(&100_000_u32.to_le_bytes()).unwrap();
    slow.0.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let begun = Instant::now();
    // It is closed though it goes on: a byte after each look that finds the connection there.
    while matches!(slow.0.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock) {
        let _ = slow.0.write_all(b" ");
        assert!(begun.elapsed() < LONG, "a byte now and then keeps the connection");
    }
    get(&server);
}

/// A relay that is none: it answers each session by `session`, and says how many there were.
fn fake(session: impl Fn(Raw, u64) + Send + Sync + 'static) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("ucx://{}", listener.local_addr().unwrap());
    let sessions = Arc::new(AtomicU64::new(0));
    let (count, session) = (sessions.clone(), Arc::new(session));
    thread::spawn(move || {
        for stream in listener.incoming().map_while(std::io::Result::ok) {
            let (number, session) = (count.fetch_add(1, SeqCst), session.clone());
            thread::spawn(move || session(Raw(stream), number));
        }
    });
    (url, sessions)
}

/// Answers what is asked for with what `lie` makes of the right bytes; sends nothing for none.
fn lies(raw: &mut Raw, fabric: &Ucx, store: &Arc<dyn Store>, lie: impl Fn(Vec<u8>) -> Vec<u8>) {
    let Some(hello) = raw.hear() else { return };
    let mut link = fabric.link("the follower").unwrap();
    link.connect(&hex::decode(hello["address"].as_str().unwrap()).unwrap()).unwrap();
    raw.tell(&json!({}));
    while let Some(ask) = raw.hear() {
        let key = Key::new(ask["key"].as_str().unwrap()).unwrap();
        let (start, bytes) = (ask["start"].as_u64().unwrap(), ask["bytes"].as_u64().unwrap());
        let told = lie(store.get(&key, Some(start..start + bytes)).unwrap());
        raw.tell(&json!({}));
        if told.is_empty() {
            return;
        }
        let mut bucket = fabric.bucket(told.len()).unwrap();
        bucket.copy_from_slice(&told);
        let ticket = link.send(bucket, 0..told.len(), ask["tag"].as_u64().unwrap()).unwrap();
        if link.finish(ticket, LONG, &mut || Ok(())).is_err() {
            return;
        }
    }
}

#[test]
fn relays_that_lie_are_noticed_and_stop_nobody() {
    let Some(fabric) = fabric() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    // In some forty ranges, two of each object: so many are under way at once for each of those that fetch
    // objects.
    let expected = publish_rows(&store, dir.path(), 10_000, 1 << 20);
    type Lie = fn(Vec<u8>) -> Vec<u8>;
    let contents: [(&str, Lie); 4] = [
        ("wrong", |mut bytes| {
            bytes[0] ^= 1;
            bytes
        }),
        ("short", |mut bytes| {
            bytes.pop();
            bytes
        }),
        ("long", |mut bytes| {
            bytes.push(0);
            bytes
        }),
        ("absent", |_| Vec::new()),
    ];
    for (name, lie) in contents {
        let (fabric, origin) = (fabric.clone(), store.clone());
        let (url, sessions) = fake(move |mut raw, _| lies(&mut raw, &fabric, &origin, lie));
        assert_reader(&behind(&store, &[url]), &dir.path().join(name), 1, &expected);
        // For those that are under way at once, and not for all.
        assert!((1..=24).contains(&sessions.load(SeqCst)), "{name}: {sessions:?} sessions");
    }
    let (url, sessions) = fake(|mut raw, number| {
        let noises: [&[u8]; 4] = [&[], &[255; 4], &[2, 0, 0, 0, b'{', b'{'], &[9, 0, 0, 0, b'{']];
        // It may have hung up.
        let _ = raw.0.write_all(noises[number as usize % noises.len()]);
    });
    for number in 0..4 {
        // Another follower each, as one leaves a relay alone that failed.
        assert_reader(
            &behind(&store, std::slice::from_ref(&url)),
            &dir.path().join(format!("noise-{number}")),
            1,
            &expected,
        );
    }
    assert!(sessions.load(SeqCst) >= 4, "{sessions:?}");
}
