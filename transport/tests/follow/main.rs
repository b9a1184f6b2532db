//! What a follower promises: the newest version on disk and on every engine, whatever engines and stores do.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod damage;
mod engine;
mod foreign;
mod http;
mod told;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use driftless_store::wait::Stop;
use driftless_store::wrap::{Count, Fault, When};
use driftless_store::{Error as StoreError, Memory, Store};
use driftless_transport::activate::{Activate, Compared, How};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::gc::Ack;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Checkpoint, Error, Follower, Publisher, Replica, Run, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_same, publisher, step};

use engine::{Engine, Mood};

struct Fixture {
    store: Arc<dyn Store>,
    fault: Arc<Fault>,
    publisher: Publisher,
    weights: Weights,
    dir: tempfile::TempDir,
}

impl Fixture {
    /// A run with version 0 in full.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Memory::new());
        let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
        let weights = Weights::small(1);
        publisher.publish(&weights, step(0), Mode::Full).unwrap();
        Self { fault: Arc::new(Fault::new(store.clone())), store, publisher, weights, dir }
    }

    fn publish(&mut self) -> Version {
        let number = self.publisher.version().unwrap().0 + 1;
        self.weights.step(number, 40);
        self.publisher.publish(&self.weights, step(number), Mode::Delta).unwrap().version
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    fn options(&self) -> FollowerOptions {
        let mut options = FollowerOptions::new(RUN, self.path(), "host-0");
        (options.poll, options.engine_poll) = (Duration::from_millis(1), Duration::from_millis(1));
        options.backoff_max = Duration::from_millis(4);
        options
    }

    fn follower(&self, engines: Vec<Box<dyn Activate>>) -> Follower {
        Follower::open(self.fault.clone(), self.options(), engines).unwrap()
    }

    fn label(&self, version: u64) -> String {
        self.publisher.run().id().label(Version(version))
    }

    fn ack(&self) -> Ack {
        let key = self.publisher.run().follower_key("host-0").unwrap();
        serde_json::from_slice(&self.store.get(&key, None).unwrap()).unwrap()
    }

    fn assert_on_disk(&self) {
        assert_same(&Checkpoint::open(self.path()).unwrap(), &self.weights);
    }
}

#[test]
fn prepare_and_activate_are_separate_and_acknowledged() {
    let mut fixture = Fixture::new();
    let engine = Engine::default();
    let follower = fixture.follower(vec![engine.fake("http://a")]);
    assert!(matches!(follower.activate(), Err(Error::NothingApplied { .. })));
    let prepared = follower.prepare(None).unwrap();
    assert_eq!((prepared.version, &prepared.label), (Version(0), &fixture.label(0)));
    assert_eq!(engine.activations(), 0);
    let ack = fixture.ack();
    assert_eq!((ack.version, &ack.engines[0].label), (Version(0), &None));
    assert!(ack.bytes > 0);

    let status = follower.activate().unwrap();
    assert_eq!(status.applied.as_ref(), Some(&fixture.ack()));
    assert_eq!(fixture.ack().engines[0].label, Some(fixture.label(0)));
    let told = &fixture.ack().engines[0];
    assert_eq!(told.pause_ms, Some(7.0));
    assert_eq!(told.how, Some(How::Loaded { why: None }));
    assert_eq!(told.compared, Some(Compared::Not { why: "a fake".into() }));
    assert_eq!(engine.serving(), Some(fixture.label(0)));
    follower.activate().unwrap();
    assert_eq!(engine.activations(), 1, "an engine that serves the version is left alone");

    fixture.publish();
    fixture.publish();
    assert_eq!(follower.prepare(Some(Version(1))).unwrap().version, Version(1));
    assert_eq!(engine.serving(), Some(fixture.label(0)), "a prepare does not touch engines");
    assert_eq!(follower.status().newest, Some(Version(2)));
    assert_eq!(follower.prepare(None).unwrap().advanced.versions, 1);
    assert_eq!(follower.prepare(None).unwrap().advanced.versions, 0);
    follower.activate().unwrap();
    assert_eq!(engine.0.lock().unwrap().loaded, *fixture.weights.tensor_mut("g.up"));
    fixture.assert_on_disk();
}

#[test]
fn once_brings_everything_to_the_newest_version_or_says_why_not() {
    let mut fixture = Fixture::new();
    let [good, bad] = [Engine::default(), Engine::default()];
    let follower = fixture.follower(vec![bad.fake("http://bad"), good.fake("http://good")]);
    fixture.publish();
    bad.next(Mood::Fail);
    let error = follower.run_until(&Stop::new(), true).unwrap_err();
    assert!(
        matches!(&error, Error::Engine { engine, action: "activate", .. } if engine == "http://bad"),
        "{error:?}"
    );
    assert_eq!(good.serving(), Some(fixture.label(1)), "one engine does not hold up the other");
    let engines = fixture.ack().engines;
    assert!(engines[0].error.as_ref().unwrap().contains("flush refused"), "{engines:?}");
    assert_eq!((engines[0].label.as_ref(), engines[1].error.as_ref()), (None, None));

    follower.run_until(&Stop::new(), true).unwrap();
    assert_eq!(bad.serving(), Some(fixture.label(1)));
    assert_eq!(good.activations(), 1);
    assert_eq!(follower.status().error, None);

    bad.0.lock().unwrap().unreachable = true;
    let error = follower.run_until(&Stop::new(), true).unwrap_err();
    assert!(matches!(error, Error::Engine { action: "report its version", .. }), "{error:?}");
}

#[test]
fn an_engine_that_hangs_is_fenced_and_never_gets_torn_weights() {
    let mut fixture = Fixture::new();
    let [slow, good] = [Engine::default(), Engine::default()];
    let (inside, entered) = channel();
    let (release, out) = channel();
    slow.next(Mood::Hang(inside, out));
    let mut options = fixture.options();
    (options.activate_deadline, options.leave_deadline) = (Duration::from_millis(50), Duration::ZERO);
    let engines = vec![slow.fake("http://slow"), good.fake("http://good")];
    let follower = Follower::open(fixture.store.clone(), options, engines).unwrap();
    follower.prepare(None).unwrap();
    let before = fixture.weights.clone();
    let error = follower.activate().unwrap_err();
    assert!(matches!(&error, Error::EngineTimeout { engine, .. } if engine == "http://slow"), "{error:?}");
    entered.recv_timeout(Duration::from_secs(60)).unwrap();
    // On a busy machine it may have missed the short deadline as well, and gets there later.
    wait_for(|| good.serving() == Some(fixture.label(0)));

    fixture.publish();
    let error = follower.prepare(None).unwrap_err();
    assert!(matches!(&error, Error::Busy { with, .. } if with.contains("http://slow")), "{error:?}");
    assert!(matches!(follower.activate(), Err(Error::EngineTimeout { .. })));
    assert_same(&Checkpoint::open(fixture.path()).unwrap(), &before);

    release.send(()).unwrap();
    wait_for(|| follower.prepare(None).is_ok());
    // An engine that misses the short deadline has got there when it is asked again.
    wait_for(|| follower.run_until(&Stop::new(), true).is_ok());
    assert_eq!(good.serving(), Some(fixture.label(1)));
    assert_eq!(slow.serving(), Some(fixture.label(1)));
    assert_eq!(slow.0.lock().unwrap().loaded, *fixture.weights.tensor_mut("g.up"));
}

/// Polls with a generous bound; what is waited for is an event of another thread, not a time.
fn wait_for(mut done: impl FnMut() -> bool) {
    let pause = Stop::new();
    for _ in 0..20_000 {
        if done() {
            return;
        }
        assert!(!pause.wait(Duration::from_millis(1)));
    }
    panic!("waited in vain");
}

#[test]
fn a_driver_that_panics_is_named_and_the_rest_goes_on() {
    let fixture = Fixture::new();
    let [bad, good] = [Engine::default(), Engine::default()];
    bad.next(Mood::Panic);
    let follower = fixture.follower(vec![bad.fake("http://bad"), good.fake("http://good")]);
    follower.prepare(None).unwrap();
    let error = follower.activate().unwrap_err();
    assert!(matches!(&error, Error::Engine { engine, .. } if engine == "http://bad"), "{error:?}");
    assert_eq!(good.serving(), Some(fixture.label(0)));
}

#[test]
fn the_loop_follows_restarts_and_outages() {
    let mut fixture = Fixture::new();
    let engine = Engine::default();
    engine.next(Mood::Fail);
    engine.next(Mood::Fail);
    let follower = fixture.follower(vec![engine.fake("http://a")]);
    let stop = Stop::new();
    let looping = std::thread::spawn({
        let (follower, stop) = (follower.clone(), stop.clone());
        move || follower.run_until(&stop, false)
    });
    wait_for(|| engine.serving() == Some(fixture.label(0)));

    let version = fixture.publish();
    wait_for(|| engine.serving() == Some(fixture.label(version.0)));

    // The engine comes back with the weights it was launched with.
    engine.0.lock().unwrap().serving = Some("default".into());
    wait_for(|| engine.serving() == Some(fixture.label(version.0)));

    fixture.fault.arm(0, u64::MAX, When::Before);
    wait_for(|| follower.status().error.is_some());
    assert_eq!(follower.status().applied.unwrap().version, version);
    engine.0.lock().unwrap().serving = None;
    wait_for(|| engine.serving() == Some(fixture.label(version.0)));
    let next = fixture.publish();
    fixture.fault.disarm();
    wait_for(|| engine.serving() == Some(fixture.label(next.0)));
    wait_for(|| follower.status().error.is_none());
    wait_for(|| fixture.ack().engines[0].label == Some(fixture.label(next.0)));
    stop.stop();
    looping.join().unwrap().unwrap();
    fixture.assert_on_disk();
}

/// Runs the follower's loop meanwhile, which is stopped and has to end well.
fn while_following(follower: &Follower, work: impl FnOnce()) {
    let stop = Stop::new();
    let looping = std::thread::spawn({
        let (follower, stop) = (follower.clone(), stop.clone());
        move || follower.run_until(&stop, false)
    });
    work();
    stop.stop();
    looping.join().unwrap().unwrap();
}

#[test]
fn engine_that_refuses_is_asked_ever_later_but_at_once_anew() {
    let mut fixture = Fixture::new();
    let engine = Engine::default();
    engine.next(Mood::Fail);
    let mut options = fixture.options();
    // Whatever happens in this test happens because it was nudged.
    [options.poll, options.engine_poll, options.refusal_backoff_max] = [Duration::from_secs(3600); 3];
    let follower = Follower::open(fixture.store.clone(), options, vec![engine.fake("http://a")]).unwrap();
    while_following(&follower, || {
        wait_for(|| engine.0.lock().unwrap().tries == 1);
        wait_for(|| {
            follower.notify();
            engine.0.lock().unwrap().looks > 3
        });
        assert_eq!(engine.0.lock().unwrap().tries, 1, "it is looked at, and not paused again");
        let error = follower.status().applied.unwrap().engines[0].error.clone();
        assert!(error.unwrap().contains("flush refused"), "what happened stays told");
        let version = fixture.publish();
        wait_for(|| {
            follower.notify();
            engine.serving() == Some(fixture.label(version.0))
        });
    });
}

#[test]
fn outage_of_the_store_changes_nothing_of_what_is_there() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    engine.next(Mood::Fail);
    let mut options = fixture.options();
    [options.poll, options.engine_poll, options.refusal_backoff_max] = [Duration::from_secs(3600); 3];
    let follower = Follower::open(fixture.fault.clone(), options, vec![engine.fake("http://a")]).unwrap();
    while_following(&follower, || {
        wait_for(|| engine.0.lock().unwrap().tries == 1);
        let told = || follower.status().applied.map(|ack| (ack.version, ack.bytes, ack.prepare_ms)).unwrap();
        let before = told();
        fixture.fault.arm(0, u64::MAX, When::Before);
        for _ in 0..3 {
            let (calls, looks) = (fixture.fault.calls(), engine.0.lock().unwrap().looks);
            wait_for(|| {
                follower.notify();
                fixture.fault.calls() > calls && engine.0.lock().unwrap().looks > looks
            });
        }
        wait_for(|| follower.status().error.is_some());
        assert_eq!(engine.0.lock().unwrap().tries, 1, "an engine that refuses is not paused again at once");
        assert_eq!(told(), before);
    });
}

#[test]
fn an_engine_that_somebody_else_paused_is_not_in_step() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    let follower = fixture.follower(vec![engine.fake("http://a")]);
    follower.prepare(None).unwrap();
    follower.activate().unwrap();
    let metric = |name: &str, value: u8| {
        let line = format!("driftless_follower_{name}{{engine=\"http://a\"}} {value}");
        assert!(follower.metrics().lines().any(|found| found == line), "{line}\n{}", follower.metrics());
    };
    metric("engine_in_step", 1);
    engine.0.lock().unwrap().paused = true;
    let status = follower.activate().unwrap().applied.unwrap().engines[0].clone();
    assert!(status.paused && status.label.is_none() && status.error.is_some(), "{status:?}");
    metric("engine_in_step", 0);
    metric("engine_paused", 1);
    assert_eq!(follower.maybe_paused(), ["http://a"]);
    engine.0.lock().unwrap().paused = false;
    let status = follower.activate().unwrap().applied.unwrap().engines[0].clone();
    assert_eq!((status.paused, status.label, status.error), (false, Some(fixture.label(0)), None));
    assert!(follower.maybe_paused().is_empty());
    assert_eq!(engine.activations(), 1);
}

#[test]
fn a_follower_that_is_stopped_does_not_wait_for_a_slow_load() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    let (inside, entered) = channel();
    engine.next(Mood::Linger(inside));
    let mut options = fixture.options();
    options.activate_deadline = Duration::from_secs(24 * 3600);
    let follower = Follower::open(fixture.store.clone(), options, vec![engine.fake("http://a")]).unwrap();
    while_following(&follower, || {
        entered.recv().unwrap();
        assert_eq!(follower.maybe_paused(), ["http://a"], "while it loads");
    });
    let status = follower.status().applied.unwrap().engines[0].clone();
    assert!(status.paused && status.error.unwrap().contains("given up"));
    assert_eq!(follower.maybe_paused(), ["http://a"]);
}

#[test]
fn the_last_version_is_not_passed_and_ends_the_loop() {
    let mut fixture = Fixture::new();
    fixture.publish();
    let second = fixture.weights.clone();
    fixture.publish();
    let engine = Engine::default();
    engine.next(Mood::Fail);
    let mut options = fixture.options();
    options.until = Some(Version(1));
    let follower = Follower::open(fixture.store.clone(), options, vec![engine.fake("http://a")]).unwrap();
    follower.run_until(&Stop::new(), false).unwrap();
    assert_eq!(engine.serving(), Some(fixture.label(1)), "it waited for the engine");
    assert_same(&Checkpoint::open(fixture.path()).unwrap(), &second);
    assert_eq!(follower.status().newest, Some(Version(2)));
    drop(follower);
    // The next one waits for a version that is not there yet.
    let mut options = fixture.options();
    options.until = Some(Version(3));
    let follower = Follower::open(fixture.store.clone(), options, vec![engine.fake("http://a")]).unwrap();
    let looping = std::thread::spawn({
        let follower = follower.clone();
        move || follower.run_until(&Stop::new(), false)
    });
    wait_for(|| engine.serving() == Some(fixture.label(2)));
    assert!(!looping.is_finished());
    fixture.publish();
    looping.join().unwrap().unwrap();
    assert_eq!(engine.serving(), Some(fixture.label(3)));
}

#[test]
fn coordinated_follower_waits_and_mends_what_was_ordered() {
    let mut fixture = Fixture::new();
    let engine = Engine::default();
    let mut options = fixture.options();
    options.coordinated = true;
    // Each round of the loop writes the lease.
    options.renew = Duration::ZERO;
    let count = Arc::new(Count::new(fixture.store.clone()));
    let follower = Follower::open(count.clone(), options, vec![engine.fake("http://a")]).unwrap();
    let rounds_pass = || {
        let before = count.counts().puts;
        wait_for(|| count.counts().puts >= before + 20);
    };
    let stop = Stop::new();
    let looping = std::thread::spawn({
        let (follower, stop) = (follower.clone(), stop.clone());
        move || follower.run_until(&stop, false)
    });
    // The loop is at it for moments only, and an order that meets it is given again.
    let order = |what: &dyn Fn() -> bool| wait_for(what);
    order(&|| follower.prepare(Some(Version(0))).is_ok());
    order(&|| follower.activate().is_ok());
    fixture.publish();
    order(&|| follower.prepare(None).is_ok());
    assert_eq!(follower.status().applied.unwrap().version, Version(1));
    // Prepared is not activated; many rounds of the loop look at the engine and load nothing. What an earlier
    // process left paused shows.
    engine.0.lock().unwrap().serving = None;
    engine.0.lock().unwrap().paused = true;
    rounds_pass();
    assert_eq!((engine.serving(), engine.activations()), (None, 1));
    assert_eq!(follower.maybe_paused(), ["http://a"]);
    engine.0.lock().unwrap().paused = false;
    order(&|| follower.activate().is_ok());
    assert_eq!(engine.serving(), Some(fixture.label(1)));
    // One that is started again gets what was ordered.
    engine.0.lock().unwrap().serving = Some("default".into());
    wait_for(|| engine.serving() == Some(fixture.label(1)));
    fixture.publish();
    rounds_pass();
    assert_eq!(follower.status().applied.unwrap().version, Version(1));
    stop.stop();
    looping.join().unwrap().unwrap();
}

#[test]
fn a_plan_is_what_the_advance_then_does() {
    let mut fixture = Fixture::new();
    for _ in 0..3 {
        fixture.publish();
    }
    let run = Run::open(fixture.store.clone(), RUN).unwrap();
    let plan = |to| Replica::plan(&fixture.path(), &run, MODEL, Version(to)).unwrap();
    let whole = plan(3);
    assert!(!fixture.path().exists(), "a plan makes no directory");
    assert_eq!(
        (whole.from, whole.to, whole.versions.len(), whole.versions[0].full),
        (None, Version(3), 4, true)
    );
    let follower = fixture.follower(vec![]);
    let first = plan(1);
    let did = follower.prepare(Some(Version(1))).unwrap().advanced;
    assert_eq!((did.versions, did.bytes, Some(did.changed)), (2, first.bytes, first.changed));
    follower.sync().unwrap();
    let rest = plan(3);
    assert_eq!((rest.from, rest.versions.len(), rest.versions[0].full), (Some(Version(1)), 2, false));
    let did = follower.prepare(None).unwrap().advanced;
    assert_eq!((did.versions, did.bytes, Some(did.changed)), (2, rest.bytes, rest.changed));
    follower.sync().unwrap();
    assert!(plan(3).versions.is_empty() && plan(3).bytes == 0);
    let error = Replica::plan(&fixture.path(), &run, MODEL, Version(1)).unwrap_err();
    assert!(matches!(error, Error::Rewind { .. }), "{error:?}");
    let other = Fixture::new();
    let foreign = Run::open(other.store.clone(), RUN).unwrap();
    let error = Replica::plan(&fixture.path(), &foreign, MODEL, Version(0)).unwrap_err();
    assert!(matches!(error, Error::ForeignRun { .. }), "{error:?}");
}

#[test]
fn a_follower_may_be_there_before_its_run() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let mut options = FollowerOptions::new(RUN, dir.path().join("host"), "early");
    (options.poll, options.engine_poll) = (Duration::from_millis(1), Duration::from_millis(1));
    let follower = Follower::open(store.clone(), options, vec![]).unwrap();
    assert!(matches!(follower.prepare(None), Err(Error::NoSuchRun { .. })));
    assert!(matches!(follower.run_until(&Stop::new(), true), Err(Error::NoSuchRun { .. })));
    let stop = Stop::new();
    let looping = std::thread::spawn({
        let (follower, stop) = (follower.clone(), stop.clone());
        move || follower.run_until(&stop, false)
    });
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish(&Weights::small(1), step(0), Mode::Full).unwrap();
    wait_for(|| follower.status().applied.is_some_and(|ack| ack.version == Version(0)));
    stop.stop();
    looping.join().unwrap().unwrap();
}

#[test]
fn a_reference_starts_from_the_hosts_own_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let source = dir.path().join("hf");
    let mut weights = Weights::small(1);
    write_checkpoint(&source, &weights, 7000).unwrap();
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish_reference(&source, step(0)).unwrap();
    weights.step(1, 30);
    publisher.publish(&weights, step(1), Mode::Delta).unwrap();
    let mut options = FollowerOptions::new(RUN, dir.path().join("host"), "h");
    let follower = Follower::open(store.clone(), options.clone(), vec![]).unwrap();
    let error = follower.prepare(None).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    drop(follower);
    options.hf_checkpoint = Some(source);
    let follower = Follower::open(store, options, vec![]).unwrap();
    assert_eq!(follower.prepare(None).unwrap().version, Version(1));
    assert_same(&Checkpoint::open(dir.path().join("host")).unwrap(), &weights);
}

#[test]
fn the_run_is_pinned_across_restarts() {
    let fixture = Fixture::new();
    fixture.follower(vec![]).prepare(None).unwrap();
    // The trainer begins anew in an emptied store, under the same name.
    let other = Fixture::new();
    let follower = Follower::open(other.store.clone(), fixture.options(), vec![]).unwrap();
    assert_eq!(follower.status().run_id, Some(fixture.publisher.run().id()));
    let error = follower.run_until(&Stop::new(), false).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::ForeignRun { .. }), "{text}");
    for run in [fixture.publisher.run(), other.publisher.run()] {
        assert!(text.contains(&run.id().to_string()), "{text}");
    }
    fixture.assert_on_disk();
}

#[test]
fn bad_names_and_a_held_directory_are_refused_at_open() {
    let fixture = Fixture::new();
    let _holder = fixture.follower(vec![]);
    assert!(matches!(
        Follower::open(fixture.store.clone(), fixture.options(), vec![]),
        Err(Error::Store(error @ StoreError::Locked { .. })) if error.to_string().contains("in this process")
    ));
    let mut options = fixture.options();
    options.id = "a/b".into();
    assert!(matches!(Follower::open(fixture.store.clone(), options, vec![]), Err(Error::BadName { .. })));
}
