//! Whose versions these are: restarted trainers, emptied directories, two publishers, lost baselines, stores
//! that fail.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use driftless_follower::{ServeOptions, serve};
use driftless_slime::{Checksum, Encoding};
use driftless_store::wait::Stop;
use driftless_store::wrap::{Fault, When};
use driftless_store::{Disk, Error as StoreError, Key, PutMode, Store};
use driftless_transport::publish::Start;
use driftless_transport::{Dtype, Error, Replica, Version};

use crate::reference::{Delta, receive};
use crate::{World, follower, tensors};
use driftless_testkit::http::exchange;
use driftless_testkit::publications::Weights;

const FORM: (&str, &str) = ("xor", "xxh3-128");
const OUR_FORM: (Encoding, Checksum) = (Encoding::Xor, Checksum::Xxh3);

/// Writes versions `from..=to` of the run that `seed` names and returns where they lead.
pub(crate) fn trainer(
    world: &World,
    base: &Weights,
    seed: u64,
    versions: std::ops::RangeInclusive<u64>,
) -> Weights {
    trainer_of(world, base, FORM, seed, versions)
}

/// [`trainer`] in any form.
pub(crate) fn trainer_of(
    world: &World,
    base: &Weights,
    form: (&str, &str),
    seed: u64,
    versions: std::ops::RangeInclusive<u64>,
) -> Weights {
    let mut weights = base.clone();
    for version in 1..=*versions.end() {
        let old = tensors(&weights);
        weights.step(100 * seed + version, 11);
        if versions.contains(&version) {
            Delta::new(version, form, &old, &tensors(&weights), 2).write(&world.source());
        }
    }
    weights
}

#[test]
fn a_restarted_trainer_is_refused_with_both_identities() {
    let base = Weights::small(1);
    let world = World::new(&base);
    let first = trainer(&world, &base, 1, 1..=3);
    let host = world.follower();
    let pinned = host.prepare(None).map(|_| host.status().run_id.unwrap()).unwrap();

    // It empties the directory first: not the time to give up yet.
    fs::remove_dir_all(world.source()).unwrap();
    let error = host.prepare(None).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { what, .. } if what.contains("gone")), "{error}");

    // Behind, level with and ahead of what the host has; and after a restart of the host.
    for newest in [1, 3, 5] {
        trainer(&world, &base, 2, 1..=newest);
        let error = host.prepare(None).unwrap_err();
        let Error::ForeignRun { expected, found, .. } = error else { panic!("{error}") };
        assert!(expected == pinned && found != pinned);
    }
    drop(host);
    let host = world.follower();
    assert!(matches!(host.run_until(&Stop::new(), false), Err(Error::ForeignRun { .. })), "the loop ends");
    assert!(world.host() == tensors(&first));

    // A new directory follows the new run, under other labels for the same numbers.
    let other = follower(world.store(), &world.path("hf"), &world.path("other"));
    other.prepare(Some(Version(3))).unwrap();
    assert_ne!(other.status().applied.unwrap().label, host.status().applied.unwrap().label);
}

#[test]
fn a_rewritten_version_is_noticed_and_a_pruned_chain_followed() {
    let base = Weights::small(1);
    let world = World::new(&base);
    trainer(&world, &base, 1, 1..=3);
    let host = world.follower();
    host.prepare(None).unwrap();
    let dir = |version: u64| world.source().join(format!("weight_v{version:06}"));

    // Version 3 of another run under version 1 of this one.
    fs::rename(dir(3), world.path("kept")).unwrap();
    trainer(&world, &base, 2, 3..=3);
    let error = host.prepare(None).unwrap_err();
    assert!(matches!(error, Error::Store(StoreError::DigestMismatch { .. })), "{error}");
    fs::remove_dir_all(dir(3)).unwrap();
    fs::rename(world.path("kept"), dir(3)).unwrap();

    for version in 1..=2 {
        fs::remove_dir_all(dir(version)).unwrap();
    }
    let newest = trainer(&world, &base, 1, 4..=5);
    assert_eq!(host.prepare(None).unwrap().version, Version(5));
    assert!(world.host() == tensors(&newest));
    // Nobody can join any more, and says so.
    let late = follower(world.store(), &world.path("hf"), &world.path("late"));
    assert!(matches!(late.prepare(Some(Version(5))), Err(Error::NoSuchVersion { .. })));
    // Nor go back.
    assert!(matches!(host.prepare(Some(Version(4))), Err(Error::Rewind { .. })));
}

#[test]
fn a_host_needs_version_0_and_a_directory_of_its_own() {
    let base = Weights::small(1);
    let world = World::new(&base);
    trainer(&world, &base, 1, 1..=1);
    let options = driftless_transport::follow::FollowerOptions::new("slime", world.path("host"), "host");
    let host = driftless_slime::open(world.store(), options, Vec::new()).unwrap();
    assert!(matches!(host.prepare(None), Err(Error::Unsupported { .. })));

    // A replica of one of our own runs is none of slime's.
    let store: Arc<dyn Store> = Arc::new(driftless_store::Memory::new());
    let ours = world.path("ours");
    let mut publisher = driftless_testkit::publications::publisher(&store, Start::NewRun, &ours);
    publisher.publish_reference(&world.path("hf"), driftless_testkit::publications::step(0)).unwrap();
    drop(publisher);
    let mistaken = follower(world.store(), &world.path("hf"), &ours);
    assert!(matches!(mistaken.prepare(None), Err(Error::Unsupported { .. })));
}

#[test]
fn ranks_may_share_a_tensor_but_not_disagree() {
    let base = Weights::small(1);
    let world = World::new(&base);
    let mut weights = base.clone();
    weights.step(1, 11);
    let mut delta = Delta::new(1, FORM, &tensors(&base), &tensors(&weights), 2);
    let shared = delta.ranks[0][0].clone();
    delta.ranks[1].push(shared);
    delta.map();
    delta.write(&world.source());
    let host = world.follower();
    host.prepare(None).unwrap();
    assert!(world.host() == tensors(&weights), "applied once");

    let old = tensors(&weights);
    weights.step(2, 11);
    let mut delta = Delta::new(2, FORM, &old, &tensors(&weights), 2);
    let mut other = delta.ranks[0][0].clone();
    other.2 = "0".repeat(32);
    delta.ranks[1].push(other);
    delta.map();
    delta.write(&world.source());
    let error = host.prepare(None).unwrap_err();
    assert!(matches!(error, Error::DuplicateTensor { .. }), "{error}");
    assert!(world.host() == old);
}

#[test]
fn a_publisher_resumes_and_rebuilds_its_baseline() {
    let mut weights = Weights::small(1);
    let world = World::new(&weights);
    world.publisher(Start::NewRun, OUR_FORM).unwrap();
    for version in 1..=3 {
        weights.step(version, 11);
        let mut publisher = world.publisher(Start::Resume, OUR_FORM).unwrap();
        assert_eq!(publisher.publish(&weights).unwrap().version, Version(version));
        drop(publisher);
        if version == 2 {
            fs::remove_dir_all(world.path("baseline")).unwrap();
        }
    }
    let mut local = crate::read_checkpoint(&world.path("hf"));
    (1..=3).for_each(|version| receive(&mut local, &world.source(), version));
    assert!(local == tensors(&weights));

    let taken = world.publisher(Start::NewRun, OUR_FORM).unwrap_err();
    assert!(matches!(taken, Error::BadSetting { .. }), "{taken}");
    fs::remove_dir_all(world.path("baseline")).unwrap();
    let taken = world.publisher(Start::NewRun, OUR_FORM).unwrap_err();
    assert!(matches!(taken, Error::RunExists { .. }), "{taken}");

    let mut publisher = world.publisher(Start::Resume, OUR_FORM).unwrap();
    weights.set("g.up", Dtype::F32, &[64, 47], |_| 0);
    assert!(matches!(publisher.publish(&weights), Err(Error::TensorMismatch { .. })));
}

#[test]
fn leftovers_are_removed_and_the_loser_of_a_race_is_told() {
    let mut weights = Weights::small(1);
    let world = World::new(&weights);
    let mut publisher = world.publisher(Start::NewRun, OUR_FORM).unwrap();
    // A receiver would apply it.
    let left = Key::new("weight_v000001/model-00007-of-00009.safetensors").unwrap();
    world.store().put(&left, b"torn", PutMode::Create).unwrap();
    weights.step(1, 11);
    publisher.publish(&weights).unwrap();
    assert!(!world.source().join(left.as_str()).exists());

    let old = tensors(&weights);
    let mut theirs = weights.clone();
    theirs.step(2, 7);
    // Theirs appears while ours is being encoded.
    let written = Delta::new(2, FORM, &old, &tensors(&theirs), 1).write(&world.path("elsewhere"));
    let place = world.source().join("weight_v000002");
    publisher.on_progress(Box::new(move |_| crate::hostile::copy(&written, &place)));
    weights.step(2, 11);
    let error = publisher.publish(&weights).unwrap_err();
    assert!(matches!(error, Error::LostRace { version: Version(2), .. }), "{error}");
    let mut local = old;
    receive(&mut local, &world.source(), 2);
    assert!(local == tensors(&theirs), "the winner's version is whole");
}

#[test]
fn whichever_call_of_the_store_fails_a_version_is_there_or_not() {
    let base = Weights::small(1);
    let mut weights = base.clone();
    weights.step(1, 11);
    for when in [When::Before, When::After] {
        for call in 0.. {
            let world = World::new(&base);
            let store = Arc::new(Fault::new(Arc::new(Disk::new(world.source()))));
            let open = |start| {
                let mut options = driftless_slime::PublisherOptions::new(start, world.path("baseline"));
                options.hf_checkpoint = Some(world.path("hf"));
                options.allow_non_finite = true;
                driftless_slime::Publisher::open(store.clone(), options)
            };
            let mut publisher = open(Start::NewRun).unwrap();
            store.arm(call, 1, when);
            let before = store.calls();
            let outcome = publisher.publish(&weights);
            let passed = store.calls() - before <= call;
            store.disarm();
            drop(publisher);
            // Whatever it said: the next one goes on from what is there, and a receiver can take it.
            let mut publisher = open(Start::Resume).unwrap();
            let there = publisher.applied().unwrap().version;
            if outcome.is_ok() {
                assert_eq!(there, Version(1));
            }
            let mut next = weights.clone();
            next.step(2, 11);
            publisher.publish(&next).unwrap();
            let mut local = tensors(&base);
            (1..=there.0 + 1).for_each(|version| receive(&mut local, &world.source(), version));
            assert!(local == tensors(&next), "call {call}");
            if passed {
                break;
            }
        }
    }

    // And the reading side.
    let world = World::new(&base);
    Delta::new(1, FORM, &tensors(&base), &tensors(&weights), 2).write(&world.source());
    for call in 0.. {
        let store = Arc::new(Fault::new(world.store()));
        let host = world.path(&format!("host-{call}"));
        let follower = follower(store.clone(), &world.path("hf"), &host);
        store.arm(call, 1, When::Before);
        let failed = follower.prepare(None).is_err();
        assert_eq!(failed, store.calls() > call);
        store.disarm();
        assert_eq!(follower.prepare(None).unwrap().version, Version(1));
        drop(follower);
        Replica::open(&host).unwrap().verify().unwrap();
        assert!(crate::read_checkpoint(&host) == tensors(&weights));
        if !failed {
            break;
        }
    }
}

/// What the trainer asks of each engine, with a follower to answer.
#[test]
fn a_trainer_pulls_through_the_follower() {
    let base = Weights::small(1);
    let world = World::new(&base);
    let host = world.follower();
    let routes = driftless_slime::routes(host.clone());
    let server = serve(host.clone(), ServeOptions::new(([127, 0, 0, 1], 0)).with_routes(routes)).unwrap();
    let pull = |dir: &Path, version: u64| pull(server.addr(), dir, version);
    let local = world.path("host");
    assert_eq!(pull(&local, 0), (200, true), "the trainer's first request");
    let newest = trainer(&world, &base, 1, 1..=3);
    assert_eq!(pull(&local, 2), (200, true));
    assert_eq!(host.status().applied.unwrap().version, Version(2));
    assert_eq!(pull(&local, 3), (200, true));
    assert_eq!(pull(&local, 3), (200, true));
    assert!(world.host() == tensors(&newest));
    assert_eq!(pull(&local, 4), (400, false), "not there");
    assert_eq!(pull(&world.path("hf"), 3), (400, false), "another directory");
    // The trainer starts again: its first request already fails.
    fs::remove_dir_all(world.source()).unwrap();
    assert_eq!(pull(&local, 0), (400, false));
    trainer(&world, &base, 2, 1..=4);
    for version in 1..=4 {
        assert_eq!(pull(&local, version), (400, false));
    }
    assert!(world.host() == tensors(&newest));
}

fn pull(server: SocketAddr, dir: &Path, version: u64) -> (u16, bool) {
    let body = serde_json::json!({
        "local_checkpoint_dir": dir, "source_dir": "/elsewhere", "target_version": version,
    })
    .to_string();
    let (status, reply) = exchange(server, "POST /pull_weights", "content-type: application/json\r\n", &body);
    let reply: serde_json::Value = serde_json::from_str(&reply).unwrap();
    (status, reply["success"].as_bool().unwrap())
}
