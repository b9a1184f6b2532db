//! FIFOs, sockets, devices and directories in place of files: refused by name, and nothing waits for them.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use driftless_store::{Disk, Error as StoreError, Key, PutMode, Store};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::sign::{SignKey, TrustKey};
use driftless_transport::{Checkpoint, Error, Replica, Run, Version};

use driftless_testkit::odd::{ODD, put};
use driftless_testkit::publications::{MODEL, RUN, Weights, publisher, step};

/// Puts it in the place of the file, does something, and puts the file back.
fn in_place_of<T>(path: &Path, odd: &str, work: impl FnOnce() -> T) -> T {
    let aside = path.with_extension("aside.bin");
    let there = fs::rename(path, &aside).is_ok();
    put(odd, path);
    let done = work();
    let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
    if there {
        fs::rename(&aside, path).unwrap();
    }
    done
}

/// The error, or one behind it, says what lies at this path.
fn assert_named(error: &Error, path: &Path, odd: &str) {
    let mut inner = error;
    while let Error::DamagedReplica { source, .. } = inner {
        inner = source;
    }
    let named = matches!(inner, Error::Store(StoreError::NotAFile { path: at, found }) if at == path && *found == odd);
    assert!(named, "{}: {odd}: {error:?}: {:?}", path.display(), error.source());
    assert!(inner.to_string().contains(odd) && inner.to_string().contains(path.to_str().unwrap()));
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.filter(|entry| entry.file_type().unwrap().is_file()).map(|entry| entry.path()).collect()
}

#[test]
fn a_checkpoint_with_something_odd_in_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [sharded, single] = ["sharded", "single"].map(|name| dir.path().join(name));
    write_checkpoint(&sharded, &Weights::small(3), 7000).unwrap();
    write_checkpoint(&single, &Weights::small(3), u64::MAX).unwrap();
    for path in [files(&sharded), files(&single)].concat() {
        for odd in ODD {
            let opened = in_place_of(&path, odd, || Checkpoint::open(path.parent().unwrap()));
            let is_weights = path.to_str().unwrap().contains("safetensors");
            match opened {
                // Directories beside the weights are not part of a checkpoint.
                Ok(_) => assert!(!is_weights && odd == "a directory", "{}: {odd}", path.display()),
                Err(error) => assert_named(&error, &path, odd),
            }
        }
    }
    Checkpoint::open(&sharded).unwrap();
    Checkpoint::open(&single).unwrap();
}

/// A store on a disk with versions 0 and 1, and the weights of version 1.
fn published(dir: &Path) -> (Arc<dyn Store>, Weights) {
    let store: Arc<dyn Store> = Arc::new(Disk::new(dir.join("store")));
    let mut publisher = publisher(&store, Start::NewRun, &dir.join("baseline"));
    let mut weights = Weights::small(1);
    for version in 0..2 {
        weights.step(version, 30);
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
    }
    publisher.wait().unwrap();
    (store, weights)
}

#[test]
fn a_replica_with_something_odd_in_it_is_damaged_and_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = published(dir.path());
    let run = Run::open(store, RUN).unwrap();
    let host = dir.path().join("host");
    Replica::open(&host).unwrap().advance(&run, MODEL, Version(1), None).unwrap();
    let state = host.join(".driftless");
    let (mut places, spare) = (files(&state), state.join("journal.spare"));
    places.retain(|path| *path != spare);
    places.push(state.join("journal"));
    places.extend(files(&host).into_iter().filter(|path| path.to_str().unwrap().contains("safetensors")));
    assert!(places.len() >= 6, "{places:?}");
    for path in places {
        for odd in ODD {
            let error = in_place_of(&path, odd, || Replica::open(&host).map(drop).unwrap_err());
            assert_named(&error, &path, odd);
        }
    }
    // Nothing is read from what journals are written over.
    for odd in ODD {
        in_place_of(&spare, odd, || Replica::open(&host).map(drop).unwrap());
    }
    // What is named like an auxiliary file, and is in no manifest, is none of the replica's business.
    put("a FIFO", &host.join("notes.txt"));
    assert_eq!(Replica::open(&host).unwrap().applied().unwrap().version, Version(1));
}

#[test]
fn a_store_with_something_odd_in_it_says_so_or_does_without() {
    let dir = tempfile::tempdir().unwrap();
    let (store, weights) = published(dir.path());
    let root = dir.path().join("store");
    let run = Run::open(store.clone(), RUN).unwrap();
    let manifest = run.manifest_key(MODEL, Version(1)).unwrap();
    let object = run.get(MODEL, Version(1)).unwrap().manifest.objects[0].key.clone();
    let follow = |name: &str| {
        let run = Run::open(store.clone(), RUN)?;
        let newest = run.newest_version(MODEL)?.unwrap();
        Replica::open(dir.path().join(name))?.advance(&run, MODEL, newest, None)
    };
    for (number, odd) in ODD.into_iter().enumerate() {
        for (name, key) in [("run", Key::new("runs/test").unwrap()), ("object", object.clone())] {
            let path = root.join(key.as_str());
            let error = in_place_of(&path, odd, || follow(&format!("{name}-{number}")).unwrap_err());
            match odd {
                // Other keys lie there, and no object.
                "a directory" => {
                    assert!(
                        matches!(error, Error::NoSuchRun { .. } | Error::Store(StoreError::NotFound { .. })),
                        "{name}: {error:?}"
                    );
                }
                _ => assert_named(&error, &path, odd),
            }
        }
        let path = root.join(manifest.as_str());
        let got = in_place_of(&path, odd, || run.get(MODEL, Version(1)).unwrap_err());
        match odd {
            "a directory" => assert!(matches!(got, Error::NoSuchVersion { .. }), "{got:?}"),
            _ => assert_named(&got, &path, odd),
        }
        // The head only says where to begin.
        let path = root.join(format!("{}/{MODEL}/head", run.id()));
        in_place_of(&path, odd, || follow(&format!("head-{number}")).unwrap());
        let host = Checkpoint::open(dir.path().join(format!("head-{number}"))).unwrap();
        driftless_testkit::publications::assert_same(&host, &weights);
        // A writer looks for what dead ones left.
        put(odd, &root.join(format!(".staging/{number}")));
        let again: Arc<dyn Store> = Arc::new(Disk::new(&root));
        again.put(&Key::new("probes/x").unwrap(), b"x", PutMode::Overwrite).unwrap();
    }
}

#[test]
fn keys_are_files() {
    let dir = tempfile::tempdir().unwrap();
    for (number, odd) in ODD.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        put(odd, &path);
        assert_named(&SignKey::read(&path).unwrap_err(), &path, odd);
        assert_named(&TrustKey::read_all(&path).unwrap_err(), &path, odd);
    }
}
