mod link;

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use driftless_testkit::s3::{Fault, Server};
use object_store::memory::InMemory;

use super::*;
use crate::wrap::{Count, Fault as FaultStore};
use crate::{conformance, probe_conditional_put};

const SECRET: &str = "c2VjcmV0LWtleXM=";

/// Small parts and short times: what takes gigabytes and minutes happens in a test.
fn limits() -> Limits {
    Limits {
        part_bytes: 1 << 10,
        attempt: Duration::from_millis(300),
        bytes_per_second_min: 1 << 20,
        deadline: Duration::from_secs(20),
        pause: [Duration::from_millis(1), Duration::from_millis(10)],
        ..Limits::default()
    }
}

fn in_memory(part_bytes: usize) -> Arc<dyn Store> {
    // Patient: hashing megabytes on a busy machine is not a lost answer.
    let limits = Limits { part_bytes, ..Limits::default() };
    Arc::new(Bucket::new(Box::new(InMemory::new()), "some/prefix", "memory".to_owned(), limits).unwrap())
}

fn bucket(server: &Server, limits: Limits) -> Bucket {
    bucket_at(server.addr, limits)
}

fn bucket_at(addr: SocketAddr, limits: Limits) -> Bucket {
    let settings = [
        ("AWS_ACCESS_KEY_ID", "key-id"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_ENDPOINT_URL", &format!("http://{addr}")),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut bucket = open("s3://bucket/root", &settings).unwrap();
    Arc::get_mut(&mut bucket.remote).unwrap().limits = limits;
    bucket
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn body(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 31 % 251) as u8).collect()
}

#[test]
fn over_the_reference_backend_it_conforms_bare_and_wrapped() {
    // One request for everything, and the suite's large object in some eighty parts.
    for part_bytes in [8 << 20, 64 << 10] {
        conformance::check(&*in_memory(part_bytes));
        conformance::check(&Count::new(in_memory(part_bytes)));
        conformance::check(&FaultStore::new(in_memory(part_bytes)));
    }
}

#[test]
fn over_the_fake_server_it_conforms() {
    let server = Server::start();
    conformance::check(&bucket(&server, Limits { part_bytes: 256 << 10, ..Limits::default() }));
    assert!(server.with(|bucket| bucket.uploads.is_empty()), "every upload was completed");
}

#[test]
fn get_cached_reports_arrived_bytes_once() {
    let server = Server::start();
    let store = bucket(&server, Limits { part_bytes: 64 << 10, ..Limits::default() });
    let bytes = body(200_000);
    let object = Object { key: key("a"), size: 200_000, blake3: crate::ContentDigest::of(&bytes) };
    store.put(&object.key, &bytes, PutMode::Create).unwrap();
    let told = Arc::new(AtomicU64::new(0));
    let telling = told.clone();
    let arrived: OnBytes = Arc::new(move |bytes| {
        telling.fetch_add(bytes, Relaxed);
    });
    assert!(store.get_cached(&object, 1000..300_000, &arrived).unwrap() == bytes[1000..]);
    assert_eq!(told.load(Relaxed), 199_000);
}

#[test]
fn a_server_that_ignores_conditions_is_refused_by_name() {
    let server = Server::start();
    server.with(|bucket| bucket.careless = true);
    let error = probe_conditional_put(&bucket(&server, limits())).unwrap_err();
    assert!(matches!(error, Error::ConditionalPutIgnored { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(&format!("s3://bucket/root?endpoint=http://{}", server.addr)), "{text}");
    assert!(server.with(|bucket| bucket.objects.is_empty()), "the probe leaves nothing behind");
}

#[test]
fn busy_servers_are_asked_again_and_refusals_are_not() {
    let server = Server::start();
    let store = bucket(&server, limits());
    for status in [408, 429, 500, 503] {
        server.with(|bucket| {
            bucket.faults.extend([("PUT", Fault::Before(status)), ("GET", Fault::After(status))])
        });
        store.put(&key("a"), b"1", PutMode::Overwrite).unwrap();
        assert_eq!(store.get(&key("a"), None).unwrap(), b"1");
    }
    for status in [400, 403, 501] {
        server.with(|bucket| {
            bucket.requests.clear();
            bucket.faults.push_back(("PUT", Fault::Before(status)));
        });
        let error = store.put(&key("a"), b"2", PutMode::Overwrite).unwrap_err();
        assert!(matches!(error, Error::Refused { action: "put", .. }), "{error:?}");
        assert_eq!(server.with(|bucket| bucket.requests.len()), 1, "{status}");
        assert!(crate::chain_text(&error).contains("Injected"), "{error:?}");
    }
    assert_eq!(store.get(&key("a"), None).unwrap(), b"1");
}

#[test]
fn bucket_redirect_to_another_host_is_refused_and_not_followed() {
    let (server, elsewhere) = (Server::start(), Server::start());
    let store = bucket(&server, limits());
    let theirs = bucket(&elsewhere, limits());
    theirs.put(&key("a"), b"theirs", PutMode::Create).unwrap();
    elsewhere.with(|bucket| bucket.requests.clear());
    server.with(|bucket| bucket.elsewhere = elsewhere.addr.to_string());
    for status in [301, 302, 303, 307, 308] {
        let redirect = Fault::Redirect(status);
        server.with(|bucket| bucket.faults.extend([("GET", redirect), ("PUT", redirect)]));
        let got = store.get(&key("a"), None).map(drop);
        let put = store.put(&key("a"), b"ours", PutMode::Overwrite);
        let requests = elsewhere.with(|bucket| bucket.requests.clone());
        assert!(requests.is_empty(), "{status}: {requests:?}, {got:?}, {put:?}");
        for error in [got.unwrap_err(), put.unwrap_err()] {
            assert!(matches!(error, Error::Refused { .. }), "{error:?}");
            let (words, place) = (crate::chain_text(&error), format!("http://{}/", elsewhere.addr));
            assert!(words.contains(&status.to_string()) && words.contains(&place), "{words}");
        }
    }
}

#[test]
fn a_create_whose_answer_was_lost_is_known_again() {
    let server = Server::start();
    let store = bucket(&server, limits());
    for (name, fault) in [("a", Fault::After(500)), ("b", Fault::Silence), ("c", Fault::After(503))] {
        server.with(|bucket| bucket.faults.push_back(("PUT", fault)));
        store.put(&key(name), name.as_bytes(), PutMode::Create).unwrap();
        assert_eq!(store.get(&key(name), None).unwrap(), name.as_bytes());
    }
    // The answer that was lost was a refusal: the object is another's.
    server.with(|bucket| bucket.faults.push_back(("PUT", Fault::After(500))));
    let error = store.put(&key("a"), b"mine", PutMode::Create).unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error:?}");
    // Told at the first try, equal bytes are another's too.
    assert!(matches!(store.put(&key("a"), b"a", PutMode::Create), Err(Error::AlreadyExists { .. })));
}

#[test]
fn large_objects_travel_in_parts_and_only_lost_parts_again() {
    let server = Server::start();
    let store = bucket(&server, limits());
    let bytes = body(10 * 1024 + 1);
    server.with(|bucket| {
        bucket.faults.extend([("PUT part", Fault::Before(500)), ("PUT part", Fault::Silence)])
    });
    store.put(&key("large"), &bytes, PutMode::Overwrite).unwrap();
    let puts = server.with(|bucket| bucket.requests.iter().filter(|kind| *kind == "PUT part").count());
    assert_eq!(puts, 11 + 2);

    server.with(|bucket| {
        bucket.requests.clear();
        bucket.faults.extend([("GET", Fault::Cut), ("GET", Fault::Before(503))]);
    });
    assert!(store.get(&key("large"), None).unwrap() == bytes);
    assert_eq!(server.with(|bucket| bucket.requests.len()), 11 + 2);
    assert!(store.get(&key("large"), Some(1000..5001)).unwrap() == bytes[1000..5001]);
}

#[test]
fn an_answer_longer_than_its_range_is_refused_before_it_is_kept() {
    let server = Server::start();
    let store = bucket(&server, limits());
    let bytes = body(500);
    store.put(&key("a"), &bytes, PutMode::Create).unwrap();
    server.with(|bucket| bucket.faults.push_back(("GET", Fault::Longer)));
    let error = store.get(&key("a"), None).unwrap_err();
    assert!(matches!(error, Error::Refused { action: "get", .. }), "{error:?}");
    let text = crate::chain_text(&error);
    assert!(text.contains("expected 500 bytes"), "{text}");
    assert!(store.get(&key("a"), None).unwrap() == bytes, "it was that answer alone");
}

#[test]
fn upload_with_a_lost_completion_is_complete_else_leaves_none() {
    let server = Server::start();
    let store = bucket(&server, limits());
    let bytes = body(3000);
    // The first POST begins the upload, the second completes it.
    server.with(|bucket| bucket.faults.push_back(("POST", Fault::Before(503))));
    store.put(&key("large"), &bytes, PutMode::Overwrite).unwrap();
    let path = Path::from("root/large");
    let id = store.wait(&key("large"), |remote, _| async move {
        Ok(remote.backend.create_multipart(&path).await.map_err(|error| cause(&error).text).unwrap())
    });
    let id = id.unwrap();
    server.with(|bucket| {
        bucket.uploads.get_mut(&id).unwrap().insert(1, bytes.clone().into());
        bucket.faults.push_back(("POST", Fault::After(500)));
    });
    let part = PartId { content_id: "\"1\"".to_owned() };
    let whole = Bytes::from(bytes.clone());
    let completed = store.wait(&key("large"), |remote, key| async move {
        remote.complete(&key, &Path::from("root/large"), &id, &[part], &whole).await
    });
    completed.unwrap();

    server.with(|bucket| bucket.faults.extend([("PUT part", Fault::Before(400))]));
    let error = store.put(&key("other"), &bytes, PutMode::Overwrite).unwrap_err();
    assert!(matches!(error, Error::Refused { action: "put a part of", .. }), "{error:?}");
    assert!(server.with(|bucket| bucket.uploads.is_empty()), "the upload was aborted");
    assert!(matches!(store.head(&key("other")), Err(Error::NotFound { .. })));
}

#[test]
fn an_object_that_is_replaced_while_it_is_read_is_read_again() {
    let server = Server::start();
    let store = bucket(&server, Limits { parts: 1, ..limits() });
    let bytes = body(3000);
    store.put(&key("a"), &bytes, PutMode::Overwrite).unwrap();
    server.with(|bucket| bucket.faults.extend([("GET", Fault::None), ("GET", Fault::Replaced)]));
    let found = store.get(&key("a"), None).unwrap();
    let other: Vec<u8> = bytes.iter().map(|byte| byte ^ 0xff).collect();
    assert!(found == other, "a mixture of two objects");
}

#[test]
fn a_silent_server_is_given_up_by_name() {
    let server = Server::start();
    let short =
        Limits { attempt: Duration::from_millis(20), deadline: Duration::from_millis(100), ..limits() };
    let store = bucket(&server, short);
    server.with(|bucket| bucket.faults.extend([("HEAD", Fault::Silence); 100]));
    let error = store.head(&key("a")).unwrap_err();
    let Error::Unreachable { store, action: "examine", attempts, .. } = &error else { panic!("{error:?}") };
    assert!(store.contains(&server.addr.to_string()) && *attempts > 1, "{error:?}");
    assert!(error.is_retryable());
    assert!(crate::chain_text(&error).contains("no answer within"), "{error:?}");
}

/// As a whole it takes longer than one request may.
#[test]
fn listing_has_the_time_of_a_request_for_each_page() {
    let server = Server::start();
    let store = bucket(&server, Limits { attempt: Duration::from_secs(2), ..limits() });
    let late = Fault::Late(Duration::from_millis(400));
    let objects = (0..13).map(|at| (format!("root/dir/{at:02}"), (Bytes::new(), at)));
    server.with(|bucket| {
        bucket.objects = objects.collect();
        bucket.faults.extend([("GET", late); 7]);
    });
    assert_eq!(store.list(&key("dir")).unwrap().len(), 13);
    let (asked, left) = server.with(|bucket| (bucket.requests.len(), bucket.faults.len()));
    assert_eq!((asked, left), (7, 0), "each page was asked for once, and was late");
}

#[test]
fn a_server_that_is_away_is_named_with_the_reason() {
    let server = Server::start();
    let store = bucket(&server, Limits { deadline: Duration::from_millis(50), ..limits() });
    drop(server);
    let error = store.get(&key("a"), None).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert!(crate::chain_text(&error).contains("onnect"), "{error:?}");
}

#[test]
fn secrets_are_neither_shown_nor_taken_from_the_url() {
    let server = Server::start();
    let store = bucket(&server, limits());
    server.with(|bucket| bucket.faults.push_back(("HEAD", Fault::Before(403))));
    let error = store.head(&key("a")).unwrap_err();
    for text in [format!("{store} {store:?}"), format!("{error:?} {}", crate::chain_text(&error))] {
        assert!(!text.contains(SECRET) && !text.contains("key-id"), "{text}");
    }
    for url in [
        "s3://key:hidden@bucket/prefix",
        "s3://bucket/prefix?secret_access_key=hidden",
        "s3://bucket/prefix?token=hidden",
        "az://container/prefix?sas_token=hidden",
        "s3://bucket/prefix?endpoint=http://user:hidden@host",
        "s3:///prefix",
    ] {
        let error = open(url, &[]).unwrap_err();
        assert!(matches!(error, Error::BadText { what: "store URL", .. }), "{error:?}");
        assert!(!error.to_string().contains("hidden"), "{error}");
    }
    assert!(matches!(open("s3://bucket/.hidden", &[]), Err(Error::BadKey { .. })));
    assert!(matches!(open("ftp://bucket/x", &[]), Err(Error::Unsupported { .. })));
}

#[test]
fn a_url_wins_over_the_settings_and_shows_what_they_say() {
    let settings = [
        ("AWS_ENDPOINT_URL", "https://from.settings"),
        ("AWS_BUCKET", "from-settings"),
        ("AWS_ACCESS_KEY_ID", "key-id"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("AZURE_STORAGE_ACCOUNT_KEY", SECRET),
        ("UNKNOWN", "ignored"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let shown = |url| open(url, &settings).unwrap().to_string();
    assert_eq!(shown("s3://b/p/q/"), "s3://b/p/q?endpoint=https://from.settings");
    assert_eq!(shown("s3://b?endpoint=https://from.url"), "s3://b?endpoint=https://from.url");
    assert_eq!(shown("az://c/p"), "az://c/p?account=account");
    assert_eq!(shown("gs://b/p"), "gs://b/p");
}

#[test]
fn calls_work_from_the_threads_of_another_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let store = in_memory(1 << 10);
        store.put(&key("a"), b"1", PutMode::Create).unwrap();
        assert_eq!(store.get(&key("a"), None).unwrap(), b"1");
        drop(store);
    });
}
