//! What collecting old versions may never do: take what a reader needs, reuse a number, or stop half way for
//! good.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod world;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftless_store::wait::Stop;
use driftless_store::wrap::{Fault, When};
use driftless_store::{Error as StoreError, Key, Memory, PutMode, Store};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::gc::{GcOptions, collect};
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Error, Follower, Publisher, Replica, Run, Version};

use driftless_testkit::hook::Hook;
use driftless_testkit::publications::{
    MODEL, RUN, Weights, assert_reader, assert_same, options, publisher, step,
};
use world::{Clocked, TTL, World};

#[test]
fn any_interleaving_with_a_collection_keeps_what_is_needed() {
    let (mut collected, mut recovered, mut crashed) = (0, 0, 0);
    for seed in 0..150 {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.publish();
        for _ in 0..60 {
            match world.below(12) {
                0..4 => world.publish(),
                4 => world.attempt(),
                5 => {
                    let seconds = world.below(80);
                    world.clock.pass(seconds);
                }
                6 | 7 => {
                    // A follower moves to the newest version, or only renews.
                    let id = format!("host-{}", world.below(3));
                    let from = world.followers.get(&id).map(|(version, _)| *version);
                    let disturb = (world.below(3) == 0).then(|| world.below(3));
                    recovered += world.read(from, disturb);
                    let newest = world.newest().unwrap();
                    world.lease(&id, newest, newest);
                }
                8 => {
                    let follower = world.followers.iter().next().map(|(id, f)| (id.clone(), f.0));
                    if let Some((id, version)) = follower {
                        world.lease(&id, version, version);
                    }
                }
                9 => {
                    let (live, calls) = (world.live(), world.below(40));
                    let when = if world.below(2) == 0 { When::Before } else { When::After };
                    world.fault.arm(calls, u64::MAX, when);
                    crashed += u64::from(world.gc(1).is_err());
                    world.fault.disarm();
                    world.check(&live);
                }
                _ => {
                    let (live, keep) = (world.live(), 1 + world.below(4));
                    let floor = world.floor(keep).max(world.run.oldest(MODEL).unwrap().0);
                    let collection = world.gc(keep).unwrap();
                    assert_eq!(collection.floor, Version(floor));
                    collected += collection.removed.iter().filter(|removed| removed.collected).count();
                    world.check(&live);
                    world.check_exact(floor);
                    assert_eq!(world.gc(keep).unwrap().removed, [], "there is nothing left to do");
                }
            }
        }
    }
    println!("{collected} versions collected, {recovered} readers recovered, {crashed} collections crashed");
    assert!(collected > 1000 && recovered > 20 && crashed > 200);
}

/// Twelve versions with anchors, leftovers and two followers, one of them with a lease that ran out.
fn long_world(seed: u64) -> World {
    let mut world = World::new(seed);
    (0..4).for_each(|_| world.publish());
    world.lease("gone", 1, 1);
    world.clock.pass(TTL.as_secs() + 1);
    for _ in 0..14 {
        world.publish();
        world.attempt();
    }
    let newest = world.newest().unwrap();
    let object = world.put_object(newest);
    world.leftovers.insert(object.key);
    world.lease("here", newest - 2, newest - 2);
    world
}

#[test]
fn a_collection_that_stops_at_any_call_is_finished_by_the_next() {
    for when in [When::Before, When::After] {
        let mut stops = 0;
        for call in 0.. {
            let mut world = long_world(7);
            let live = world.live();
            world.fault.arm(call, u64::MAX, when);
            let outcome = world.gc(1);
            world.fault.disarm();
            world.check(&live);
            if outcome.is_ok() {
                break;
            }
            stops += 1;
            // Another one, with the same end.
            let floor = world.floor(1);
            world.gc(1).unwrap();
            world.check(&live);
            world.check_exact(floor);
        }
        println!("{when:?}: stopped at {stops} calls");
        assert!(stops > 40);
    }
}

#[test]
fn lease_of_a_follower_long_gone_is_removed() {
    let mut world = World::new(5);
    (0..4).for_each(|_| world.publish());
    world.lease("gone", 1, 1);
    let followers = |world: &World| world.run.followers().unwrap().len();
    for (passed, left) in [(TTL.as_secs() + 1, 1), (90 * TTL.as_secs(), 1), (6 * TTL.as_secs(), 0)] {
        world.clock.pass(passed);
        world.gc(1).unwrap();
        assert_eq!(followers(&world), left, "{passed}");
    }
}

#[test]
fn a_dry_run_tells_the_same_and_removes_nothing() {
    let world = long_world(3);
    let mut options = GcOptions::new(MODEL);
    (options.lease_ttl, options.dry_run) = (TTL, true);
    let root = Key::new(format!("{}/{MODEL}", world.run.id())).unwrap();
    let before = world.clock.list(&root).unwrap();
    let told = collect(&world.run, &options).unwrap();
    assert_eq!(world.clock.list(&root).unwrap(), before);
    options.dry_run = false;
    let done = collect(&world.run, &options).unwrap();
    assert_eq!(told, done);
    assert!(done.removed.iter().any(|removed| removed.collected));
    assert!(done.removed.iter().any(|removed| !removed.collected && removed.objects > 0));
    let removed: u64 = done.removed.iter().map(|removed| removed.bytes).sum();
    assert!(removed > 0);
    let live: Vec<_> = done.leases.iter().map(|lease| (lease.follower.as_str(), lease.live)).collect();
    assert_eq!(live, [("gone", false), ("here", true)]);

    options.keep = 0;
    assert!(matches!(collect(&world.run, &options), Err(Error::BadSetting { name: "keep", .. })));
}

#[test]
fn lease_undated_or_unreadable_holds_collection_back() {
    for undated in [true, false] {
        let world = long_world(5);
        *world.clock.undated.lock().unwrap() = undated;
        if !undated {
            let key = world.run.follower_key("strange").unwrap();
            world.clock.put(&key, b"not a lease", PutMode::Overwrite).unwrap();
        }
        let collection = world.gc(1).unwrap();
        assert_eq!(collection.floor, Version(if undated { 1 } else { 0 }));
        assert!(collection.removed.iter().all(|removed| !removed.collected || removed.version.0 == 0));
    }
}

#[test]
fn lease_that_is_forgotten_is_the_one_that_was_listed() {
    let world = long_world(5);
    let deep = Key::new(format!("{}/followers/deep/host", world.run.id())).unwrap();
    world.clock.put(&deep, b"{}", PutMode::Overwrite).unwrap();
    world.clock.pass(97 * TTL.as_secs());
    let host = world.run.follower_key("host").unwrap();
    world.clock.put(&host, b"{}", PutMode::Overwrite).unwrap();
    world.gc(1).unwrap();
    assert!(matches!(world.clock.get(&deep, None), Err(StoreError::NotFound { .. })));
    world.clock.get(&host, None).unwrap();
}

#[test]
fn old_versions_are_kept_while_the_newest_anchor_is_not_whole() {
    let world = long_world(9);
    let anchor = Version(*world.anchors.last().unwrap());
    let object = world.run.get(MODEL, anchor).unwrap().manifest.objects[0].key.clone();
    let whole = world.clock.get(&object, None).unwrap();
    world.clock.delete(&object).unwrap();
    assert!(matches!(world.gc(1), Err(Error::Store(StoreError::NotFound { key, .. })) if key == object));
    world.clock.put(&object, &whole[1..], PutMode::Create).unwrap();
    assert!(matches!(world.gc(1), Err(Error::Corrupt { .. })));
    assert!(world.run.get(MODEL, Version(0)).is_ok());
    world.clock.put(&object, &whole, PutMode::Overwrite).unwrap();
    world.gc(1).unwrap();
}

/// A run of real weights, anchored at every third version.
fn story(store: &Arc<dyn Store>, dir: &std::path::Path, versions: u64) -> (Publisher, Vec<Weights>) {
    let mut options = options(Start::NewRun, dir);
    options.anchor_every = Some(3);
    let mut publisher = Publisher::open(store.clone(), options).unwrap();
    let mut weights = Weights::small(1);
    let mut all = Vec::new();
    for version in 0..versions {
        weights.step(version, 30);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        all.push(weights.clone());
    }
    publisher.wait().unwrap();
    (publisher, all)
}

#[test]
fn replica_in_what_is_collected_goes_on_from_the_anchor() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, versions) = story(&inner, &dir.path().join("baseline"), 8);
    let run = publisher.run();
    let mut replica = Replica::open(dir.path().join("host")).unwrap();
    replica.advance(run, MODEL, Version(1), None).unwrap();

    let at = run.get(MODEL, Version(2)).unwrap().manifest.objects[0].key.clone();
    let (at, collected) = (Mutex::new(Some(at)), run.clone());
    let ambush = Hook::before(&inner, move |key| {
        if at.lock().unwrap().take_if(|at| at == key).is_some() {
            collect(&collected, &GcOptions::new(MODEL)).unwrap();
        }
    });
    let watched = Run::open(ambush, RUN).unwrap();
    replica.advance(&watched, MODEL, Version(7), None).unwrap();
    assert_same(replica.checkpoint().unwrap(), &versions[7]);

    // Who asks for what is gone is told, and where to start.
    let error = run.get(MODEL, Version(2)).unwrap_err();
    assert!(matches!(error, Error::Collected { version: Version(2), anchor: Version(6), .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("version 2") && text.contains("anchor, version 6"), "{text}");
    let mut late = Replica::open(dir.path().join("late")).unwrap();
    let error = late.advance(run, MODEL, Version(4), None).unwrap_err();
    assert!(matches!(error, Error::Collected { version: Version(4), .. }), "{error:?}");
    drop(late);
    assert_reader(&inner, &dir.path().join("late"), 7, &versions[7]);
}

#[test]
fn publisher_asleep_during_a_collection_has_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let (mut awake, versions) = story(&store, &dir.path().join("awake"), 2);
    let mut asleep = publisher(&store, Start::Resume, &dir.path().join("asleep"));
    let mut weights = versions[1].clone();
    for version in 2..9 {
        weights.step(version, 30);
        awake.publish(&weights, step(version), Mode::Delta).unwrap();
    }
    awake.wait().unwrap();
    let winner = awake.run().get(MODEL, Version(8)).unwrap().digest;
    collect(awake.run(), &GcOptions::new(MODEL)).unwrap();
    let error = asleep.publish(&versions[0], step(2), Mode::Delta).unwrap_err();
    assert!(
        matches!(error, Error::LostRace { version: Version(8), winner: found, .. } if found == winner),
        "{error:?}"
    );
    assert_eq!(collect(awake.run(), &GcOptions::new(MODEL)).unwrap().removed, [], "it removed its objects");
    drop(asleep);
    // Resumed, it finds its way past what is gone.
    let mut resumed = publisher(&store, Start::Resume, &dir.path().join("asleep"));
    weights.step(9, 30);
    resumed.publish(&weights, step(9), Mode::Delta).unwrap();
    assert_reader(&store, &dir.path().join("late"), 9, &weights);
}

#[test]
fn number_taken_after_its_collection_is_no_version() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(Clocked::default());
    let store: Arc<dyn Store> = clock.clone();
    let (mut publisher, versions) = story(&store, &dir.path().join("baseline"), 2);
    let options = FollowerOptions::new(RUN, dir.path().join("host"), "host-0");
    let follower = Follower::open(store.clone(), options, vec![]).unwrap();
    assert_eq!(follower.prepare(None).unwrap().version, Version(1));
    let mut weights = versions[1].clone();
    for version in 2..9 {
        weights.step(version, 30);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
    }
    publisher.wait().unwrap();
    let run = publisher.run();
    // What a publisher that slept would commit as version 2, were it killed before it looks at the floor.
    let mut manifest = run.get(MODEL, Version(2)).unwrap().manifest;
    manifest.trainer_step += 100;
    let objects: Vec<_> = manifest.objects.iter().map(|o| (o.key.clone(), run.object(o).unwrap())).collect();
    let mut gc_options = GcOptions::new(MODEL);
    gc_options.lease_ttl = TTL;
    clock.pass(TTL.as_secs() + 1);
    assert_eq!(collect(run, &gc_options).unwrap().floor, Version(6));
    for (key, bytes) in objects {
        store.put(&key, &bytes, PutMode::Create).unwrap();
    }
    let key = run.manifest_key(MODEL, Version(2)).unwrap();
    store.put(&key, &manifest.to_bytes().unwrap(), PutMode::Create).unwrap();

    let got = run.get(MODEL, Version(2));
    assert!(matches!(got, Err(Error::Collected { anchor: Version(6), .. })), "{got:?}");
    // It is the next version of this host, which asks for it first.
    assert_eq!(follower.prepare(None).unwrap().version, Version(8));
    assert_same(&driftless_transport::Checkpoint::open(dir.path().join("host")).unwrap(), &weights);
    // Not even a head that leads there makes it the newest.
    let head = Key::new(format!("{}/{MODEL}/head", run.id())).unwrap();
    store
        .put(
            &head,
            format!("{{\"version\":2,\"manifest_digest\":\"{}\"}}", "0".repeat(64)).as_bytes(),
            PutMode::Overwrite,
        )
        .unwrap();
    assert_eq!(run.newest_version(MODEL).unwrap(), Some(Version(8)));
    collect(run, &gc_options).unwrap();
    assert!(
        matches!(store.get(&key, None), Err(StoreError::NotFound { .. })),
        "the next collection removes it"
    );
}

#[test]
fn run_of_100_000_versions_is_one_page_and_folds_tombstones() {
    const COLLECTED: u64 = 100_000;
    let mut world = World::new(11);
    world.bury(COLLECTED);
    let tombstone = world.run.get(MODEL, Version(7)).unwrap_err();
    assert!(matches!(tombstone, Error::Collected { anchor: Version(COLLECTED), .. }), "{tombstone:?}");
    (0..3).for_each(|_| world.publish());
    let collection = world.gc(1).unwrap();
    assert!(collection.floor >= Version(COLLECTED));
    let folded = collection.removed.iter().filter(|removed| removed.version.0 < COLLECTED);
    assert_eq!(folded.clone().count() as u64, COLLECTED);
    assert!(folded.clone().all(|removed| !removed.collected), "they had been collected before");
    let root = Key::new(format!("{}/{MODEL}", world.run.id())).unwrap();
    assert!(world.clock.list(&root).unwrap().len() < 20);
    let got = world.run.get(MODEL, Version(7)).unwrap_err();
    assert!(matches!(got, Error::Collected { version: Version(7), .. }), "{got:?}");
    assert_eq!(world.read(None, None), 0);
    assert_eq!(world.gc(1).unwrap().removed, []);
}

#[test]
fn followers_take_and_renew_leases_that_hold_a_collection_back() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(Clocked::default());
    let store: Arc<dyn Store> = clock.clone();
    let (mut publisher, versions) = story(&store, &dir.path().join("baseline"), 3);
    let mut options = FollowerOptions::new(RUN, dir.path().join("host"), "host-0");
    (options.poll, options.renew) = (Duration::from_millis(1), Duration::ZERO);
    let follower = Follower::open(store.clone(), options, vec![]).unwrap();
    follower.prepare(None).unwrap();
    let mut gc_options = GcOptions::new(MODEL);
    gc_options.lease_ttl = TTL;
    let leases = |publisher: &Publisher| collect(publisher.run(), &gc_options).unwrap().leases;
    let lease = &leases(&publisher)[0];
    assert_eq!(
        (lease.follower.as_str(), lease.version, lease.needs),
        ("host-0", Some(Version(2)), Version(2))
    );
    assert_eq!((lease.age, lease.live), (Some(Duration::ZERO), true));

    // Nothing changes, but the lease is dated anew.
    clock.pass(TTL.as_secs() + 1);
    assert!(!leases(&publisher)[0].live);
    follower.prepare(None).unwrap();
    assert!(leases(&publisher)[0].live);

    let mut weights = versions[2].clone();
    for version in 3..8 {
        weights.step(version, 30);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
    }
    publisher.wait().unwrap();
    assert_eq!(collect(publisher.run(), &gc_options).unwrap().floor, Version(2));
    clock.pass(TTL.as_secs() + 1);
    assert_eq!(collect(publisher.run(), &gc_options).unwrap().floor, Version(6));
    // It wakes up behind the floor, and gets there all the same.
    follower.run_until(&Stop::new(), true).unwrap();
    assert_same(&driftless_transport::Checkpoint::open(dir.path().join("host")).unwrap(), &weights);
    assert_eq!(leases(&publisher)[0].needs, Version(7));
}

#[test]
fn new_follower_has_its_lease_before_its_first_object() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, _) = story(&inner, &dir.path().join("baseline"), 5);
    let key = publisher.run().follower_key("host-0").unwrap();
    let fault = Arc::new(Fault::new(inner.clone()));
    for skip in 0.. {
        assert!(skip < 40, "an object has to be read");
        let options = FollowerOptions::new(RUN, dir.path().join(skip.to_string()), "host-0");
        let follower = Follower::open(fault.clone(), options, vec![]).unwrap();
        inner.delete(&key).unwrap();
        fault.arm(skip, 1, When::Before);
        let prepared = follower.prepare(None);
        fault.disarm();
        match prepared {
            Err(Error::Store(StoreError::Injected { operation: "get", key: object, .. }))
                if object.name().contains('-') =>
            {
                break;
            }
            // What failed was the lease itself, which keeps nobody from reading.
            prepared => drop(prepared),
        }
    }
    let lease: serde_json::Value = serde_json::from_slice(&inner.get(&key, None).unwrap()).unwrap();
    assert_eq!((&lease["model"], &lease["needs"]), (&MODEL.into(), &3.into()));
    assert_eq!(lease.as_object().unwrap().len(), 3, "and the writer, before there is a version");
}
