//! A file that is synced while it is written, so that the last sync finds little to do.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::watch::{self, Call};
use super::{if_there, regular, remove_file, sync_file};
use crate::error::{Error, Result};
use crate::wait::lock;

/// A file that threads write side by side. A thread of its own has the disk begin with what is there.
#[derive(Debug)]
pub struct Steady {
    path: PathBuf,
    file: File,
    /// Bytes since write-back last began, and from how many on it begins again.
    unsynced: AtomicU64,
    begin_bytes: u64,
    begun: Mutex<Option<Begun>>,
}

/// A thread that syncs what was written so far while more is being written.
#[derive(Debug)]
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
        let outcome = thread::Builder::new().name("driftless-steady".to_owned()).spawn(work)?;
        Ok(Self { more, outcome })
    }

    fn end(self) -> io::Result<()> {
        drop(self.more);
        self.outcome.join().unwrap_or_else(|_| Err(io::Error::other("the thread that syncs it is gone")))
    }
}

impl Steady {
    /// Opens the file at `path`, whose bytes stay until they are written over, or makes it. Write-back begins after each
    /// `begin_bytes`.
    ///
    /// # Errors
    /// Whatever the file system reports, as [`Error::io`] tells it apart.
    pub fn open(path: &Path, begin_bytes: u64) -> Result<Self> {
        let open = || regular::open_own(File::options().write(true).create(true).truncate(false), path);
        // What is no file, or another's, makes place for one.
        let replace = |_| if_there(remove_file(path)).and_then(|_| open());
        let file = watch::before(Call::Create, path)
            .and_then(|()| open().or_else(replace))
            .map_err(|source| Error::io("create", path, source))?;
        let (unsynced, begun) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { path: path.into(), file, unsynced, begin_bytes, begun })
    }

    /// Has write-back begin after each `bytes` from here on.
    #[must_use]
    pub fn beginning_after(self, bytes: u64) -> Self {
        Self { begin_bytes: bytes, ..self }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `bytes` at a place that nobody else writes.
    ///
    /// # Errors
    /// As [`Steady::open`], also for a thread that cannot be started.
    pub fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        watch::before(Call::Write, &self.path)
            .and_then(|()| self.file.write_all_at(bytes, at))
            .and_then(|()| self.begin(bytes.len() as u64))
            .map_err(|source| Error::io("write", &self.path, source))
    }

    /// Has the disk begin with what is there, every so many bytes.
    fn begin(&self, written: u64) -> io::Result<()> {
        if self.unsynced.fetch_add(written, Relaxed) + written < self.begin_bytes {
            return Ok(());
        }
        self.unsynced.store(0, Relaxed);
        let mut begun = lock(&self.begun);
        let thread = match begun.take() {
            Some(thread) => thread,
            None => Begun::start(&self.file, &self.path)?,
        };
        // It has enough to do, or has failed, which the end tells.
        let _ = thread.more.try_send(());
        *begun = Some(thread);
        Ok(())
    }

    /// Cuts off what lies behind `length`, which is of the file before.
    ///
    /// # Errors
    /// As [`Steady::open`].
    pub fn cut(&self, length: u64) -> Result<()> {
        let longer = self.file.metadata().map(|found| found.len() > length);
        longer
            .and_then(|longer| if longer { self.file.set_len(length) } else { Ok(()) })
            .map_err(|source| Error::io("shorten", &self.path, source))
    }

    /// Makes all of it durable.
    ///
    /// # Errors
    /// As [`Steady::open`], those of earlier write-backs included.
    pub fn sync(self) -> Result<()> {
        // Not one after the other: the last sync waits for the one before anyhow.
        let synced = sync_file(&self.file, &self.path);
        let begun = self.begun.into_inner().unwrap_or_else(PoisonError::into_inner);
        synced.and(begun.map_or(Ok(()), Begun::end)).map_err(|source| Error::io("sync", self.path, source))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::fs;

    use super::*;

    #[test]
    fn threads_write_over_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, [9; 5000]).unwrap();
        let file = Steady::open(&path, u64::MAX).unwrap().beginning_after(100);
        thread::scope(|scope| {
            for part in 0..4 {
                let file = &file;
                scope.spawn(move || {
                    for at in 0..10 {
                        file.write(&[part; 100], 1000 * u64::from(part) + 100 * at).unwrap();
                    }
                });
            }
        });
        assert!(lock(&file.begun).is_some(), "the disk has begun");
        file.cut(4000).unwrap();
        file.sync().unwrap();
        let found = fs::read(&path).unwrap();
        assert_eq!(found.len(), 4000);
        assert!(found.iter().zip(0..).all(|(byte, at)| usize::from(*byte) == at / 1000));
    }

    #[test]
    fn link_in_the_place_of_the_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("file"), dir.path().join("other"));
        fs::write(&other, "other").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        let file = Steady::open(&path, u64::MAX).unwrap();
        file.write(b"own", 0).unwrap();
        assert!(lock(&file.begun).is_none());
        file.sync().unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), fs::read(&other).unwrap()),
            (b"own".to_vec(), b"other".to_vec())
        );
    }
}
