//! The objects of the publications that are being applied, shared by the threads that decode them.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::manifest::Object;
use crate::run::Committed;

/// Bytes of objects that are kept for the next tensor; what is in use stays besides.
pub(super) const CACHE_BYTES: u64 = 256 << 20;

/// Gives the bytes of one object, already checked against its digest. Called from several threads at once.
pub type FetchObject<'a> = dyn Fn(&Object) -> Result<Vec<u8>> + Sync + 'a;

/// Fetches objects when they are needed, each by one thread, and keeps those used last.
pub(super) struct Objects<'a> {
    links: &'a [Committed],
    fetch: &'a FetchObject<'a>,
    cache: Mutex<Cache>,
    fetched: AtomicU64,
}

#[derive(Default)]
struct Cache {
    slots: BTreeMap<(usize, u32), (Arc<Slot>, u64)>,
    bytes: u64,
    uses: u64,
}

/// An object's bytes once they are there; locked while they are fetched.
#[derive(Default)]
struct Slot(Mutex<Option<Arc<Vec<u8>>>>);

/// A range of an object.
pub(super) struct Held {
    bytes: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(self.range.clone()).unwrap_or_default()
    }
}

impl<'a> Objects<'a> {
    pub(super) fn new(links: &'a [Committed], fetch: &'a FetchObject<'a>) -> Self {
        Self { links, fetch, cache: Mutex::default(), fetched: AtomicU64::new(0) }
    }

    /// Bytes fetched so far.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched.load(Relaxed)
    }

    /// A range of an object of the `link`-th publication; the manifest's own check has already placed it inside.
    pub(super) fn range(&self, link: usize, object: u32, offset: u64, length: u64) -> Result<Held> {
        let outside = |subject: &str| Error::Corrupt {
            subject: format!("{subject} of a publication"),
            what: "a payload lies outside",
            expected: "a range inside an object".into(),
            found: format!("{length} bytes from {offset} of object {object}"),
        };
        let entry = self.links.get(link).and_then(|link| link.manifest.objects.get(object as usize));
        let bytes = self.object((link, object), entry.ok_or_else(|| outside("manifest"))?)?;
        let start = usize::try_from(offset).ok();
        let range = start
            .zip(usize::try_from(length).ok())
            .and_then(|(start, length)| Some(start..start.checked_add(length)?))
            .filter(|range| range.end <= bytes.len())
            .ok_or_else(|| outside("object"))?;
        Ok(Held { bytes, range })
    }

    fn object(&self, place: (usize, u32), entry: &Object) -> Result<Arc<Vec<u8>>> {
        let slot = self.slot(place, entry.size);
        let mut bytes = lock(&slot.0);
        if let Some(bytes) = &*bytes {
            return Ok(bytes.clone());
        }
        super::crash_point("follow.fetch")?;
        let fetched = Arc::new((self.fetch)(entry)?);
        self.fetched.fetch_add(fetched.len() as u64, Relaxed);
        *bytes = Some(fetched.clone());
        Ok(fetched)
    }

    /// The slot of an object. Makes room for it where it is new: those not used for longest go.
    fn slot(&self, place: (usize, u32), size: u64) -> Arc<Slot> {
        let mut cache = lock(&self.cache);
        cache.uses += 1;
        let now = cache.uses;
        if let Some((slot, used)) = cache.slots.get_mut(&place) {
            *used = now;
            return slot.clone();
        }
        while cache.bytes.saturating_add(size) > CACHE_BYTES
            && let Some(oldest) =
                cache.slots.iter().min_by_key(|(_, (_, used))| *used).map(|(place, _)| *place)
        {
            cache.slots.remove(&oldest);
            cache.bytes = cache.bytes.saturating_sub(self.size(oldest));
        }
        cache.bytes = cache.bytes.saturating_add(size);
        let slot = Arc::<Slot>::default();
        cache.slots.insert(place, (slot.clone(), now));
        slot
    }

    fn size(&self, (link, object): (usize, u32)) -> u64 {
        let objects = self.links.get(link).map(|link| &link.manifest.objects);
        objects.and_then(|objects| objects.get(object as usize)).map_or(0, |object| object.size)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
