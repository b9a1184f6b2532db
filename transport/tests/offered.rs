//! Versions that engines take before their journal is durable: what every crash and every failure leaves, what the store
//! is told, and what the next follower makes of an engine that is ahead of the directory.
//!
//! Crash points are global, so these tests have a binary of their own and take turns.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftless_store::os::watch::{self, Call};
use driftless_store::wait::Stop;
use driftless_store::wrap::{Fault, When};
use driftless_store::{BoxError, Memory, Store};
use driftless_testkit::publications::{
    MODEL, RUN, Weights, assert_loads_whole_or_not, assert_same, publisher, step,
};
use driftless_transport::activate::{Activate, Activated, Target};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::gc::{Ack, GcOptions, collect};
use driftless_transport::prepared::OfferWhen;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Checkpoint, Error, Follower, Publisher, Replica, Result, Run, Version};
use fail::FailScenario;

/// Behind the offer, in this order.
const POINTS: [&str; 5] =
    ["follow.offered", "follow.journal", "follow.apply", "follow.sync", "follow.marker"];

/// A run: version 0 in full, and deltas that change nothing but weights.
struct Scene {
    store: Arc<dyn Store>,
    publisher: Publisher,
    versions: Vec<Weights>,
    dir: tempfile::TempDir,
    /// Keeps other tests from crash points, and clears them when the test ends.
    _turn: FailScenario<'static>,
}

fn scene(deltas: u64) -> Scene {
    let turn = FailScenario::setup();
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    let mut weights = Weights::small(1);
    // Of a type that plugins are offered nothing of.
    weights.remove("f.ids");
    publisher.publish(&weights, step(0), Mode::Full).unwrap();
    let plugins = dir.path().join("plugins");
    fs::create_dir(&plugins).unwrap();
    fs::set_permissions(&plugins, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(plugins.join("rank-30000-0.json"), "{}").unwrap();
    let mut scene = Scene { store, publisher, versions: vec![weights], dir, _turn: turn };
    (0..deltas).for_each(|_| scene.publish());
    scene
}

impl Scene {
    fn publish(&mut self) {
        let mut weights = self.versions.last().unwrap().clone();
        let number = self.versions.len() as u64;
        // Little, so that nobody starts over.
        weights.step(number, 200);
        self.publisher.publish(&weights, step(number), Mode::Delta).unwrap();
        // Its baseline moves behind, past the same crash points.
        self.publisher.wait().unwrap();
        self.versions.push(weights);
    }

    fn run(&self) -> Run {
        Run::open(self.store.clone(), RUN).unwrap()
    }

    fn label(&self, version: u64) -> String {
        self.run().id().label(Version(version))
    }

    /// A directory at version 0.
    fn host(&self, name: &str) -> PathBuf {
        let dir = self.dir.path().join(name);
        self.advance(&mut Replica::open(&dir).unwrap(), 0).unwrap();
        dir
    }

    fn replica(&self, dir: &Path) -> Replica {
        let mut replica = Replica::open(dir).unwrap();
        replica.set_plugin_dir(self.dir.path().join("plugins"));
        replica.offer_first(OfferWhen::Decoded);
        replica
    }

    fn advance(&self, replica: &mut Replica, to: u64) -> Result<()> {
        replica.advance(&self.run(), MODEL, Version(to), None)?;
        replica.sync().map(drop)
    }

    fn assert_at(&self, dir: &Path, version: u64) {
        let replica = Replica::open(dir).unwrap();
        assert_eq!(replica.applied().unwrap().version, Version(version));
        assert_same(&Checkpoint::open(dir).unwrap(), &self.versions[version as usize]);
        replica.verify().unwrap();
        assert!(!dir.join(".driftless/journal").exists());
    }

    fn options(&self, dir: &Path) -> FollowerOptions {
        let mut options = FollowerOptions::new(RUN, dir, "host");
        (options.poll, options.engine_poll) = (Duration::from_millis(1), Duration::from_millis(1));
        options.backoff_max = Duration::from_millis(4);
        options.sample_poll = Duration::ZERO;
        options.plugin_dir = Some(self.dir.path().join("plugins"));
        options.offer = OfferWhen::Decoded;
        options
    }

    /// The acknowledgement in the store, and the version that the follower's lease needs.
    fn lease(&self) -> (Ack, u64) {
        let key = self.run().follower_key("host").unwrap();
        let bytes = self.store.get(&key, None).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        (serde_json::from_value(record.clone()).unwrap(), record["needs"].as_u64().unwrap())
    }
}

#[test]
fn crash_before_the_journal_is_kept_leaves_the_version_before() {
    let scene = scene(2);
    for point in POINTS {
        let mut crashes = 0;
        for passed in 0.. {
            let dir = scene.host(&format!("{point}-{passed}"));
            fail::cfg(point, &format!("{passed}*off->return")).unwrap();
            let mut replica = scene.replica(&dir);
            replica.advance(&scene.run(), MODEL, Version(1), None).unwrap();
            assert_eq!(replica.applied().unwrap().version, Version(1), "it is offered");
            let kept = replica.keep();
            drop(replica);
            fail::remove(point);
            if kept.is_ok() && !dir.join(".driftless/journal").exists() {
                break;
            }
            crashes += 1;
            let versions = [Some(&scene.versions[0]), Some(&scene.versions[1])];
            let loads = assert_loads_whole_or_not(&dir, &versions);
            assert_eq!(loads, point != "follow.apply", "{point}, {passed}");
            let is_kept = point != "follow.offered";
            scene.assert_at(&dir, u64::from(is_kept));
            // The next one brings it there from the store, and goes on.
            scene.advance(&mut scene.replica(&dir), 1).unwrap();
            scene.assert_at(&dir, 1);
            scene.advance(&mut scene.replica(&dir), 2).unwrap();
            scene.assert_at(&dir, 2);
        }
        assert!(crashes > 0, "{point} was never reached");
    }
}

#[test]
fn the_same_replica_brings_what_it_could_not_keep() {
    let scene = scene(2);
    for point in POINTS {
        let dir = scene.host(point);
        let mut replica = scene.replica(&dir);
        fail::cfg(point, "1*return").unwrap();
        replica.advance(&scene.run(), MODEL, Version(1), None).unwrap();
        let checkpoint = replica.checkpoint().unwrap();
        let written = checkpoint.wait(Duration::from_secs(60));
        let kept = replica.keep().and_then(|_| replica.sync());
        fail::remove(point);
        assert!(kept.is_err(), "{point}");
        assert_eq!(written.is_err(), POINTS[..3].contains(&point), "{point}: {written:?}");
        assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })));
        scene.advance(&mut replica, 2).unwrap();
        drop(replica);
        scene.assert_at(&dir, 2);
    }
}

/// Called with the label of a version.
type Then = Box<dyn FnMut(&str) + Send>;

/// An engine whose plugin takes every version at once, unless it serves it.
#[derive(Clone, Default)]
struct Engine(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    serving: Option<String>,
    labels: Vec<String>,
    looks: usize,
    /// Called when it has taken a version.
    then: Option<Then>,
}

impl Engine {
    fn serving(label: String) -> Self {
        Self(Arc::new(Mutex::new(Taken { serving: Some(label), ..Taken::default() })))
    }

    fn then(&self, then: impl FnMut(&str) + Send + 'static) {
        self.0.lock().unwrap().then = Some(Box::new(then));
    }

    fn labels(&self) -> Vec<String> {
        self.0.lock().unwrap().labels.clone()
    }

    fn boxed(&self) -> Vec<Box<dyn Activate>> {
        vec![Box::new(self.clone())]
    }
}

impl Activate for Engine {
    fn name(&self) -> String {
        "engine".into()
    }

    fn serving(&mut self) -> std::result::Result<Option<String>, BoxError> {
        let mut taken = self.0.lock().unwrap();
        taken.looks += 1;
        Ok(taken.serving.clone())
    }

    fn activate(&mut self, target: &Target<'_>) -> std::result::Result<Activated, BoxError> {
        let mut taken = self.0.lock().unwrap();
        taken.serving = Some(target.label.to_owned());
        taken.labels.push(target.label.to_owned());
        taken.then.iter_mut().for_each(|then| then(target.label));
        Ok(Activated::default())
    }

    fn waits(&self) -> bool {
        true
    }
}

/// Runs the follower until `over`, which is asked after each round.
fn run_until(follower: &Follower, over: impl Fn() -> bool + Send + Sync + 'static) {
    let stop = Stop::new();
    follower.on_round({
        let stop = stop.clone();
        move |_| {
            if over() {
                stop.stop();
            }
        }
    });
    follower.run_until(&stop, false).unwrap();
}

/// Has the next syncs of a journal fail, the first one once the engine has taken the version and `then` was done.
fn journals_fail(engine: &Engine, failures: usize, then: impl Fn() + Send + 'static) {
    let (tell, taken) = channel();
    engine.then(move |_| {
        then();
        tell.send(()).unwrap();
    });
    let mut failed = 0;
    watch::set(Some(Box::new(move |call, path| {
        if call != Call::Sync || !path.ends_with(".driftless/journal.spare") || failed == failures {
            return Ok(());
        }
        if failed == 0 {
            taken.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        failed += 1;
        Err(io::Error::from_raw_os_error(5))
    })));
}

#[test]
fn store_is_told_of_a_version_once_it_is_kept() {
    let scene = scene(1);
    let dir = scene.host("host");
    let engine = Engine::default();
    let mut options = scene.options(&dir);
    options.until = Some(Version(1));
    let follower = Follower::open(scene.store.clone(), options, engine.boxed()).unwrap();
    follower.prepare(Some(Version(0))).unwrap();
    fail::cfg("follow.offered", "pause").unwrap();
    let told = Arc::new(Mutex::new(None));
    let (seen, key, store) = (told.clone(), scene.run().follower_key("host").unwrap(), scene.store.clone());
    let journal = dir.join(".driftless/journal");
    engine.then(move |_| {
        let record: serde_json::Value = serde_json::from_slice(&store.get(&key, None).unwrap()).unwrap();
        *seen.lock().unwrap() = Some((record["version"].clone(), record["needs"].clone(), journal.exists()));
        fail::remove("follow.offered");
    });
    follower.run_until(&Stop::new(), false).unwrap();
    let told = told.lock().unwrap().take().unwrap();
    assert_eq!(told, (0.into(), 0.into(), false), "the engine has it, and nothing is promised");
    let (ack, needs) = scene.lease();
    assert_eq!((ack.version, ack.label, needs), (Version(1), scene.label(1), 1));
    assert_eq!(engine.labels(), [scene.label(1)]);
    drop(follower);
    scene.assert_at(&dir, 1);
}

#[test]
fn prepare_that_somebody_asks_for_is_kept_when_it_returns() {
    let scene = scene(1);
    let dir = scene.host("host");
    let engine = Engine::default();
    let follower = Follower::open(scene.store.clone(), scene.options(&dir), engine.boxed()).unwrap();
    fail::cfg("follow.offered", "1*return").unwrap();
    follower.prepare(Some(Version(1))).unwrap_err();
    assert_eq!(follower.status().applied.unwrap().version, Version(0), "the directory holds it");
    assert!(follower.status().error.unwrap().contains("follow.offered"));
    assert_eq!(follower.prepare(Some(Version(1))).unwrap().version, Version(1));
    assert_eq!(scene.lease().0.version, Version(1));
    assert!(engine.labels().is_empty());
    drop(follower);
    scene.assert_at(&dir, 1);
}

#[test]
fn journal_that_fails_behind_an_engine_is_made_up_for() {
    let scene = scene(1);
    let dir = scene.host("host");
    let engine = Engine::default();
    let mut options = scene.options(&dir);
    options.until = Some(Version(1));
    let follower = Follower::open(scene.store.clone(), options, engine.boxed()).unwrap();
    follower.prepare(Some(Version(0))).unwrap();
    journals_fail(&engine, 3, || {});
    follower.run_until(&Stop::new(), false).unwrap();
    watch::set(None);
    assert_eq!(engine.labels(), [scene.label(1)], "it has the version and is left alone");
    let metrics = follower.metrics();
    assert!(metrics.contains("driftless_follower_prepare_failures_total 3\n"), "{metrics}");
    assert_eq!(scene.lease().0.version, Version(1));
    drop(follower);
    scene.assert_at(&dir, 1);
}

#[test]
fn engine_ahead_is_left_alone_until_the_directory_is_there() {
    let mut scene = scene(1);
    let dir = scene.host("host");
    let engine = Engine::serving(scene.label(1));
    let fault = Arc::new(Fault::new(scene.store.clone()));
    fault.arm(0, u64::MAX, When::Before);
    let follower = Follower::open(fault.clone(), scene.options(&dir), engine.boxed()).unwrap();
    let (looks, path, healed) = (engine.clone(), dir.join(".driftless/state.json"), fault.clone());
    let two = scene.label(2);
    scene.publish();
    run_until(&follower, move || {
        let taken = looks.0.lock().unwrap();
        if taken.looks == 5 {
            assert_eq!(taken.labels, Vec::<String>::new(), "nothing takes it back");
            assert!(fs::read_to_string(&path).unwrap().contains("\"version\": 0"));
            healed.disarm();
        }
        taken.serving.as_ref() == Some(&two)
    });
    assert_eq!(engine.labels(), [scene.label(2)]);
    assert_eq!(follower.status().applied.unwrap().version, Version(2));
}

#[test]
fn engine_that_is_ahead_of_the_last_version_is_brought_back() {
    let scene = scene(2);
    let dir = scene.host("host");
    let engine = Engine::serving(scene.label(2));
    let mut options = scene.options(&dir);
    options.until = Some(Version(1));
    let follower = Follower::open(scene.store.clone(), options, engine.boxed()).unwrap();
    follower.run_until(&Stop::new(), false).unwrap();
    assert_eq!(engine.labels(), [scene.label(1)]);
    // So is one of another run, and one whose weights nobody knows.
    for label in ["0123456789ab:7".to_owned(), format!("{}?partial", scene.label(2))] {
        let engine = Engine::serving(label);
        let mut options = scene.options(&scene.host("other"));
        options.until = Some(Version(1));
        let follower = Follower::open(scene.store.clone(), options, engine.boxed()).unwrap();
        follower.run_until(&Stop::new(), false).unwrap();
        assert_eq!(engine.labels(), [scene.label(1)]);
        drop(follower);
        fs::remove_dir_all(scene.dir.path().join("other")).unwrap();
    }
}

#[test]
fn collection_leaves_what_leads_to_a_version_that_is_not_kept() {
    let mut scene = scene(1);
    let dir = scene.host("host");
    let engine = Engine::default();
    let mut options = scene.options(&dir);
    options.until = Some(Version(3));
    let follower = Follower::open(scene.store.clone(), options, engine.boxed()).unwrap();
    follower.prepare(Some(Version(0))).unwrap();
    follower.activate().unwrap();
    scene.publish();
    scene.publish();
    // Newer versions need nothing of these.
    let last = scene.versions.last().unwrap().clone();
    scene.publisher.publish(&last, step(4), Mode::Full).unwrap();
    scene.publisher.wait().unwrap();
    let (run, kept) = (scene.run(), Arc::new(Mutex::new(Vec::new())));
    let found = kept.clone();
    journals_fail(&engine, usize::MAX, move || {
        let mut options = GcOptions::new(MODEL);
        options.keep = 1;
        collect(&run, &options).unwrap();
        *found.lock().unwrap() = (1..4).filter(|at| run.get(MODEL, Version(*at)).is_ok()).collect();
    });
    let stop = Stop::new();
    std::thread::scope(|scope| {
        scope.spawn(|| follower.run_until(&stop, false));
        while engine.labels().len() < 2 {
            std::thread::yield_now();
        }
        stop.stop();
    });
    drop(follower);
    watch::set(None);
    assert_eq!(*kept.lock().unwrap(), [1, 2, 3], "the lease keeps what leads there");
    scene.assert_at(&dir, 0);
    scene.advance(&mut scene.replica(&dir), 3).unwrap();
    scene.assert_at(&dir, 3);
}
