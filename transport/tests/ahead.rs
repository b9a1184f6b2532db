//! Objects are fetched a little ahead of those who decode them, and what goes wrong there is told to them.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use driftless_store::{Error as StoreError, Key, Memory, Store};
use driftless_transport::manifest::Object;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Dtype, Error, Publisher, Replica, Result, Run, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_same, options, step};
use driftless_testkit::random::Random;

/// For what never comes.
const DEADLINE: Duration = Duration::from_secs(60);

/// A small tensor, and one that needs an object for each of its pieces, in full and in a delta, which one
/// thread decodes.
fn weights(seed: u64) -> Weights {
    let mut random = Random(seed);
    let mut weights = Weights::default();
    weights.set("a.small", Dtype::F32, &[64, 64], |_| random.next() as u8);
    weights.set("large", Dtype::F32, &[1100, 1000], |_| random.next() as u8);
    weights
}

struct Scene {
    run: Run,
    versions: [Weights; 2],
    dir: tempfile::TempDir,
}

fn scene() -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut options = options(Start::NewRun, &dir.path().join("baseline"));
    options.object_bytes_max = 1 << 20;
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    let versions = [weights(1), weights(2)];
    publisher.publish(&versions[0], step(0), Mode::Full).unwrap();
    publisher.publish(&versions[1], step(1), Mode::Delta).unwrap();
    publisher.wait().unwrap();
    Scene { run: Run::open(store, RUN).unwrap(), versions, dir }
}

impl Scene {
    /// Takes a replica through both versions, each object by `fetch`, which is told the number of objects.
    fn advance(&self, fetch: impl Fn(usize, &Object) -> Result<Vec<u8>> + Sync) -> Result<()> {
        let mut replica = Replica::open(self.dir.path().join("replica"))?;
        for (version, weights) in (0..).zip(&self.versions) {
            let link = self.run.get(MODEL, Version(version))?;
            let objects = link.manifest.objects.len();
            assert!(objects > 3, "{objects} objects are too few to say anything");
            replica.advance_with(&link, &|object| fetch(objects, object))?;
            assert_same(replica.checkpoint()?, weights);
        }
        Ok(())
    }
}

#[test]
fn an_object_is_fetched_before_the_one_in_front_of_it_is_there() {
    let scene = scene();
    let (begun, more) = (Mutex::new(BTreeSet::<Key>::new()), Condvar::new());
    let fetch = |_, object: &Object| {
        let mut begun = begun.lock().unwrap();
        begun.insert(object.key.clone());
        more.notify_all();
        let first = begun.len() == 1;
        if first {
            let (waited, timeout) =
                more.wait_timeout_while(begun, DEADLINE, |begun| begun.len() < 2).unwrap();
            assert!(!timeout.timed_out(), "nobody asked for a second object");
            begun = waited;
        }
        drop(begun);
        scene.run.object(object)
    };
    scene.advance(fetch).unwrap();
}

#[test]
fn object_not_fetched_ahead_fails_who_asks_and_is_fetched_again() {
    let scene = scene();
    for failing in 0..4 {
        let asked = Mutex::new(0);
        let fetch = |_, object: &Object| {
            let mut asked = asked.lock().unwrap();
            *asked += 1;
            if *asked == failing + 1 {
                return Err(Error::Cancelled { what: "this fetch" });
            }
            scene.run.object(object)
        };
        let error = scene.advance(fetch).unwrap_err();
        assert!(matches!(error, Error::Cancelled { what: "this fetch" }), "{error:?}");
    }
    scene.advance(|_, object| scene.run.object(object)).unwrap();
}

#[test]
fn object_that_does_not_come_in_time_is_asked_for_once() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut weights = Weights::default();
    for tensor in 0..40 {
        weights.set(&format!("t{tensor}"), Dtype::F32, &[64, 64], |_| tensor);
    }
    let mut publisher =
        Publisher::open(store.clone(), options(Start::NewRun, &dir.path().join("baseline"))).unwrap();
    publisher.publish(&weights, step(0), Mode::Full).unwrap();
    let link = Run::open(store, RUN).unwrap().get(MODEL, Version(0)).unwrap();
    let asked = Mutex::new(BTreeMap::<Key, usize>::new());
    let fetch = |object: &Object| {
        *asked.lock().unwrap().entry(object.key.clone()).or_default() += 1;
        let (store, key, waited) = ("bucket".to_owned(), object.key.clone(), Duration::from_secs(120));
        Err(Error::Store(StoreError::Unreachable {
            store,
            action: "get",
            key,
            waited,
            attempts: 5,
            source: "no answer".into(),
        }))
    };
    let mut replica = Replica::open(dir.path().join("replica")).unwrap();
    let error = replica.advance_with(&link, &fetch).unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::Unreachable { .. })), "{error:?}");
    let asked = asked.into_inner().unwrap();
    assert!(!asked.is_empty() && asked.values().all(|times| *times == 1), "{asked:?}");
}

/// The weight file's time by the marker, and as it is.
fn times(replica: &Path) -> [i128; 2] {
    let marker = fs::read(replica.join(".driftless/state.json")).unwrap();
    let marker: serde_json::Value = serde_json::from_slice(&marker).unwrap();
    let noted = marker["weights"][0]["modified_ns"].to_string().parse().unwrap();
    let file = fs::metadata(replica.join("model.safetensors")).unwrap();
    [noted, i128::from(file.mtime()) * 1_000_000_000 + i128::from(file.mtime_nsec())]
}

#[test]
fn pages_made_ready_for_no_version_count_as_they_were() {
    let scene = scene();
    let path = scene.dir.path().join("replica");
    let mut replica = Replica::open(&path).unwrap();
    let links = [0, 1].map(|version| scene.run.get(MODEL, Version(version)).unwrap());
    replica.advance_with(&links[0], &|object| scene.run.object(object)).unwrap();
    replica.sync().unwrap();
    let before = times(&path);
    assert_eq!(before[0], before[1]);
    let last = &links[1].manifest.objects.last().unwrap().key;
    let cut = |object: &Object| {
        if object.key == *last {
            Err(Error::Cancelled { what: "this fetch" })
        } else {
            scene.run.object(object)
        }
    };
    for _ in 0..2 {
        let error = replica.advance_with(&links[1], &cut).unwrap_err();
        assert!(matches!(error, Error::Cancelled { what: "this fetch" }), "{error:?}");
        // Whatever the file system makes of it, nothing has to be hashed again.
        let [noted, is] = times(&path);
        println!("the file's time moved by {} ns", is - before[1]);
        assert_eq!(noted, is);
    }
    drop(replica);
    let mut replica = Replica::open(&path).unwrap();
    assert_same(replica.checkpoint().unwrap(), &scene.versions[0]);
    replica.advance_with(&links[1], &|object| scene.run.object(object)).unwrap();
    assert_same(replica.checkpoint().unwrap(), &scene.versions[1]);
}
