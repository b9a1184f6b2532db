//! Power that goes at every sync of an apply, with every choice of what the disk had taken by then; and calls
//! that fail.
//!
//! What then lies on the fake disk (`common/power.rs`) is opened again. While the version is only being made
//! durable, engines may have it already, so that only the new one may come back.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "common/power.rs"]
mod power;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use driftless_store::os::watch::{self, Call};
use driftless_store::{Error as StoreError, Memory, Store};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::prepared::OfferWhen;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Checkpoint, Error, Replica, Result, Run, Snapshot as _, Version};

use driftless_testkit::publications::{MODEL, RUN, Weights, assert_loads_whole_or_not, publisher, step};
use driftless_testkit::random::Random;
use power::{BEHIND, Image, Moment, TURN, record, scratch, with_failure};

struct Fixture {
    run: Run,
    versions: Vec<Weights>,
    reference: PathBuf,
    dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Version 0 by reference, 1 and 2 deltas, 3 of other tensors, 4 a delta.
fn fixture() -> Fixture {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = scratch();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let reference = dir.path().join("hf");
    let mut weights = Weights::small(1);
    // Of a type that plugins are offered nothing of.
    weights.remove("f.ids");
    write_checkpoint(&reference, &weights, 7000).unwrap();
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish_reference(&reference, step(0)).unwrap();
    let mut versions = vec![weights.clone()];
    for version in 1..5 {
        weights.step(version, 20);
        match version {
            1 => {
                weights.file("config.json", b"{\"hidden_size\": 33}");
                weights.file("vocab.json", b"{}");
                weights.files.retain(|file| file.name() != "tokenizer.json");
            }
            3 => weights.remove("d.norm"),
            _ => {}
        }
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        versions.push(weights.clone());
    }
    publisher.wait().unwrap();
    let run = Run::open(store, RUN).unwrap();
    Fixture { run, versions, reference, dir, _turn: turn }
}

impl Fixture {
    /// Moves, and waits until the version is durable.
    fn advance(&self, replica: &mut Replica, to: u64) -> Result<()> {
        self.run_to(replica, to)?;
        replica.sync().map(drop)
    }

    /// Moves, until the version could be loaded.
    fn run_to(&self, replica: &mut Replica, to: u64) -> Result<()> {
        replica.advance(&self.run, MODEL, Version(to), Some(&self.reference)).map(drop)
    }

    fn prepared(&self, name: &str, version: Option<u64>) -> PathBuf {
        let dir = self.dir.path().join(name);
        if let Some(version) = version {
            self.advance(&mut Replica::open(&dir).unwrap(), version).unwrap();
        }
        dir
    }

    /// A replica that offers versions to a plugin.
    fn offering(&self, dir: &Path, when: OfferWhen) -> Result<Replica> {
        let plugins = self.dir.path().join("plugins");
        if !plugins.exists() {
            fs::create_dir(&plugins).unwrap();
            fs::set_permissions(&plugins, fs::Permissions::from_mode(0o700)).unwrap();
            fs::write(plugins.join("rank-30000-0.json"), "{}").unwrap();
        }
        let mut replica = Replica::open(dir)?;
        replica.set_plugin_dir(plugins);
        replica.offer_first(when);
        Ok(replica)
    }

    /// The version that a replica holds, every bit of it.
    fn held(&self, replica: &Replica) -> Option<u64> {
        let version = replica.applied()?.version.0;
        let expected = &self.versions[version as usize];
        let found = Checkpoint::open(replica.dir()).unwrap();
        assert_eq!(found.tensors(), expected.tensors());
        for (index, bytes) in expected.bytes.iter().enumerate() {
            assert!(found.bytes(index).unwrap() == &bytes[..], "{}", expected.infos[index].name);
        }
        for file in &expected.files {
            assert_eq!(fs::read(replica.dir().join(file.name())).unwrap(), file.bytes());
        }
        Some(version)
    }

    /// Opens what a crash left, and goes on to `to`; returns the moments of both and the version in between.
    fn recover(
        &self,
        image: &Image,
        allowed: &[Option<u64>],
        to: u64,
        why: &dyn Fn() -> String,
    ) -> Option<u64> {
        let dir = scratch();
        let replica_dir = dir.path().join("replica");
        fs::create_dir(&replica_dir).unwrap();
        image.write_to(&replica_dir);
        let mut replica = Replica::open(&replica_dir).unwrap_or_else(|error| panic!("{error:?} {}", why()));
        let version = self.held(&replica);
        assert!(allowed.contains(&version), "{version:?}: {}", why());
        self.advance(&mut replica, to).unwrap_or_else(|error| panic!("{error:?} {}", why()));
        assert_eq!(self.held(&replica), Some(to));
        version
    }

    /// Tries every moment with every choice, or many; returns how many images were opened, and how many of
    /// them held the old version and the new one.
    fn try_all(&self, moments: &[Moment], from: Option<u64>, to: u64, seed: u64) -> [usize; 3] {
        let (mut random, mut counts) = (Random(seed), [0, 0, 0]);
        for (number, moment) in moments.iter().enumerate() {
            for (image, taken) in power::images(moment, &mut random) {
                let why = || format!("seed {seed}, moment {number}: {taken}");
                let allowed = [if moment.visible { Some(to) } else { from }, Some(to)];
                let version = self.recover(&image, &allowed, to, &why);
                counts[0] += 1;
                counts[if version == Some(to) { 2 } else { 1 }] += 1;
            }
        }
        counts
    }
}

/// From where, to where: by reference, a delta, two deltas in one, other tensors, a full version as the
/// first.
const MOVES: [(Option<u64>, u64); 5] = [(None, 0), (Some(0), 1), (Some(0), 2), (Some(2), 3), (None, 4)];

#[test]
fn power_lost_at_any_sync_leaves_the_old_or_the_new_version() {
    let fixture = fixture();
    for (seed, (from, to)) in (0..).zip(MOVES) {
        let dir = fixture.prepared(&format!("{from:?}-{to}"), from);
        let moments = record(&dir, || fixture.advance(&mut Replica::open(&dir).unwrap(), to).unwrap());
        let most = moments.iter().map(Moment::differences).max().unwrap();
        let [images, old, new] = fixture.try_all(&moments, from, to, seed);
        println!(
            "{from:?} to {to}: {} syncs, up to {most} differences, {images} different images: {old} old, {new} new",
            moments.len()
        );
        assert!(old > 0 && new > 0 && moments.len() > 8);
        let behind: Vec<&Moment> = moments.iter().filter(|moment| moment.visible).collect();
        assert!(behind.len() > 4, "the data, digests, manifest, marker, journal: {}", behind.len());
        if from.is_some_and(|from| from < 2) {
            assert!(behind[0].has_unsynced_pages());
        }
    }
}

#[test]
fn power_that_goes_behind_an_offer_leaves_the_new_version() {
    let fixture = fixture();
    let dir = fixture.prepared("offered", Some(1));
    let mut replica = fixture.offering(&dir, OfferWhen::Durable).unwrap();
    let moments = record(&dir, || fixture.advance(&mut replica, 2).unwrap());
    assert_eq!(fs::read_dir(fixture.dir.path().join("plugins")).unwrap().count(), 2, "a rank, and the offer");
    assert!(moments.iter().any(|moment| moment.has_unsynced_pages()));
    let [images, old, new] = fixture.try_all(&moments, Some(1), 2, 11);
    println!("{} syncs, {images} different images: {old} old, {new} new", moments.len());
    assert!(old > 0 && new > 0 && moments.len() > 8);
}

#[test]
fn power_that_goes_behind_an_early_offer_leaves_one_version() {
    let fixture = fixture();
    let dir = fixture.prepared("offered", Some(1));
    let mut replica = fixture.offering(&dir, OfferWhen::Decoded).unwrap();
    let mut moments = record(&dir, || fixture.advance(&mut replica, 2).unwrap());
    // An engine on the host goes with the power, so that the version before may come back until the journal is kept.
    let kept = moments.iter().position(|moment| moment.what == "SyncDir .driftless").unwrap();
    let offered = moments.iter().position(|moment| moment.visible).unwrap();
    assert!(offered < kept, "the journal is synced behind the offer");
    moments[..=kept].iter_mut().for_each(|moment| moment.visible = false);
    assert!(moments[kept + 1..].iter().any(|moment| moment.visible && moment.has_unsynced_pages()));
    let [images, old, new] = fixture.try_all(&moments, Some(1), 2, 12);
    println!("{} syncs, {images} different images: {old} old, {new} new", moments.len());
    assert!(old > 0 && new > 0 && moments.len() > 8);
}

/// Any call, and with a full disk any write, fails behind an early offer or in front of it.
#[test]
fn what_fails_around_an_early_offer_is_named_and_made_up_for() {
    let fixture = fixture();
    let (all, writes) = ((|_| true) as fn(Call) -> bool, |call| matches!(call, Call::Write | Call::Create));
    let mut behind = 0;
    for (which, error) in [(all, 5), (writes, 28)] {
        for k in 0.. {
            let dir = fixture.prepared(&format!("{error}-{k}"), Some(1));
            let work = || {
                let mut replica = fixture.offering(&dir, OfferWhen::Decoded)?;
                let offered = fixture.run_to(&mut replica, 2).map(|()| replica.applied().cloned());
                let moved = offered.and_then(|applied| {
                    assert_eq!(applied.unwrap().version, Version(2));
                    replica.keep().inspect_err(|_| behind += 1)?;
                    replica.sync()
                });
                Ok((replica, moved))
            };
            let (outcome, struck): (Result<_>, bool) = with_failure(k, which, error, work);
            if !struck {
                break;
            }
            if let Ok((mut replica, moved)) = outcome {
                if let Err(error) = moved {
                    assert!(
                        matches!(error, Error::Store(StoreError::Io { .. } | StoreError::NoSpace { .. })),
                        "{error:?}"
                    );
                }
                if k % 2 == 0 {
                    fixture.advance(&mut replica, 2).unwrap();
                    assert_eq!(fixture.held(&replica), Some(2));
                }
            }
            let mut replica = Replica::open(&dir).unwrap();
            assert!(matches!(fixture.held(&replica), Some(1 | 2)), "call {k}");
            fixture.advance(&mut replica, 2).unwrap();
            assert_eq!(fixture.held(&replica), Some(2));
        }
    }
    println!("{behind} calls failed between the offer and the journal");
    assert!(behind >= 3, "its sync, its name, the directory's sync: {behind}");
}

#[test]
fn power_that_goes_again_during_the_recovery_does_no_harm() {
    let fixture = fixture();
    let mut random = Random(5);
    let (mut crashes, mut images) = (0, 0);
    for (from, to) in [(Some(0), 2), (Some(2), 3)] {
        let dir = fixture.prepared(&format!("{from:?}-{to}"), from);
        let moments = record(&dir, || fixture.advance(&mut Replica::open(&dir).unwrap(), to).unwrap());
        for moment in &moments {
            let (image, _) = power::one_image(moment, &mut random);
            let again = scratch();
            let replica_dir = again.path().join("replica");
            fs::create_dir(&replica_dir).unwrap();
            image.write_to(&replica_dir);
            let recovery = record(&replica_dir, || drop(Replica::open(&replica_dir).unwrap()));
            crashes += recovery.len();
            // One choice each: what is on the disk is one of very many already.
            for moment in &recovery {
                let (image, taken) = power::one_image(moment, &mut random);
                let why = || format!("{from:?} to {to}, {taken}");
                fixture.recover(&image, &[from, Some(to)], to, &why);
                images += 1;
            }
        }
    }
    println!("{crashes} moments in recoveries, {images} images");
    assert!(images > 30);
}

/// At no call of an apply, and so at no kill, does an engine that starts get anything but a version whole.
#[test]
fn at_every_call_of_an_apply_a_mixture_has_no_config() {
    let fixture = fixture();
    for (from, to) in MOVES {
        let dir = fixture.prepared(&format!("{from:?}-{to}"), from);
        let versions =
            [from, Some(to)].map(|version| version.map(|at| fixture.versions[at as usize].clone()));
        let (place, seen) = (dir.clone(), Arc::new(Mutex::new([0, 0])));
        let count = seen.clone();
        watch::set(Some(Box::new(move |_, _| {
            let loads = assert_loads_whole_or_not(&place, &versions.each_ref().map(Option::as_ref));
            count.lock().unwrap()[usize::from(loads)] += 1;
            Ok(())
        })));
        let moved = fixture.advance(&mut Replica::open(&dir).unwrap(), to);
        watch::set(None);
        moved.unwrap();
        let [refused, loaded] = *seen.lock().unwrap();
        assert!(refused > 0 && loaded > 0, "{from:?} to {to}: {refused} and {loaded} calls");
    }
}

/// A disk that loses what it was to write: the sync fails once, the kernel takes the pages for clean, and
/// they are what they were before.
#[test]
fn sync_behind_a_version_that_fails_is_told_and_made_up_for() {
    let fixture = fixture();
    for (from, to, failures) in [(0, 1, 1), (0, 2, 1), (0, 1, 3)] {
        for k in 0.. {
            let dir = fixture.prepared(&format!("{from}-{to}-{failures}-{k}"), Some(from));
            let before: BTreeMap<PathBuf, Vec<u8>> = fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| is_weights(path))
                .map(|path| (path.clone(), fs::read(&path).unwrap()))
                .collect();
            let mut replica = Replica::open(&dir).unwrap();
            let passed = Arc::new(Mutex::new(0));
            let count = passed.clone();
            watch::set(Some(Box::new(move |call, path| {
                if call != Call::Sync || !before.contains_key(path) {
                    return Ok(());
                }
                let mut count = count.lock().unwrap();
                *count += 1;
                if *count <= k || *count > k + failures {
                    return Ok(());
                }
                let file = File::options().write(true).open(path)?;
                io::Write::write_all(&mut &file, &before[path])?;
                Err(io::Error::from_raw_os_error(5))
            })));
            fixture.run_to(&mut replica, to).unwrap();
            assert_eq!(replica.applied().unwrap().version, Version(to));
            let mut told = replica.sync();
            if *passed.lock().unwrap() <= k {
                watch::set(None);
                told.unwrap();
                assert!(k > 0, "nothing was synced");
                break;
            }
            for failure in 1..=failures {
                assert!(matches!(told, Err(Error::Store(StoreError::Io { .. }))), "{told:?}");
                assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })));
                assert!(!dir.join("config.json").exists(), "an engine that starts would load a mixture");
                if failure < failures {
                    told = replica.sync();
                }
            }
            if k % 2 == 0 {
                replica.sync().unwrap();
                assert_eq!(fixture.held(&replica), Some(to));
                replica.verify().unwrap();
            }
            watch::set(None);
            drop(replica);
            let replica = Replica::open(&dir).unwrap();
            assert_eq!(fixture.held(&replica), Some(to));
            replica.verify().unwrap();
        }
    }
}

/// Whether it is a weight file that engines read.
fn is_weights(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
        && path.parent().is_some_and(|parent| !parent.ends_with("next"))
}

fn every_call(which: fn(Call) -> bool, error: i32, is_typed: fn(&Error) -> bool) {
    let fixture = fixture();
    let mut calls = 0;
    BEHIND.store(0, Relaxed);
    for (from, to) in MOVES {
        for k in 0.. {
            let dir = fixture.prepared(&format!("{from:?}-{to}-{k}"), from);
            let work = || {
                let mut replica = Replica::open(&dir)?;
                let moved = fixture.advance(&mut replica, to);
                Ok((replica, moved))
            };
            let (outcome, struck): (Result<(Replica, Result<()>)>, bool) =
                with_failure(k, which, error, work);
            if !struck {
                break;
            }
            calls += 1;
            match outcome {
                Err(error) => assert!(is_typed(&error), "{from:?} to {to}, call {k}: {error:?}"),
                Ok((mut replica, moved)) => {
                    if let Err(error) = moved {
                        assert!(is_typed(&error), "{from:?} to {to}, call {k}: {error:?}");
                    }
                    // The same value finishes, or starts again, once the fault has passed.
                    if k % 2 == 0 {
                        fixture.advance(&mut replica, to).unwrap();
                        assert_eq!(fixture.held(&replica), Some(to));
                    }
                }
            }
            let mut replica = Replica::open(&dir).unwrap();
            let version = fixture.held(&replica);
            assert!(version == from || version == Some(to), "{from:?} to {to}, call {k}: {version:?}");
            fixture.advance(&mut replica, to).unwrap();
            assert_eq!(fixture.held(&replica), Some(to));
            drop(replica);
            fs::remove_dir_all(&dir).unwrap();
        }
    }
    let behind = BEHIND.load(Relaxed);
    println!("{calls} calls failed, {behind} of them behind a version that could be loaded");
    assert!(calls > 50 && behind > 20);
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
