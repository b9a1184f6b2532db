//! The few things a log asks of the medium under it, and the directory that normally provides them.
//!
//! A mapped file bypasses any trait once it is mapped, so the seam sits around it: create, open, flush (in
//! [`Map`]), remove and replace. The crash tests put a simulated medium behind the same calls.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::{MmapOptions, MmapRaw};

use crate::layout::segment::HEADER_PAGE;
use crate::map::Map;
use crate::regular::{self, call};

/// A named set of segments and small files.
pub(crate) trait Storage: Send + Sync {
    /// Where `name` lives, for messages.
    fn path(&self, name: &str) -> PathBuf;
    /// Names of all files.
    fn names(&self) -> io::Result<Vec<String>>;
    /// Makes the spare: a zeroed file of `bytes` bytes, all of them backed by storage, durable on return.
    /// There is at most one; another one takes its place.
    fn prepare(&self, bytes: usize) -> io::Result<Map>;
    /// Gives the spare, whose header is on stable storage, its name as a segment, durably.
    fn adopt(&self, name: &str) -> io::Result<()>;
    /// Removes the spare, if there is one.
    fn discard_spare(&self);
    /// Maps a file as it is: for reading, or, when it was cut short, grown back to `bytes` for writing.
    fn open(&self, name: &str, write: Option<usize>) -> io::Result<Map>;
    /// Gives the storage behind `range` back; the bytes there are zero and stay so.
    fn release(&self, name: &str, range: Range<usize>);
    /// Removes a file, durably. Maps of it stay valid.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Reads a small file; `None` when absent.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// Replaces a small file: after a crash it holds the old bytes or the new ones.
    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()>;
}

/// A directory of files.
#[derive(Debug)]
pub(crate) struct Directory {
    root: PathBuf,
}

/// Suffix of files that are not complete yet; ignored and overwritten.
const UNFINISHED: &str = ".new";
/// The next segment, before it is one.
pub(crate) const SPARE: &str = "spare.new";
/// Small files are read whole; nothing the log writes comes near this.
const SMALL_BYTES_MAX: u64 = 1 << 20;

impl Directory {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(crate) fn sync_root(&self) -> io::Result<()> {
        let root = call(|| File::open(&self.root))?;
        call(|| root.sync_all())
    }

    /// Writes a file from its beginning and syncs it. What cannot be completed is removed.
    fn put<T>(&self, unfinished: &str, write: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let path = self.root.join(unfinished);
        let attempt = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(true);
            let file = call(|| regular::open_with(&mut options, &path))?;
            let out = write(&file)?;
            call(|| file.sync_all())?;
            Ok(out)
        };
        attempt().inspect_err(|_| {
            // The error being returned matters more; a left-over file is overwritten by the next attempt.
            let _ = fs::remove_file(&path);
        })
    }

    /// Moves a complete file to its name, durably.
    fn rename(&self, unfinished: &str, name: &str) -> io::Result<()> {
        call(|| fs::rename(self.root.join(unfinished), self.root.join(name)))?;
        self.sync_root()
    }
}

impl Storage for Directory {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in call(|| fs::read_dir(&self.root))? {
            // Names that are not UTF-8 are none of ours.
            if let Ok(name) = entry?.file_name().into_string()
                && !name.ends_with(UNFINISHED)
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn prepare(&self, bytes: usize) -> io::Result<Map> {
        let (raw, file) = self.put(SPARE, |file| {
            allocate(file, bytes as u64)?;
            Ok((map(file, bytes)?, file.try_clone()?))
        })?;
        Ok(Map::writable(raw, file, HEADER_PAGE))
    }

    fn adopt(&self, name: &str) -> io::Result<()> {
        if call(|| self.root.join(name).try_exists())? {
            return Err(io::Error::from(io::ErrorKind::AlreadyExists));
        }
        self.rename(SPARE, name)
    }

    fn discard_spare(&self) {
        match fs::remove_file(self.root.join(SPARE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // Costs disk space until the next one takes its place, nothing else.
                tracing::debug!(%error, "could not remove the spare segment");
            }
            _ => {}
        }
    }

    fn open(&self, name: &str, write: Option<usize>) -> io::Result<Map> {
        let path = self.root.join(name);
        let Some(bytes) = write else {
            let file = call(|| regular::open(&path))?;
            let raw = call(|| MmapOptions::new().map_raw_read_only(&file))?;
            let tail = raw.len();
            return Ok(Map::file(raw, tail));
        };
        let file = call(|| regular::open_with(OpenOptions::new().read(true).write(true), &path))?;
        let found = file.metadata()?.len();
        if found < bytes as u64 {
            allocate(&file, bytes as u64)?;
            call(|| file.sync_all())?;
        }
        // What was appended to a segment is none of it: its trailer ends at its capacity.
        let raw = map(&file, if bytes == 0 { usize::try_from(found).unwrap_or(usize::MAX) } else { bytes })?;
        let tail = raw.len();
        Ok(Map::writable(raw, file, tail))
    }

    fn release(&self, name: &str, range: Range<usize>) {
        use rustix::fs::{FallocateFlags, fallocate};
        let free = || -> io::Result<()> {
            let file = regular::open_with(OpenOptions::new().write(true), &self.root.join(name))?;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(fallocate(&file, flags, range.start as u64, range.len() as u64)?)
        };
        if !range.is_empty()
            && let Err(error) = free()
        {
            // Costs disk space until retention removes the file, nothing else.
            tracing::debug!(name, %error, "could not release the unused end of a segment");
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        call(|| fs::remove_file(self.root.join(name)))?;
        self.sync_root()
    }

    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let path = self.root.join(name);
        let file = match call(|| regular::open(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        call(|| file.take(SMALL_BYTES_MAX + 1).read_to_end(&mut bytes))?;
        if bytes.len() as u64 > SMALL_BYTES_MAX {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        Ok(Some(bytes))
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = format!("{name}{UNFINISHED}");
        self.put(&unfinished, |file| Calls(file).write_all(bytes))?;
        self.rename(&unfinished, name)
    }
}

/// Writes to a file; in the tests a call may store only a part.
struct Calls<'a>(&'a File);

impl Write for Calls<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        #[cfg(all(test, not(loom)))]
        let bytes = crate::tests::syscalls::shortened(bytes);
        call(|| self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Maps the first `bytes` bytes of a file, to write them. A medium may have lost the growth of the file and
/// said that it was done: a store to memory behind the file's end would end the process.
pub(crate) fn map(file: &File, bytes: usize) -> io::Result<MmapRaw> {
    let found = file.metadata()?.len();
    if found < bytes as u64 {
        let message =
            format!("expected a file of {bytes} bytes, found {found}: the file system has lost its growth");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
    }
    call(|| MmapOptions::new().len(bytes).map_raw(file))
}

/// Gives every byte of the file storage, so that a full disk is an error here and not a signal at some later
/// store.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    #[cfg(all(test, not(loom)))]
    if crate::tests::syscalls::loses_growth() {
        return Ok(());
    }
    match call(|| Ok(fallocate(file, FallocateFlags::empty(), 0, bytes)?)) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            let zeros = vec![0; 1 << 20];
            let mut at = file.metadata()?.len();
            while at < bytes {
                let count = (bytes - at).min(zeros.len() as u64);
                file.write_all_at(&zeros[..count as usize], at)?;
                at += count;
            }
            Ok(())
        }
        answer => answer,
    }
}
