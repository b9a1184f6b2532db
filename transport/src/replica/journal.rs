//! The redo log of one apply: everything needed to finish it, written and synced before the first byte of the
//! checkpoint changes.
//!
//! Layout (little-endian): magic, then records of `kind: u32, name length: u32, number: u64, body length:
//! u64, name, body`. The last is a commit whose body is BLAKE3-256 of all bytes in front of it. A file
//! without a valid commit at its very end was never committed.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use driftless_store::os::watch::{self, Call};
use driftless_store::os::{if_there, remove_file, sync_file};

use crate::error::{Error, Result};

const MAGIC: [u8; 8] = *b"dftljnl1";
const HEAD_BYTES: usize = 24;
const DIGEST_BYTES: usize = 32;
const COMMIT: u32 = 0xffff_ffff;
/// After so many bytes write-back of them begins, unless the journal will be short.
const BEGIN_BYTES: u64 = 16 << 20;
/// After so many bytes, if it will be.
const BEGIN_BYTES_MIN: u64 = 2 << 20;
/// Parts of a short journal of which write-back begins early: little is left for the end. Of a long one
/// that comes across a slow line, so many syncs would keep others from writing what arrives.
const PARTS: u64 = 8;

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

/// A journal being written. Dropped before [`Writer::commit`], it leaves a file that reads as uncommitted.
pub(super) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    hash: blake3::Hasher,
    /// Bytes since write-back last began, and from how many on it begins again.
    unsynced: u64,
    begin_bytes: u64,
    begun: Option<Begun>,
}

/// A thread that syncs what was written so far while more is being written, so that the last sync finds
/// little to do.
struct Begun {
    more: SyncSender<()>,
    /// A failed write-back is reported once, maybe here.
    outcome: JoinHandle<io::Result<()>>,
}

impl Begun {
    fn start(file: &File, path: &Path) -> io::Result<Self> {
        // One request waits while another is carried out; what comes then is in it.
        let (more, requests) = sync_channel(1);
        let (file, path) = (file.try_clone()?, path.to_owned());
        let work = move || {
            requests.iter().try_for_each(|()| {
                watch::before(Call::Sync, &path)?;
                file.sync_data()
            })
        };
        let outcome = thread::Builder::new().name("driftless-journal".to_owned()).spawn(work)?;
        Ok(Self { more, outcome })
    }

    fn end(self) -> io::Result<()> {
        drop(self.more);
        self.outcome.join().unwrap_or_else(|_| Err(io::Error::other("the thread that syncs it is gone")))
    }
}

impl Writer {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = watch::before(Call::Create, path).and_then(|()| File::create(path));
        let file = file.map_err(|source| Error::io("create", path, source))?;
        let file = BufWriter::with_capacity(1 << 18, file);
        let (path, hash, begin_bytes) = (path.into(), blake3::Hasher::new(), BEGIN_BYTES);
        let mut writer = Self { path, file, hash, unsynced: 0, begin_bytes, begun: None };
        writer.write(&MAGIC)?;
        Ok(writer)
    }

    /// The journal will have about so many bytes.
    pub(super) fn expecting(mut self, bytes: u64) -> Self {
        self.begin_bytes = (bytes / PARTS).clamp(BEGIN_BYTES_MIN, BEGIN_BYTES);
        self
    }

    pub(super) fn push(&mut self, record: Record<'_>) -> Result<()> {
        let (kind, number, name, body) = record.parts();
        self.write(&head(kind, number, name, body))?;
        self.write(name.as_bytes())?;
        self.write(body)
    }

    /// Seals and syncs the file; once the directory is synced too the apply is committed.
    pub(super) fn commit(mut self) -> Result<()> {
        let digest = *self.hash.finalize().as_bytes();
        self.write(&head(COMMIT, 0, "", &digest))?;
        self.write(&digest)?;
        let file =
            self.file.into_inner().map_err(|error| Error::io("write", &self.path, error.into_error()))?;
        // Not one after the other: the last sync waits for the one before anyhow.
        let synced = sync_file(&file, &self.path);
        let begun = self.begun.map_or(Ok(()), Begun::end);
        synced.and(begun).map_err(|source| Error::io("sync", &self.path, source))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        watch::before(Call::Write, &self.path)
            .and_then(|()| self.file.write_all(bytes))
            .and_then(|()| self.begin(bytes.len() as u64))
            .map_err(|source| Error::io("write", &self.path, source))
    }

    /// Has the disk begin with what is there, every so many bytes.
    fn begin(&mut self, written: u64) -> io::Result<()> {
        self.unsynced += written;
        if self.unsynced >= self.begin_bytes {
            self.unsynced = 0;
            let begun = match self.begun.take() {
                Some(begun) => begun,
                None => Begun::start(self.file.get_ref(), &self.path)?,
            };
            // It has enough to do, or has failed, which the end tells.
            let _ = begun.more.try_send(());
            self.begun = Some(begun);
        }
        Ok(())
    }
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
    let sealed = bytes.len().checked_sub(HEAD_BYTES + DIGEST_BYTES)?;
    let (content, seal) = bytes.split_at(sealed);
    let digest = *blake3::hash(content).as_bytes();
    let (seal_head, seal_body) = seal.split_at(HEAD_BYTES);
    if seal_head != head(COMMIT, 0, "", &digest) || seal_body != digest {
        return None;
    }
    records(content)
}

/// The records of a journal that this process has just sealed: what was synced has not to be proved.
pub(super) fn sealed(bytes: &[u8]) -> Option<Vec<Record<'_>>> {
    records(bytes.get(..bytes.len().checked_sub(HEAD_BYTES + DIGEST_BYTES)?)?)
}

/// The records of content that is known to be whole.
fn records(content: &[u8]) -> Option<Vec<Record<'_>>> {
    let mut rest = content.strip_prefix(&MAGIC)?;
    let mut records = Vec::new();
    while !rest.is_empty() {
        let (kind, tail) = rest.split_first_chunk::<4>()?;
        let (name, tail) = tail.split_first_chunk::<4>()?;
        let (number, tail) = tail.split_first_chunk::<8>()?;
        let (body, tail) = tail.split_first_chunk::<8>()?;
        let (name, tail) = tail.split_at_checked(u32::from_le_bytes(*name) as usize)?;
        let (body, tail) = tail.split_at_checked(usize::try_from(u64::from_le_bytes(*body)).ok()?)?;
        let (kind, number) = (u32::from_le_bytes(*kind), u64::from_le_bytes(*number));
        records.push(Record::from_parts(kind, number, std::str::from_utf8(name).ok()?, body)?);
        rest = tail;
    }
    Some(records)
}

/// Removes a journal if there is one; the caller syncs the directory.
pub(super) fn remove(path: &Path) -> Result<()> {
    if_there(remove_file(path)).map(drop).map_err(|source| Error::io("remove", path, source))
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        let mut writer = Writer::create(&path).unwrap();
        for record in sample() {
            writer.push(record).unwrap();
        }
        writer.commit().unwrap();
        fs::read(&path).unwrap()
    }

    #[test]
    fn records_come_back_in_order() {
        assert_eq!(committed(&written()).unwrap(), sample());
        assert_eq!(sealed(&written()).unwrap(), sample());
        assert!(sealed(&[0; HEAD_BYTES + DIGEST_BYTES]).is_none() && sealed(b"short").is_none());
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
        let mut writer = Writer::create(&path).unwrap();
        writer.push(Record::Manifest(b"{}")).unwrap();
        drop(writer);
        assert!(committed(&fs::read(&path).unwrap()).is_none());
    }

    #[test]
    fn the_disk_begins_sooner_with_a_short_journal() {
        let dir = tempfile::tempdir().unwrap();
        let begun_after = |name: &str, expected: Option<u64>, mib: usize| {
            let writer = Writer::create(&dir.path().join(name)).unwrap();
            let mut writer = expected.into_iter().fold(writer, Writer::expecting);
            (0..mib).for_each(|_| writer.push(Record::Digests(&vec![5; 1 << 20])).unwrap());
            let begun = writer.begun.is_some();
            writer.commit().unwrap();
            begun
        };
        assert!(!begun_after("none yet", Some(0), 1));
        assert!(begun_after("short", Some(24 << 20), 3));
        assert!(!begun_after("long", Some(1 << 40), 3));
        assert!(!begun_after("not known", None, 3));
    }

    #[cfg(feature = "failpoints")]
    #[test]
    fn a_sync_that_fails_while_more_is_written_fails_the_commit() {
        let dir = tempfile::tempdir().unwrap();
        let body = vec![5; BEGIN_BYTES as usize / 2];
        let write = |name: &str| {
            let path = dir.path().join(name);
            let mut writer = Writer::create(&path)?;
            for _ in 0..5 {
                writer.push(Record::Digests(&body))?;
            }
            writer.commit().map(|()| path)
        };
        let bad = dir.path().join("bad");
        let (failed, failing) = (std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)), bad.clone());
        let once = failed.clone();
        watch::set(Some(Box::new(move |call, path| {
            let first = call == Call::Sync
                && path == failing
                && !once.swap(true, std::sync::atomic::Ordering::SeqCst);
            if first { Err(io::Error::other("once")) } else { Ok(()) }
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
