//! A publisher whose store fails at any call: readers see the old version or the new one, and the next
//! publication is right.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use driftless_store::wrap::{Fault, When};
use driftless_store::{Entry, Error as StoreError, Key, Memory, PutMode, Result as StoreResult, Store};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::gc::{GcOptions, collect};
use driftless_transport::publish::{Mode, PublisherOptions, Start};
use driftless_transport::{Dtype, Error, Follower, Publisher, Run, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_reader, options, orphans, step};
use driftless_testkit::random::Random;

/// What happens to the publisher after the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// One call fails; the same publisher goes on.
    Transient,
    /// Every later call fails, and the process dies; a new one resumes with the same baseline.
    Dead,
    /// The same, and the baseline is lost with it.
    DeadWithoutBaseline,
}

fn small_objects(start: Start, baseline: &Path) -> PublisherOptions {
    let mut options = options(start, baseline);
    options.object_bytes_max = 1 << 20;
    options
}

/// The versions of the story: the second fills several objects.
fn story() -> [Weights; 3] {
    let mut random = Random(11);
    let mut first = Weights::small(1);
    first.set("x.large", Dtype::Bf16, &[1000, 600], |_| random.next() as u8);
    let mut second = first.clone();
    second.set("x.large", Dtype::Bf16, &[1000, 600], |_| random.next() as u8);
    second.step(2, 10);
    second.file("config.json", b"{\"hidden_size\": 64}");
    let mut third = second.clone();
    third.step(3, 10);
    [first, second, third]
}

/// Publishes the second version with a fault at call `k`. Returns false if the publication ended before that
/// call.
fn survive(k: u64, when: When, after: After, story: &[Weights; 3], seen: &mut Vec<&'static str>) -> bool {
    let [first, second, third] = story;
    let dir = tempfile::tempdir().unwrap();
    let (baseline, follower) = (dir.path().join("baseline"), dir.path().join("follower"));
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let fault = Arc::new(Fault::new(inner.clone()));
    let mut publisher = Publisher::open(fault.clone(), small_objects(Start::NewRun, &baseline)).unwrap();
    publisher.publish(first, step(0), Mode::Delta).unwrap();
    publisher.wait().unwrap();
    assert_reader(&inner, &follower, 0, first);

    fault.arm(k, if after == After::Transient { 1 } else { u64::MAX }, when);
    let before = fault.calls();
    let published = publisher.publish(second, step(1), Mode::Delta);
    let moved = publisher.wait();
    assert!(moved.is_ok() || after != After::Transient || published.is_ok(), "{moved:?}");
    let struck = fault.calls() - before > k;
    fault.disarm();
    let run = Run::open(inner.clone(), RUN).unwrap();
    let newest = run.newest(MODEL).unwrap().unwrap().manifest.version;
    match &published {
        Ok(published) => {
            assert_eq!(published.version, newest, "what is reported is committed");
            seen.push("committed");
        }
        Err(Error::CommitUnknown { .. }) => seen.push("unknown"),
        Err(error) => {
            assert!(matches!(error, Error::Store(StoreError::Injected { .. })), "{error:?}");
            assert_eq!(newest, Version(0), "what is reported to fail is not committed: {error:?}");
            seen.push("failed");
        }
    }
    assert_reader(&inner, &follower, newest.0, if newest.0 == 0 { first } else { second });

    if after != After::Transient {
        drop(publisher);
        if after == After::DeadWithoutBaseline {
            std::fs::remove_dir_all(&baseline).unwrap();
        }
        publisher = Publisher::open(inner.clone(), small_objects(Start::Resume, &baseline)).unwrap();
    }
    let next = publisher.publish(third, step(2), Mode::Delta).unwrap();
    assert_eq!(next.version, newest.next(), "numbers have no gaps and no repeats");
    assert_reader(&inner, &follower, next.version.0, third);
    assert_reader(&inner, &dir.path().join("late"), next.version.0, third);
    assert_eq!(orphans(&run), Vec::<String>::new(), "call {k} {when:?} {after:?}");
    struck
}

fn at_every_call(when: When, after: After) -> Vec<&'static str> {
    let (story, mut seen) = (story(), Vec::new());
    let mut k = 0;
    while survive(k, when, after, &story, &mut seen) {
        k += 1;
        assert!(k < 100, "a publication of a few objects takes a few calls");
    }
    assert!(k >= 6, "objects, manifest, head and the baseline's own fetches: {k}");
    seen
}

#[test]
fn a_call_that_fails_once() {
    let seen = at_every_call(When::Before, After::Transient);
    assert!(seen.contains(&"failed") && seen.contains(&"committed"), "{seen:?}");
}

#[test]
fn a_call_whose_answer_is_lost() {
    let seen = at_every_call(When::After, After::Transient);
    assert!(seen.contains(&"failed") && seen.contains(&"committed"), "{seen:?}");
}

#[test]
fn a_store_that_dies_at_a_call() {
    at_every_call(When::Before, After::Dead);
}

#[test]
fn a_store_that_dies_after_a_call() {
    let seen = at_every_call(When::After, After::Dead);
    assert!(seen.contains(&"unknown"), "the manifest is there and nobody can say so: {seen:?}");
}

#[test]
fn a_machine_that_is_lost_at_a_call() {
    at_every_call(When::After, After::DeadWithoutBaseline);
}

#[test]
fn opening_a_run_can_be_repeated_whatever_failed() {
    for when in [When::Before, When::After] {
        for k in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let inner: Arc<dyn Store> = Arc::new(Memory::new());
            let fault = Arc::new(Fault::new(inner.clone()));
            fault.arm(k, 1, when);
            let opened = Publisher::open(fault.clone(), options(Start::NewRun, dir.path()));
            if fault.calls() <= k {
                assert!(k > 4, "the probe and the claim take some calls");
                break;
            }
            drop(opened);
            let again = match Publisher::open(inner.clone(), options(Start::NewRun, dir.path())) {
                Err(Error::RunExists { .. }) => {
                    Publisher::open(inner.clone(), options(Start::Resume, dir.path()))
                }
                again => again,
            };
            let mut publisher = again.unwrap();
            publisher.publish(&Weights::small(1), step(0), Mode::Delta).unwrap();
            assert_eq!(publisher.version(), Some(Version(0)));
        }
    }
}

#[test]
fn a_claim_whose_answer_is_lost_is_still_ours() {
    let fault = Arc::new(Fault::new(Arc::new(Memory::new())));
    fault.arm(0, 1, When::After);
    let run = Run::create(fault.clone(), RUN).unwrap();
    assert_eq!(Run::open(fault, RUN).unwrap().id(), run.id());
}

#[test]
fn baseline_that_cannot_follow_is_moved_before_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let baseline = dir.path().join("baseline");
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let fault = Arc::new(Fault::new(inner.clone()));
    let mut publisher = Publisher::open(fault.clone(), options(Start::NewRun, &baseline)).unwrap();
    let mut weights = Weights::small(1);
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    publisher.wait().unwrap();
    weights.step(1, 10);
    // One object, the manifest, the floor and the head pass; what the baseline fetches does not.
    fault.arm(4, 1, When::Before);
    let published = publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    assert_eq!((published.version, publisher.version()), (Version(1), Some(Version(1))));
    let error = publisher.wait().unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::Injected { operation: "get", .. })), "{error:?}");
    weights.step(2, 10);
    publisher.publish(&weights, step(2), Mode::Delta).unwrap();
    assert_eq!(publisher.version(), Some(Version(2)));
    assert_reader(&inner, &dir.path().join("follower"), 2, &weights);
}

#[test]
fn a_version_that_appears_while_ours_is_unknown_fences_us() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let fault = Arc::new(Fault::new(inner.clone()));
    let mut publisher =
        Publisher::open(fault.clone(), options(Start::NewRun, &dir.path().join("one"))).unwrap();
    let mut weights = Weights::small(1);
    publisher.publish(&weights, step(0), Mode::Delta).unwrap();
    publisher.wait().unwrap();
    weights.step(1, 10);
    fault.arm(1, u64::MAX, When::Before);
    publisher.publish(&weights, step(1), Mode::Delta).unwrap_err();
    fault.disarm();
    let other = Publisher::open(inner, options(Start::Resume, &dir.path().join("two")));
    let theirs = other.unwrap().publish(&weights, step(1), Mode::Delta).unwrap();
    let error = publisher.publish(&weights, step(1), Mode::Delta).unwrap_err();
    assert!(matches!(error, Error::LostRace { winner, .. } if winner == theirs.manifest_digest), "{error:?}");
}

#[test]
fn sweep_keeps_foreign_keys() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut publisher = Publisher::open(store.clone(), options(Start::NewRun, dir.path())).unwrap();
    publisher.publish(&Weights::small(1), step(0), Mode::Delta).unwrap();
    let place = publisher.run().manifest_key(MODEL, Version(0)).unwrap();
    let beside = |name: &str| Key::new(place.as_str().replace("manifest", name)).unwrap();
    let (signature, orphan) = (beside("manifest.sig"), beside("0123456789abcdef-00000"));
    store.put(&signature, b"signature", PutMode::Create).unwrap();
    store.put(&orphan, b"orphan", PutMode::Create).unwrap();
    drop(publisher);
    Publisher::open(store.clone(), options(Start::Resume, dir.path())).unwrap();
    assert!(store.head(&signature).is_ok());
    assert!(matches!(store.head(&orphan), Err(StoreError::NotFound { .. })));
}

/// A store behind a proxy that sends each put twice, and gives the second answer.
#[derive(Debug)]
struct Twice(Memory);

impl fmt::Display for Twice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Store for Twice {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<()> {
        drop(self.0.put(key, bytes, mode));
        self.0.put(key, bytes, mode)
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> StoreResult<Vec<u8>> {
        self.0.get(key, range)
    }
    fn head(&self, key: &Key) -> StoreResult<Entry> {
        self.0.head(key)
    }
    fn list(&self, prefix: &Key) -> StoreResult<Vec<Entry>> {
        self.0.list(prefix)
    }
    fn delete(&self, key: &Key) -> StoreResult<()> {
        self.0.delete(key)
    }
}

#[test]
fn puts_that_a_proxy_sends_twice_hinder_nothing() {
    let store: Arc<dyn Store> = Arc::new(Twice(Memory::new()));
    let dir = tempfile::tempdir().unwrap();
    let options = |start| options(start, &dir.path().join("baseline"));
    let story = story();
    let mut publisher = Publisher::open(store.clone(), options(Start::NewRun).with_anchor_every(1)).unwrap();
    publisher.publish(&story[0], step(0), Mode::Delta).unwrap();
    drop(publisher);
    let mut publisher = Publisher::open(store.clone(), options(Start::Resume)).unwrap();
    publisher.publish(&story[1], step(1), Mode::Delta).unwrap();
    let follower =
        Follower::open(store.clone(), FollowerOptions::new(RUN, dir.path().join("host"), "host"), vec![]);
    follower.unwrap().prepare(None).unwrap();
    publisher.publish(&story[2], step(2), Mode::Delta).unwrap();
    collect(publisher.run(), &GcOptions::new(MODEL)).unwrap();
    assert_reader(&store, &dir.path().join("follower"), 2, &story[2]);
}
