//! The redo log of one apply: everything needed to finish it, written and synced before the first byte of the
//! checkpoint changes.
//!
//! Layout (little-endian): magic, then records of `kind: u32, name length: u32, number: u64, body length:
//! u64, name, body`. The last is a commit whose body is BLAKE3-256 of all bytes in front of it. A file
//! without a valid commit at its very end was never committed.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::checkpoint::{remove_file, sync_file};
use crate::error::{Error, Result};
use crate::watch::{self, Call};

const MAGIC: [u8; 8] = *b"dftljnl1";
const HEAD_BYTES: usize = 24;
const DIGEST_BYTES: usize = 32;
const COMMIT: u32 = 0xffff_ffff;

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
}

impl Writer {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = watch::before(Call::Create, path).and_then(|()| File::create(path));
        let file = file.map_err(|source| Error::io("create", path, source))?;
        let file = BufWriter::with_capacity(1 << 18, file);
        let mut writer = Self { path: path.into(), file, hash: blake3::Hasher::new() };
        writer.write(&MAGIC)?;
        Ok(writer)
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
        sync_file(&file, &self.path).map_err(|source| Error::io("sync", &self.path, source))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        watch::before(Call::Write, &self.path)
            .and_then(|()| self.file.write_all(bytes))
            .map_err(|source| Error::io("write", &self.path, source))
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
    match remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(Error::io("remove", path, source)),
        _ => Ok(()),
    }
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
    fn lengths_that_lie_under_a_valid_seal_are_refused_without_allocating() {
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
