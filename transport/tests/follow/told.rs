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
