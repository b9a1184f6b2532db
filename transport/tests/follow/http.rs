//! What a follower answers over HTTP.

use driftless_follower::{ServeOptions, serve};
use driftless_transport::follow::{PrepareReply, Status};
use driftless_transport::{Run, Version};

use super::{Engine, Fixture, Mood};
use driftless_testkit::http::exchange;
use driftless_testkit::publications::{MODEL, RUN};

#[test]
fn the_http_interface_does_what_the_calls_do() {
    let mut fixture = Fixture::new();
    let engine = Engine::default();
    let follower = fixture.follower(vec![engine.fake("http://a")]);
    let server = serve(follower.clone(), ServeOptions::new(([127, 0, 0, 1], 0))).unwrap();
    let call =
        |method: &str, path: &str, body: &str| exchange(server.addr(), &format!("{method} {path}"), "", body);
    assert_eq!(call("GET", "/health", "").0, 200);
    let (status, body) = call("POST", "/activate", "");
    assert_eq!((status, body.contains("nothing_prepared")), (409, true), "{body}");
    fixture.publish();
    let (status, body) = call("POST", "/prepare", r#"{"version":0}"#);
    let reply: PrepareReply = serde_json::from_str(&body).unwrap();
    assert_eq!((status, reply.version, reply.versions), (200, Version(0), 1));
    let (status, body) = call("POST", "/prepare", "");
    let reply: PrepareReply = serde_json::from_str(&body).unwrap();
    assert_eq!((status, reply.version, reply.label), (200, Version(1), fixture.label(1)));
    let (status, body) = call("POST", "/prepare", r#"{"version":0}"#);
    assert_eq!((status, body.contains("rewind")), (409, true), "{body}");
    let (status, body) = call("POST", "/prepare", r#"{"version":9}"#);
    assert_eq!((status, body.contains("not_found")), (404, true), "{body}");
    for bad in ["{", "[]", r#"{"version":-1}"#, r#"{"verison":1}"#] {
        let (status, body) = call("POST", "/prepare", bad);
        assert_eq!((status, body.contains("bad_request")), (400, true), "{body}");
    }
    engine.next(Mood::Fail);
    let (status, body) = call("POST", "/activate", "");
    assert_eq!((status, body.contains("flush refused")), (502, true), "{body}");
    let (status, body) = call("POST", "/activate", "");
    assert_eq!(status, 200, "{body}");
    let (status, body) = call("GET", "/status", "");
    let seen: Status = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &seen), (200, &follower.status()));
    assert_eq!(seen.applied.unwrap().engines[0].label, Some(fixture.label(1)));
    let (status, page) = call("GET", "/metrics", "");
    let line = "driftless_follower_activation_failures_total{engine=\"http://a\"} 1\n";
    assert_eq!((status, page.contains(line)), (200, true), "{page}");
    for line in ["_version 1\n", "_refused_total 0\n", "_versions_applied_total 2\n"] {
        assert!(page.contains(&format!("driftless_follower{line}")), "{line}: {page}");
    }
    assert_eq!(call("GET", "/prepare", "").0, 405);
    assert_eq!(call("GET", "/absent", "").0, 404);
    // One byte too many. With more the server hangs up on what it has not read, and its answer may be lost.
    assert_eq!(call("POST", "/prepare", &"x".repeat(4096 + 1)).0, 413);
}

#[test]
fn token_guards_all_but_health_and_a_taken_port_is_an_error() {
    let fixture = Fixture::new();
    let follower = fixture.follower(vec![]);
    let server =
        serve(follower.clone(), ServeOptions::new(([127, 0, 0, 1], 0)).with_token("secret")).unwrap();
    let call = |path: &str, token: Option<&str>| {
        let token = token.map_or(String::new(), |token| format!("authorization: Bearer {token}\r\n"));
        exchange(server.addr(), &format!("GET {path}"), &token, "").0
    };
    assert_eq!(call("/health", None), 200);
    assert_eq!(call("/status", None), 401);
    assert_eq!(call("/metrics", None), 401);
    assert_eq!(call("/status", Some("Secret")), 401);
    assert_eq!(call("/status", Some("secret")), 200);
    let error = serve(follower.clone(), ServeOptions::new(server.addr())).unwrap_err();
    assert!(matches!(error, driftless_http::Error::Listen { .. }), "{error:?}");
    let addr = server.addr();
    drop(server);
    serve(follower, ServeOptions::new(addr)).unwrap();
    assert!(Run::open(fixture.store.clone(), RUN).unwrap().has(MODEL, Version(0)).unwrap());
}
