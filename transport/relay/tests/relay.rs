//! Relays: one read of the origin for all, whatever is killed; and relays that lie, which stop nobody.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, thread};

use driftless_http::Error as HttpError;
use driftless_relay::{RelayOptions, Relays, RelaysOptions, Server, serve};
use driftless_store::wrap::{Count, Fault, When};
use driftless_store::{Disk, Error as StoreError, Key, Memory, OnBytes, Store, conformance};
use driftless_transport::manifest::Object;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Publisher, Replica, Run, Version};

use driftless_testkit::hook::Hook;
use driftless_testkit::http::exchange;
use driftless_testkit::process::turn;
use driftless_testkit::publications::{MODEL, RUN, Weights, assert_same, named, options, step};
use driftless_testkit::random::Random;

fn weights(rows: u64) -> Weights {
    let mut random = Random(5);
    let mut weights = Weights::small(1);
    weights.set("x.large", Dtype::Bf16, &[rows, 1000], |_| random.next() as u8);
    weights
}

/// One full version, in three objects.
fn publish(store: &Arc<dyn Store>, dir: &Path) -> Weights {
    publish_rows(store, dir, 1000)
}

fn publish_rows(store: &Arc<dyn Store>, dir: &Path, rows: u64) -> Weights {
    let weights = weights(rows);
    let mut options = options(Start::NewRun, &dir.join("baseline"));
    options.object_bytes_max = 1 << 20;
    Publisher::open(store.clone(), options).unwrap().publish(&weights, step(0), Mode::Full).unwrap();
    weights
}

fn objects(store: &Arc<dyn Store>) -> Vec<Object> {
    Run::open(store.clone(), RUN).unwrap().get(MODEL, Version(0)).unwrap().manifest.objects
}

fn relay(origin: Arc<dyn Store>, dir: &Path, bytes: u64) -> Server {
    let mut options = RelayOptions::new("127.0.0.1:0".parse().unwrap(), dir);
    options.cache_bytes = bytes;
    serve(origin, options).unwrap()
}

fn url(addr: SocketAddr) -> String {
    format!("http://{addr}")
}

fn behind(origin: &Arc<dyn Store>, relays: &[String]) -> Arc<dyn Store> {
    Arc::new(Relays::new(origin.clone(), relays, RelaysOptions::default()).unwrap())
}

fn follow(store: Arc<dyn Store>, dir: &Path, expected: &Weights) {
    let run = Run::open(store, RUN).unwrap();
    let mut replica = Replica::open(dir).unwrap();
    replica.advance(&run, MODEL, Version(0), None).unwrap();
    assert_same(replica.checkpoint().unwrap(), expected);
}

fn whole(store: &dyn Store, object: &Object) -> Vec<u8> {
    whole_and_told(store, object).0
}

/// An object, and how many bytes of it were told to arrive.
fn whole_and_told(store: &dyn Store, object: &Object) -> (Vec<u8>, u64) {
    let told = Arc::new(AtomicU64::new(0));
    let telling = told.clone();
    let arrived: OnBytes = Arc::new(move |bytes| {
        telling.fetch_add(bytes, SeqCst);
    });
    let bytes = store.get_cached(object, 0..object.size + 1, &arrived).unwrap();
    (bytes, told.load(SeqCst))
}

#[test]
fn a_store_behind_a_relay_is_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let origin: Arc<dyn Store> = Arc::new(Memory::new());
    let server = relay(origin.clone(), dir.path(), 1 << 30);
    conformance::check(&*behind(&origin, &[url(server.addr())]));
}

#[test]
fn many_followers_are_one_reader_of_the_origin() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let expected = publish(&store, dir.path());
    let total: u64 = objects(&store).iter().map(|object| object.size).sum();
    let count = Arc::new(Count::new(store.clone()));
    let server = relay(count.clone(), &dir.path().join("cache"), 1 << 30);
    // What followers read themselves is counted apart.
    let direct = Arc::new(Count::new(store.clone()));
    let origin: Arc<dyn Store> = direct.clone();
    thread::scope(|scope| {
        for number in 0..6 {
            let (place, store) =
                (dir.path().join(format!("replica-{number}")), behind(&origin, &[url(server.addr())]));
            let expected = &expected;
            scope.spawn(move || follow(store, &place, expected));
        }
    });
    assert_eq!(count.counts().bytes_got, total);
    let chain = Count::new(store.clone());
    let run = Run::open(Arc::new(chain), RUN).unwrap();
    let documents: u64 =
        [Key::new(format!("runs/{RUN}")).unwrap(), run.manifest_key(MODEL, Version(0)).unwrap()]
            .iter()
            .map(|key| store.head(key).unwrap().size)
            .sum();
    assert_eq!(direct.counts().bytes_got, 6 * documents, "objects come through the relay, documents do not");
}

#[test]
fn a_relay_that_starts_again_serves_what_it_had_and_checks_it() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    publish(&store, dir.path());
    let (cache, objects) = (dir.path().join("cache"), objects(&store));
    let read = |count: &Arc<Count>| {
        let server = relay(count.clone(), &cache, 1 << 30);
        let before = count.counts().bytes_got;
        let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
        for object in &objects {
            assert!(
                whole(&*behind(&nowhere, &[url(server.addr())]), object)
                    == store.get(&object.key, None).unwrap()
            );
        }
        count.counts().bytes_got - before
    };
    let count = Arc::new(Count::new(store.clone()));
    let total: u64 = objects.iter().map(|object| object.size).sum();
    assert_eq!(read(&count), total);
    assert_eq!(read(&count), 0, "after a restart everything is there");
    // A disk that lost or mixed up pages, and a file that is nobody's.
    for (number, entry) in fs::read_dir(cache.join("objects")).unwrap().enumerate() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        match number {
            0 => bytes[1000] ^= 1,
            1 => bytes.truncate(5000),
            _ => bytes[4096..8192].fill(0),
        }
        fs::write(path, bytes).unwrap();
    }
    fs::write(cache.join("objects/other"), b"x").unwrap();
    assert_eq!(read(&count), total, "what is damaged is read again, and never served");
}

#[test]
fn cache_link_in_place_of_an_object_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let object = named(&store, "a/object", 100_000);
    let honest = store.get(&object.key, None).unwrap();
    // The link itself is as long as the file of a short object.
    let (cache, theirs) = (dir.path().join("cache"), dir.path().join("their".repeat(10)));
    fs::create_dir_all(cache.join("objects")).unwrap();
    let place = cache.join("objects").join(object.blake3.to_string());
    let link = |bytes: &[u8]| {
        fs::write(&theirs, bytes).unwrap();
        std::os::unix::fs::symlink(&theirs, &place).unwrap();
    };
    // One that was there first.
    link(b"theirs");
    let count = Arc::new(Count::new(store.clone()));
    let server = relay(count.clone(), &cache, 1 << 30);
    let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
    let client = behind(&nowhere, &[url(server.addr())]);
    assert!(whole(&*client, &object) == honest);
    assert!(fs::read(&theirs).unwrap() == b"theirs", "nothing is written through it");
    // One that takes the place of an object, with all of its bytes.
    let kept = fs::read(&place).unwrap();
    fs::remove_file(&place).unwrap();
    link(&kept);
    assert!(whole(&*client, &object) == honest);
    assert_eq!(count.counts().bytes_got, 2 * object.size, "nothing is served through it");
    assert!(fs::read(&theirs).unwrap() == kept && !place.is_symlink());
}

#[test]
fn cache_stays_within_its_bound_and_keeps_the_last_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let objects = [1_000_000, 1_000_001, 900_000].map(|size| named(&store, &format!("a/{size}"), size));
    let count = Arc::new(Count::new(store.clone()));
    let server = relay(count.clone(), &dir.path().join("cache"), 2_200_000);
    let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
    let client = behind(&nowhere, &[url(server.addr())]);
    let fetched = |object: &Object| {
        let before = count.counts().bytes_got;
        let (bytes, told) = whole_and_told(&*client, object);
        assert_eq!((bytes.len() as u64, told), (object.size, object.size));
        count.counts().bytes_got > before
    };
    assert!(fetched(&objects[0]) && fetched(&objects[1]));
    assert!(!fetched(&objects[0]), "asked for again, and newest now");
    assert!(fetched(&objects[2]), "the third makes the second go");
    assert!(!fetched(&objects[0]) && !fetched(&objects[2]));
    assert!(fetched(&objects[1]));
    let kept: u64 = fs::read_dir(dir.path().join("cache/objects"))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(kept < 2_201_000, "{kept}");
    // One that is larger than the whole cache is served all the same.
    let large = named(&store, "more/large", 3_000_000);
    assert!(fetched(&large) && fetched(&large));
    assert!(fetched(&named(&store, "more/empty", 1)), "and a short one");
}

#[test]
fn an_origin_that_breaks_off_is_read_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let object = named(&store, "a/large", 30 << 20);
    let fault = Arc::new(Fault::new(store.clone()));
    let count = Arc::new(Count::new(fault.clone()));
    let server = relay(count.clone(), &dir.path().join("cache"), 1 << 30);
    // Two of four ranges, then nothing: the client goes to the origin itself.
    fault.arm(2, 2, When::Before);
    let client = behind(&store, &[url(server.addr())]);
    assert_eq!(whole(&*client, &object).len() as u64, object.size);
    fault.disarm();
    let client = behind(&store, &[url(server.addr())]);
    assert_eq!(whole(&*client, &object).len() as u64, object.size);
    assert_eq!(count.counts().bytes_got, object.size, "no range was read twice");
}

/// What a false relay does with a request.
type Reply = Box<dyn Fn(&str, &mut TcpStream) + Send>;

/// A server that answers every request as `reply` likes; it ends with the test's process.
fn false_relay(reply: Reply) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = String::new();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            while reader.read_line(&mut request).is_ok_and(|read| read > 2) {}
            count.fetch_add(1, SeqCst);
            reply(&request, &mut stream);
        }
    });
    (url(addr), asked)
}

/// Answers 206 with as many bytes as were asked for, made by `lie`.
fn partial(request: &str, stream: &mut TcpStream, lie: impl Fn(Vec<u8>) -> Vec<u8>) {
    let range = request
        .to_lowercase()
        .split("range: bytes=")
        .nth(1)
        .unwrap()
        .split("\r\n")
        .next()
        .unwrap()
        .to_owned();
    let (first, last) = range.split_once('-').unwrap();
    let length = last.parse::<usize>().unwrap() + 1 - first.parse::<usize>().unwrap();
    let bytes = lie(vec![7; length]);
    let head = format!("HTTP/1.1 206 x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", bytes.len());
    // The client may have hung up.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&bytes));
}

#[test]
fn relays_that_lie_are_left_alone_and_stop_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    // In some forty ranges.
    let expected = publish_rows(&store, dir.path(), 10_000);
    let good = relay(store.clone(), &dir.path().join("cache"), 1 << 30);
    let lies: Vec<(&str, Reply)> = vec![
        ("garbage", Box::new(|request, stream| partial(request, stream, |bytes| bytes))),
        ("short", Box::new(|request, stream| partial(request, stream, |bytes| bytes[1..].to_vec()))),
        ("long", Box::new(|request, stream| partial(request, stream, |bytes| [bytes, vec![1]].concat()))),
        ("nothing", Box::new(|_, stream| drop(stream.shutdown(std::net::Shutdown::Both)))),
        (
            "torn",
            Box::new(|_, stream| {
                drop(stream.write_all(b"HTTP/1.1 206 x\r\ncontent-length: 9000\r\n\r\nabc"))
            }),
        ),
        (
            "denial",
            Box::new(|_, stream| drop(stream.write_all(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n"))),
        ),
        (
            "whole",
            Box::new(|_, stream| drop(stream.write_all(b"HTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n"))),
        ),
        (
            "elsewhere",
            Box::new(|_, stream| {
                drop(stream.write_all(
                    b"HTTP/1.1 302 x\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
                ));
            }),
        ),
        ("noise", Box::new(|_, stream| drop(stream.write_all(&[0x80; 5000])))),
    ];
    for (name, reply) in lies {
        let (liar, asked) = false_relay(reply);
        // Alone, so that it is asked; and beside an honest one.
        for (number, relays) in [vec![liar.clone()], vec![liar, url(good.addr())]].into_iter().enumerate() {
            let replica = dir.path().join(format!("{name}-{number}"));
            follow(behind(&store, &relays), &replica, &expected);
        }
        // In each of the two for those that are under way at once, and not for all.
        assert!((1..=2 * 20).contains(&asked.load(SeqCst)), "{name} was asked {asked:?} times");
    }
}

#[test]
fn followers_agree_on_relays_and_share_them_out() {
    let _turn = turn();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let objects: Vec<Object> = (0..60).map(|n| named(&store, &format!("many/{n}"), 100 + n)).collect();
    let dirs: Vec<tempfile::TempDir> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let counts: Vec<Arc<Count>> = dirs.iter().map(|_| Arc::new(Count::new(store.clone()))).collect();
    let servers: Vec<Server> =
        dirs.iter().zip(&counts).map(|(dir, count)| relay(count.clone(), dir.path(), 1 << 30)).collect();
    let mut urls: Vec<String> = servers.iter().map(|server| url(server.addr())).collect();
    let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
    for _ in 0..3 {
        // In whatever order they are named.
        urls.rotate_left(1);
        let client = behind(&nowhere, &urls);
        objects.iter().for_each(|object| drop(whole(&*client, object)));
    }
    let shares: Vec<u64> = counts.iter().map(|count| count.counts().gets).collect();
    assert_eq!(shares.iter().sum::<u64>(), 60, "each object is one relay's: {shares:?}");
    assert!(shares.iter().all(|share| *share > 5), "{shares:?}");
    // One that is gone leaves its share to the others.
    drop(servers);
    let survivor = relay(store.clone(), dirs[0].path(), 1 << 30);
    urls.push(url(survivor.addr()));
    let client = behind(&nowhere, &urls);
    objects.iter().for_each(|object| drop(whole(&*client, object)));
}

fn request(addr: SocketAddr, path: &str, headers: &str) -> (u16, String) {
    exchange(addr, &format!("GET {path}"), headers, "")
}

#[test]
fn client_that_hangs_up_ends_no_fetch_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let object = named(&store, "a/object", 1000);
    let (asked, was_asked) = channel();
    let (open, opened) = channel();
    let opened = Mutex::new(opened);
    // Waits for a word before it gives an object.
    let gate = Hook::before(&store, move |_| {
        asked.send(()).unwrap();
        opened.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
    });
    let server = relay(gate, dir.path(), 1 << 30);
    let path = format!("/objects/{}?size={}&blake3={}", object.key, object.size, object.blake3);
    let mut first = TcpStream::connect(server.addr()).unwrap();
    write!(first, "GET {path} HTTP/1.1\r\nhost: localhost\r\nrange: bytes=0-9\r\n\r\n").unwrap();
    was_asked.recv_timeout(Duration::from_secs(60)).unwrap();
    drop(first);
    let others: Vec<_> = (0..5)
        .map(|_| {
            let (addr, path) = (server.addr(), path.clone());
            thread::spawn(move || request(addr, &path, "range: bytes=10-19\r\n"))
        })
        .collect();
    open.send(()).unwrap();
    for other in others {
        let (status, _) = other.join().unwrap();
        assert_eq!(status, 206);
    }
    assert!(was_asked.try_recv().is_err(), "the origin was read once");
}

#[test]
fn bad_requests_are_told_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let object = named(&store, "a/object", 1000);
    let mut options = RelayOptions::new("127.0.0.1:0".parse().unwrap(), dir.path());
    options.token = Some("secret".to_owned());
    let server = serve(store.clone(), options.clone()).unwrap();
    let error = serve(store.clone(), options).unwrap_err();
    assert!(
        matches!(error, driftless_relay::Error::Transport(Error::Store(StoreError::Locked { .. }))),
        "{error:?}"
    );
    let token = "authorization: Bearer secret\r\n";
    let named = format!("size={}&blake3={}", object.size, object.blake3);
    let other = format!("size=1000&blake3={}", "0".repeat(64));
    for (path, range, expected) in [
        (format!("/objects/a/object?{named}"), "range: bytes=0-9\r\n", 206),
        (format!("/objects/a/object?{named}"), "range: bytes=990-5000\r\n", 206),
        (format!("/objects/a/object?{named}"), "", 400),
        (format!("/objects/a/object?{named}"), "range: bytes=1000-1000\r\n", 416),
        (format!("/objects/a/object?{named}"), "range: bytes=1001-1002\r\n", 416),
        (format!("/objects/a/../object?{named}"), "range: bytes=0-9\r\n", 400),
        (format!("/objects/.staging/x?{named}"), "range: bytes=0-9\r\n", 400),
        ("/objects/a/object?size=9".to_owned(), "range: bytes=0-9\r\n", 400),
        ("/objects/a/object".to_owned(), "range: bytes=0-9\r\n", 400),
        (format!("/objects/a/object?{other}"), "range: bytes=0-9\r\n", 502),
        (format!("/objects/a/nothing?{other}"), "range: bytes=0-9\r\n", 404),
        ("/metrics".to_owned(), "", 200),
        ("/status".to_owned(), "", 200),
        ("/runs/test".to_owned(), "", 404),
    ] {
        let (status, body) = request(server.addr(), &path, &format!("{token}{range}"));
        assert_eq!(status, expected, "{path} {range}: {body}");
    }
    let (status, _) = request(server.addr(), &format!("/objects/a/object?{named}"), "range: bytes=0-9\r\n");
    assert_eq!(status, 401);
    assert_eq!(request(server.addr(), "/health", "").0, 200);
    let (_, metrics) = request(server.addr(), "/metrics", token);
    assert!(metrics.contains("driftless_relay_cache_bytes 1000\n"), "{metrics}");
    assert!(metrics.contains("driftless_relay_served_bytes_total 20\n"), "{metrics}");
    let open =
        serve(store, RelayOptions::new("0.0.0.0:0".parse().unwrap(), dir.path().join("open"))).unwrap_err();
    assert!(matches!(open, driftless_relay::Error::Http(HttpError::BadSetting { .. })), "{open:?}");
}

/// Tells the child where to work, and where to die: `<point>:<passes before>`.
const DIR: &str = "DRIFTLESS_TEST_DIR";
const KILL: &str = "DRIFTLESS_TEST_KILL";

/// The relay that is killed, and the client that asks it. On its own, without a directory to work in, there
/// is nothing to do.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR).map(std::path::PathBuf::from) else { return };
    let kill = std::env::var(KILL).unwrap();
    let (point, passes) = kill.split_once(':').unwrap();
    let (passes, passed) = (passes.parse::<u64>().unwrap(), AtomicU64::new(0));
    let callback = move || {
        if passed.fetch_add(1, SeqCst) == passes {
            std::process::abort();
        }
    };
    fail::cfg_callback(point, callback).unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));
    let server = relay(store.clone(), &dir.join("cache"), 60 << 20);
    let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
    let client = behind(&nowhere, &[url(server.addr())]);
    for number in 0..2 {
        whole(&*client, &large(&store, number));
    }
}

/// An object of four ranges; made by who is first.
fn large(store: &Arc<dyn Store>, number: u64) -> Object {
    let (name, size) = (format!("a/large-{number}"), (25 << 20) + number);
    let key = Key::new(name.as_str()).unwrap();
    match store.get(&key, None) {
        Ok(bytes) => Object { key, size, blake3: driftless_store::ContentDigest::of(&bytes) },
        Err(_) => named(store, &name, size),
    }
}

#[test]
fn a_relay_killed_anywhere_goes_on_with_what_it_has() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path().join("store")));
    (0..2).for_each(|number| drop(large(&store, number)));
    let mut kills = 0;
    for (point, most) in [("relay.fetch", 2), ("relay.range", 8), ("relay.whole", 2)] {
        for passes in 0..most {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "child"]).env(DIR, dir.path()).env(KILL, format!("{point}:{passes}"));
            assert!(!command.output().unwrap().status.success(), "{point} is not passed {passes} times");
            kills += 1;
            let count = Arc::new(Count::new(store.clone()));
            let server = relay(count.clone(), &dir.path().join("cache"), 60 << 20);
            let nowhere: Arc<dyn Store> = Arc::new(Memory::new());
            let client = behind(&nowhere, &[url(server.addr())]);
            let mut total = 0;
            for number in 0..2 {
                let object = large(&store, number);
                total += object.size;
                assert!(
                    whole(&*client, &object) == store.get(&object.key, None).unwrap(),
                    "{point}:{passes}"
                );
            }
            if point == "relay.range" {
                // One object after the other, each in four ranges; at worst the short one came first.
                let (whole, more): (u64, u64) = ((passes + 1) / 4, (passes + 1) % 4);
                let kept = whole * (25 << 20) + more.min(1) * (1 << 20) + more.saturating_sub(1) * (8 << 20);
                let fetched = count.counts().bytes_got;
                assert!(fetched <= total - kept, "{fetched} bytes after {passes} ranges");
            }
            drop(server);
            fs::remove_dir_all(dir.path().join("cache")).unwrap();
        }
    }
    assert_eq!(kills, 12);
}
