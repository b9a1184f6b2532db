//! What a follower says, and how often: in its log, in its status and in its lease.

use std::fmt::Write as _;

use driftless_transport::gc::{GcOptions, leases_at};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::*;

/// The warnings of a thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Warnings {
    /// Those of `work`, on this thread, that have `words` in them.
    fn of(words: &str, work: impl FnOnce()) -> usize {
        let warnings = Self::default();
        tracing::subscriber::with_default(warnings.clone(), work);
        warnings.0.lock().unwrap().iter().filter(|text| text.contains(words)).count()
    }
}

#[test]
fn dead_engine_is_not_up_and_told_of_ever_more_seldom() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    let follower = fixture.follower(vec![engine.fake("http://a")]);
    follower.prepare(None).unwrap();
    follower.activate().unwrap();
    let entry = || follower.status().applied.unwrap().engines[0].clone();
    assert!(entry().up && !entry().paused);
    {
        // It ends while it is paused.
        let mut state = engine.0.lock().unwrap();
        (state.unreachable, state.paused, state.looks) = (true, true, 0);
    }
    let told = Warnings::of("engine is not on", || {
        let stop = Stop::new();
        let ends = std::thread::spawn({
            let (stop, engine) = (stop.clone(), engine.clone());
            move || {
                wait_for(|| engine.0.lock().unwrap().looks >= 33);
                stop.stop();
            }
        });
        follower.run_until(&stop, false).unwrap();
        ends.join().unwrap();
    });
    let looks = engine.0.lock().unwrap().looks as u32;
    assert!(told >= 6 && told as u32 <= looks.ilog2() + 1, "told {told} times of {looks} looks");
    assert!(!entry().up && !entry().paused, "{:?}", entry());
    assert!(follower.metrics().contains("engine_up{engine=\"http://a\"} 0"));
    assert_eq!(follower.maybe_paused(), ["http://a"], "whoever ends is still told that it may be");
}

#[test]
fn engines_are_looked_at_in_their_own_time() {
    let mut fixture = Fixture::new();
    let engine = Engine::default();
    let mut options = fixture.options();
    options.engine_poll = Duration::from_secs(3600);
    let follower = Follower::open(fixture.fault.clone(), options, vec![engine.fake("http://a")]).unwrap();
    let store = fixture.fault.clone();
    while_following(&follower, || {
        wait_for(|| engine.serving() == Some(fixture.label(0)));
        let (calls, looks) = (store.calls(), engine.0.lock().unwrap().looks);
        wait_for(|| store.calls() > calls + 20);
        assert_eq!(engine.0.lock().unwrap().looks, looks, "the store is polled, and not the engine");
        let version = fixture.publish();
        wait_for(|| engine.serving() == Some(fixture.label(version.0)));
    });
}

#[test]
fn lease_that_another_process_renews_is_told_of_once() {
    let mut fixture = Fixture::new();
    let follower = |dir: &str| {
        let mut options = FollowerOptions::new(RUN, fixture.dir.path().join(dir), "host");
        options.renew = Duration::ZERO;
        Follower::open(fixture.store.clone(), options, vec![]).unwrap()
    };
    let (one, other) = (follower("one"), follower("other"));
    let told =
        |follower: &Follower| Warnings::of("renews the same lease", || drop(follower.prepare(None).unwrap()));
    assert_eq!((told(&one), told(&one)), (0, 0), "alone");
    drop(one);
    let one = follower("one");
    assert_eq!((told(&one), told(&one)), (0, 0), "started anew");
    assert_eq!(told(&other), 0, "it may have been started anew");
    assert_eq!(told(&one), 1);
    assert_eq!(told(&other), 1);
    assert_eq!((told(&one), told(&other)), (0, 0), "said already");
    fixture.publish();
    let leases = leases_at(fixture.publisher.run(), &GcOptions::new(MODEL), None).unwrap();
    assert_eq!(leases.len(), 1, "one hides the other");
}

#[test]
fn phases_of_the_last_64_versions_add_up_and_are_acknowledged() {
    let mut fixture = Fixture::new();
    let follower = fixture.follower(vec![Engine::default().fake("http://a")]);
    for version in 0..66u64 {
        if version > 0 {
            fixture.publish();
        }
        follower.prepare(None).unwrap();
        follower.activate().unwrap();
        let ack = follower.status().applied.unwrap();
        let phases = ack.phases.last().unwrap();
        assert_eq!(phases.version, Version(version));
        let host: f64 = phases.of_host().into_iter().map(|(_, ms)| ms).sum();
        assert!((host - ack.prepare_ms).abs() < 0.01, "{phases:?} of {}", ack.prepare_ms);
        assert!(phases.decode_ms + phases.fetch_ms + phases.journal_ms > 0.0, "{phases:?}");
        assert_eq!(phases.of_engine().collect::<Vec<_>>(), [("copy", 40.0), ("patch", 20.0)]);
    }
    let ack = fixture.ack();
    let versions: Vec<_> = ack.phases.iter().map(|phases| phases.version.0).collect();
    assert_eq!(versions, (2..66).collect::<Vec<_>>());
    assert!(ack.phases.windows(2).all(|pair| pair[0].began_at_ms <= pair[1].began_at_ms));
    let metrics = follower.metrics();
    assert!(metrics.contains("last_phase_seconds{phase=\"copy\"} 0.04"), "{metrics}");
    assert!(metrics.contains("phase_seconds_total{phase=\"patch\"} 1.32"), "{metrics}");
    // A later look at the engines adds nothing.
    follower.activate().unwrap();
    assert_eq!(follower.metrics().lines().filter(|line| line.contains("\"patch\"} 1.32")).count(), 1);
}

#[test]
fn engine_that_comes_back_does_not_change_the_phases() {
    let fixture = Fixture::new();
    let engine = Engine::default();
    let follower = fixture.follower(vec![engine.fake("http://a")]);
    follower.prepare(None).unwrap();
    follower.activate().unwrap();
    let before = follower.status().applied.unwrap().phases;
    engine.0.lock().unwrap().serving = None;
    follower.activate().unwrap();
    assert_eq!(engine.activations(), 2);
    assert_eq!(follower.status().applied.unwrap().phases, before);
    assert!(follower.metrics().contains("phase_seconds_total{phase=\"patch\"} 0.02"));
}
