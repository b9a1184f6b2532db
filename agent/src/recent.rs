//! Values that were used lately, as many as fit in a bound on bytes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A digest of what a value was made of.
pub(crate) type Key = [u8; 32];

/// Values by their keys. Those that were used longest ago go first.
#[derive(Debug)]
pub(crate) struct Recent<V> {
    kept: Mutex<Kept<V>>,
    bytes_max: usize,
}

#[derive(Debug)]
struct Kept<V> {
    entries: HashMap<Key, Entry<V>>,
    bytes: usize,
    uses: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: usize,
    used: u64,
}

impl<V: Clone> Recent<V> {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let kept = Kept { entries: HashMap::new(), bytes: 0, uses: 0 };
        Recent { kept: Mutex::new(kept), bytes_max }
    }

    fn lock(&self) -> MutexGuard<'_, Kept<V>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, key: &Key) -> Option<V> {
        let mut kept = self.lock();
        kept.uses += 1;
        let used = kept.uses;
        let entry = kept.entries.get_mut(key)?;
        entry.used = used;
        Some(entry.value.clone())
    }

    /// Keeps a value of so many bytes, unless it alone is over the bound.
    pub(crate) fn put(&self, key: Key, value: V, bytes: usize) {
        let kept = &mut *self.lock();
        if bytes > self.bytes_max || kept.entries.contains_key(&key) {
            return;
        }
        while kept.bytes + bytes > self.bytes_max {
            let oldest = kept.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key);
            let Some(gone) = oldest.and_then(|oldest| kept.entries.remove(&oldest)) else { break };
            kept.bytes -= gone.bytes;
        }
        kept.uses += 1;
        kept.bytes += bytes;
        kept.entries.insert(key, Entry { value, bytes, used: kept.uses });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_were_used_longest_ago_make_room() {
        let [a, b, c] = [[1; 32], [2; 32], [3; 32]];
        let recent = Recent::new(24);
        for key in [a, b] {
            recent.put(key, "twelve", 12);
        }
        assert!(recent.get(&a).is_some());
        recent.put(c, "eight", 8);
        assert!(recent.get(&b).is_none() && recent.get(&a).is_some());
        recent.put(b, "too large", 28);
        assert_eq!((recent.get(&b), recent.get(&c), recent.lock().bytes), (None, Some("eight"), 20));
    }
}
