//! Keeps the ranges of objects that have arrived on disk, so that a fetch that was stopped continues with the
//! rest.
//!
//! There is one file per object, named by its digest. It holds the object's bytes at their places. Behind
//! them are 32 bytes per range: the range's digest once the range is there. Nothing is synced. A range counts
//! only if its digest is right, and an object only if its own is. A file that lost pages costs a second fetch
//! of what it lost, nothing else.

mod window;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;
use std::{io, thread};

use derive_setters::Setters;
use driftless_store::os::watch::{self, Call};
use driftless_store::os::{regular, remove_file};
use driftless_store::{ContentDigest, Error as StoreError, Object, OnBytes, Store};

use crate::error::{Error, Result};
use crate::run::{fetch_object, wrong_size};
use window::Window;

/// Bytes of a range's digest.
const MARK_BYTES: u64 = 32;
/// What the digests of ranges are derived with; they are never those of objects.
const MARK_CONTEXT: &str = "driftless 2026-11-21 a range of an object that arrives";
/// Requests of one object that are under way at the same time at most.
const PARALLEL: usize = 16;

/// How objects are kept while they arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct DownloadOptions {
    /// Bytes of objects that are kept at most, 16 GiB by default; what is beyond is fetched and not kept. 0
    /// keeps nothing.
    pub bytes_max: u64,
    /// Bytes that are kept at a time, 512 KiB by default.
    pub range_bytes: u64,
    /// Bytes that are asked for at a time at most, 8 MiB by default; fewer, until the line turns out to be
    /// fast.
    pub request_bytes_max: u64,
    /// Smaller objects, 256 KiB by default, are one short request and not kept.
    pub object_bytes_min: u64,
}

impl Default for DownloadOptions {
    fn default() -> Self {
        Self {
            bytes_max: 16 << 30,
            range_bytes: 512 << 10,
            request_bytes_max: 8 << 20,
            object_bytes_min: 256 << 10,
        }
    }
}

/// A directory of objects that arrive. It has one user at a time, which its owner sees to.
#[derive(Debug)]
pub struct DownloadCache {
    dir: PathBuf,
    options: DownloadOptions,
    /// The moment, for tests, at which a range has been kept.
    point: &'static str,
    /// Sizes of the objects that are kept, in whole or in part; looked up when first needed.
    held: OnceLock<Mutex<BTreeMap<ContentDigest, u64>>>,
    /// Nothing more is kept: the disk is full.
    paused: AtomicBool,
    window: Window,
}

impl DownloadCache {
    /// The download cache in `dir`, which is made when something is kept. What an earlier process kept there is found
    /// again.
    pub fn new(dir: PathBuf, options: DownloadOptions, point: &'static str) -> Self {
        let (held, paused) = (OnceLock::new(), AtomicBool::new(false));
        Self { dir, options, point, held, paused, window: Window::default() }
    }

    /// What lies in the directory; whatever cannot be of use is removed.
    fn survey(&self) -> BTreeMap<ContentDigest, u64> {
        let mut held = BTreeMap::new();
        let mut total = 0u64;
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let digest = entry.file_name().to_str().and_then(|name| name.parse::<ContentDigest>().ok());
            let size = entry.metadata().ok().and_then(|metadata| object_bytes(metadata.len(), self.options));
            let fits = |size: &u64| total.saturating_add(*size) <= self.options.bytes_max;
            match digest.zip(size.filter(fits)) {
                Some((digest, size)) => {
                    total += size;
                    held.insert(digest, size);
                }
                None => discard(&entry.path()),
            }
        }
        held
    }

    /// The bytes of an object, checked against its digest: what is kept, and from `store` what is missing,
    /// which is kept. `arriving` is told before each request.
    ///
    /// # Errors
    /// [`Error::Corrupt`] or [`DigestMismatch`](driftless_store::Error::DigestMismatch) if the object is not
    /// what the manifest says; the store's.
    pub fn object(
        &self,
        store: &dyn Store,
        object: &Object,
        arriving: &(dyn Fn() + Sync),
    ) -> Result<Vec<u8>> {
        loop {
            let Some(kept) = self.kept(object) else {
                arriving();
                return fetch_object(store, object);
            };
            let (bytes, reused) = self.gather(store, object, &kept, arriving)?;
            let Err(error) = object.blake3.check(&bytes, format_args!("object `{}`", object.key)) else {
                return Ok(bytes);
            };
            // Whoever is wrong, the disk or the store: nothing of this is believed again.
            self.forget(&object.blake3);
            if !reused && !store.report_corrupt(object) {
                return Err(error.into());
            }
            tracing::warn!(key = %object.key, %error, "fetching the object once more");
        }
    }

    /// Removes the objects that `wanted` does not choose.
    pub fn retain(&self, wanted: impl Fn(&ContentDigest) -> bool) {
        let unwanted: Vec<ContentDigest> =
            self.lock().keys().filter(|digest| !wanted(digest)).copied().collect();
        for digest in unwanted {
            self.forget(&digest);
        }
    }

    /// Removes everything, and keeps nothing more until [`DownloadCache::resume`]: others need the space.
    pub fn pause(&self) {
        self.paused.store(true, Relaxed);
        self.retain(|_| false);
    }

    /// Removes everything; from here on objects are kept again.
    pub fn resume(&self) {
        self.retain(|_| false);
        self.paused.store(false, Relaxed);
    }

    /// Removes what is kept of an object.
    pub fn forget(&self, digest: &ContentDigest) {
        if self.lock().remove(digest).is_some() {
            discard(&self.path(digest));
        }
    }

    /// What is kept, in whole or in part: digest, size, and when it was last written or asked for.
    pub fn kept_objects(&self) -> Vec<(ContentDigest, u64, Option<SystemTime>)> {
        let modified = |digest| fs::metadata(self.path(digest)).and_then(|metadata| metadata.modified()).ok();
        self.lock().iter().map(|(digest, size)| (*digest, *size, modified(digest))).collect()
    }

    /// The file of an object that is kept, its bytes at the front.
    pub fn kept_file(&self, digest: &ContentDigest) -> Option<File> {
        self.keeps(digest).then(|| regular::open(&self.path(digest)).ok())?
    }

    /// Whether an object is kept, in whole or in part.
    pub fn keeps(&self, digest: &ContentDigest) -> bool {
        self.lock().contains_key(digest)
    }

    fn path(&self, digest: &ContentDigest) -> PathBuf {
        self.dir.join(digest.to_string())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ContentDigest, u64>> {
        // Every critical section is a single operation on the map.
        self.held.get_or_init(|| Mutex::new(self.survey())).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of an object, or `None` if it is not to be kept.
    fn kept(&self, object: &Object) -> Option<Kept> {
        if object.size < self.options.object_bytes_min.max(1) || self.paused.load(Relaxed) {
            return None;
        }
        {
            let mut held = self.lock();
            if held.get(&object.blake3).is_none_or(|size| *size != object.size) {
                let others = held.iter().filter(|(digest, _)| **digest != object.blake3);
                let total = others.fold(object.size, |sum, (_, size)| sum.saturating_add(*size));
                if total > self.options.bytes_max {
                    return None;
                }
                held.insert(object.blake3, object.size);
            }
        }
        let path = self.path(&object.blake3);
        match Kept::open(&self.dir, &path, object.size, self.options.range_bytes.max(1)) {
            Ok(kept) => Some(kept),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "what arrives is not kept");
                self.forget(&object.blake3);
                None
            }
        }
    }

    /// All ranges of an object, several at a time; and whether any of them was here already.
    fn gather(
        &self,
        store: &dyn Store,
        object: &Object,
        kept: &Kept,
        arriving: &(dyn Fn() + Sync),
    ) -> Result<(Vec<u8>, bool)> {
        let mut bytes = zeroed(object)?;
        let ranges = Mutex::new(bytes.chunks_mut(kept.range_bytes as usize).enumerate().peekable());
        let (reused, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let error = Mutex::new(None);
        let here = |index: usize, range: &mut [u8]| {
            let here = kept.read(index as u64, range);
            reused.fetch_or(here, Relaxed);
            here
        };
        let most = self.options.request_bytes_max / kept.range_bytes;
        let work = || {
            while !failed.load(Relaxed) {
                let mut rest = ranges.lock().unwrap_or_else(PoisonError::into_inner);
                while let Some((index, range)) = rest.peek_mut()
                    && here(*index, range)
                {
                    rest.next();
                }
                let Some((first, _)) = rest.peek() else { return };
                let left = object.size - *first as u64 * kept.range_bytes;
                // One waits for an object, so that nobody does once all of it is under way.
                let request = self.window.enter(&object.key, kept.range_bytes, most, left);
                if failed.load(Relaxed) {
                    return;
                }
                let mut group: Vec<(usize, &mut [u8])> = rest.next().into_iter().collect();
                while (group.len() as u64) < request.bytes.div_ceil(kept.range_bytes)
                    && let Some((index, range)) = rest.peek_mut()
                    && !here(*index, range)
                {
                    group.extend(rest.next());
                }
                drop(rest);
                arriving();
                let fetched = fetch_ranges(store, object, kept.range_bytes, &mut group, &request.arrived());
                if fetched.is_ok() {
                    request.done();
                }
                if let Err(first) = fetched.and_then(|()| self.keep(object, kept, &group)) {
                    error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(first);
                    failed.store(true, Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..PARALLEL.min(kept.ranges() as usize) {
                // Where the system has no more threads, fewer do it.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok((bytes, reused.into_inner())),
        }
    }

    /// Keeps ranges. A disk that does not take them is no reason to stop.
    fn keep(&self, object: &Object, kept: &Kept, ranges: &[(usize, &mut [u8])]) -> Result<()> {
        for (index, range) in ranges {
            if let Err(error) = kept.write(*index as u64, range) {
                tracing::warn!(path = %kept.path.display(), %error, "what arrives is not kept");
                self.forget(&object.blake3);
            }
            driftless_store::os::crash_point(self.point)?;
        }
        Ok(())
    }
}

/// Reads ranges that lie one behind the other; the last one of an object with a byte more, so that a longer
/// object is noticed.
fn fetch_ranges(
    store: &dyn Store,
    object: &Object,
    range_bytes: u64,
    ranges: &mut [(usize, &mut [u8])],
    arrived: &OnBytes,
) -> Result<()> {
    let start = ranges.first().map_or(0, |(index, _)| *index as u64 * range_bytes);
    let length: usize = ranges.iter().map(|(_, range)| range.len()).sum();
    let end = start + length as u64;
    let asked = if end == object.size { end + 1 } else { end };
    let bytes = match store.get_cached(object, start..asked, arrived) {
        Err(StoreError::RangeOutside { size, .. }) => return Err(wrong_size(object, size)),
        bytes => bytes?,
    };
    if bytes.len() != length {
        return Err(wrong_size(object, start + bytes.len() as u64));
    }
    let mut rest = bytes.as_slice();
    for (_, range) in ranges {
        let (own, behind) = rest.split_at(range.len());
        range.copy_from_slice(own);
        rest = behind;
    }
    Ok(())
}

/// A buffer for an object; a size that cannot be had is an error, not an abort.
fn zeroed(object: &Object) -> Result<Vec<u8>> {
    let too_large =
        || Error::TooLarge { what: format!("memory for object `{}`", object.key), max: object.size };
    let size = usize::try_from(object.size).map_err(|_| too_large())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| too_large())?;
    bytes.resize(size, 0);
    Ok(bytes)
}

/// Best effort: what stays is found again when the download cache is opened.
fn discard(path: &Path) {
    if let Err(error) = remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "what arrived stays behind");
    }
}

/// The size of the object whose file has `length` bytes, or `None` if there is none.
fn object_bytes(length: u64, options: DownloadOptions) -> Option<u64> {
    let range = options.range_bytes.max(1);
    // Each range adds its own bytes and a mark; the last range may be shorter.
    let ranges = length.div_ceil(range.saturating_add(MARK_BYTES));
    let size = length.checked_sub(ranges * MARK_BYTES)?;
    (size > 0 && size.div_ceil(range) == ranges).then_some(size)
}

/// One object's file.
struct Kept {
    file: File,
    path: PathBuf,
    size: u64,
    range_bytes: u64,
}

impl Kept {
    fn open(dir: &Path, path: &Path, size: u64, range_bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        watch::before(Call::Create, path)?;
        let options = &mut File::options();
        let file = regular::open_with(options.create(true).truncate(false).read(true).write(true), path)?;
        let kept = Self { file, path: path.to_path_buf(), size, range_bytes };
        let length = size + kept.ranges() * MARK_BYTES;
        if kept.file.metadata()?.len() != length {
            // Another object's, or cut short: whatever is in it would be at the wrong place.
            kept.file.set_len(0)?;
            kept.file.set_len(length)?;
        }
        Ok(kept)
    }

    fn ranges(&self) -> u64 {
        self.size.div_ceil(self.range_bytes)
    }

    fn mark_place(&self, index: u64) -> u64 {
        self.size + index * MARK_BYTES
    }

    fn mark(index: u64, range: &[u8]) -> [u8; MARK_BYTES as usize] {
        let mut hasher = blake3::Hasher::new_derive_key(MARK_CONTEXT);
        hasher.update(&index.to_le_bytes()).update(range);
        *hasher.finalize().as_bytes()
    }

    /// Reads a range if it is here, and whole.
    fn read(&self, index: u64, into: &mut [u8]) -> bool {
        let mut mark = [0; MARK_BYTES as usize];
        let read = self.file.read_exact_at(&mut mark, self.mark_place(index));
        // Most often there is nothing; then the range is not worth reading.
        read.is_ok()
            && mark != [0; MARK_BYTES as usize]
            && self.file.read_exact_at(into, index * self.range_bytes).is_ok()
            && Self::mark(index, into) == mark
    }

    fn write(&self, index: u64, range: &[u8]) -> io::Result<()> {
        watch::before(Call::Write, &self.path)?;
        self.file.write_all_at(range, index * self.range_bytes)?;
        watch::before(Call::Write, &self.path)?;
        self.file.write_all_at(&Self::mark(index, range), self.mark_place(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_file_tells_the_size_of_its_object() {
        let options = DownloadOptions { range_bytes: 100, ..DownloadOptions::default() };
        for size in [1u64, 31, 32, 99, 100, 101, 132, 200, 201, 10_000, 12_345] {
            let length = size + size.div_ceil(100) * MARK_BYTES;
            assert_eq!(object_bytes(length, options), Some(size));
        }
        assert_eq!(object_bytes(0, options), None);
        assert_eq!(object_bytes(32, options), None);
        assert_eq!(object_bytes(100 + 32 + 5, options), None, "no object leaves such a length");
    }
}
