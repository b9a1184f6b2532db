//! Power that goes at every sync of an apply, with every choice of what the disk had taken by then; and calls that fail.
//!
//! The fake disk keeps two images of the replica's directory: the live one is the directory itself, the durable one what
//! had been synced. Before each sync everything that differs between them may or may not have reached the disk: pages of
//! 4096 bytes and the length of each file, and each change of a name (a rename moves both its names). All choices are
//! tried for up to eight such differences, and 1,000 seeded ones above; what then lies on the disk is opened again.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::{MODEL, RUN, Random, Weights, publisher, step};
use driftless_transport::watch::{self, Call};
use driftless_transport::{
    Checkpoint, Error, Memory, Mode, Replica, Result, Run, Snapshot as _, Start, Store, Version,
    write_checkpoint,
};

const PAGE: usize = 4096;
const ALL_UP_TO: usize = 8;
const SEEDED: u64 = 1000;

static TURN: Mutex<()> = Mutex::new(());

/// A directory in memory, where there is one: the tests sync it thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Dir,
    File(u64),
}

/// Names, relative to the directory, and contents by inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Image {
    names: BTreeMap<PathBuf, Node>,
    contents: BTreeMap<u64, Vec<u8>>,
}

impl Image {
    /// The directory as it is now. Files are held open in `held`, so that no inode is used twice.
    fn of(dir: &Path, held: &mut BTreeMap<u64, File>) -> Self {
        let mut image = Self::default();
        image.collect(dir, Path::new(""), held);
        image
    }

    fn collect(&mut self, dir: &Path, below: &Path, held: &mut BTreeMap<u64, File>) {
        for entry in fs::read_dir(dir.join(below)).unwrap() {
            let entry = entry.unwrap();
            let name = below.join(entry.file_name());
            let metadata = entry.metadata().unwrap();
            if metadata.is_dir() {
                self.names.insert(name.clone(), Node::Dir);
                self.collect(dir, &name, held);
            } else if entry.file_name() != "lock" {
                self.contents.insert(metadata.ino(), fs::read(entry.path()).unwrap());
                held.entry(metadata.ino()).or_insert_with(|| File::open(entry.path()).unwrap());
                self.names.insert(name, Node::File(metadata.ino()));
            }
        }
    }

    fn write_to(&self, dir: &Path) {
        for (name, node) in &self.names {
            let path = dir.join(name);
            // What lies in a directory that did not reach the disk did not reach it either.
            if !path.parent().unwrap().is_dir() {
                continue;
            }
            match node {
                Node::Dir => fs::create_dir(path).unwrap(),
                Node::File(inode) => {
                    fs::write(path, self.contents.get(inode).map_or(&[][..], Vec::as_slice)).unwrap()
                }
            }
        }
    }
}

/// One thing that may have reached the disk or not.
#[derive(Clone, Debug)]
enum Unit {
    Page(u64, usize),
    Length(u64),
    Names(Vec<PathBuf>),
}

/// What differs between the images.
fn units(durable: &Image, live: &Image) -> Vec<Unit> {
    let mut units = Vec::new();
    for (inode, new) in &live.contents {
        let old = durable.contents.get(inode).map_or(&[][..], Vec::as_slice);
        for page in 0..new.len().max(old.len()).div_ceil(PAGE) {
            let of = |bytes: &[u8]| {
                let start = (page * PAGE).min(bytes.len());
                bytes[start..(start + PAGE).min(bytes.len())].to_vec()
            };
            if of(new) != of(old) {
                units.push(Unit::Page(*inode, page));
            }
        }
        if new.len() != old.len() {
            units.push(Unit::Length(*inode));
        }
    }
    // Names that one file had before and has now change together.
    let all: BTreeSet<&PathBuf> = durable.names.keys().chain(live.names.keys()).collect();
    let changed: Vec<&PathBuf> =
        all.into_iter().filter(|name| durable.names.get(*name) != live.names.get(*name)).collect();
    let mut groups: Vec<(BTreeSet<Node>, Vec<PathBuf>)> = Vec::new();
    for name in changed {
        let nodes = [durable.names.get(name), live.names.get(name)];
        let files: BTreeSet<Node> =
            nodes.into_iter().flatten().copied().filter(|node| matches!(node, Node::File(_))).collect();
        let mut merged = (files, vec![name.clone()]);
        groups.retain(|(nodes, names)| {
            let apart = nodes.is_disjoint(&merged.0);
            if !apart {
                merged.0.extend(nodes);
                merged.1.extend(names.iter().cloned());
            }
            apart
        });
        groups.push(merged);
    }
    units.extend(groups.into_iter().map(|(_, names)| Unit::Names(names)));
    units
}

/// The durable image with some of the differences on top.
fn crashed(durable: &Image, live: &Image, taken: &[&Unit]) -> Image {
    let mut image = durable.clone();
    for unit in taken {
        if let Unit::Names(names) = unit {
            for name in names {
                match live.names.get(name) {
                    Some(node) => drop(image.names.insert(name.clone(), *node)),
                    None => drop(image.names.remove(name)),
                }
            }
        }
    }
    for (inode, new) in &live.contents {
        let old = durable.contents.get(inode).cloned().unwrap_or_default();
        let longer = taken.iter().any(|unit| matches!(unit, Unit::Length(of) if of == inode));
        let mut bytes = old.clone();
        bytes.resize(if longer { new.len() } else { old.len() }, 0);
        for unit in taken {
            if let Unit::Page(of, page) = unit
                && of == inode
            {
                let range = page * PAGE..((page + 1) * PAGE).min(new.len()).min(bytes.len());
                if range.start < range.end {
                    bytes[range.clone()].copy_from_slice(&new[range]);
                }
            }
        }
        image.contents.insert(*inode, bytes);
    }
    image
}

/// A moment before a sync.
struct Moment {
    what: String,
    durable: Image,
    live: Image,
}

/// Watches one replica's directory.
struct Disk {
    dir: PathBuf,
    durable: Image,
    syncing: Option<(Call, PathBuf, Image)>,
    held: BTreeMap<u64, File>,
    moments: Vec<Moment>,
}

impl Disk {
    /// A disk that has taken all that lies in `dir`.
    fn new(dir: &Path) -> Self {
        let mut held = BTreeMap::new();
        let durable = if dir.is_dir() { Image::of(dir, &mut held) } else { Image::default() };
        Self { dir: dir.into(), durable, syncing: None, held, moments: Vec::new() }
    }

    /// The sync that was announced last has been made.
    fn settle(&mut self) {
        let Some((call, path, live)) = self.syncing.take() else { return };
        let Ok(name) = path.strip_prefix(&self.dir) else { return };
        if call == Call::Sync {
            let Some(Node::File(inode)) = live.names.get(name).copied() else {
                panic!("{name:?} was synced")
            };
            self.durable.contents.insert(inode, live.contents[&inode].clone());
            return;
        }
        let inside = |known: &PathBuf| known.parent() == Some(name);
        let gone: Vec<PathBuf> = self.durable.names.keys().filter(|known| inside(known)).cloned().collect();
        for known in gone {
            if !live.names.contains_key(&known) {
                self.durable.names.retain(|other, _| !other.starts_with(&known));
            }
        }
        let names = live.names.iter().filter(|(known, _)| inside(known));
        self.durable.names.extend(names.map(|(known, node)| (known.clone(), *node)));
    }

    fn before(&mut self, call: Call, path: &Path) {
        if !matches!(call, Call::Sync | Call::SyncDir) || !path.starts_with(&self.dir) {
            return;
        }
        self.settle();
        let live = Image::of(&self.dir, &mut self.held);
        let what = format!("{call:?} {}", path.strip_prefix(&self.dir).unwrap().display());
        self.moments.push(Moment { what, durable: self.durable.clone(), live: live.clone() });
        self.syncing = Some((call, path.into(), live));
    }
}

/// Does something to the replica in `dir` and returns the moments at which the power may go.
fn record(dir: &Path, work: impl FnOnce()) -> Vec<Moment> {
    let disk = Arc::new(Mutex::new(Disk::new(dir)));
    let ears = disk.clone();
    watch::set(Some(Box::new(move |call, path| {
        ears.lock().unwrap().before(call, path);
        Ok(())
    })));
    work();
    watch::set(None);
    std::mem::take(&mut disk.lock().unwrap().moments)
}

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
    fn advance(&self, replica: &mut Replica, to: u64) -> Result<()> {
        replica.advance(&self.run, MODEL, Version(to), Some(&self.reference)).map(drop)
    }

    fn prepared(&self, name: &str, version: Option<u64>) -> PathBuf {
        let dir = self.dir.path().join(name);
        if let Some(version) = version {
            self.advance(&mut Replica::open(&dir).unwrap(), version).unwrap();
        }
        dir
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

    /// Tries every moment with every choice, or many; returns how many images were opened, and how many of them held
    /// the old version and the new one.
    fn try_all(&self, moments: &[Moment], from: Option<u64>, to: u64, seed: u64) -> [usize; 3] {
        let (mut random, mut counts) = (Random(seed), [0, 0, 0]);
        for (number, moment) in moments.iter().enumerate() {
            let units = units(&moment.durable, &moment.live);
            let all = units.len() <= ALL_UP_TO;
            let mut seen: Vec<Image> = Vec::new();
            for choice in 0..if all { 1 << units.len() } else { SEEDED } {
                let mask = if all { choice } else { random.next() };
                let taken: Vec<&Unit> =
                    (0..units.len()).filter(|i| mask >> (i % 64) & 1 == 1).map(|i| &units[i]).collect();
                let image = crashed(&moment.durable, &moment.live, &taken);
                // What no name leads to makes no difference.
                let named: BTreeSet<Node> = image.names.values().copied().collect();
                let mut image = image;
                image.contents.retain(|inode, _| named.contains(&Node::File(*inode)));
                if seen.contains(&image) {
                    continue;
                }
                let why = || {
                    format!("seed {seed}, moment {number} ({}), taken {taken:?} of {units:?}", moment.what)
                };
                let version = self.recover(&image, &[from, Some(to)], to, &why);
                counts[0] += 1;
                counts[if version == Some(to) { 2 } else { 1 }] += 1;
                seen.push(image);
            }
        }
        counts
    }
}

/// From where, to where: by reference, a delta, two deltas in one, other tensors, a full version as the first.
const MOVES: [(Option<u64>, u64); 5] = [(None, 0), (Some(0), 1), (Some(0), 2), (Some(2), 3), (None, 4)];

#[test]
fn power_that_goes_at_any_sync_leaves_the_old_or_the_new_version() {
    let fixture = fixture();
    for (seed, (from, to)) in (0..).zip(MOVES) {
        let dir = fixture.prepared(&format!("{from:?}-{to}"), from);
        let moments = record(&dir, || fixture.advance(&mut Replica::open(&dir).unwrap(), to).unwrap());
        let most = moments.iter().map(|moment| units(&moment.durable, &moment.live).len()).max().unwrap();
        let [images, old, new] = fixture.try_all(&moments, from, to, seed);
        println!(
            "{from:?} to {to}: {} syncs, up to {most} differences, {images} different images: {old} old, {new} new",
            moments.len()
        );
        assert!(old > 0 && new > 0 && moments.len() > 8);
    }
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
            let units = units(&moment.durable, &moment.live);
            let mask = random.next();
            let taken: Vec<&Unit> =
                (0..units.len()).filter(|i| mask >> (i % 64) & 1 == 1).map(|i| &units[i]).collect();
            let image = crashed(&moment.durable, &moment.live, &taken);
            let again = scratch();
            let replica_dir = again.path().join("replica");
            fs::create_dir(&replica_dir).unwrap();
            image.write_to(&replica_dir);
            let recovery = record(&replica_dir, || drop(Replica::open(&replica_dir).unwrap()));
            crashes += recovery.len();
            // One choice each: what is on the disk is one of very many already.
            for moment in &recovery {
                let units = self::units(&moment.durable, &moment.live);
                let mask = random.next();
                let taken: Vec<&Unit> =
                    (0..units.len()).filter(|i| mask >> (i % 64) & 1 == 1).map(|i| &units[i]).collect();
                let image = crashed(&moment.durable, &moment.live, &taken);
                let why = || format!("{from:?} to {to}, {}, {taken:?} of {units:?}", moment.what);
                fixture.recover(&image, &[from, Some(to)], to, &why);
                images += 1;
            }
        }
    }
    println!("{crashes} moments in recoveries, {images} images");
    assert!(images > 30);
}

/// Fails the `k`-th call that `which` chooses, with `error`; false if there was none.
fn with_failure<T>(k: usize, which: fn(Call) -> bool, error: i32, work: impl FnOnce() -> T) -> (T, bool) {
    let passed = Arc::new(Mutex::new(0));
    let count = passed.clone();
    watch::set(Some(Box::new(move |call, _| {
        if !which(call) {
            return Ok(());
        }
        let mut count = count.lock().unwrap();
        *count += 1;
        if *count == k + 1 { Err(io::Error::from_raw_os_error(error)) } else { Ok(()) }
    })));
    let done = work();
    watch::set(None);
    let struck = *passed.lock().unwrap() > k;
    (done, struck)
}

fn every_call(which: fn(Call) -> bool, error: i32, is_typed: fn(&Error) -> bool) {
    let fixture = fixture();
    let mut calls = 0;
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
            fs::remove_dir_all(&dir).unwrap();
        }
    }
    println!("{calls} calls failed");
    assert!(calls > 50);
}

#[test]
fn a_disk_that_is_full_at_any_write_is_named_and_survived() {
    let writes = |call| matches!(call, Call::Write | Call::Create);
    every_call(writes, 28, |error| matches!(error, Error::NoSpace { .. }));
}

#[test]
fn any_call_that_fails_is_named_and_survived() {
    every_call(|_| true, 5, |error| matches!(error, Error::Io { .. }));
}
