//! The store of a publisher that also serves what it puts.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use driftless_store::wait::lock;
use driftless_store::{Entry, Key, Object, OnBytes, PutMode, Result, Store};

/// A store whose objects are remembered when they are put through it, so that a relay beside a publisher,
/// with this as its origin, does not read back what has just been written. Only [`Store::get_cached`] is
/// answered from memory, whose callers check what they get.
#[derive(Debug)]
pub struct Recent {
    origin: Arc<dyn Store>,
    bytes_max: u64,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Oldest first.
    objects: VecDeque<(Key, Arc<[u8]>)>,
    bytes: u64,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("objects", &self.objects.len()).field("bytes", &self.bytes).finish()
    }
}

impl Kept {
    fn get(&self, key: &Key) -> Option<Arc<[u8]>> {
        self.objects.iter().find(|(kept, _)| kept == key).map(|(_, bytes)| bytes.clone())
    }

    fn remove(&mut self, key: &Key) -> bool {
        let place = self.objects.iter().position(|(kept, _)| kept == key);
        let removed = place.and_then(|place| self.objects.remove(place));
        self.bytes -= removed.as_ref().map_or(0, |(_, bytes)| bytes.len() as u64);
        removed.is_some()
    }

    fn insert(&mut self, key: &Key, bytes: &[u8], bytes_max: u64) {
        self.remove(key);
        let length = bytes.len() as u64;
        if length > bytes_max {
            return;
        }
        while self.bytes + length > bytes_max {
            let Some((_, oldest)) = self.objects.pop_front() else { break };
            self.bytes -= oldest.len() as u64;
        }
        self.objects.push_back((key.clone(), bytes.into()));
        self.bytes += length;
    }
}

impl Recent {
    /// Remembers at most `bytes_max` bytes of what was put last; the rest is read from `origin`.
    #[must_use]
    pub fn new(origin: Arc<dyn Store>, bytes_max: u64) -> Self {
        Self { origin, bytes_max, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl fmt::Display for Recent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.origin.fmt(f)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for Recent {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        // What is there after an error, nobody knows.
        self.kept().remove(key);
        self.origin.put(key, bytes, mode)?;
        self.kept().insert(key, bytes, self.bytes_max);
        Ok(())
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.origin.get(key, range)
    }

    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        let kept = self.kept().get(&object.key).filter(|bytes| bytes.len() as u64 == object.size);
        let end = range.end.min(object.size);
        match kept.as_deref().and_then(|bytes| bytes.get(range.start as usize..end as usize)) {
            Some(bytes) => Ok(bytes.to_vec()),
            // Also for a range that is outside: the origin knows what to say.
            None => self.origin.get_cached(object, range, arrived),
        }
    }

    fn report_corrupt(&self, object: &Object) -> bool {
        let forgotten = self.kept().remove(&object.key);
        self.origin.report_corrupt(object) || forgotten
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        self.origin.head(key)
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.origin.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.kept().remove(key);
        self.origin.delete(key)
    }
}

#[cfg(test)]
mod tests {
    use driftless_store::wrap::{Count, Fault, When};
    use driftless_store::{ContentDigest, Error, Memory, no_progress};

    use super::*;

    fn object(key: &str, bytes: &[u8]) -> Object {
        Object { key: Key::new(key).unwrap(), size: bytes.len() as u64, blake3: ContentDigest::of(bytes) }
    }

    fn put(store: &dyn Store, key: &str, bytes: &[u8]) -> Object {
        let object = object(key, bytes);
        store.put(&object.key, bytes, PutMode::Overwrite).unwrap();
        object
    }

    #[test]
    fn recent_conforms() {
        driftless_store::conformance::check(&Recent::new(Arc::new(Memory::new()), 1 << 20));
    }

    #[test]
    fn what_was_put_last_is_not_read_back() {
        let origin = Arc::new(Count::new(Arc::new(Memory::new())));
        let store = Recent::new(origin.clone(), 10);
        let old = put(&store, "old", b"0123456");
        let new = put(&store, "new", b"789");
        let whole = |object: &Object| store.get_cached(object, 0..object.size, &no_progress()).unwrap();
        assert_eq!((whole(&old), whole(&new)), (b"0123456".to_vec(), b"789".to_vec()));
        assert_eq!(store.get_cached(&new, 1..9, &no_progress()).unwrap(), b"89");
        assert_eq!(origin.counts().gets, 0);
        let newer = put(&store, "newer", b"x");
        assert_eq!(
            (whole(&old), whole(&new), whole(&newer)),
            (b"0123456".to_vec(), b"789".to_vec(), b"x".to_vec())
        );
        assert_eq!(origin.counts().gets, 1, "the oldest made room");
        let large = put(&store, "large", b"0123456789a");
        assert_eq!((whole(&large), whole(&newer)), (b"0123456789a".to_vec(), b"x".to_vec()));
        assert_eq!(origin.counts().gets, 2, "and what is too large needs none");
        assert_eq!(store.get(&new.key, None).unwrap(), b"789");
        assert_eq!(origin.counts().gets, 3, "who does not check what he gets, gets it from the origin");
    }

    #[test]
    fn what_may_be_wrong_is_forgotten() {
        let inner = Arc::new(Memory::new());
        let fault = Arc::new(Fault::new(inner.clone()));
        let store = Recent::new(fault.clone(), 100);
        let first = put(&store, "a", b"first");
        fault.arm(0, 1, When::After);
        let other = object("a", b"other");
        store.put(&other.key, b"other", PutMode::Overwrite).unwrap_err();
        assert_eq!(store.get_cached(&other, 0..5, &no_progress()).unwrap(), b"other", "an answer was lost");
        put(&store, "a", b"first");
        inner.put(&first.key, b"other", PutMode::Overwrite).unwrap();
        assert_eq!(
            store.get_cached(&other, 0..5, &no_progress()).unwrap(),
            b"first",
            "as long as nobody doubts it"
        );
        assert!(store.report_corrupt(&other) && !store.report_corrupt(&other));
        assert_eq!(store.get_cached(&other, 0..5, &no_progress()).unwrap(), b"other");
        let gone = put(&store, "b", b"gone");
        store.delete(&gone.key).unwrap();
        let error = store.get_cached(&gone, 0..4, &no_progress()).unwrap_err();
        assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
    }
}
