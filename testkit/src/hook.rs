//! A store that lets a test see, delay or falsify what passes through it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use driftless_store::{Entry, Key, OnBytes, PutMode, Result, Store};
use driftless_transport::manifest::Object;

type Before = dyn Fn(&Key) + Send + Sync;
type After = dyn Fn(&Object, &Range<u64>, &mut Vec<u8>) + Send + Sync;
type Put = dyn Fn(&[u8], &dyn Fn() -> Result<()>) -> Result<()> + Send + Sync;

/// Another store with something done before or after its reads, or around its puts.
pub struct Hook {
    inner: Arc<dyn Store>,
    before: Box<Before>,
    after: Box<After>,
    put: Box<Put>,
}

impl Hook {
    /// Calls `before` with the key of each read before it is made.
    pub fn before(inner: &Arc<dyn Store>, before: impl Fn(&Key) + Send + Sync + 'static) -> Arc<dyn Store> {
        Arc::new(Self { before: Box::new(before), ..Self::forward(inner) })
    }

    /// Calls `after` with what was read of an object, which it may change.
    pub fn after(
        inner: &Arc<dyn Store>,
        after: impl Fn(&Object, &Range<u64>, &mut Vec<u8>) + Send + Sync + 'static,
    ) -> Arc<dyn Store> {
        Arc::new(Self { after: Box::new(after), ..Self::forward(inner) })
    }

    /// Calls `put` with the bytes of each put, and with what makes it.
    pub fn puts(
        inner: &Arc<dyn Store>,
        put: impl Fn(&[u8], &dyn Fn() -> Result<()>) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<dyn Store> {
        Arc::new(Self { put: Box::new(put), ..Self::forward(inner) })
    }

    fn forward(inner: &Arc<dyn Store>) -> Self {
        Self {
            inner: inner.clone(),
            before: Box::new(|_| {}),
            after: Box::new(|_, _, _| {}),
            put: Box::new(|_, put| put()),
        }
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hook").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Store for Hook {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        (self.put)(bytes, &|| self.inner.put(key, bytes, mode))
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        (self.before)(key);
        self.inner.get(key, range)
    }
    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        (self.before)(&object.key);
        let mut bytes = self.inner.get_cached(object, range.clone(), arrived)?;
        (self.after)(object, &range, &mut bytes);
        Ok(bytes)
    }
    fn head(&self, key: &Key) -> Result<Entry> {
        self.inner.head(key)
    }
    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.inner.list(prefix)
    }
    fn delete(&self, key: &Key) -> Result<()> {
        self.inner.delete(key)
    }
}
