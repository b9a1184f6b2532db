//! A store that counts requests and bytes.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::Result;
use crate::key::Key;
use crate::store::{Entry, Object, OnBytes, PutMode, Store};

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
    puts: AtomicU64,
    gets: AtomicU64,
    heads: AtomicU64,
    lists: AtomicU64,
    deletes: AtomicU64,
    bytes_put: AtomicU64,
    bytes_got: AtomicU64,
}

impl Count {
    /// Counts from zero.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self {
            inner,
            puts: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            heads: AtomicU64::new(0),
            lists: AtomicU64::new(0),
            deletes: AtomicU64::new(0),
            bytes_put: AtomicU64::new(0),
            bytes_got: AtomicU64::new(0),
        }
    }

    /// What has passed so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            puts: self.puts.load(Relaxed),
            gets: self.gets.load(Relaxed),
            heads: self.heads.load(Relaxed),
            lists: self.lists.load(Relaxed),
            deletes: self.deletes.load(Relaxed),
            bytes_put: self.bytes_put.load(Relaxed),
            bytes_got: self.bytes_got.load(Relaxed),
        }
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
        self.puts.fetch_add(1, Relaxed);
        self.inner.put(key, bytes, mode)?;
        self.bytes_put.fetch_add(bytes.len() as u64, Relaxed);
        Ok(())
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.gets.fetch_add(1, Relaxed);
        let bytes = self.inner.get(key, range)?;
        self.bytes_got.fetch_add(bytes.len() as u64, Relaxed);
        Ok(bytes)
    }

    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        self.gets.fetch_add(1, Relaxed);
        let bytes = self.inner.get_cached(object, range, arrived)?;
        self.bytes_got.fetch_add(bytes.len() as u64, Relaxed);
        Ok(bytes)
    }

    fn report_corrupt(&self, object: &Object) -> bool {
        self.inner.report_corrupt(object)
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        self.heads.fetch_add(1, Relaxed);
        self.inner.head(key)
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.lists.fetch_add(1, Relaxed);
        self.inner.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.deletes.fetch_add(1, Relaxed);
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
