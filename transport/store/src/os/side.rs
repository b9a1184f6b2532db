//! A file that several threads write side by side.
#![expect(unsafe_code, reason = "a memory map that is written")]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::{MmapOptions, MmapRaw};

/// A file that several threads write at once, each at places of its own. The kernel has writes of one file wait for each
/// other; what the file had before is written through a map, where threads only share the memory's speed.
#[derive(Debug)]
pub struct SideBySide {
    file: File,
    map: Option<MmapRaw>,
    /// So many bytes from the beginning were written.
    whole: AtomicU64,
}

impl SideBySide {
    /// A file whose bytes are written by calls of the kernel.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { file, map: None, whole: AtomicU64::new(0) }
    }

    /// Notes that the first `bytes` were all written. Nothing makes the file shorter from now on: a page that is not there,
    /// or has no room on the disk, would end the process.
    pub fn is_whole(&self, bytes: u64) {
        self.whole.fetch_max(bytes, Relaxed);
    }

    /// Has what is whole written through a map from now on.
    pub fn map(&mut self) {
        let bytes = self.whole.load(Relaxed);
        if self.map.as_ref().is_none_or(|map| (map.len() as u64) < bytes) {
            let length = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0);
            // Without a map everything goes as it did.
            self.map = length.and_then(|length| MmapOptions::new().len(length).map_raw(&self.file).ok());
        }
    }

    /// Writes `bytes` at byte `at`. Of calls at the same time no two write the same place.
    ///
    /// # Errors
    /// The file system's, where bytes lie outside of the map.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let inside =
            |map: &&MmapRaw| at.checked_add(bytes.len() as u64).is_some_and(|end| end <= map.len() as u64);
        let Some(map) = self.map.as_ref().filter(inside) else { return self.file.write_all_at(bytes, at) };
        // SAFETY: the range lies inside the map, which lives as long as `self`. Its pages are the file's, which others may
        // read and write as any file: nothing here holds a reference into them, and `bytes` is no part of them, as no
        // reference to them is given out.
        unsafe {
            map.as_mut_ptr().add(at as usize).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        Ok(())
    }
}

impl Deref for SideBySide {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::fs;
    use std::thread;

    use super::*;

    const PART: usize = 5000;

    #[test]
    fn threads_write_through_the_map_and_beyond_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let options =
            || File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let mut side = SideBySide::new(options());
        for round in 0..3u8 {
            thread::scope(|scope| {
                for number in 0..16u8 {
                    let side = &side;
                    scope.spawn(move || {
                        side.write_all_at(&[round * 16 + number; PART], u64::from(number) * PART as u64)
                            .unwrap();
                    });
                }
            });
            let expected: Vec<u8> = (0..16u8).flat_map(|number| [round * 16 + number; PART]).collect();
            assert!(fs::read(&path).unwrap() == expected, "round {round}");
            // The map ends inside of a part: the next round writes on both sides, and that part by a call.
            side.is_whole(u64::from(round + 1) * 5 * PART as u64 + 17);
            side.map();
        }
        side.write_all_at(b"end", 16 * PART as u64).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 16 * PART as u64 + 3);
        assert!(side.write_all_at(b"x", u64::MAX).is_err());
    }
}
