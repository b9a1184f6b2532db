//! A relay's cache: objects under their digests, evicted least recently used first. Blocking.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use driftless_store::download::{DownloadCache, DownloadOptions};
use driftless_store::os::crash_point;
use driftless_store::wait::lock;
use driftless_store::wrap::Count;
use driftless_store::{ContentDigest, Error, Object, Result, Store};
use serde::Serialize;

/// An object's bytes, checked.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// At the front of a file, which stays readable when the cache gives it up.
    File(Arc<File>),
    /// The disk did not take it.
    Memory(Arc<Vec<u8>>),
}

/// What the cache has done.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Counters {
    pub(super) hits: u64,
    pub(super) fetches: u64,
    pub(super) joined: u64,
    pub(super) failures: u64,
    pub(super) refused: u64,
    pub(super) evictions: u64,
    /// Filled in by [`Cache::counted`].
    pub(super) origin_bytes: u64,
    pub(super) served_bytes: u64,
}

/// How full the cache is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Fill {
    pub(super) objects: u64,
    pub(super) bytes: u64,
    pub(super) bytes_max: u64,
}

#[derive(Debug)]
struct Entry {
    size: u64,
    /// When it was asked for last, by a count.
    used: u64,
    /// This process has read it whole, and it was right.
    whole: bool,
    /// It is being fetched or checked, and must stay.
    busy: bool,
}

#[derive(Debug, Default)]
struct Entries {
    all: BTreeMap<ContentDigest, Entry>,
    uses: u64,
}

impl Entries {
    fn bytes(&self) -> u64 {
        self.all.values().map(|entry| entry.size).sum()
    }

    fn oldest(&self) -> Option<ContentDigest> {
        let idle = self.all.iter().filter(|(_, entry)| !entry.busy);
        idle.min_by_key(|(_, entry)| entry.used).map(|(digest, _)| *digest)
    }
}

#[derive(Debug)]
pub(super) struct Cache {
    origin: Count,
    downloads: DownloadCache,
    bytes_max: u64,
    entries: Mutex<Entries>,
    counters: Mutex<Counters>,
}

impl Cache {
    /// The cache in `dir` with what an earlier process left there, which is checked before it
    /// is served.
    pub(super) fn new(origin: Arc<dyn Store>, dir: std::path::PathBuf, bytes_max: u64) -> Self {
        let mut options = DownloadOptions::default();
        // Nobody decodes here while the rest arrives.
        options.range_bytes = options.request_bytes_max;
        (options.bytes_max, options.object_bytes_min) = (bytes_max, 1);
        let downloads = DownloadCache::new(dir, options, "relay.range");
        let mut found = downloads.kept_objects();
        found.sort_by_key(|(_, _, modified)| *modified);
        let mut entries = Entries::default();
        for (digest, size, _) in found {
            entries.uses += 1;
            let used = entries.uses;
            entries.all.insert(digest, Entry { size, used, whole: false, busy: false });
        }
        let origin = Count::new(origin);
        Self { origin, downloads, bytes_max, entries: Mutex::new(entries), counters: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        lock(&self.entries)
    }

    pub(super) fn counters(&self) -> MutexGuard<'_, Counters> {
        lock(&self.counters)
    }

    /// All counters, those of the origin too.
    pub(super) fn counted(&self) -> Counters {
        Counters { origin_bytes: self.origin.counts().bytes_got, ..*self.counters() }
    }

    pub(super) fn fill(&self) -> Fill {
        let entries = self.lock();
        Fill { objects: entries.all.len() as u64, bytes: entries.bytes(), bytes_max: self.bytes_max }
    }

    /// An object that is here and was found to be right.
    pub(super) fn hit(&self, object: &Object) -> Option<Content> {
        {
            let mut entries = self.lock();
            entries.uses += 1;
            let now = entries.uses;
            let entry = entries.all.get_mut(&object.blake3)?;
            entry.used = now;
            if !entry.whole || entry.size != object.size {
                return None;
            }
        }
        let file = self.downloads.kept_file(&object.blake3)?;
        // So that the next process knows what was asked for last; a date that stays costs nothing but that.
        let _ = file.set_modified(SystemTime::now());
        Some(Content::File(Arc::new(file)))
    }

    /// Reads an object: what is missing of it from the origin. Calls for one object take turns, which the
    /// caller sees to.
    ///
    /// # Errors
    /// The origin's; those of an object that is not what its digest says.
    pub(super) fn fetch(&self, object: &Object) -> Result<Content> {
        crash_point("relay.fetch")?;
        self.counters().fetches += 1;
        let fits = self.make_room(object);
        let fetched = self.downloads.object(&self.origin, object, &|| {});
        if fetched.as_ref().is_err_and(Error::is_not_found) {
            self.downloads.forget(&object.blake3);
        }
        let file = fetched.as_ref().ok().and_then(|_| self.downloads.kept_file(&object.blake3));
        {
            let mut entries = self.lock();
            match (entries.all.get_mut(&object.blake3), &file) {
                (Some(entry), Some(_)) => (entry.whole, entry.busy) = (true, false),
                // Parts of an object that could not be had are kept like others: the next try goes on with
                // them.
                (Some(entry), None) if fetched.is_err() && self.downloads.keeps(&object.blake3) => {
                    entry.busy = false
                }
                _ => {
                    entries.all.remove(&object.blake3);
                }
            }
        }
        let bytes = fetched?;
        crash_point("relay.whole")?;
        match file {
            Some(file) => Ok(Content::File(Arc::new(file))),
            None => {
                // The disk holds less than was allowed: the next object shall find room.
                if fits {
                    self.evict();
                }
                Ok(Content::Memory(Arc::new(bytes)))
            }
        }
    }

    /// Makes room for an object and enters it; false if it is too large for the whole cache.
    fn make_room(&self, object: &Object) -> bool {
        let mut entries = self.lock();
        entries.uses += 1;
        let used = entries.uses;
        entries.all.remove(&object.blake3);
        if object.size > self.bytes_max {
            return false;
        }
        let mut unwanted = Vec::new();
        while entries.bytes().saturating_add(object.size) > self.bytes_max {
            let Some(oldest) = entries.oldest() else { return false };
            entries.all.remove(&oldest);
            unwanted.push(oldest);
        }
        entries.all.insert(object.blake3, Entry { size: object.size, used, whole: false, busy: true });
        drop(entries);
        for digest in unwanted {
            self.counters().evictions += 1;
            self.downloads.forget(&digest);
        }
        true
    }

    /// Gives up the object that was not asked for longest.
    fn evict(&self) {
        let oldest = {
            let mut entries = self.lock();
            let oldest = entries.oldest();
            if let Some(digest) = &oldest {
                entries.all.remove(digest);
            }
            oldest
        };
        if let Some(digest) = oldest {
            self.counters().evictions += 1;
            self.downloads.forget(&digest);
        }
    }
}
