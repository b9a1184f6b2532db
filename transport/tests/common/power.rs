//! A fake disk: what may lie on it when the power goes.
//!
//! It keeps two images of a directory: the live one is the directory itself, the durable one what had been
//! synced. Before each sync everything that differs between them may or may not have reached the disk: pages
//! of 4096 bytes and the length of each file, and each change of a name (a rename moves both its names).
#![allow(dead_code, reason = "every test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use driftless_store::os::watch::{self, Call};

use driftless_testkit::random::Random;

const PAGE: usize = 4096;
const ALL_UP_TO: usize = 8;
const SEEDED: u64 = 1000;

/// The thread that makes a replica's version durable that can be loaded already.
const SETTLER: &str = "driftless-sync";

/// Calls that [`with_failure`] failed on that thread.
pub(crate) static BEHIND: AtomicUsize = AtomicUsize::new(0);

pub(crate) static TURN: Mutex<()> = Mutex::new(());

/// A directory in memory, where there is one: the tests sync it thousands of times.
pub(crate) fn scratch() -> tempfile::TempDir {
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
pub(crate) struct Image {
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

    pub(crate) fn write_to(&self, dir: &Path) {
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
pub(crate) struct Moment {
    pub(crate) what: String,
    /// Whether engines may have the replica's new version.
    pub(crate) visible: bool,
    pub(crate) durable: Image,
    pub(crate) live: Image,
}

impl Moment {
    /// How many things may have reached the disk or not.
    pub(crate) fn differences(&self) -> usize {
        units(&self.durable, &self.live).len()
    }

    /// Whether pages are among them.
    pub(crate) fn has_unsynced_pages(&self) -> bool {
        units(&self.durable, &self.live).iter().any(|unit| matches!(unit, Unit::Page(..)))
    }
}

/// Watches one directory.
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
        let visible = is_settler();
        self.moments.push(Moment { what, visible, durable: self.durable.clone(), live: live.clone() });
        self.syncing = Some((call, path.into(), live));
    }
}

fn is_settler() -> bool {
    std::thread::current().name() == Some(SETTLER)
}

/// Does something to what lies in `dir` and returns the moments at which the power may go: before each sync,
/// and after all.
pub(crate) fn record(dir: &Path, work: impl FnOnce()) -> Vec<Moment> {
    let disk = Arc::new(Mutex::new(Disk::new(dir)));
    let ears = disk.clone();
    watch::set(Some(Box::new(move |call, path| {
        ears.lock().unwrap().before(call, path);
        Ok(())
    })));
    work();
    watch::set(None);
    let mut disk = disk.lock().unwrap();
    disk.settle();
    let live = Image::of(dir, &mut disk.held);
    let visible = disk.moments.iter().any(|moment| moment.visible);
    let end = Moment { what: "the end".to_owned(), visible, durable: disk.durable.clone(), live };
    disk.moments.push(end);
    std::mem::take(&mut disk.moments)
}

/// The images in which the power that goes at a moment can leave the disk, each once, and what had been
/// taken: all choices of up to eight differences, 1,000 seeded ones above.
pub(crate) fn images(moment: &Moment, random: &mut Random) -> Vec<(Image, String)> {
    let units = units(&moment.durable, &moment.live);
    let all = units.len() <= ALL_UP_TO;
    let mut images: Vec<(Image, String)> = Vec::new();
    for choice in 0..if all { 1 << units.len() } else { SEEDED } {
        let chosen = image(moment, &units, if all { choice } else { random.next() });
        if images.iter().all(|(known, _)| *known != chosen.0) {
            images.push(chosen);
        }
    }
    images
}

/// One of them, by chance.
pub(crate) fn one_image(moment: &Moment, random: &mut Random) -> (Image, String) {
    image(moment, &units(&moment.durable, &moment.live), random.next())
}

/// The image with those differences whose bits are set.
fn image(moment: &Moment, units: &[Unit], mask: u64) -> (Image, String) {
    let taken: Vec<&Unit> =
        (0..units.len()).filter(|i| mask >> (i % 64) & 1 == 1).map(|i| &units[i]).collect();
    let mut image = crashed(&moment.durable, &moment.live, &taken);
    // What no name leads to makes no difference.
    let named: BTreeSet<Node> = image.names.values().copied().collect();
    image.contents.retain(|inode, _| named.contains(&Node::File(*inode)));
    (image, format!("{}, taken {taken:?} of {units:?}", moment.what))
}

/// Fails the `k`-th call that `which` chooses, with `error`; false if there was none.
pub(crate) fn with_failure<T>(
    k: usize,
    which: fn(Call) -> bool,
    error: i32,
    work: impl FnOnce() -> T,
) -> (T, bool) {
    let passed = Arc::new(Mutex::new(0));
    let count = passed.clone();
    watch::set(Some(Box::new(move |call, _| {
        if !which(call) {
            return Ok(());
        }
        let mut count = count.lock().unwrap();
        *count += 1;
        if *count != k + 1 {
            return Ok(());
        }
        BEHIND.fetch_add(usize::from(is_settler()), Relaxed);
        Err(io::Error::from_raw_os_error(error))
    })));
    let done = work();
    watch::set(None);
    let struck = *passed.lock().unwrap() > k;
    (done, struck)
}
