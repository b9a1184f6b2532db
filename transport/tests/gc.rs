//! What collecting old versions may never do: take what a reader needs, reuse a number, or stop half way for good.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use common::{MODEL, RUN, Random, Weights, assert_reader, assert_same, options, publisher, step};
use driftless_transport::gc::{Collection, GcOptions, collect};
use driftless_transport::manifest::{
    Algorithms, Base, FORMAT, Features, Kind, Manifest, Object, Piece, Representation, Tensor,
};
use driftless_transport::wrap::{Fault, When};
use driftless_transport::{
    ContentDigest, Dtype, Entry, Error, Follower, FollowerOptions, Key, Memory, Mode, Publisher, PutMode,
    Replica, Result, Run, Start, Stop, Store, Version,
};

const TTL: Duration = Duration::from_secs(100);

/// A store in memory whose clock the test sets, and which can be told to do something before a get.
#[derive(Debug, Default)]
struct Clocked {
    inner: Memory,
    dates: Mutex<BTreeMap<Key, u64>>,
    now: Mutex<u64>,
    undated: Mutex<bool>,
}

impl Clocked {
    fn date(&self, entry: Entry) -> Entry {
        let then = self.dates.lock().unwrap().get(&entry.key).copied().unwrap_or_default();
        let undated = *self.undated.lock().unwrap();
        let modified = (!undated).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(then));
        Entry::new(entry.key, entry.size, modified)
    }

    fn pass(&self, seconds: u64) {
        *self.now.lock().unwrap() += seconds;
    }
}

impl fmt::Display for Clocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Store for Clocked {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.inner.put(key, bytes, mode)?;
        let now = *self.now.lock().unwrap();
        self.dates.lock().unwrap().insert(key.clone(), now);
        Ok(())
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.inner.get(key, range)
    }
    fn head(&self, key: &Key) -> Result<Entry> {
        self.inner.head(key).map(|entry| self.date(entry))
    }
    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        Ok(self.inner.list(prefix)?.into_iter().map(|entry| self.date(entry)).collect())
    }
    fn delete(&self, key: &Key) -> Result<()> {
        self.inner.delete(key)
    }
}

/// A chain of manifests about nothing: one tensor of four bytes, objects of random content.
struct World {
    clock: Arc<Clocked>,
    fault: Arc<Fault>,
    run: Run,
    chain: Vec<Base>,
    anchors: BTreeSet<u64>,
    /// Objects that attempts which lost had left beside committed versions, and those above the newest.
    leftovers: BTreeSet<Key>,
    /// Each follower: its version, and when its lease was written.
    followers: BTreeMap<String, (u64, u64)>,
    random: Random,
}

impl World {
    fn new(seed: u64) -> Self {
        let clock = Arc::new(Clocked::default());
        let fault = Arc::new(Fault::new(clock.clone()));
        let run = Run::create(fault.clone(), RUN).unwrap();
        let (chain, followers) = Default::default();
        let (anchors, leftovers) = Default::default();
        Self { clock, fault, run, chain, anchors, leftovers, followers, random: Random(seed) }
    }

    fn newest(&self) -> Option<u64> {
        (self.chain.len() as u64).checked_sub(1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.next() % bound
    }

    fn place(&self, version: u64) -> Key {
        let manifest = self.run.manifest_key(MODEL, Version(version)).unwrap();
        Key::new(manifest.as_str().trim_end_matches("/manifest")).unwrap()
    }

    fn put_object(&mut self, version: u64) -> Object {
        let bytes: Vec<u8> = (0..8).map(|_| self.random.next() as u8).collect();
        let key = self.place(version).join(&format!("{:016x}-00000", self.random.next())).unwrap();
        self.clock.put(&key, &bytes, PutMode::Create).unwrap();
        Object { key, size: 8, blake3: ContentDigest::of(&bytes) }
    }

    fn manifest(&mut self, anchor: bool) -> Manifest {
        let version = self.chain.len() as u64;
        let full = version == 0 || (anchor && self.below(2) == 0);
        let count = if full || !anchor { 1 } else { 2 };
        let objects: Vec<Object> = (0..count).map(|_| self.put_object(version)).collect();
        let piece = |object| vec![Piece { start: 0, elements: 4, object, offset: 0, length: 8 }];
        let tensor = Tensor {
            name: "w".into(),
            dtype: Dtype::U8,
            shape: vec![4],
            digest: Default::default(),
            aliases: vec![],
            pieces: piece(0),
            anchor: if anchor && !full { piece(1) } else { vec![] },
        };
        Manifest {
            format: FORMAT,
            run_id: self.run.id(),
            model: MODEL.into(),
            version: Version(version),
            kind: if full { Kind::Full } else { Kind::Delta },
            representation: Representation { scheme: "u8".into(), config_digest: None },
            base: self.chain.last().copied(),
            trainer_step: version,
            checkpoint: None,
            created: 0,
            changed: 0,
            algorithms: Algorithms::default(),
            features: Features::default(),
            objects,
            tensors: vec![tensor],
            files: vec![],
        }
    }

    fn publish(&mut self) {
        let anchor = self.chain.is_empty() || self.below(4) == 0;
        let manifest = self.manifest(anchor);
        let bytes = manifest.to_bytes().unwrap();
        let version = manifest.version;
        let key = self.run.manifest_key(MODEL, version).unwrap();
        self.clock.put(&key, &bytes, PutMode::Create).unwrap();
        self.chain.push(Base { version, manifest_digest: ContentDigest::of(&bytes) });
        if manifest.is_anchor() {
            self.anchors.insert(version.0);
        }
        if self.below(3) > 0 {
            let head = Key::new(format!("{}/{MODEL}/head", self.run.id())).unwrap();
            let hint = serde_json::to_vec(self.chain.last().unwrap()).unwrap();
            self.clock.put(&head, &hint, PutMode::Overwrite).unwrap();
        }
    }

    /// A publisher that died, or is still at it: at a number that is taken, or the next one.
    fn attempt(&mut self) {
        let version = self.below(self.chain.len() as u64 + 1);
        let object = self.put_object(version);
        self.leftovers.insert(object.key);
    }

    fn lease(&mut self, id: &str, version: u64, needs: u64) {
        let key = self.run.follower_key(id).unwrap();
        let text = format!("{{\"model\":\"{MODEL}\",\"needs\":{needs},\"version\":{version}}}");
        self.clock.put(&key, text.as_bytes(), PutMode::Overwrite).unwrap();
        let now = *self.clock.now.lock().unwrap();
        self.followers.insert(id.to_owned(), (version, now));
    }

    fn is_live(&self, (_, written): (u64, u64)) -> bool {
        *self.clock.now.lock().unwrap() - written <= TTL.as_secs()
    }

    /// Reads a chain as a replica does, with a collection somewhere in between if `disturb` says so, and returns how
    /// often that took another chain.
    fn read(&mut self, from: Option<u64>, disturb: Option<u64>) -> u64 {
        let newest = self.chain.last().unwrap().version;
        let mut again = 0;
        loop {
            let from = from.map(|version| self.chain[version as usize]);
            let chain = match self.run.chain(MODEL, from, newest) {
                // Out of reach now, with what stood in front of it: a reader goes for what is the newest by now.
                Err(Error::Collected { .. }) if again > 0 => return again,
                chain => chain.unwrap(),
            };
            if let Some(link) = chain.links.first().filter(|_| !chain.restart) {
                assert_eq!(link.manifest.base, from);
            }
            assert!(chain.links.last().is_none_or(|link| link.manifest.version == newest));
            let mut outcome = Ok(());
            'links: for (number, link) in chain.links.iter().enumerate() {
                if disturb == Some(number as u64) && again == 0 {
                    // What is published meanwhile makes more of the chain collectable.
                    (0..3).for_each(|_| self.publish());
                    self.gc(1).unwrap();
                }
                for object in &link.manifest.objects {
                    match self.run.object(object) {
                        Ok(_) => {}
                        Err(Error::NotFound { .. }) => {
                            outcome = self.run.get(MODEL, link.manifest.version).map(drop);
                            assert!(matches!(outcome, Err(Error::Collected { .. })), "{outcome:?}");
                            break 'links;
                        }
                        Err(error) => panic!("{error:?}"),
                    }
                }
            }
            match outcome {
                Ok(()) => return again,
                Err(Error::Collected { anchor, .. }) => {
                    assert!(self.anchors.contains(&anchor.0));
                    again += 1;
                    assert!(again < 3);
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    fn gc(&self, keep: u64) -> Result<Collection> {
        let mut options = GcOptions::new(MODEL);
        (options.keep, options.lease_ttl) = (keep, TTL);
        collect(&self.run, &options)
    }

    fn floor(&self, keep: u64) -> u64 {
        let newest = self.newest().unwrap();
        let live = self.followers.values().filter(|follower| self.is_live(**follower));
        let needs = live.map(|(version, _)| *version).min().unwrap_or(newest);
        let anchor = *self.anchors.last().unwrap();
        needs.min(anchor).min((newest + 1).saturating_sub(keep))
    }

    /// Everything that must hold after any number of collections, whole or not; the followers in `live` had leases.
    fn check(&mut self, live: &[u64]) {
        let newest = self.newest().unwrap();
        assert_eq!(self.run.newest_version(MODEL).unwrap(), Some(Version(newest)));
        assert_eq!(self.read(None, None), 0, "a late joiner finds a whole chain");
        for &version in live {
            for link in version + 1..=newest {
                let manifest = self.run.get(MODEL, Version(link)).unwrap().manifest;
                manifest.objects.iter().for_each(|object| drop(self.run.object(object).unwrap()));
            }
        }
        for version in 0..=newest {
            let key = self.run.manifest_key(MODEL, Version(version)).unwrap();
            let again = self.clock.put(&key, b"{}", PutMode::Create);
            assert!(matches!(again, Err(Error::AlreadyExists { .. })), "number {version} is free again");
        }
    }

    /// The versions of the followers whose leases count. One that ran out and was taken again after a collection brings
    /// nothing back.
    fn live(&self) -> Vec<u64> {
        let intact = |version: u64| {
            (version + 1..self.chain.len() as u64).all(|link| self.run.get(MODEL, Version(link)).is_ok())
        };
        let live = self.followers.values().filter(|follower| self.is_live(**follower));
        live.map(|(version, _)| *version).filter(|version| intact(*version)).collect()
    }

    /// After a whole collection nothing is left but what must be.
    fn check_exact(&self, floor: u64) {
        let newest = self.newest().unwrap();
        let mut expected: BTreeSet<Key> = BTreeSet::new();
        for version in 0..=newest {
            expected.insert(self.run.manifest_key(MODEL, Version(version)).unwrap());
            match self.run.get(MODEL, Version(version)) {
                Ok(committed) => expected.extend(committed.manifest.objects.into_iter().map(|o| o.key)),
                Err(Error::Collected { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
            assert!(version >= floor || self.run.get(MODEL, Version(version)).is_err());
        }
        let above = self.place(newest + 1);
        expected.extend(self.leftovers.iter().filter(|key| key.under(&above).is_some()).cloned());
        let root = Key::new(format!("{}/{MODEL}", self.run.id())).unwrap();
        let listed = self.clock.list(&root).unwrap();
        let found: BTreeSet<Key> =
            listed.into_iter().map(|entry| entry.key).filter(|key| key.name() != "head").collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn any_interleaving_of_publishing_following_and_collecting_keeps_what_is_needed() {
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
                    let floor = world.floor(keep);
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
fn what_cannot_be_dated_or_read_holds_everything_back() {
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
fn old_versions_are_kept_while_the_newest_anchor_is_not_whole() {
    let world = long_world(9);
    let anchor = Version(*world.anchors.last().unwrap());
    let object = world.run.get(MODEL, anchor).unwrap().manifest.objects[0].key.clone();
    let whole = world.clock.get(&object, None).unwrap();
    world.clock.delete(&object).unwrap();
    assert!(matches!(world.gc(1), Err(Error::NotFound { key, .. }) if key == object));
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

/// Runs something before the first get of a key.
#[derive(Debug)]
struct Ambush {
    inner: Arc<dyn Store>,
    at: Mutex<Option<Key>>,
    run: Mutex<Option<Run>>,
}

impl fmt::Display for Ambush {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Store for Ambush {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.inner.put(key, bytes, mode)
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        let sprung = self.at.lock().unwrap().take_if(|at| at == key).is_some();
        if sprung {
            collect(self.run.lock().unwrap().as_ref().unwrap(), &GcOptions::new(MODEL)).unwrap();
        }
        self.inner.get(key, range)
    }
    fn head(&self, key: &Key) -> Result<Entry> {
        self.inner.head(key)
    }
    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.inner.list(prefix)
    }
    fn delete(&self, key: &Key) -> Result<()> {
        self.inner.delete(key)
    }
}

#[test]
fn a_replica_in_the_middle_of_what_is_collected_goes_on_from_the_anchor() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(Memory::new());
    let (publisher, versions) = story(&inner, &dir.path().join("baseline"), 8);
    let run = publisher.run();
    let mut replica = Replica::open(dir.path().join("host")).unwrap();
    replica.advance(run, MODEL, Version(1), None).unwrap();

    let at = run.get(MODEL, Version(2)).unwrap().manifest.objects[0].key.clone();
    let ambush =
        Ambush { inner: inner.clone(), at: Mutex::new(Some(at)), run: Mutex::new(Some(run.clone())) };
    let watched = Run::open(Arc::new(ambush), RUN).unwrap();
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
fn a_publisher_that_slept_through_a_collection_has_lost_and_leaves_nothing() {
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
    let winner = awake.run().get(MODEL, Version(2)).unwrap().digest;
    collect(awake.run(), &GcOptions::new(MODEL)).unwrap();
    let error = asleep.publish(&versions[0], step(2), Mode::Delta).unwrap_err();
    assert!(
        matches!(error, Error::LostRace { version: Version(2), winner: found, .. } if found == winner),
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
fn a_new_follower_has_its_lease_before_it_reads_the_first_object() {
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
            Err(Error::Injected { operation: "get", key: object, .. }) if object.name().contains('-') => {
                break;
            }
            // What failed was the lease itself, which keeps nobody from reading.
            prepared => drop(prepared),
        }
    }
    let lease = String::from_utf8(inner.get(&key, None).unwrap()).unwrap();
    assert_eq!(lease, format!("{{\"model\":\"{MODEL}\",\"needs\":3}}"));
}
