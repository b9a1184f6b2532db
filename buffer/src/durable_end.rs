//! Tells readers in other processes how far the log is durable, and wakes those that wait: one small mapped
//! file.
//!
//! Nothing durable depends on it. It means something only while a process holds the log's lock, and each such
//! process writes it anew.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memmap2::MmapOptions;
use rustix::thread::futex;

use crate::error::{Error, Result};
use crate::map::Map;
use crate::regular;
use crate::storage;

const NAME: &str = "end";
const BYTES: usize = 64;
/// Where the end of the durable records stands, 8 bytes.
const END: usize = 0;
/// Where the number of its changes stands, 4 bytes: the word that readers sleep on.
const CHANGES: usize = 8;

/// The mapped file.
#[derive(Debug)]
pub(crate) struct DurableEnd {
    map: Map,
}

impl DurableEnd {
    /// For the process that holds the lock.
    pub(crate) fn create(root: &Path, end: u64) -> Result<Self> {
        let path = root.join(NAME);
        let open = || -> io::Result<Map> {
            let options = &mut OpenOptions::new();
            let file =
                regular::open_with(options.read(true).write(true).create(true).truncate(false), &path)?;
            // Readers may have it mapped: it is never cut short.
            if file.metadata()?.len() < BYTES as u64 {
                file.set_len(BYTES as u64)?;
            }
            Ok(Map::file(storage::map(&file, BYTES)?, BYTES))
        };
        let durable_end = Self { map: open().map_err(Error::io("map", &path))? };
        durable_end.set(end);
        Ok(durable_end)
    }

    /// For a reader; `None` when no process has ever written the log.
    pub(crate) fn open(root: &Path) -> Option<Self> {
        let file = regular::open(&root.join(NAME)).ok()?;
        let whole = file.metadata().is_ok_and(|found| found.len() >= BYTES as u64);
        let raw = MmapOptions::new().len(BYTES).map_raw_read_only(&file);
        raw.ok().filter(|_| whole).map(|raw| Self { map: Map::file(raw, BYTES) })
    }

    /// Moves the end and wakes every waiting reader.
    pub(crate) fn set(&self, end: u64) {
        self.map.word(END).store(end, Ordering::Relaxed);
        let changes = self.map.counter(CHANGES);
        changes.fetch_add(1, Ordering::Release);
        // It has no way to fail on a mapped word; and a reader that misses it looks again by itself.
        let _ = futex::wake(changes, futex::Flags::empty(), i32::MAX as u32);
    }

    /// The number of changes so far, and the end of the durable records.
    pub(crate) fn get(&self) -> (u32, u64) {
        let changes = self.map.counter(CHANGES).load(Ordering::Acquire);
        (changes, self.map.word(END).load(Ordering::Relaxed))
    }

    /// Sleeps until the number of changes is no longer `seen`, at most for `limit`.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // Woken, changed already, interrupted or out of time: the caller looks again in every case.
        let _ = futex::wait(self.map.counter(CHANGES), futex::Flags::empty(), seen, Some(&timeout));
    }
}
