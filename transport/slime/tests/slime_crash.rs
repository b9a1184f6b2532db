//! A host that is interrupted while it takes a version from slime's layout has, afterwards, the old version
//! or the new one.
//!
//! Crash points are global, so these tests have a binary of their own and take turns.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "slime/reference.rs"]
#[allow(dead_code, reason = "every test binary uses its own part")]
mod reference;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use driftless_slime::{Publisher, PublisherOptions};
use driftless_store::{Disk, Store};
use driftless_testkit::publications::{Weights, assert_same};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::publish::Start;
use driftless_transport::{Checkpoint, Follower, Replica, Version};
use fail::FailScenario;
use reference::{Delta, Tensors, receive};

fn tensors(weights: &Weights) -> Tensors {
    weights.infos.iter().map(|info| info.name.clone()).zip(weights.bytes.iter().cloned()).collect()
}

fn follower(root: &Path) -> Follower {
    let mut options = FollowerOptions::new("slime", root.join("host"), "host");
    options.hf_checkpoint = Some(root.join("hf"));
    driftless_slime::open(Arc::new(Disk::new(root.join("source"))), options, Vec::new()).unwrap()
}

/// Interrupted at every passage of every point: the version is the old one until the journal is sealed, the
/// new one after.
#[test]
fn interrupted_anywhere_a_host_has_one_of_both_versions() {
    let _turn = FailScenario::setup();
    for form in [("xor", "xxh3-128"), ("overwrite", "blake3")] {
        let mut weights = Weights::small(1);
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write_checkpoint(root.join("hf"), &weights, 7000).unwrap();
        follower(root).prepare(None).unwrap();
        let mut version = 0;
        for point in ["follow.fetch", "follow.journal", "follow.apply", "follow.sync", "follow.marker"] {
            for passage in 0.. {
                let old = weights.clone();
                weights.step(version + 1, 11);
                version += 1;
                Delta::new(version, form, &tensors(&old), &tensors(&weights), 2).write(&root.join("source"));
                let host = follower(root);
                fail::cfg(point, &format!("{passage}*off->1*return->off")).unwrap();
                let interrupted = host.prepare(None).and_then(|_| host.sync()).is_err();
                fail::remove(point);
                let mut committed = !interrupted || point != "follow.fetch";
                if version % 2 == 0 {
                    // The same process tries again; else, as after a kill, the next one does.
                    assert_eq!(host.prepare(None).unwrap().version, Version(version));
                    committed = true;
                }
                drop(host);
                let replica = Replica::open(root.join("host")).unwrap();
                let expected = if committed { version } else { version - 1 };
                assert_eq!(replica.applied().unwrap().version, Version(expected), "{point} {passage}");
                assert_same(replica.checkpoint().unwrap(), if committed { &weights } else { &old });
                replica.verify().unwrap();
                drop(replica);
                // Goes on as if nothing had been: nothing is applied twice.
                assert_eq!(follower(root).prepare(None).unwrap().version, Version(version));
                assert_same(&Checkpoint::open(root.join("host")).unwrap(), &weights);
                if !interrupted {
                    break;
                }
            }
        }
        assert!(version > 6, "every point was passed");
    }
}

/// What a killed publisher leaves is no version, and no part of the next one.
#[test]
fn publisher_dead_before_the_index_left_nothing_that_counts() {
    let _turn = FailScenario::setup();
    let mut weights = Weights::small(1);
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_checkpoint(root.join("hf"), &weights, 7000).unwrap();
    let store: Arc<dyn Store> = Arc::new(Disk::new(root.join("source")));
    let open = |start| {
        let mut options = PublisherOptions::new(start, root.join("baseline"));
        options.allow_non_finite = true;
        options.hf_checkpoint = Some(root.join("hf"));
        options.file_bytes = 1000;
        Publisher::open(store.clone(), options).unwrap()
    };
    let mut publisher = open(Start::NewRun);
    let mut lost = weights.clone();
    lost.step(9, 3);
    fail::cfg("publish.manifest", "panic").unwrap();
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| publisher.publish(&lost)));
    fail::remove("publish.manifest");
    assert!(died.is_err());
    drop(publisher);
    assert!(fs::read_dir(root.join("source/weight_v000001")).unwrap().count() > 2, "files were written");

    let mut local = tensors(&weights);
    weights.step(1, 50);
    let mut publisher = open(Start::Resume);
    assert_eq!(publisher.applied().unwrap().version, Version(0));
    publisher.publish(&weights).unwrap();
    receive(&mut local, &root.join("source"), 1);
    assert!(local == tensors(&weights));
}
