//! A store that counts requests and bytes.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::key::Key;
use crate::store::{Entry, Object, OnBytes, PutMode, Store};
use crate::wait::lock;

/// Calls and bytes that passed a [`Count`]. Failed calls count as calls, not as bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Calls of `put`.
    pub puts: u64,
    /// Calls of `get` and `get_cached`.
    pub gets: u64,
    /// Calls of `head`.
    pub heads: u64,
    /// Calls of `list`.
    pub lists: u64,
    /// Calls of `delete`.
    pub deletes: u64,
    /// Bytes stored.
    pub bytes_put: u64,
    /// Bytes read.
    pub bytes_got: u64,
}

/// Counts the calls and bytes of the store inside.
#[derive(Debug)]
pub struct Count {
    inner: Arc<dyn Store>,
    counts: Mutex<Counts>,
}

impl Count {
    /// Counts from zero.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self { inner, counts: Mutex::default() }
    }

    /// The counts so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *lock(&self.counts)
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for Count {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        lock(&self.counts).puts += 1;
        self.inner.put(key, bytes, mode)?;
        lock(&self.counts).bytes_put += bytes.len() as u64;
        Ok(())
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        lock(&self.counts).gets += 1;
        let bytes = self.inner.get(key, range)?;
        lock(&self.counts).bytes_got += bytes.len() as u64;
        Ok(bytes)
    }

    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        lock(&self.counts).gets += 1;
        let bytes = self.inner.get_cached(object, range, arrived)?;
        lock(&self.counts).bytes_got += bytes.len() as u64;
        Ok(bytes)
    }

    fn report_corrupt(&self, object: &Object) -> bool {
        self.inner.report_corrupt(object)
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        lock(&self.counts).heads += 1;
        self.inner.head(key)
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        lock(&self.counts).lists += 1;
        self.inner.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        lock(&self.counts).deletes += 1;
        self.inner.delete(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    #[test]
    fn calls_and_bytes_are_counted() {
        let store = Count::new(Arc::new(Memory::new()));
        let key = Key::new("a").unwrap();
        store.put(&key, b"12345", PutMode::Create).unwrap();
        store.put(&key, b"123", PutMode::Create).unwrap_err();
        store.get(&key, Some(1..3)).unwrap();
        store.head(&key).unwrap();
        store.list(&key).unwrap();
        store.delete(&key).unwrap();
        let expected =
            Counts { puts: 2, gets: 1, heads: 1, lists: 1, deletes: 1, bytes_put: 5, bytes_got: 2 };
        assert_eq!(store.counts(), expected);
    }
}
