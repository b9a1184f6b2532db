//! The redo log of one apply: everything needed to finish it, written and synced before the first byte of the
//! checkpoint changes.
//!
//! Layout (little-endian): magic, then records of `kind: u32, name length: u32, number: u64, body length:
//! u64, name, body`. The last is a commit. Its body is BLAKE3-256 of the magic and of each record's BLAKE3-256, in the
//! order of their places. A file without a valid commit at its very end was never committed.
//!
//! Threads write records side by side, over the pages of the journal before: it is kept as the *spare*, and becomes
//! the journal by its name once all of it is synced.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use driftless_store::os::{Steady, if_there, remove_if_there, rename};
use driftless_store::wait::lock;

use crate::error::{Error, Result};

const MAGIC: [u8; 8] = *b"dftljnl2";
/// Of the releases before, whose commit has BLAKE3-256 of all bytes in front of it.
const MAGIC_1: [u8; 8] = *b"dftljnl1";
const HEAD_BYTES: usize = 24;
/// The commit: its head, and a digest.
const COMMIT_BYTES: usize = HEAD_BYTES + 32;
const COMMIT: u32 = 0xffff_ffff;
/// After so many bytes write-back of them begins, unless the journal will be short.
const BEGIN_BYTES: u64 = 16 << 20;
/// After so many bytes, if it will be.
const BEGIN_BYTES_MIN: u64 = 2 << 20;
/// Parts of a short journal of which write-back begins early: little is left for the end. Of a long one
/// that comes across a slow line, so many syncs would keep others from writing what arrives.
const PARTS: u64 = 8;
/// A longer spare is not kept.
const SPARE_BYTES_MAX: u64 = 4 << 30;

/// One step of an apply. All are idempotent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    /// The manifest of the version being applied, its exact bytes.
    Manifest(&'a [u8]),
    /// The digest table file of that version.
    Digests(&'a [u8]),
    /// Absolute changes to a range of a tensor that begins at byte `offset`, in the codec's journal form.
    Patch { tensor: &'a str, offset: u64, bytes: &'a [u8] },
    /// New content of an auxiliary file.
    File { name: &'a str, bytes: &'a [u8] },
    /// Moves a staged file into the directory.
    Install { name: &'a str },
    /// Removes a file of the version before.
    Remove { name: &'a str },
    /// The manifest digest of the version that the patches start from.
    Base(&'a [u8]),
    /// The seal: the last record.
    Commit(&'a [u8]),
}

impl<'a> Record<'a> {
    /// Kind, number, name and body as they are stored.
    fn parts(self) -> (u32, u64, &'a str, &'a [u8]) {
        match self {
            Self::Manifest(bytes) => (1, 0, "", bytes),
            Self::Digests(bytes) => (2, 0, "", bytes),
            Self::Patch { tensor, offset, bytes } => (3, offset, tensor, bytes),
            Self::File { name, bytes } => (4, 0, name, bytes),
            Self::Install { name } => (5, 0, name, &[]),
            Self::Remove { name } => (6, 0, name, &[]),
            Self::Base(bytes) => (7, 0, "", bytes),
            Self::Commit(bytes) => (COMMIT, 0, "", bytes),
        }
    }

    fn from_parts(kind: u32, number: u64, name: &'a str, bytes: &'a [u8]) -> Option<Self> {
        Some(match kind {
            1 => Self::Manifest(bytes),
            2 => Self::Digests(bytes),
            3 => Self::Patch { tensor: name, offset: number, bytes },
            4 => Self::File { name, bytes },
            5 => Self::Install { name },
            6 => Self::Remove { name },
            7 => Self::Base(bytes),
            _ => return None,
        })
    }
}

/// A journal being written, by several threads if need be. Dropped before [`Sealed::keep`], it leaves a spare.
pub(super) struct Writer {
    /// The journal's name, which the file gets at last.
    path: PathBuf,
    spare: Steady,
    /// Where the next record goes.
    end: AtomicU64,
    /// The place of each record, and its digest.
    digests: Mutex<Vec<(u64, blake3::Hash)>>,
}

/// A journal with all its records, in the spare.
pub(super) struct Sealed {
    path: PathBuf,
    spare: Steady,
}

impl Writer {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let (spare, end) = (Steady::open(&spare(path), BEGIN_BYTES)?, AtomicU64::new(MAGIC.len() as u64));
        spare.write(&MAGIC, 0)?;
        Ok(Self { path: path.into(), spare, end, digests: Mutex::default() })
    }

    /// The journal will have about so many bytes.
    pub(super) fn expecting(mut self, bytes: u64) -> Self {
        self.spare = self.spare.beginning_after(begin_bytes(bytes));
        self
    }

    /// Adds a record. Those that one thread adds keep their order.
    pub(super) fn push(&self, record: Record<'_>) -> Result<()> {
        let (kind, number, name, body) = record.parts();
        let head = [&head(kind, number, name, body), name.as_bytes()].concat();
        let start = self.end.fetch_add((head.len() + body.len()) as u64, Relaxed);
        self.spare.write(&head, start)?;
        self.spare.write(body, start + head.len() as u64)?;
        let digest = blake3::Hasher::new().update(&head).update(body).finalize();
        lock(&self.digests).push((start, digest));
        Ok(())
    }

    /// Adds the seal.
    pub(super) fn seal(self) -> Result<Sealed> {
        let mut digests = std::mem::take(&mut *lock(&self.digests));
        digests.sort_unstable_by_key(|(start, _)| *start);
        let seal = *seal(digests.into_iter().map(|(_, digest)| digest)).as_bytes();
        self.push(Record::Commit(&seal))?;
        let Self { path, spare, end, .. } = self;
        spare.cut(end.into_inner())?;
        Ok(Sealed { path, spare })
    }
}

impl Sealed {
    /// Where it lies until it is kept.
    pub(super) fn place(&self) -> &Path {
        self.spare.path()
    }

    /// Syncs it and gives it its name; once the directory is synced too the apply is committed.
    pub(super) fn keep(self) -> Result<()> {
        let place = self.place().to_owned();
        self.spare.sync()?;
        rename(&place, &self.path).map_err(|source| Error::io("rename", place, source))
    }
}

/// After how many bytes write-back begins in a journal of about so many.
fn begin_bytes(expected: u64) -> u64 {
    (expected / PARTS).clamp(BEGIN_BYTES_MIN, BEGIN_BYTES)
}

/// What a journal is written into.
fn spare(path: &Path) -> PathBuf {
    path.with_extension("spare")
}

/// What the commit has, from the digests of the records in front of it.
fn seal(records: impl Iterator<Item = blake3::Hash>) -> blake3::Hash {
    let mut hash = blake3::Hasher::new();
    hash.update(&MAGIC);
    for digest in records {
        hash.update(digest.as_bytes());
    }
    hash.finalize()
}

fn head(kind: u32, number: u64, name: &str, body: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    // Names are file and tensor names, a few hundred bytes at most.
    head[4..8].copy_from_slice(&(name.len() as u32).to_le_bytes());
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head[16..].copy_from_slice(&(body.len() as u64).to_le_bytes());
    head
}

/// The records of a journal's bytes, or `None` if it was never committed: torn anywhere, or damaged since.
pub(super) fn committed(bytes: &[u8]) -> Option<Vec<Record<'_>>> {
    let (content, commit) = bytes.split_last_chunk::<COMMIT_BYTES>()?;
    let (records, ends) = records(content)?;
    let digest = if content.starts_with(&MAGIC) {
        let starts = std::iter::once(MAGIC.len()).chain(ends.iter().copied());
        seal(starts.zip(&ends).map(|(start, end)| blake3::hash(&content[start..*end])))
    } else {
        blake3::hash(content)
    };
    let digest = digest.as_bytes();
    (*commit == *[&head(COMMIT, 0, "", digest)[..], digest].concat()).then_some(records)
}

/// The records of a journal that this process has just sealed: what was synced has not to be proved.
pub(super) fn sealed(bytes: &[u8]) -> Option<Vec<Record<'_>>> {
    records(bytes.split_last_chunk::<COMMIT_BYTES>()?.0).map(|(records, _)| records)
}

/// The records of a journal without its commit, and the byte at which each ends. `None` for what no writer left.
fn records(content: &[u8]) -> Option<(Vec<Record<'_>>, Vec<usize>)> {
    let mut rest = content.strip_prefix(&MAGIC).or_else(|| content.strip_prefix(&MAGIC_1))?;
    let (mut records, mut ends) = (Vec::new(), Vec::new());
    while !rest.is_empty() {
        let (kind, tail) = rest.split_first_chunk::<4>()?;
        let (name, tail) = tail.split_first_chunk::<4>()?;
        let (number, tail) = tail.split_first_chunk::<8>()?;
        let (body, tail) = tail.split_first_chunk::<8>()?;
        let (name, tail) = tail.split_at_checked(u32::from_le_bytes(*name) as usize)?;
        let (body, tail) = tail.split_at_checked(usize::try_from(u64::from_le_bytes(*body)).ok()?)?;
        let (kind, number) = (u32::from_le_bytes(*kind), u64::from_le_bytes(*number));
        records.push(Record::from_parts(kind, number, std::str::from_utf8(name).ok()?, body)?);
        ends.push(content.len() - tail.len());
        rest = tail;
    }
    Some((records, ends))
}

/// Has the next journal be written over a journal that is not needed any more; the caller syncs the directory.
pub(super) fn retire(path: &Path) -> Result<()> {
    let length = if_there(fs::symlink_metadata(path)).map_err(|source| Error::io("inspect", path, source))?;
    match length {
        None => Ok(()),
        Some(found) if found.len() <= SPARE_BYTES_MAX => {
            rename(path, &spare(path)).map_err(|source| Error::io("rename", path, source))
        }
        Some(_) => Ok(remove_if_there(path)?),
    }
}

/// Gives the spare's space back; the caller syncs the directory.
pub(super) fn remove_spare(path: &Path) -> Result<()> {
    Ok(remove_if_there(&spare(path))?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn sample() -> [Record<'static>; 7] {
        [
            Record::Manifest(b"{}"),
            Record::Digests(&[7; 40]),
            Record::Patch { tensor: "model.embed.weight", offset: 1 << 40, bytes: &[1, 2, 3] },
            Record::File { name: "config.json", bytes: b"" },
            Record::Install { name: "model.safetensors" },
            Record::Remove { name: "merges.txt" },
            Record::Base(&[9; 32]),
        ]
    }

    fn written() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let writer = Writer::create(&path).unwrap();
        for record in sample() {
            writer.push(record).unwrap();
        }
        writer.seal().unwrap().keep().unwrap();
        fs::read(&path).unwrap()
    }

    #[test]
    fn records_come_back_in_order() {
        assert_eq!(committed(&written()).unwrap(), sample());
        assert_eq!(sealed(&written()).unwrap(), sample());
        assert!(sealed(&[0; COMMIT_BYTES]).is_none() && sealed(b"short").is_none());
    }

    #[test]
    fn torn_at_any_byte_or_with_any_bit_flipped_it_is_uncommitted() {
        let bytes = written();
        for cut in 0..bytes.len() {
            assert!(committed(&bytes[..cut]).is_none(), "cut at {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(committed(&flipped).is_none(), "bit {bit}");
        }
        let mut longer = bytes;
        longer.push(0);
        assert!(committed(&longer).is_none());
    }

    #[test]
    fn a_writer_that_was_dropped_leaves_nothing_committed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let writer = Writer::create(&path).unwrap();
        writer.push(Record::Manifest(b"{}")).unwrap();
        drop(writer);
        assert!(!path.exists() && committed(&fs::read(spare(&path)).unwrap()).is_none());
    }

    #[test]
    fn journals_are_written_over_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let mut inodes = Vec::new();
        for length in [70_000, 300, 5_000, 100_000] {
            let (writer, body) = (Writer::create(&path).unwrap(), vec![length as u8; length]);
            writer.push(Record::Digests(&body)).unwrap();
            writer.seal().unwrap().keep().unwrap();
            let found = fs::read(&path).unwrap();
            assert_eq!(committed(&found).unwrap(), [Record::Digests(&body)]);
            inodes.push(fs::metadata(&path).unwrap().ino());
            retire(&path).unwrap();
            assert!(!path.exists());
        }
        inodes.dedup();
        assert_eq!(inodes.len(), 1);
        // What is no file of ours is not written to.
        fs::remove_file(spare(&path)).unwrap();
        fs::write(dir.path().join("another's"), "kept").unwrap();
        std::os::unix::fs::symlink("another's", spare(&path)).unwrap();
        Writer::create(&path).unwrap().seal().unwrap().keep().unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("another's")).unwrap(), "kept");
        assert!(committed(&fs::read(&path).unwrap()).unwrap().is_empty());
        remove_spare(&path).unwrap();
        retire(&path).unwrap();
        remove_spare(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn threads_add_records_side_by_side() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (writer, names) = (Writer::create(&path).unwrap(), ["a", "b", "c", "d"]);
        let add = |name: &str| {
            for offset in 0..200 {
                let bytes = vec![offset as u8; offset as usize * 7];
                writer.push(Record::Patch { tensor: name, offset, bytes: &bytes }).unwrap();
            }
        };
        std::thread::scope(|scope| names.iter().for_each(|name| drop(scope.spawn(|| add(name)))));
        writer.seal().unwrap().keep().unwrap();
        let found = fs::read(&path).unwrap();
        let records = committed(&found).unwrap();
        assert_eq!(records.len(), 800);
        for name in names {
            let own = records.iter().filter_map(|record| match record {
                Record::Patch { tensor, offset, bytes } if *tensor == name => {
                    Some((*offset, bytes.len() as u64))
                }
                _ => None,
            });
            assert!(own.eq((0..200).map(|offset| (offset, offset * 7))), "in the order of its thread");
        }
    }

    #[test]
    fn journals_of_the_releases_before_are_read() {
        let whole = written();
        let mut old = [&MAGIC_1[..], &whole[MAGIC.len()..whole.len() - COMMIT_BYTES]].concat();
        assert!(committed(&[&old[..], &whole[whole.len() - COMMIT_BYTES..]].concat()).is_none());
        let digest = *blake3::hash(&old).as_bytes();
        old.extend(head(COMMIT, 0, "", &digest));
        old.extend(digest);
        assert_eq!(committed(&old).unwrap(), sample());
        old[50] ^= 1;
        assert!(committed(&old).is_none());
    }

    #[test]
    fn the_disk_begins_sooner_with_a_short_journal() {
        assert_eq!([0, 24 << 20, 1 << 40].map(begin_bytes), [2 << 20, 3 << 20, 16 << 20]);
    }

    #[cfg(feature = "failpoints")]
    #[test]
    fn a_sync_that_fails_while_more_is_written_fails_the_commit() {
        use driftless_store::os::watch::{self, Call};

        let dir = tempfile::tempdir().unwrap();
        let body = vec![5; BEGIN_BYTES as usize / 2];
        let write = |name: &str| {
            let path = dir.path().join(name);
            let writer = Writer::create(&path)?;
            for _ in 0..5 {
                writer.push(Record::Digests(&body))?;
            }
            writer.seal()?.keep().map(|()| path)
        };
        let bad = dir.path().join("bad");
        let (failed, failing) = (std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)), bad.clone());
        let once = failed.clone();
        watch::set(Some(Box::new(move |call, path| {
            let first = call == Call::Sync
                && path == spare(&failing)
                && !once.swap(true, std::sync::atomic::Ordering::SeqCst);
            if first { Err(std::io::Error::other("once")) } else { Ok(()) }
        })));
        let (bad, good) = (write("bad"), write("good"));
        watch::set(None);
        assert!(failed.load(std::sync::atomic::Ordering::SeqCst));
        assert!(bad.is_err(), "{bad:?}");
        assert_eq!(committed(&fs::read(good.unwrap()).unwrap()).unwrap().len(), 5);
    }

    #[test]
    fn lying_lengths_under_a_valid_seal_are_refused() {
        for (name, body) in [(u32::MAX, 0u64), (0, u64::MAX), (0, 1)] {
            let mut content = MAGIC.to_vec();
            content.extend_from_slice(&1u32.to_le_bytes());
            content.extend_from_slice(&name.to_le_bytes());
            content.extend_from_slice(&0u64.to_le_bytes());
            content.extend_from_slice(&body.to_le_bytes());
            assert!(records(&content).is_none());
        }
    }
}
