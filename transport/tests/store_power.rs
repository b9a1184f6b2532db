//! Power that goes at every sync of a store in a directory, and calls that fail there: a version is there or
//! not, what was acknowledged stays, and the next publisher and the next collection go on.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "common/power.rs"]
mod power;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use driftless_store::os::watch::{self, Call};
use driftless_store::{Disk, Error as StoreError, Key, PutMode, Store};
use driftless_transport::gc::{GcOptions, collect};
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Error, Publisher, Result, Run, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_reader, options, orphans, step};
use driftless_testkit::random::Random;
use power::{Image, Moment, TURN, images, record, scratch, with_failure};

/// The versions that a test publishes. The third one is also an anchor, and the collection takes what stands
/// before it.
const VERSIONS: u64 = 4;
const ANCHOR_EVERY: u64 = 2;

/// What the trainer has at a version.
fn weights(version: u64) -> Weights {
    let mut weights = Weights::small(1);
    (1..=version).for_each(|version| weights.step(version, 10));
    weights
}

/// One thread and one upload, so that calls come in one order.
fn open(store: &Path, baseline: &Path) -> Result<Publisher> {
    let store: Arc<dyn Store> = Arc::new(Disk::new(store));
    let start = match Run::open(store.clone(), RUN) {
        Ok(_) => Start::Resume,
        Err(Error::NoSuchRun { .. }) => Start::NewRun,
        Err(error) => return Err(error),
    };
    let mut options = options(start, baseline);
    (options.uploads, options.threads) = (1, 1);
    options.anchor_every = Some(ANCHOR_EVERY);
    Publisher::open(store, options)
}

fn publish(store: &Path, baseline: &Path, version: u64) -> Result<()> {
    let mut publisher = open(store, baseline)?;
    let receipt = publisher.publish(&weights(version), step(version), Mode::Delta)?;
    assert_eq!(receipt.version, Version(version));
    publisher.wait()
}

/// The newest version in a store, all of it.
fn newest(store: &Path) -> Option<u64> {
    let store: Arc<dyn Store> = Arc::new(Disk::new(store));
    let run = match Run::open(store.clone(), RUN) {
        Err(Error::NoSuchRun { .. }) => return None,
        run => run.unwrap(),
    };
    let version = run.newest(MODEL).unwrap()?.manifest.version.0;
    let reader = scratch();
    assert_reader(&store, reader.path(), version, &weights(version));
    Some(version)
}

struct Scene {
    _dir: tempfile::TempDir,
    store: PathBuf,
    baseline: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

fn scene() -> Scene {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = scratch();
    let [store, baseline] = ["store", "baseline"].map(|name| dir.path().join(name));
    fs::create_dir(&store).unwrap();
    Scene { _dir: dir, store, baseline, _turn }
}

/// Opens what a crash left, checks that it is one of these versions, and publishes the next one with a
/// baseline of its own.
fn recover(image: &Image, allowed: &[Option<u64>], why: &str, then: fn(&Run)) -> Option<u64> {
    let dir = scratch();
    let store = dir.path().join("store");
    fs::create_dir(&store).unwrap();
    image.write_to(&store);
    println!("{why}");
    let version = newest(&store);
    assert!(allowed.contains(&version), "{version:?} is none of {allowed:?}");
    let next = version.map_or(0, |version| version + 1);
    publish(&store, &dir.path().join("baseline"), next).unwrap();
    assert_eq!(newest(&store), Some(next));
    then(&Run::open(Arc::new(Disk::new(&store)), RUN).unwrap());
    version
}

/// Tries every moment with every choice; at the last one, when the work is acknowledged, only `new` will do.
fn try_all(moments: &[Moment], old: Option<u64>, new: u64, then: fn(&Run)) -> Vec<Option<u64>> {
    let mut random = Random(new);
    let mut found = Vec::new();
    for (number, moment) in moments.iter().enumerate() {
        let allowed = [if number + 1 < moments.len() { old } else { Some(new) }, Some(new)];
        for (image, taken) in images(moment, &mut random) {
            found.push(recover(&image, &allowed, &format!("seed {new}, moment {number}: {taken}"), then));
        }
    }
    let most = moments.iter().map(Moment::differences).max().unwrap();
    println!("{} moments, up to {most} differences, {} different images", moments.len(), found.len());
    found
}

#[test]
fn power_lost_at_any_sync_leaves_a_publication_or_none() {
    let scene = scene();
    for version in 0..VERSIONS {
        let moments = record(&scene.store, || publish(&scene.store, &scene.baseline, version).unwrap());
        let old = version.checked_sub(1);
        let found = try_all(&moments, old, version, |run| assert_eq!(orphans(run), [""; 0]));
        assert!(moments.len() > 8 && found.contains(&old) && found.contains(&Some(version)));
    }
}

#[test]
fn power_lost_at_any_sync_of_a_collection_takes_nothing_needed() {
    let scene = scene();
    (0..VERSIONS).for_each(|version| publish(&scene.store, &scene.baseline, version).unwrap());
    let collection = || {
        let run = Run::open(Arc::new(Disk::new(&scene.store)), RUN).unwrap();
        let removed = collect(&run, &GcOptions::new(MODEL)).unwrap().removed;
        assert_eq!(removed.len() as u64, ANCHOR_EVERY, "all that stands before the anchor");
    };
    let moments = record(&scene.store, collection);
    // The next collection finishes what this one began, and goes on.
    let found = try_all(&moments, Some(VERSIONS - 1), VERSIONS - 1, |run| {
        let collected = collect(run, &GcOptions::new(MODEL)).unwrap();
        assert_eq!(collected.floor, Version(VERSIONS));
        for version in 0..VERSIONS {
            let manifest = run.manifest_key(MODEL, Version(version)).unwrap();
            let place = Key::new(manifest.as_str().trim_end_matches("/manifest")).unwrap();
            assert_eq!(run.store().list(&place).unwrap(), []);
            let got = run.get(MODEL, Version(version));
            assert!(matches!(got, Err(Error::Collected { .. })), "{got:?}");
        }
    });
    assert!(moments.len() > 2 && found.len() > 8);
}

/// Fails every call in turn: it is named, nothing is half there, and the same publisher's next try makes the
/// version.
fn every_call(which: fn(Call) -> bool, error: i32, is_typed: fn(&Error) -> bool) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut refused = 0;
    for k in 0.. {
        let dir = scratch();
        let [store, baseline] = ["store", "baseline"].map(|name| dir.path().join(name));
        let (done, struck) = with_failure(k, which, error, || publish(&store, &baseline, 0));
        if !struck {
            break;
        }
        if let Err(error) = &done {
            assert!(is_typed(error), "call {k}: {error:?}");
            refused += 1;
        }
        let version = newest(&store);
        assert!(version == Some(0) || (version.is_none() && done.is_err()), "call {k}: {version:?}");
        let next = version.map_or(0, |version| version + 1);
        publish(&store, &baseline, next).unwrap();
        assert_eq!(newest(&store), Some(next));
    }
    println!("{refused} publications were refused");
    assert!(refused > 10);
}

#[test]
fn a_disk_that_is_full_at_any_write_is_named_and_survived() {
    let writes = |call| matches!(call, Call::Write | Call::Create);
    every_call(writes, 28, |error| matches!(error, Error::Store(StoreError::NoSpace { .. })));
}

#[test]
fn any_call_that_fails_is_named_and_survived() {
    every_call(|_| true, 5, |error| matches!(error, Error::Store(StoreError::Io { .. })));
}

/// Whatever takes the time of a sync, a collection that deletes the last object of a directory meanwhile, and
/// the directory with it, keeps no put from its end.
#[test]
fn an_empty_directory_that_goes_during_any_sync_fails_no_put() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = scratch();
    let taken = dir.path().join("run/versions");
    let directory = taken.clone();
    watch::set(Some(Box::new(move |call, _| {
        if matches!(call, Call::Sync | Call::SyncDir) {
            // Refused while anything lies there.
            let _ = fs::remove_dir(&directory);
        }
        Ok(())
    })));
    let store = Disk::new(dir.path());
    let put = store.put(&Key::new("run/versions/1").unwrap(), b"x", PutMode::Create);
    watch::set(None);
    put.unwrap();
    assert!(taken.join("1").exists());
}

/// The other writer may have synced nothing when the power goes, and this put has been acknowledged.
#[test]
fn directory_made_meanwhile_by_another_writer_is_synced() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = scratch();
    let [parent, made] = ["run", "run/versions"].map(|name| dir.path().join(name));
    let synced = Arc::new(Mutex::new(Vec::new()));
    let (ears, theirs) = (synced.clone(), made.clone());
    watch::set(Some(Box::new(move |call, path| {
        match call {
            Call::Create if path == theirs => fs::create_dir(path)?,
            Call::SyncDir => ears.lock().unwrap().push(path.to_path_buf()),
            _ => {}
        }
        Ok(())
    })));
    let store = Disk::new(dir.path());
    let put = store.put(&Key::new("run/versions/1").unwrap(), b"x", PutMode::Create);
    watch::set(None);
    put.unwrap();
    let synced = synced.lock().unwrap();
    assert!(synced.contains(&parent) && synced.contains(&made), "{synced:?}");
}
