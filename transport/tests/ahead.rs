//! Objects are fetched a little ahead of those who decode them, and what goes wrong there is told to them.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use common::{MODEL, RUN, Random, Weights, assert_same, options, step};
use driftless_transport::manifest::Object;
use driftless_transport::{
    Dtype, Error, Key, Memory, Mode, Publisher, Replica, Result, Run, Start, Store, Version,
};

/// For what never comes.
const DEADLINE: Duration = Duration::from_secs(60);

/// One tensor that needs an object for each of its pieces, in full and in a delta, which one thread decodes.
fn weights(seed: u64) -> Weights {
    let mut random = Random(seed);
    let mut weights = Weights::default();
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
fn an_object_that_cannot_be_fetched_ahead_fails_the_one_who_asks_and_is_fetched_again() {
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
