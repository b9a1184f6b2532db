//! The objects of the publications that are being applied, shared by the threads that decode them.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Scope;
use std::time::Instant;

use driftless_store::wait::lock;
use driftless_store::{Error as StoreError, Object};

use crate::error::{Error, Result};
use crate::run::Committed;

/// Bytes of objects that are kept for the next tensor; what is in use stays besides.
pub(super) const CACHE_BYTES: u64 = 256 << 20;

/// Bytes of objects that are fetched before a thread asks for them, behind the last one that was asked for.
const AHEAD_BYTES: u64 = 32 << 20;
/// Objects that are fetched ahead at the same time.
const AHEAD_THREADS: usize = 4;

/// An object's publication, by number, and its own number there.
pub(super) type ObjectNumber = (usize, u32);

/// Gives the bytes of one object, already checked against its digest. Called from several threads at once.
pub type FetchObject<'a> = dyn Fn(&Object) -> Result<Vec<u8>> + Sync + 'a;

/// Fetches objects when they are needed, or shortly before, each by one thread, and keeps those used last.
pub(super) struct Objects<'a> {
    versions: &'a [Committed],
    fetch: &'a FetchObject<'a>,
    cache: Mutex<Cache>,
    fetched: AtomicU64,
    /// When the last one arrived.
    pub(super) came: Mutex<Option<Instant>>,
    ahead: Mutex<Ahead>,
    moved: Condvar,
}

/// What is fetched ahead: the objects in the order in which they will be asked for.
#[derive(Default)]
struct Ahead {
    order: Vec<ObjectNumber>,
    /// Where each of them stands there.
    turns: BTreeMap<ObjectNumber, usize>,
    /// How many of them have been begun.
    begun: usize,
    /// The last of them that was asked for, and one.
    asked: usize,
    over: bool,
}

#[derive(Default)]
struct Cache {
    slots: BTreeMap<ObjectNumber, (Arc<Slot>, u64)>,
    bytes: u64,
    uses: u64,
}

/// An object; locked while it is fetched.
#[derive(Default)]
struct Slot(Mutex<Fetched>);

#[derive(Default)]
enum Fetched {
    #[default]
    Absent,
    Here(Arc<Vec<u8>>),
    /// Why it could not be fetched, for the next thread that asks.
    Failed(Error),
}

/// A range of an object.
pub(super) struct ObjectRange {
    bytes: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Deref for ObjectRange {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // Checked when it was made.
        &self.bytes[self.range.clone()]
    }
}

impl<'a> Objects<'a> {
    pub(super) fn new(versions: &'a [Committed], fetch: &'a FetchObject<'a>) -> Self {
        let (cache, came, ahead) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { versions, fetch, cache, fetched: AtomicU64::new(0), came, ahead, moved: Condvar::new() }
    }

    /// Has threads fetch objects a little ahead of those that ask for them, about in this order, until what is
    /// returned is dropped.
    pub(super) fn ahead<'s>(&'s self, scope: &'s Scope<'s, '_>, order: Vec<ObjectNumber>) -> Over<'s, 'a> {
        // One object is asked for at once.
        let threads = if order.len() > 1 { AHEAD_THREADS.min(order.len()) } else { 0 };
        let turns = order.iter().enumerate().map(|(turn, place)| (*place, turn)).collect();
        *lock(&self.ahead) = Ahead { order, turns, ..Ahead::default() };
        for _ in 0..threads {
            scope.spawn(move || self.fetch_ahead());
        }
        Over(self)
    }

    fn fetch_ahead(&self) {
        while let Some(place) = self.next_ahead() {
            let Some(entry) = self.entry(place) else { continue };
            let slot = self.slot(place, entry.size);
            let mut state = lock(&slot.0);
            if matches!(*state, Fetched::Absent) {
                *state = self.fetch(entry).map_or_else(Fetched::Failed, Fetched::Here);
            }
        }
    }

    /// The object to fetch next, once those ahead leave room for it; `None` if there are no more.
    fn next_ahead(&self) -> Option<ObjectNumber> {
        let mut ahead = lock(&self.ahead);
        loop {
            // Those behind are another thread's already.
            ahead.begun = ahead.begun.max(ahead.asked);
            let place = *ahead.order.get(ahead.begun).filter(|_| !ahead.over)?;
            let waiting = &ahead.order[ahead.asked..ahead.begun];
            if waiting.iter().map(|place| self.size(*place)).sum::<u64>() < AHEAD_BYTES {
                ahead.begun += 1;
                return Some(place);
            }
            // Ends with the next call of `asked`, or with the work.
            ahead = self.moved.wait(ahead).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn asked(&self, place: ObjectNumber) {
        let mut ahead = lock(&self.ahead);
        if let Some(turn) = ahead.turns.get(&place).copied().filter(|turn| *turn >= ahead.asked) {
            ahead.asked = turn + 1;
            self.moved.notify_all();
        }
    }

    /// Bytes fetched so far.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched.load(Relaxed)
    }

    /// A range of an object of the publication `number`; the manifest's own check has already placed it
    /// inside.
    pub(super) fn range(&self, number: usize, object: u32, offset: u64, length: u64) -> Result<ObjectRange> {
        let outside = |subject: &str| Error::Corrupt {
            subject: format!("{subject} of a publication"),
            what: "a payload lies outside",
            expected: "a range inside an object".into(),
            found: format!("{length} bytes from {offset} of object {object}"),
        };
        let place = (number, object);
        let bytes = self.object(place, self.entry(place).ok_or_else(|| outside("manifest"))?)?;
        let start = usize::try_from(offset).ok();
        let range = start
            .zip(usize::try_from(length).ok())
            .and_then(|(start, length)| Some(start..start.checked_add(length)?))
            .filter(|range| range.end <= bytes.len())
            .ok_or_else(|| outside("object"))?;
        Ok(ObjectRange { bytes, range })
    }

    fn object(&self, place: ObjectNumber, entry: &Object) -> Result<Arc<Vec<u8>>> {
        self.asked(place);
        let slot = self.slot(place, entry.size);
        let mut state = lock(&slot.0);
        let bytes = match std::mem::take(&mut *state) {
            Fetched::Here(bytes) => Ok(bytes),
            Fetched::Failed(error) => Err(error),
            Fetched::Absent => self.fetch(entry),
        };
        *state = bytes.as_ref().map_or_else(after, |bytes| Fetched::Here(bytes.clone()));
        bytes
    }

    fn fetch(&self, entry: &Object) -> Result<Arc<Vec<u8>>> {
        driftless_store::os::crash_point("follow.fetch")?;
        let fetched = (self.fetch)(entry)?;
        self.fetched.fetch_add(fetched.len() as u64, Relaxed);
        *lock(&self.came) = Some(Instant::now());
        Ok(fetched.into())
    }

    fn entry(&self, place: ObjectNumber) -> Option<&'a Object> {
        self.versions.get(place.0)?.manifest.objects.get(place.1 as usize)
    }

    /// The slot of an object. Makes room for it where it is new: those not used for longest go.
    fn slot(&self, place: ObjectNumber, size: u64) -> Arc<Slot> {
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

    fn size(&self, place: ObjectNumber) -> u64 {
        self.entry(place).map_or(0, |object| object.size)
    }
}

/// What an object is after an error that one thread was told. Where the store's deadline has passed, the
/// others get the error too: each of them would wait for it once more.
fn after(error: &Error) -> Fetched {
    let Error::Store(StoreError::Unreachable { store, action, key, waited, attempts, source }) = error else {
        return Fetched::Absent;
    };
    let (store, key, source) = (store.clone(), key.clone(), source.to_string().into());
    Fetched::Failed(Error::Store(StoreError::Unreachable {
        store,
        action,
        key,
        waited: *waited,
        attempts: *attempts,
        source,
    }))
}

/// Ends the fetching ahead when the work ends, whichever way it does.
pub(super) struct Over<'o, 'a>(&'o Objects<'a>);

impl Drop for Over<'_, '_> {
    fn drop(&mut self) {
        lock(&self.0.ahead).over = true;
        self.0.moved.notify_all();
    }
}
