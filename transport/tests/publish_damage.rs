//! Manifests, objects and hints that were damaged, exchanged or replayed: each is a typed error, and nothing
//! moves.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;
use std::sync::Arc;

use driftless_store::{Disk, Error as StoreError, Key, Memory, PutMode, Store};
use driftless_transport::manifest::Kind;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Error, Publisher, Replica, Run, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_reader, assert_same, publisher, step};
use driftless_testkit::random::Random;

/// A run with versions 0 to 2, and the weights of each.
fn story(store: &Arc<dyn Store>, baseline: &Path) -> (Publisher, Vec<Weights>) {
    let mut publisher = publisher(store, Start::NewRun, baseline);
    let mut weights = Weights::small(1);
    let mut versions = Vec::new();
    for version in 0..3 {
        weights.step(version, 20);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        versions.push(weights.clone());
    }
    (publisher, versions)
}

fn rewrite(store: &dyn Store, key: &Key, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = store.get(key, None).unwrap();
    change(&mut bytes);
    store.put(key, &bytes, PutMode::Overwrite).unwrap();
}

#[test]
fn every_damaged_object_is_refused_and_the_old_version_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, versions) = story(&store, &dir.path().join("baseline"));
    let run = publisher.run();
    let mut replica = Replica::open(dir.path().join("follower")).unwrap();
    replica.advance(run, MODEL, Version(1), None).unwrap();
    let key = run.get(MODEL, Version(2)).unwrap().manifest.objects[0].key.clone();
    let other = run.get(MODEL, Version(1)).unwrap().manifest.objects[0].key.clone();
    let (good, other) = (store.get(&key, None).unwrap(), store.get(&other, None).unwrap());

    let mut random = Random(3);
    let mut bad: Vec<Vec<u8>> =
        vec![Vec::new(), good[..good.len() - 1].to_vec(), [&good[..], b"x"].concat(), other];
    for _ in 0..20 {
        let mut flipped = good.clone();
        let bit = random.next() as usize % (flipped.len() * 8);
        flipped[bit / 8] ^= 1 << (bit % 8);
        bad.push(flipped);
    }
    for bytes in bad {
        store.put(&key, &bytes, PutMode::Overwrite).unwrap();
        let error = replica.advance(run, MODEL, Version(2), None).unwrap_err();
        let told = match &error {
            Error::Store(
                StoreError::DigestMismatch { subject, .. } | StoreError::WrongSize { subject, .. },
            ) => subject,
            _ => panic!("{error:?}"),
        };
        assert!(told.contains(key.as_str()), "{error}");
        assert_same(replica.checkpoint().unwrap(), &versions[1]);
    }
    store.delete(&key).unwrap();
    let error = replica.advance(run, MODEL, Version(2), None).unwrap_err();
    assert!(
        matches!(&error, Error::Store(StoreError::NotFound { key: missing, .. }) if *missing == key),
        "{error:?}"
    );
    store.put(&key, &good, PutMode::Create).unwrap();
    replica.advance(run, MODEL, Version(2), None).unwrap();
    assert_same(replica.checkpoint().unwrap(), &versions[2]);
}

#[test]
fn a_full_version_goes_on_where_the_store_has_lost_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, versions) = story(&store, &dir.path().join("baseline"));
    let run = publisher.run().clone();
    drop(publisher);
    let mut replica = Replica::open(dir.path().join("follower")).unwrap();
    replica.advance(&run, MODEL, Version(1), None).unwrap();
    let key = run.get(MODEL, Version(2)).unwrap().manifest.objects[0].key.clone();
    let mut weights = versions[2].clone();
    for (number, lose) in [true, false].into_iter().enumerate() {
        if lose {
            store.delete(&key).unwrap();
        } else {
            let key = run.get(MODEL, Version(4)).unwrap().manifest.objects[0].key.clone();
            rewrite(&*store, &key, |bytes| bytes[0] ^= 1);
        }
        // Its baseline is to be built from what is lost.
        let mut publisher = publisher_at(&store, &dir.path().join(format!("baseline-{number}")));
        let full = Version(3 + 2 * number as u64);
        weights.step(full.0, 20);
        for _ in 0..2 {
            let error = publisher.publish(&weights, step(full.0), Mode::Delta).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Store(StoreError::NotFound { .. } | StoreError::DigestMismatch { .. })
                ),
                "{error:?}"
            );
        }
        assert_eq!(publisher.publish(&weights, step(full.0), Mode::Full).unwrap().version, full);
        replica.advance(&run, MODEL, full, None).unwrap();
        assert_same(replica.checkpoint().unwrap(), &weights);
        weights.step(full.0 + 1, 20);
        let delta = publisher.publish(&weights, step(full.0 + 1), Mode::Delta).unwrap();
        assert_eq!((delta.version, delta.kind), (full.next(), Kind::Delta));
    }
}

/// A publisher that goes on with the run.
fn publisher_at(store: &Arc<dyn Store>, baseline: &Path) -> Publisher {
    publisher(store, Start::Resume, baseline)
}

#[test]
fn a_changed_manifest_breaks_the_chain() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, _) = story(&store, &dir.path().join("baseline"));
    let run = publisher.run();
    let from = run.get(MODEL, Version(0)).unwrap().identity();
    let key = run.manifest_key(MODEL, Version(1)).unwrap();
    // Still a manifest, and of the right version: only the chain can tell.
    rewrite(&*store, &key, |bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        *bytes = text.replace("\"trainer_step\":1", "\"trainer_step\":7").into_bytes();
    });
    let error = run.chain(MODEL, Some(from), Version(2)).unwrap_err();
    let Error::BrokenChain { version: Version(2), base: Version(1), expected, found } = error else {
        panic!("{error:?}")
    };
    assert_ne!(expected, found);
    // A reader that is there already is told that the store's version is another one.
    let have = driftless_transport::manifest::Base { version: Version(1), manifest_digest: expected };
    let error = run.chain(MODEL, Some(have), Version(1)).unwrap_err();
    assert!(
        matches!(error, Error::Store(StoreError::DigestMismatch { expected: ours, .. }) if ours == expected),
        "{error:?}"
    );
    let foreign =
        driftless_transport::manifest::Base { version: Version(1), manifest_digest: from.manifest_digest };
    let error = run.chain(MODEL, Some(foreign), Version(2)).unwrap_err();
    assert!(matches!(error, Error::BrokenChain { .. }), "{error:?}");
}

#[test]
fn a_manifest_of_something_else_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, _) = story(&store, &dir.path().join("baseline"));
    let run = publisher.run();
    let other_store: Arc<dyn Store> = Arc::new(Memory::new());
    let (other, _) = story(&other_store, &dir.path().join("other"));
    let key = run.manifest_key(MODEL, Version(2)).unwrap();
    let foreign = other_store.get(&other.run().manifest_key(MODEL, Version(2)).unwrap(), None).unwrap();
    let older = store.get(&run.manifest_key(MODEL, Version(1)).unwrap(), None).unwrap();

    store.put(&key, &foreign, PutMode::Overwrite).unwrap();
    let error = run.newest(MODEL).unwrap_err();
    let Error::ForeignRun { subject, expected, found } = error else { panic!("{error:?}") };
    assert_eq!((subject.as_str(), expected, found), (key.as_str(), run.id(), other.run().id()));

    store.put(&key, &older, PutMode::Overwrite).unwrap();
    let error = run.get(MODEL, Version(2)).unwrap_err();
    assert!(matches!(error, Error::Corrupt { what, .. } if what.contains("another version")));

    let critic = run.manifest_key("critic", Version(1)).unwrap();
    store.put(&critic, &older, PutMode::Create).unwrap();
    let error = run.get("critic", Version(1)).unwrap_err();
    assert!(matches!(error, Error::ForeignModel { expected, .. } if expected == "critic"));

    store.put(&key, &older[..older.len() / 2], PutMode::Overwrite).unwrap();
    let error = run.newest(MODEL).unwrap_err();
    assert!(matches!(&error, Error::Parse { subject, .. } if subject == key.as_str()), "{error:?}");
    let error = run.get(MODEL, Version(9)).unwrap_err();
    assert!(matches!(error, Error::NoSuchVersion { version: Version(9), .. }));
}

#[test]
fn the_head_is_a_hint_and_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    let run = publisher.run().clone();
    let head = Key::new(format!("{}/{MODEL}/head", run.id())).unwrap();
    let old = store.get(&head, None).unwrap();
    for version in 1..=20 {
        weights.step(version, 200);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        // Replayed: one behind at first, many behind in the end.
        store.put(&head, &old, PutMode::Overwrite).unwrap();
        assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(version)));
    }
    let future =
        String::from_utf8(old.clone()).unwrap().replace("\"version\":0", "\"version\":77").into_bytes();
    let digest = String::from_utf8(old).unwrap().replace(char::is_numeric, "0").into_bytes();
    for lie in [future, digest, b"{".to_vec(), vec![b'x'; 100_000], Vec::new()] {
        store.put(&head, &lie, PutMode::Overwrite).unwrap();
        assert_eq!(
            run.newest_version(MODEL).unwrap(),
            Some(Version(20)),
            "{}",
            String::from_utf8_lossy(&lie[..lie.len().min(80)])
        );
    }
    store.delete(&head).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 20, &weights);
    assert_eq!(run.newest("critic").unwrap(), None);
}

#[test]
fn runs_are_claimed_once_and_read_back() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let run = Run::create(store.clone(), "one").unwrap();
    let error = Run::create(store.clone(), "one").unwrap_err();
    assert!(matches!(&error, Error::RunExists { run_id, .. } if *run_id == run.id()), "{error:?}");
    Run::create(store.clone(), "two").unwrap();
    assert_eq!(Run::names(&*store).unwrap(), ["one", "two"]);
    assert!(matches!(Run::open(store.clone(), "three"), Err(Error::NoSuchRun { .. })));
    for bad in ["", "../x", "a/b"] {
        assert!(matches!(Run::create(store.clone(), bad), Err(Error::BadName { what: "run", .. })), "{bad}");
    }
    let key = Key::new("runs/one").unwrap();
    for record in [&b""[..], b"{", b"{\"format\":1}", b"{\"format\":1,\"run_id\":\"12\"}"] {
        store.put(&key, record, PutMode::Overwrite).unwrap();
        assert!(matches!(Run::open(store.clone(), "one"), Err(Error::Parse { .. })));
    }
    store
        .put(&key, format!("{{\"format\":2,\"run_id\":\"{}\"}}", run.id()).as_bytes(), PutMode::Overwrite)
        .unwrap();
    assert!(matches!(Run::open(store, "one"), Err(Error::Unsupported { .. })));
}

#[test]
fn followers_leave_dated_acknowledgements() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.path()));
    let run = Run::create(store.clone(), RUN).unwrap();
    assert!(run.followers().unwrap().is_empty());
    store.put(&run.follower_key("host-1").unwrap(), b"{}", PutMode::Overwrite).unwrap();
    let followers = run.followers().unwrap();
    assert_eq!((followers.len(), followers[0].key.name()), (1, "host-1"));
    assert!(followers[0].modified.is_some());
    assert!(matches!(run.follower_key("a/b"), Err(Error::BadName { what: "follower", .. })));
    assert!(run.models().unwrap().is_empty());
}
