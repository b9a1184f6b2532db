//! Every route without the token, and what is no request at all.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;

use driftless_http::Server;
use driftless_http::listen::Limits;
use driftless_store::{Memory, Store};
use driftless_transport::manifest::Object;

use super::{AUTHORISED, answer, ask, connect, publish, raw, rest, serve_follower, serve_relay};
use driftless_testkit::publications::named;
use driftless_testkit::random::Random;

/// Both servers, and an object that the relay has.
struct World {
    dir: tempfile::TempDir,
    follower: Server,
    relay: driftless_relay::Server,
    object: Object,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        publish(&store, dir.path());
        let object = named(&store, "a/object", 1000);
        let follower = serve_follower(&store, dir.path(), Limits::default());
        let relay = serve_relay(&store, dir.path(), Limits::default());
        Self { dir, follower, relay, object }
    }

    fn addrs(&self) -> [SocketAddr; 2] {
        [self.follower.addr(), self.relay.addr()]
    }

    fn object_path(&self) -> String {
        format!("/objects/{}?size={}&blake3={}", self.object.key, self.object.size, self.object.blake3)
    }

    /// Both still serve, and nothing has happened to the host.
    fn assert_untouched(&self) {
        for addr in self.addrs() {
            assert!(ask(&mut connect(addr), "GET /status").starts_with("HTTP/1.1 200"));
        }
        assert!(!self.dir.path().join("host/config.json").exists());
        assert!(ask(&mut connect(self.follower.addr()), "GET /status").contains(r#""applied":null"#));
    }
}

fn send(addr: SocketAddr, request: &str, headers: &str) -> String {
    raw(addr, format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n").as_bytes())
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

#[test]
fn every_route_without_the_token_is_refused() {
    let world = World::new();
    let routes = [
        (
            world.follower.addr(),
            &["/prepare", "/activate", "/notify", "/pull_weights", "/status", "/metrics"][..],
        ),
        (world.relay.addr(), &["/objects/a/object", "/status", "/metrics"]),
    ];
    let object = world.object_path();
    let range = "range: bytes=0-999\r\n";
    for near in [
        "",
        "authorization: the token\r\n",
        "authorization: Bearer\r\n",
        "authorization: Bearer \r\n",
        "authorization: Bearer the toke\r\n",
        "authorization: Bearer the token2\r\n",
        "authorization: Bearer The token\r\n",
        "authorization: bearer the token\r\n",
        "authorization: Bearer  the token\r\n",
        "authorization: Basic dGhlIHRva2Vu\r\n",
        "x-authorization: Bearer the token\r\n",
        "cookie: authorization=Bearer the token\r\n",
        "authorization: Bearer wrong\r\nauthorization: Bearer the token\r\n",
    ] {
        for (addr, paths) in routes {
            for path in paths.iter().copied().chain([object.as_str(), "/health/../status", "//status"]) {
                for method in ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"] {
                    let answer = send(addr, &format!("{method} {path}"), &format!("{near}{range}"));
                    let refused = matches!(status(&answer), 401 | 404 | 405);
                    assert!(refused && answer.len() < 600, "{method} {path} with `{near}`: {answer}");
                }
            }
        }
    }
    world.assert_untouched();
    let answer = send(world.relay.addr(), &format!("GET {object}"), &format!("{AUTHORISED}{range}"));
    assert_eq!(status(&answer), 206, "{answer}");
}

#[test]
fn malformed_request_is_refused_and_changes_nothing() {
    let world = World::new();
    let many = format!("GET /status HTTP/1.1\r\nhost: x\r\n{}\r\n", "x-many: 1\r\n".repeat(2000));
    let wide = format!("GET /status HTTP/1.1\r\nhost: x\r\nx-wide: {}\r\n\r\n", "w".repeat(1 << 20));
    let far = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "f".repeat(1 << 20));
    let head = format!("POST /prepare HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORISED}");
    let with = |headers: &str| format!("{head}{headers}\r\n");
    let mut noise = vec![0; 4096];
    let mut random = Random(11);
    noise.iter_mut().for_each(|byte| *byte = random.next() as u8 | 0x80);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("noise", noise),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(50)),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00".to_vec()),
        ("no version", b"GET /status\r\n\r\n".to_vec()),
        ("another version", b"GET /status HTTP/9.9\r\n\r\n".to_vec()),
        ("no path", b"GET HTTP/1.1\r\n\r\n".to_vec()),
        ("NUL in the path", b"GET /sta\0tus HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()),
        ("NUL in a header", b"GET /status HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n".to_vec()),
        ("NUL in a name", b"GET /status HTTP/1.1\r\nhost: x\r\nx\0y: a\r\n\r\n".to_vec()),
        ("no colon", b"GET /status HTTP/1.1\r\nhost: x\r\nauthorization\r\n\r\n".to_vec()),
        ("a header on two lines", with("x-folded: a\r\n b\r\n").into_bytes()),
        ("many headers", many.into_bytes()),
        ("a long header", wide.into_bytes()),
        ("a long path", far.into_bytes()),
        ("a negative length", with("content-length: -1\r\n").into_bytes()),
        ("a length of words", with("content-length: 1e3\r\n").into_bytes()),
        ("a length past 64 bits", with("content-length: 18446744073709551616\r\n").into_bytes()),
        ("two lengths", with("content-length: 1\r\ncontent-length: 2\r\n").into_bytes()),
        ("another encoding", with("transfer-encoding: gzip\r\n").into_bytes()),
        ("chunks that are none", (with("transfer-encoding: chunked\r\n") + "zz\r\nab\r\n").into_bytes()),
        (
            "a chunk past 64 bits",
            (with("transfer-encoding: chunked\r\n") + "fffffffffffffffff\r\n").into_bytes(),
        ),
        ("a chunk that is longer", (with("transfer-encoding: chunked\r\n") + "1\r\nabc\r\n").into_bytes()),
        ("too much", (with("content-length: 5000\r\n") + &"x".repeat(5000)).into_bytes()),
        ("no JSON", (with("content-length: 4\r\n") + "\0\0\0\0").into_bytes()),
    ];
    for (what, bytes) in cases {
        for addr in world.addrs() {
            let answer = raw(addr, &bytes);
            let refused = answer.is_empty() || (400..500).contains(&status(&answer));
            assert!(refused, "{what}: {answer}");
            assert!(answer.matches("HTTP/1.1 ").count() <= 1, "{what}: {answer}");
        }
    }
    world.assert_untouched();
}

#[test]
fn one_request_is_not_two() {
    let world = World::new();
    let addr = world.follower.addr();
    let get = |headers: &str| format!("GET /status HTTP/1.1\r\nhost: x\r\n{headers}\r\n");
    // Several at once are answered in turn, as long as each brings the token.
    let mut stream = connect(addr);
    stream.write_all(get(AUTHORISED).repeat(3).as_bytes()).unwrap();
    (0..3).for_each(|_| assert_eq!(status(&answer(&mut stream)), 200));
    stream.write_all((get("") + &get(AUTHORISED)).as_bytes()).unwrap();
    assert_eq!((status(&answer(&mut stream)), status(&answer(&mut stream))), (401, 200));
    // What hides behind a request that is refused is not read.
    let hidden = get(AUTHORISED);
    assert_eq!(raw(addr, (get("") + &hidden).as_bytes()).matches("HTTP/1.1 ").count(), 1);
    let length = format!("content-length: {}\r\n", hidden.len());
    for framing in [length.clone(), format!("{length}transfer-encoding: chunked\r\n")] {
        let refused = raw(
            addr,
            format!("POST /notify HTTP/1.1\r\nhost: x\r\n{framing}\r\n0\r\n\r\n{hidden}").as_bytes(),
        );
        assert_eq!((status(&refused), refused.matches("HTTP/1.1 ").count()), (401, 1), "{refused}");
    }
    // Chunks and a length in one request: the chunks count, and nothing behind them does.
    let mut stream = connect(addr);
    let both = format!("{AUTHORISED}{length}transfer-encoding: chunked\r\n");
    write!(stream, "POST /notify HTTP/1.1\r\nhost: x\r\n{both}\r\n0\r\n\r\n{hidden}").unwrap();
    drop(stream.shutdown(std::net::Shutdown::Write));
    let answers = rest(&mut stream);
    assert!(answers.matches("HTTP/1.1 200").count() <= 1, "{answers}");
    world.assert_untouched();
}

#[test]
fn a_relay_names_nothing_but_objects() {
    let world = World::new();
    let addr = world.relay.addr();
    let named = format!("size={}&blake3={}", world.object.size, world.object.blake3);
    let good = world.object_path();
    for path in [
        "/objects/../../etc/passwd",
        "/objects/a/../../etc/passwd",
        "/objects/%2e%2e/%2e%2e/etc/passwd",
        "/objects/..%2f..%2fetc%2fpasswd",
        "/objects//etc/passwd",
        "/objects/%2fetc/passwd",
        "/objects/a%00b",
        "/objects/a\\..\\object",
        "/objects/./a/object",
        "/objects/a//object",
        "/objects/.staging/x",
        "/objects/lock",
        "/objects/",
        "/objects",
    ] {
        let answer = send(addr, &format!("GET {path}?{named}"), &format!("{AUTHORISED}range: bytes=0-9\r\n"));
        assert!((400..503).contains(&status(&answer)) && answer.len() < 900, "{path}: {answer}");
    }
    for range in [
        "bytes=-1",
        "bytes=0-",
        "bytes=5-1",
        "bytes=0-0,2-3",
        "bytes=a-b",
        "bytes=1001-2000",
        "bytes=18446744073709551615-18446744073709551615",
        "bytes=18446744073709551616-18446744073709551617",
        "bytes=0-99999999999999999999",
        "bytes= 0-9",
        "bytes=0x0-0x9",
        "lines=0-9",
    ] {
        let answer = send(addr, &format!("GET {good}"), &format!("{AUTHORISED}range: {range}\r\n"));
        assert!(matches!(status(&answer), 400 | 416), "{range}: {answer}");
    }
    for query in [
        "size=-1",
        "size=1e3",
        "size=18446744073709551616",
        "size=1000&blake3=",
        "size=1000&blake3=zz",
        "size=9223372036854775807&blake3=0000000000000000000000000000000000000000000000000000000000000000",
        "blake3=%00",
    ] {
        let request = format!("GET /objects/{}?{query}", world.object.key);
        let answer = send(addr, &request, &format!("{AUTHORISED}range: bytes=0-9\r\n"));
        assert!(matches!(status(&answer), 400 | 416), "{query}: {answer}");
    }
    let answer = send(addr, &format!("GET {good}"), &format!("{AUTHORISED}range: bytes=0-9\r\n"));
    assert_eq!(status(&answer), 206, "{answer}");
}
