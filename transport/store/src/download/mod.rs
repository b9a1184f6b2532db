//! Keeps the ranges of objects that have arrived on disk, so that a fetch that was stopped continues with the
//! rest.
//!
//! There is one file per object, named by its digest. It holds the object's bytes at their places. Behind
//! them are 32 bytes per range: the range's digest once the range is there. Nothing is synced. A range counts
//! only if its digest is right, and an object only if its own is. A file that lost pages costs a second fetch
//! of what it lost, nothing else.
//!
//! | File | Does |
//! |---|---|
//! | this one | the files, and what is kept |
//! | `gather` | one object: ranges that are kept, and requests for the others |
//! | `window` | bounds the bytes on their way, of all objects together |

mod gather;
mod window;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::SystemTime;

use derive_setters::Setters;

use crate::error::{Error, Result};
use crate::os::watch::{self, Call};
use crate::os::{regular, remove_file};
use crate::wait::lock;
use crate::{ContentDigest, Object, Store, no_progress};
use window::Window;

/// Bytes of a range's digest.
const MARK_BYTES: u64 = 32;
/// What the digests of ranges are derived with; they are never those of objects.
const MARK_CONTEXT: &str = "driftless 2026-11-21 a range of an object that arrives";

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
    /// The download cache in `dir`, which is made when something is kept. What an earlier process kept there
    /// is found again.
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
            // A link is none of this cache's, whatever it leads to.
            let file = entry.metadata().ok().filter(|metadata| metadata.is_file());
            let size = file.and_then(|metadata| object_bytes(metadata.len(), self.options));
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
    /// which is kept. `arriving` is called before each request.
    ///
    /// # Errors
    /// [`Error::WrongSize`] or [`Error::DigestMismatch`] if the object is not
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
                return fetch(store, object);
            };
            let (bytes, reused) = gather::gather(self, store, object, &kept, arriving)?;
            let Err(error) = object.blake3.check(&bytes, format_args!("object `{}`", object.key)) else {
                return Ok(bytes);
            };
            // Either the disk or the store is wrong: nothing of this is believed again.
            self.forget(&object.blake3);
            if !reused && !store.report_corrupt(object) {
                return Err(error);
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
        self.keeps(digest).then(|| regular::open_own(File::options().read(true), &self.path(digest)).ok())?
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
        lock(self.held.get_or_init(|| Mutex::new(self.survey())))
    }

    /// The file of an object, or `None` if it is not to be kept.
    fn kept(&self, object: &Object) -> Option<PartialObject> {
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
        match PartialObject::open(&self.dir, &path, object.size, self.options.range_bytes.max(1)) {
            Ok(kept) => Some(kept),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "what arrives is not kept");
                self.forget(&object.blake3);
                None
            }
        }
    }
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
struct PartialObject {
    file: File,
    path: PathBuf,
    size: u64,
    range_bytes: u64,
}

impl PartialObject {
    fn open(dir: &Path, path: &Path, size: u64, range_bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        watch::before(Call::Create, path)?;
        let options = &mut File::options();
        let file = regular::open_own(options.create(true).truncate(false).read(true).write(true), path)?;
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

/// Reads an object whole and checks it.
///
/// # Errors
/// [`Error::WrongSize`] or [`Error::DigestMismatch`] if the object is not what is on record; the store's.
pub fn fetch(store: &dyn Store, object: &Object) -> Result<Vec<u8>> {
    loop {
        // One byte more than announced, so that a longer object is noticed without being read to its end.
        let bytes = store.get_cached(object, 0..object.size.saturating_add(1), &no_progress())?;
        if bytes.len() as u64 != object.size {
            return Err(wrong_size(object, bytes.len() as u64));
        }
        match object.blake3.check(&bytes, format_args!("object `{}`", object.key)) {
            Err(error) if store.report_corrupt(object) => {
                tracing::warn!(key = %object.key, %error, "fetching the object once more");
            }
            checked => return checked.map(|()| bytes),
        }
    }
}

/// An object that ends at `found`, as far as it was read.
fn wrong_size(object: &Object, found: u64) -> Error {
    let found = if found > object.size { "more".to_owned() } else { found.to_string() };
    Error::WrongSize { subject: format!("object `{}`", object.key), expected: object.size, found }
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
