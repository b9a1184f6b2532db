//! Signed versions under attack: a writer of the store changes them, and followers refuse the result.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use driftless_store::{Key, Memory, PutMode, Store};
use driftless_testkit::hook::Hook;
use driftless_testkit::publications::{MODEL, RUN, Weights, assert_same, options, step};
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::{Mode, PublisherOptions, Rank, Shard, Slice, Start};
use driftless_transport::sign::{SignKey, TrustKey};
use driftless_transport::{Error, Follower, Publisher, Replica, Result, Run, Version};

fn key(number: u8) -> SignKey {
    SignKey::from_bytes([number; 32])
}

struct World {
    store: Arc<dyn Store>,
    /// Reads of objects.
    objects: Arc<AtomicU64>,
    dir: tempfile::TempDir,
    versions: Vec<Weights>,
}

fn signing(start: Start, baseline: &Path, key: &SignKey) -> PublisherOptions {
    let mut options = options(start, baseline);
    options.sign_key = Some(key.clone());
    options
}

impl World {
    /// `count` versions that key 1 has signed.
    fn new(count: u64) -> Self {
        let objects = Arc::new(AtomicU64::new(0));
        let read = objects.clone();
        let memory: Arc<dyn Store> = Arc::new(Memory::new());
        let store = Hook::after(&memory, move |_, _, _| {
            read.fetch_add(1, SeqCst);
        });
        let dir = tempfile::tempdir().unwrap();
        let mut publisher =
            Publisher::open(store.clone(), signing(Start::NewRun, &dir.path().join("baseline"), &key(1)))
                .unwrap();
        let mut weights = Weights::small(1);
        let mut versions = Vec::new();
        for version in 0..count {
            publisher.publish(&weights, step(version), Mode::Delta).unwrap();
            versions.push(weights.clone());
            weights.step(version, 20);
        }
        publisher.wait().unwrap();
        Self { store, objects, dir, versions }
    }

    fn follower(&self, name: &str, keys: &[TrustKey]) -> Follower {
        let mut options = FollowerOptions::new(RUN, self.dir.path().join(name), name);
        options.trust_keys = keys.to_vec();
        Follower::open(self.store.clone(), options, Vec::new()).unwrap()
    }

    fn run(&self) -> Run {
        Run::open(self.store.clone(), RUN).unwrap()
    }

    fn manifest_key(&self, version: u64) -> Key {
        self.run().manifest_key(MODEL, Version(version)).unwrap()
    }

    fn overwrite(&self, key: &Key, bytes: &[u8]) {
        self.store.put(key, bytes, PutMode::Overwrite).unwrap();
    }

    /// The follower does not move, says why, and has not read a byte of any object.
    fn assert_refused(&self, follower: &Follower, is_expected: fn(&Error) -> bool) {
        let before = self.objects.load(SeqCst);
        let error = follower.prepare(None).unwrap_err();
        assert!(is_expected(&error), "{error:?}");
        assert_eq!(self.objects.load(SeqCst), before, "objects of an untrusted version were read");
    }

    fn assert_follows(&self, follower: &Follower, version: u64) {
        assert_eq!(follower.prepare(None).unwrap().version, Version(version));
        let dir = follower.options().checkpoint_dir.clone();
        let found = driftless_transport::Checkpoint::open(&dir).unwrap();
        assert_same(&found, &self.versions[version as usize]);
    }
}

fn is_unsigned(error: &Error) -> bool {
    matches!(error, Error::Unsigned { .. })
}

fn is_forged(error: &Error) -> bool {
    matches!(error, Error::BadSignature { .. })
}

#[test]
fn signed_versions_are_followed_with_any_key_or_without() {
    let world = World::new(3);
    world.assert_follows(&world.follower("trusting", &[key(2).public(), key(1).public()]), 2);
    world.assert_follows(&world.follower("careless", &[]), 2);
    world.assert_refused(&world.follower("other", &[key(2).public()]), is_unsigned);
}

#[test]
fn unsigned_versions_are_refused_also_behind_signed_ones() {
    let world = World::new(2);
    let follower = world.follower("host", &[key(1).public()]);
    world.assert_follows(&follower, 1);
    // The intruder can write to the store. First it has no signing key, then that of another trainer.
    for (name, sign_key) in [("none", None), ("other", Some(key(2)))] {
        let mut options = options(Start::Resume, &world.dir.path().join(name));
        (options.sign_key, options.trust_keys) = (sign_key.clone(), vec![key(1).public()]);
        if sign_key.is_none() {
            options.trust_keys.clear();
        }
        let mut intruder = Publisher::open(world.store.clone(), options).unwrap();
        intruder.publish(&Weights::small(9), step(9), Mode::Full).unwrap();
        // Its baseline moves behind the publication, and reads objects.
        intruder.wait().unwrap();
        world.assert_refused(&follower, is_unsigned);
        world.assert_refused(&world.follower(&format!("late-{name}"), &[key(1).public()]), is_unsigned);
        assert_eq!(follower.status().applied.unwrap().version, Version(1));
        world.store.delete(&world.manifest_key(2)).unwrap();
    }
    world.assert_follows(&follower, 1);
    // The trainer's publisher does not build on it either.
    let baseline = world.dir.path().join("baseline");
    let mut options = options(Start::Resume, &world.dir.path().join("intruder"));
    options.sign_key = None;
    Publisher::open(world.store.clone(), options)
        .unwrap()
        .publish(&Weights::small(9), step(9), Mode::Full)
        .unwrap();
    let error = Publisher::open(world.store.clone(), signing(Start::Resume, &baseline, &key(1))).unwrap_err();
    assert!(is_unsigned(&error), "{error:?}");
}

#[test]
fn changed_manifests_are_refused() {
    let world = World::new(1);
    let place = world.manifest_key(0);
    let bytes = world.store.get(&place, None).unwrap();
    let text = String::from_utf8(bytes.clone()).unwrap();
    let object = world.run().get(MODEL, Version(0)).unwrap().manifest.objects[0].clone();
    let forged = "0".repeat(64);
    for (number, (changed, expected)) in [
        (text.replace(&object.blake3.to_string(), &forged), is_forged as fn(&Error) -> bool),
        (text.replace("\"trainer_step\":0", "\"trainer_step\":1"), is_forged),
        (text.replace("\"signatures\"", "\"signature\""), is_unsigned),
        (format!("{text} "), is_unsigned),
    ]
    .into_iter()
    .enumerate()
    {
        assert_ne!(changed, text);
        world.overwrite(&place, changed.as_bytes());
        world.assert_refused(&world.follower(&format!("host-{number}"), &[key(1).public()]), expected);
    }
    world.overwrite(&place, &bytes);
    world.assert_follows(&world.follower("host", &[key(1).public()]), 0);
}

#[test]
fn manifests_do_not_change_places() {
    // The manifest of version 1 under the key of version 2: an old version as the newest.
    let world = World::new(3);
    let follower = world.follower("host", &[key(1).public()]);
    follower.prepare(Some(Version(1))).unwrap();
    let old = world.store.get(&world.manifest_key(1), None).unwrap();
    world.overwrite(&world.manifest_key(2), &old);
    world.assert_refused(&follower, is_forged);

    // A manifest of another run of the same trainer, under this run's key.
    let (ours, theirs) = (World::new(1), World::new(1));
    let foreign = theirs.store.get(&theirs.manifest_key(0), None).unwrap();
    ours.overwrite(&ours.manifest_key(0), &foreign);
    ours.assert_refused(&ours.follower("host", &[key(1).public()]), is_forged);
}

#[test]
fn a_name_that_leads_to_another_run_is_noticed() {
    // Both runs are the trainer's own, in one store. The attacker changes which run the name points to.
    let world = World::new(1);
    let mut other = signing(Start::NewRun, &world.dir.path().join("other"), &key(1));
    other.run = "other".to_owned();
    Publisher::open(world.store.clone(), other)
        .unwrap()
        .publish(&Weights::small(9), step(0), Mode::Full)
        .unwrap();
    let followed = world.follower("before", &[key(1).public()]);
    world.assert_follows(&followed, 0);
    let [ours, theirs] = ["runs/test", "runs/other"].map(|key| Key::new(key).unwrap());
    let record = world.store.get(&theirs, None).unwrap();
    world.overwrite(&ours, &record);
    world.assert_refused(&world.follower("after", &[key(1).public()]), is_forged);
    drop(followed);
    world.assert_refused(&world.follower("before", &[key(1).public()]), |error| {
        matches!(error, Error::ForeignRun { .. } | Error::BadSignature { .. })
    });
}

#[test]
fn a_store_that_was_set_back_moves_nobody_back() {
    let world = World::new(3);
    let follower = world.follower("host", &[key(1).public()]);
    let head = Key::new(format!("{}/{MODEL}/head", world.run().id())).unwrap();
    world.assert_follows(&follower, 2);
    world.store.delete(&world.manifest_key(2)).unwrap();
    let digest = world.run().get(MODEL, Version(1)).unwrap().digest;
    world.overwrite(&head, format!("{{\"version\":1,\"manifest_digest\":\"{digest}\"}}").as_bytes());
    world.assert_follows(&follower, 2);
    assert!(matches!(follower.prepare(Some(Version(1))), Err(Error::Rewind { .. })));
    // Also after a restart, and with a directory that is damaged.
    drop(follower);
    let follower = world.follower("host", &[key(1).public()]);
    world.assert_refused(&follower, |error| matches!(error, Error::Rewind { .. }));
    drop(follower);
    let dir = world.dir.path().join("host");
    std::fs::write(dir.join("model.safetensors"), b"damaged").unwrap();
    let follower = world.follower("host", &[key(1).public()]);
    world.assert_refused(&follower, |error| matches!(error, Error::Rewind { .. }));
}

#[test]
fn a_false_head_or_tombstone_leads_to_nothing_unsigned() {
    let world = World::new(3);
    let run = world.run();
    let head = Key::new(format!("{}/{MODEL}/head", run.id())).unwrap();
    for text in ["", "{", r#"{"version":9999999999,"manifest_digest":""}"#, r#"{"version":77}"#] {
        world.overwrite(&head, text.as_bytes());
        world.assert_follows(&world.follower(&format!("host-{}", text.len()), &[key(1).public()]), 2);
    }
    // A tombstone that points to a version of the forger's: whoever reads it stays where he is.
    let follower = world.follower("host", &[key(1).public()]);
    follower.prepare(Some(Version(1))).unwrap();
    let tombstone = format!(
        r#"{{"format":1,"run_id":"{}","model":"{MODEL}","version":2,"features":{{"required":["collected"],"optional":[]}},"collected":{{"manifest_digest":"{}","anchor":0}}}}"#,
        run.id(),
        "0".repeat(64)
    );
    world.overwrite(&world.manifest_key(2), tombstone.as_bytes());
    world.assert_refused(&follower, |error| matches!(error, Error::Collected { .. }));
    let before = world.dir.path().join("host");
    let found = driftless_transport::Checkpoint::open(&before).unwrap();
    assert_same(&found, &world.versions[1]);
}

/// A rank that has everything.
struct All(Vec<Slice>, Weights);

impl Shard for All {
    fn slices(&self) -> &[Slice] {
        &self.0
    }
    fn bytes(&self, index: usize) -> Result<std::borrow::Cow<'_, [u8]>> {
        Ok(std::borrow::Cow::Borrowed(&self.1.bytes[index]))
    }
    fn files(&self) -> &[driftless_transport::snapshot::AuxFile] {
        &self.1.files
    }
}

#[test]
fn parts_are_signed_too_and_a_forged_one_is_not_joined() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let weights = Weights::small(3);
    let slices = weights.infos.iter().map(|info| Slice::whole(info.clone()).unwrap()).collect();
    let shard = All(slices, weights.clone());
    let rank = Rank { rank: 0, ranks: 1, attempt: "a".to_owned() };
    let mut publisher =
        Publisher::open(store.clone(), signing(Start::NewRun, &dir.path().join("baseline"), &key(1)))
            .unwrap();
    publisher.publish_part(&shard, step(0), Mode::Full, &rank).unwrap();
    let place = Key::new(format!("{}/{MODEL}/v0000000000/part-a-00000", publisher.run().id())).unwrap();
    let good = store.get(&place, None).unwrap();

    let text = String::from_utf8(good.clone()).unwrap();
    let unsigned = format!("{}}}", &text[..text.rfind(",\"signatures\"").unwrap()]);
    store.put(&place, unsigned.as_bytes(), PutMode::Overwrite).unwrap();
    let error = publisher.join(&rank, Duration::ZERO).unwrap_err();
    assert!(is_unsigned(&error), "{error:?}");
    let changed = text.replace("\"trainer_step\":0", "\"trainer_step\":7");
    store.put(&place, changed.as_bytes(), PutMode::Overwrite).unwrap();
    let error = publisher.join(&rank, Duration::ZERO).unwrap_err();
    assert!(is_forged(&error), "{error:?}");

    store.put(&place, &good, PutMode::Overwrite).unwrap();
    let published = publisher.join(&rank, Duration::ZERO).unwrap();
    publisher.wait().unwrap();
    let run = Run::open(store.clone(), RUN).unwrap().trusting(&[key(1).public()]);
    let mut replica = Replica::open(dir.path().join("replica")).unwrap();
    replica.advance(&run, MODEL, published.version, None).unwrap();
    assert_same(replica.checkpoint().unwrap(), &weights);
    let objects: u64 = run.get(MODEL, Version(0)).unwrap().manifest.object_bytes();
    let manifest = store.get(&run.manifest_key(MODEL, Version(0)).unwrap(), None).unwrap();
    assert_eq!(published.publication_bytes, objects + manifest.len() as u64);
}
