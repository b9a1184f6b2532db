//! A replica interrupted at every step, and its journal damaged at every byte: afterwards it holds the old
//! version or the new one.
//!
//! A crash is an error injected at a crash point, after which the replica is dropped and opened anew: what a
//! killed process leaves, as the page cache outlives it. Crash points are global, so these tests have a
//! binary of their own and take turns.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use driftless_store::wait::Stop;
use driftless_store::{BoxError, Error as StoreError, Memory, Store};
use driftless_transport::activate::{Activate, Activated, Target};
use driftless_transport::checkpoint::write_checkpoint;
use driftless_transport::follow::FollowerOptions;
use driftless_transport::prepared::OfferWhen;
use driftless_transport::publish::{Mode, Start};
use driftless_transport::{Checkpoint, Error, Follower, Replica, Result, Run, Version};
use fail::FailScenario;

use driftless_testkit::publications::{
    MODEL, RUN, Weights, assert_loads_whole_or_not, assert_same, publisher, step,
};

const POINTS: [&str; 5] = ["follow.fetch", "follow.journal", "follow.apply", "follow.sync", "follow.marker"];

/// A run whose version 1 is a delta that changes most tensors, a file, and removes and adds one; version 2 is
/// another tensor table, and version 3 a delta of nothing but tensors.
struct Fixture {
    run: Run,
    versions: Vec<Weights>,
    reference: PathBuf,
    dir: tempfile::TempDir,
    /// Keeps other tests from crash points, and clears them when the test ends.
    _turn: FailScenario<'static>,
}

fn fixture() -> Fixture {
    let turn = FailScenario::setup();
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let reference = dir.path().join("hf");
    let base = Weights::small(1);
    write_checkpoint(&reference, &base, 7000).unwrap();
    let mut publisher = publisher(&store, Start::NewRun, &dir.path().join("baseline"));
    publisher.publish_reference(&reference, step(0)).unwrap();
    let mut delta = base.clone();
    delta.step(2, 20);
    delta.file("config.json", b"{\"hidden_size\": 33}");
    delta.file("vocab.json", b"{}");
    delta.files.retain(|file| file.name() != "tokenizer.json");
    publisher.publish(&delta, step(1), Mode::Delta).unwrap();
    let mut full = Weights::small(5);
    full.remove("g.up");
    // Of a type that plugins are offered nothing of.
    full.remove("f.ids");
    full.file("merges.txt", b"a b");
    publisher.publish(&full, step(2), Mode::Full).unwrap();
    let mut last = full.clone();
    last.step(3, 20);
    publisher.publish(&last, step(3), Mode::Delta).unwrap();
    let run = Run::open(store, RUN).unwrap();
    Fixture { run, versions: vec![base, delta, full, last], reference, dir, _turn: turn }
}

impl Fixture {
    /// Moves, and waits until the version is durable.
    fn advance(&self, replica: &mut Replica, to: u64) -> Result<()> {
        replica.advance(&self.run, MODEL, Version(to), Some(&self.reference))?;
        replica.sync().map(drop)
    }

    /// A replica at `version`, or one without any.
    fn prepared(&self, name: &str, version: Option<u64>) -> PathBuf {
        let dir = self.dir.path().join(name);
        let mut replica = Replica::open(&dir).unwrap();
        if let Some(version) = version {
            self.advance(&mut replica, version).unwrap();
        }
        dir
    }

    /// Opens the replica and checks that it is at `version`, every bit and file of it.
    fn assert_at(&self, dir: &Path, version: Option<u64>) {
        let replica = Replica::open(dir).unwrap();
        self.assert_holds(&replica, version);
    }

    fn assert_holds(&self, replica: &Replica, version: Option<u64>) {
        assert_eq!(replica.applied().map(|applied| applied.version.0), version);
        if let Some(version) = version {
            let expected = &self.versions[version as usize];
            assert_same(replica.checkpoint().unwrap(), expected);
            assert_same(&Checkpoint::open(replica.dir()).unwrap(), expected);
            replica.verify().unwrap();
        }
        let state = replica.dir().join(".driftless");
        assert!(!state.join("journal").exists() && !state.join("next").exists());
    }
}

/// What is tried: from where, to where.
const MOVES: [(Option<u64>, u64); 4] = [(None, 0), (Some(0), 1), (Some(1), 2), (None, 2)];

#[test]
fn a_crash_at_every_step_leaves_the_old_or_the_new_version() {
    let fixture = fixture();
    for (from, to) in MOVES {
        for point in POINTS {
            let (mut crashes, mut refused) = (0, 0);
            for passed in 0.. {
                fail::remove(point);
                let dir = fixture.prepared(&format!("{from:?}-{to}-{point}-{passed}"), from);
                fail::cfg(point, &format!("{passed}*off->return")).unwrap();
                let mut replica = Replica::open(&dir).unwrap();
                let outcome = fixture.advance(&mut replica, to);
                drop(replica);
                fail::remove(point);
                if outcome.is_ok() {
                    break;
                }
                crashes += 1;
                let versions = [from, Some(to)].map(|version| Some(&fixture.versions[version? as usize]));
                refused += usize::from(!assert_loads_whole_or_not(&dir, &versions));
                let committed = point != "follow.fetch";
                fixture.assert_at(&dir, if committed { Some(to) } else { from });
                let mut replica = Replica::open(&dir).unwrap();
                fixture.advance(&mut replica, to).unwrap();
                fixture.assert_holds(&replica, Some(to));
                drop(replica);
                fs::remove_dir_all(&dir).unwrap();
            }
            let adopted = to == 0 && point == "follow.fetch";
            if point == "follow.apply" {
                assert_eq!(refused, crashes, "from {from:?} to {to}: all of them are before the last byte");
            }
            assert!(crashes > 0 || adopted, "{point} was never reached from {from:?} to {to}");
        }
    }
}

impl Fixture {
    /// A directory of plugins, with a rank in it.
    fn plugins(&self) -> PathBuf {
        let dir = self.dir.path().join("plugins");
        if !dir.exists() {
            fs::create_dir(&dir).unwrap();
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
            fs::write(dir.join("rank-30000-0.json"), "{}").unwrap();
        }
        dir
    }

    /// A replica whose versions are there once they were offered.
    fn offering(&self, dir: &Path) -> Replica {
        let mut replica = Replica::open(dir).unwrap();
        replica.set_plugin_dir(self.plugins());
        replica.offer_first(OfferWhen::Durable);
        replica
    }
}

#[test]
fn a_crash_behind_an_offer_leaves_the_new_version() {
    let fixture = fixture();
    for point in &POINTS[1..] {
        let mut crashes = 0;
        for passed in 0.. {
            let dir = fixture.prepared(&format!("offered-{point}-{passed}"), Some(2));
            fail::cfg(*point, &format!("{passed}*off->return")).unwrap();
            let mut replica = fixture.offering(&dir);
            let outcome = fixture.advance(&mut replica, 3);
            drop(replica);
            fail::remove(*point);
            if outcome.is_ok() {
                break;
            }
            crashes += 1;
            let versions = [2, 3].map(|version: usize| Some(&fixture.versions[version]));
            let loads = assert_loads_whole_or_not(&dir, &versions);
            assert_eq!(loads, *point != "follow.apply", "{point}, {passed}");
            fixture.assert_at(&dir, Some(3));
        }
        assert!(crashes > 0, "{point} was never reached");
    }
    // The same replica finishes it, too.
    let dir = fixture.prepared("offered", Some(2));
    let mut replica = fixture.offering(&dir);
    fail::cfg("follow.apply", "1*off->return").unwrap();
    fixture.advance(&mut replica, 3).unwrap_err();
    assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })));
    fail::remove("follow.apply");
    fixture.advance(&mut replica, 3).unwrap();
    fixture.assert_holds(&replica, Some(3));
    assert_eq!(fs::read_dir(fixture.plugins()).unwrap().count(), 2, "a rank, and the offer");
}

/// An engine that takes a version, and what it saw of it.
struct Taking {
    waits: bool,
    /// Label, whether the bytes were there, and whether an engine could start from the directory.
    seen: Sender<(String, Option<bool>, bool)>,
    serving: Option<String>,
}

impl Activate for Taking {
    fn name(&self) -> String {
        format!("waits: {}", self.waits)
    }

    fn serving(&mut self) -> Result<Option<String>, BoxError> {
        Ok(self.serving.clone())
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        let loads = target.checkpoint.dir().join("config.json").exists();
        self.seen.send((target.label.to_owned(), target.checkpoint.is_written(), loads))?;
        self.serving = Some(target.label.to_owned());
        Ok(Activated::default())
    }

    fn waits(&self) -> bool {
        self.waits
    }
}

#[test]
fn engine_that_waits_has_a_version_before_its_files_do() {
    let fixture = fixture();
    for waits in [true, false] {
        let name = format!("host-{waits}");
        let mut options = FollowerOptions::new(RUN, fixture.prepared(&name, Some(2)), "host");
        options.model = MODEL.to_owned();
        options.plugin_dir = Some(fixture.plugins());
        let dir = options.checkpoint_dir.clone();
        let (seen, saw) = channel();
        let engine = Taking { waits, seen, serving: None };
        let follower = Follower::open(fixture.run.store().clone(), options, vec![Box::new(engine)]).unwrap();
        follower.prepare(Some(Version(2))).unwrap();
        let (reached, at_the_files) = channel();
        let (release, gate) = channel::<()>();
        if waits {
            let gate = std::sync::Mutex::new(gate);
            fail::cfg_callback("follow.apply", move || {
                let _ = reached.send(());
                let _ = gate.lock().unwrap().recv();
            })
            .unwrap();
        }
        let prepared = follower.prepare(Some(Version(3))).unwrap();
        assert_eq!(prepared.version, Version(3));
        assert_eq!(follower.status().applied.unwrap().version, Version(3), "a crash would not take it back");
        follower.activate().unwrap();
        assert_eq!(saw.try_recv().unwrap(), (prepared.label, Some(!waits), true), "its files wait for it");
        if waits {
            at_the_files.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        assert_eq!(dir.join("config.json").exists(), !waits, "no engine starts from files that are written");
        let written = follower.wait_written(Duration::ZERO);
        assert_eq!(matches!(written, Err(Error::Busy { .. })), waits);
        drop(release);
        fail::remove("follow.apply");
        follower.wait_written(Duration::from_secs(60)).unwrap();
        follower.sync().unwrap();
        drop(follower);
        fixture.assert_at(&dir, Some(3));
    }
}

#[test]
fn bytes_that_are_waited_for_come_or_are_told() {
    let fixture = fixture();
    let dir = fixture.prepared("waited", Some(2));
    let mut replica = fixture.offering(&dir);
    fail::cfg("follow.apply", "pause").unwrap();
    replica.advance(&fixture.run, MODEL, Version(3), None).unwrap();
    let checkpoint = replica.checkpoint().unwrap();
    assert!(matches!(checkpoint.wait(Duration::from_millis(1)), Err(Error::Busy { .. })));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| checkpoint.wait(Duration::from_secs(60)));
        fail::remove("follow.apply");
        waiting.join().unwrap().unwrap();
    });
    assert_same(checkpoint, &fixture.versions[3]);
    drop(replica);

    let dir = fixture.prepared("failed", Some(2));
    let mut replica = fixture.offering(&dir);
    fail::cfg("follow.apply", "return").unwrap();
    replica.advance(&fixture.run, MODEL, Version(3), None).unwrap();
    let told = replica.checkpoint().unwrap().wait(Duration::from_secs(60));
    assert!(matches!(told, Err(Error::Cancelled { .. })), "{told:?}");
    fail::remove("follow.apply");
    drop(replica);
    fixture.assert_at(&dir, Some(3));
}

#[test]
fn a_recovery_that_crashes_too_is_recovered() {
    let fixture = fixture();
    for (from, to) in MOVES {
        let dir = fixture.prepared(&format!("{from:?}-{to}"), from);
        fail::cfg("follow.journal", "return").unwrap();
        fixture.advance(&mut Replica::open(&dir).unwrap(), to).unwrap_err();
        fail::remove("follow.journal");
        for (point, passed) in [
            ("follow.apply", 0),
            ("follow.apply", 1),
            ("follow.sync", 0),
            ("follow.marker", 0),
            ("follow.apply", 2),
        ] {
            fail::cfg(point, &format!("{passed}*off->return")).unwrap();
            let error = Replica::open(&dir).unwrap_err();
            assert!(matches!(error, Error::Store(StoreError::Io { .. })), "{point}: {error:?}");
            fail::remove(point);
        }
        fixture.assert_at(&dir, Some(to));
    }
}

#[test]
fn version_loaded_before_it_is_durable_survives_every_crash() {
    let fixture = fixture();
    for (from, to) in MOVES {
        for point in ["follow.sync", "follow.marker"] {
            let dir = fixture.prepared(&format!("{from:?}-{to}-{point}"), from);
            let mut replica = Replica::open(&dir).unwrap();
            let (reached, waiting) = std::sync::mpsc::channel();
            let (release, gate) = std::sync::mpsc::channel::<()>();
            let gate = std::sync::Mutex::new(gate);
            fail::cfg_callback(point, move || {
                let _ = reached.send(());
                let _ = gate.lock().unwrap().recv();
            })
            .unwrap();
            replica.advance(&fixture.run, MODEL, Version(to), Some(&fixture.reference)).unwrap();
            waiting.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
            // The other thread stands still; what a process that dies here leaves is this directory.
            assert_eq!(replica.applied().unwrap().version, Version(to));
            assert_same(replica.checkpoint().unwrap(), &fixture.versions[to as usize]);
            let copy = fixture.dir.path().join(format!("copy-{from:?}-{to}-{point}"));
            copy_dir(&dir, &copy);
            assert!(copy.join(".driftless/journal").exists());
            assert!(matches!(Replica::open(&dir), Err(Error::Store(StoreError::Locked { .. }))));
            release.send(()).unwrap();
            replica.sync().unwrap();
            fixture.assert_holds(&replica, Some(to));
            fail::remove(point);
            fixture.assert_at(&copy, Some(to));
        }
    }
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).unwrap();
        }
    }
}

#[test]
fn value_that_is_dropped_makes_its_version_durable_first() {
    let fixture = fixture();
    let dir = fixture.prepared("dropped", Some(0));
    fail::cfg("follow.sync", "pause").unwrap();
    let mut replica = Replica::open(&dir).unwrap();
    replica.advance(&fixture.run, MODEL, Version(1), None).unwrap();
    let dropped = std::thread::spawn(move || drop(replica));
    assert!(matches!(Replica::open(&dir), Err(Error::Store(StoreError::Locked { .. }))));
    fail::remove("follow.sync");
    dropped.join().unwrap();
    assert!(!dir.join(".driftless/journal").exists());
    fixture.assert_at(&dir, Some(1));
}

#[test]
fn the_same_replica_finishes_what_it_could_not() {
    let fixture = fixture();
    for point in ["follow.journal", "follow.apply", "follow.sync", "follow.marker"] {
        let dir = fixture.prepared(point, Some(0));
        let mut replica = Replica::open(&dir).unwrap();
        fail::cfg(point, "return").unwrap();
        fixture.advance(&mut replica, 1).unwrap_err();
        assert!(matches!(replica.checkpoint(), Err(Error::NothingApplied { .. })), "between two versions");
        fail::remove(point);
        fixture.advance(&mut replica, 2).unwrap();
        fixture.assert_holds(&replica, Some(2));
    }
}

#[test]
fn follower_tells_of_a_version_not_durable_and_mends_it() {
    let fixture = fixture();
    for coordinated in [false, true] {
        let mut options =
            FollowerOptions::new(RUN, fixture.dir.path().join(format!("host-{coordinated}")), "host");
        options.model = MODEL.to_owned();
        options.hf_checkpoint = Some(fixture.reference.clone());
        options.coordinated = coordinated;
        options.until = Some(Version(1));
        let dir = options.checkpoint_dir.clone();
        let follower = Follower::open(fixture.run.store().clone(), options, Vec::new()).unwrap();
        fail::cfg("follow.sync", "1*off->1*return->off").unwrap();
        follower.prepare(Some(Version(0))).unwrap();
        follower.sync().unwrap();
        follower.prepare(Some(Version(1))).unwrap();
        assert!(matches!(follower.sync(), Err(Error::Store(StoreError::Io { .. }))));
        let error = follower.status().error.unwrap();
        assert!(error.contains("follow.sync"), "{error}");
        assert_eq!(follower.status().applied.unwrap().version, Version(1), "its journal has it");
        // Nobody has to ask: with one more look it is carried out again.
        follower.run_until(&Stop::new(), false).unwrap();
        fail::remove("follow.sync");
        drop(follower);
        fixture.assert_at(&dir, Some(1));
    }
}

/// A replica at version 0 with the committed journal of `to` beside it, nothing of it carried out.
fn with_journal(fixture: &Fixture, name: &str, to: u64) -> (PathBuf, Vec<u8>) {
    let dir = fixture.prepared(name, Some(to - 1));
    fail::cfg("follow.journal", "return").unwrap();
    fixture.advance(&mut Replica::open(&dir).unwrap(), to).unwrap_err();
    fail::remove("follow.journal");
    let journal = fs::read(dir.join(".driftless/journal")).unwrap();
    (dir, journal)
}

#[test]
fn a_journal_torn_anywhere_was_never_committed() {
    let fixture = fixture();
    let (dir, whole) = with_journal(&fixture, "torn", 1);
    let path = dir.join(".driftless/journal");
    // Every length and every bit are tried on the journal alone, in its unit tests.
    for length in (0..whole.len()).step_by(61).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..length]).unwrap();
        let replica = Replica::open(&dir).unwrap();
        assert_eq!(replica.applied().unwrap().version, Version(0), "cut at {length}");
        assert!(!path.exists());
        fixture.assert_holds(&replica, Some(0));
    }
    fs::write(&path, &whole).unwrap();
    fixture.assert_at(&dir, Some(1));
}

#[test]
fn a_journal_flipped_anywhere_is_not_believed() {
    let fixture = fixture();
    let (dir, whole) = with_journal(&fixture, "flipped", 1);
    for index in (0..whole.len()).step_by(59) {
        let mut flipped = whole.clone();
        flipped[index] ^= 1 << (index % 8);
        fs::write(dir.join(".driftless/journal"), flipped).unwrap();
        let replica = Replica::open(&dir).unwrap();
        assert_eq!(replica.applied().unwrap().version, Version(0), "byte {index}");
    }
    fixture.assert_at(&dir, Some(0));
}

#[test]
fn a_journal_damaged_after_it_was_half_carried_out_is_told() {
    let fixture = fixture();
    let dir = fixture.prepared("half", Some(0));
    // The first two steps are files; the third overwrites a tensor.
    fail::cfg("follow.apply", "4*off->return").unwrap();
    fixture.advance(&mut Replica::open(&dir).unwrap(), 1).unwrap_err();
    fail::remove("follow.apply");
    let path = dir.join(".driftless/journal");
    let mut journal = fs::read(&path).unwrap();
    let middle = journal.len() / 2;
    journal[middle] ^= 1;
    fs::write(&path, journal).unwrap();
    let error = Replica::open(&dir).unwrap_err();
    assert!(matches!(error, Error::DamagedReplica { .. }), "{error:?}");
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(fixture.prepared("half", Some(1)), dir);
    fixture.assert_at(&dir, Some(1));
}

#[test]
fn a_journal_copied_to_another_base_is_refused() {
    let fixture = fixture();
    let (_, journal) = with_journal(&fixture, "origin", 1);
    let other = fixture.prepared("other", Some(2));
    fs::write(other.join(".driftless/journal"), &journal).unwrap();
    let error = Replica::open(&other).unwrap_err();
    assert!(matches!(error, Error::DamagedReplica { .. }), "{error:?}");
    fs::remove_file(other.join(".driftless/journal")).unwrap();
    fixture.assert_at(&other, Some(2));
}

#[test]
fn a_journal_that_reappears_after_its_version_is_harmless() {
    let fixture = fixture();
    let (dir, journal) = with_journal(&fixture, "again", 1);
    fixture.assert_at(&dir, Some(1));
    // Its removal was not synced when the power went.
    fs::write(dir.join(".driftless/journal"), &journal).unwrap();
    fixture.assert_at(&dir, Some(1));
}

#[test]
fn deltas_in_a_row_are_one_apply_with_one_journal() {
    let mut fixture = fixture();
    let store = fixture.run.store().clone();
    let mut publisher = publisher(&store, Start::Resume, &fixture.dir.path().join("baseline"));
    let mut weights = fixture.versions[2].clone();
    for version in 3..12 {
        weights.step(version, 15);
        if version == 8 {
            weights.file("config.json", b"{\"hidden_size\": 34}");
        }
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        fixture.versions.push(weights.clone());
    }
    // Its baseline moves behind, past the same crash points.
    publisher.wait().unwrap();
    let dir = fixture.prepared("folded", Some(3));
    // The second journal would be one too many.
    fail::cfg("follow.journal", "1*off->return").unwrap();
    let mut replica = Replica::open(&dir).unwrap();
    let advanced = replica.advance(&fixture.run, MODEL, Version(11), None).unwrap();
    assert_eq!(advanced.versions, 8);
    replica.sync().unwrap();
    fixture.assert_holds(&replica, Some(11));
    drop(replica);
    // A late joiner takes a full version and all deltas behind it at once.
    fail::cfg("follow.journal", "1*off->return").unwrap();
    let mut late = Replica::open(fixture.dir.path().join("late")).unwrap();
    assert_eq!(late.advance(&fixture.run, MODEL, Version(11), None).unwrap().versions, 10);
    late.sync().unwrap();
    fixture.assert_holds(&late, Some(11));
    fail::remove("follow.journal");

    // Between the journal and each of its steps.
    for point in POINTS {
        for passed in 0.. {
            let dir = fixture.prepared(&format!("{point}-{passed}"), Some(3));
            fail::cfg(point, &format!("{passed}*off->return")).unwrap();
            let outcome = fixture.advance(&mut Replica::open(&dir).unwrap(), 11);
            fail::remove(point);
            if outcome.is_ok() {
                assert!(passed > 0, "{point}");
                break;
            }
            fixture.assert_at(&dir, Some(if point == "follow.fetch" { 3 } else { 11 }));
        }
    }
}

#[test]
fn names_that_are_tied_and_part_again_are_folded_right() {
    let mut fixture = fixture();
    let store = fixture.run.store().clone();
    let mut publisher = publisher(&store, Start::Resume, &fixture.dir.path().join("baseline"));
    let mut weights = fixture.versions[2].clone();
    for version in 3..15u64 {
        weights.step(version, 25);
        // The norms are equal in some versions, and the tied pair is not in some others.
        if version % 4 < 2 {
            let norm = weights.tensor_mut("d.norm").clone();
            *weights.tensor_mut("e.norm") = norm;
        }
        if version % 5 == 0 {
            weights.tensor_mut("b.head")[7] ^= 1;
        }
        publisher.publish(&weights, step(version), Mode::Delta).unwrap();
        fixture.versions.push(weights.clone());
    }
    for from in 2..14u64 {
        let dir = fixture.prepared(&format!("from-{from}"), Some(from));
        let mut replica = Replica::open(&dir).unwrap();
        fixture.advance(&mut replica, 14).unwrap();
        fixture.assert_holds(&replica, Some(14));
    }
}
