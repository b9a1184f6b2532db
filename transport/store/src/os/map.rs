//! Memory maps of weight files and journals.
//!
//! A map is only sound while the file is not truncated, nor written to behind a live `&[u8]`. Ownership keeps
//! both: readers borrow from a `Checkpoint` of the transport, and its replica, the one writer, needs itself
//! mutably. Against other processes the replica holds a lock on its directory. A
//! checkpoint directory of the user's must not be rewritten in place while it is read, as its documentation
//! says. A replica that prefaults stores bytes that are there already.
#![expect(unsafe_code, reason = "memory maps of files")]

use std::fs::File;
use std::path::Path;

use memmap2::{Mmap, MmapMut};

use crate::error::{Error, Result};

/// Maps a whole file for reading. An empty file gives an empty map.
///
/// # Errors
/// Whatever the operating system reports, as [`Error::io`] tells it apart.
pub fn map(path: &Path, file: &File) -> Result<Mmap> {
    // SAFETY: the file is not truncated or written while the map is borrowed; see the module's documentation.
    let map = unsafe { Mmap::map(file) }.map_err(|source| Error::io("map", path, source))?;
    // What is not in memory yet comes in large folios. A kernel that refuses costs time, nothing else.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

/// Maps a whole file for reading and writing, shared with every other map and reader of it.
///
/// # Errors
/// As [`map`].
pub fn map_mut(path: &Path, file: &File) -> Result<MmapMut> {
    // SAFETY: as above; the caller holds the replica mutably, so no shared slice of the same file is alive in
    // this process.
    let map =
        unsafe { MmapMut::map_mut(file) }.map_err(|source| Error::io("map for writing", path, source))?;
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::io::Write as _;

    use super::*;

    #[test]
    fn writes_through_one_map_are_seen_through_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        File::create(&path).unwrap().write_all(b"before").unwrap();
        let reader = map(&path, &File::open(&path).unwrap()).unwrap();
        assert_eq!(&reader[..], b"before");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut writer = map_mut(&path, &file).unwrap();
        writer[..5].copy_from_slice(b"after");
        writer.flush().unwrap();
        drop(writer);
        assert_eq!(&reader[..], b"aftere");
    }

    #[test]
    fn a_file_opened_for_reading_cannot_be_mapped_for_writing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"x").unwrap();
        let error = map_mut(&path, &File::open(&path).unwrap()).unwrap_err();
        assert!(matches!(error, Error::PermissionDenied { .. }), "{error:?}");
    }
}
