//! A store that lets a test see, delay or falsify what is read from it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use driftless_transport::manifest::Object;
use driftless_transport::{Arrived, Entry, Key, PutMode, Result, Store};

type Before = dyn Fn(&Key) + Send + Sync;
type After = dyn Fn(&Object, &Range<u64>, &mut Vec<u8>) + Send + Sync;

/// Another store with something done before or after its reads.
pub(crate) struct Hook {
    inner: Arc<dyn Store>,
    before: Box<Before>,
    after: Box<After>,
}

impl Hook {
    /// Calls `before` with the key of each read before it is made.
    pub(crate) fn before(
        inner: &Arc<dyn Store>,
        before: impl Fn(&Key) + Send + Sync + 'static,
    ) -> Arc<dyn Store> {
        Arc::new(Self { inner: inner.clone(), before: Box::new(before), after: Box::new(|_, _, _| {}) })
    }

    /// Calls `after` with what was read of an object, which it may change.
    pub(crate) fn after(
        inner: &Arc<dyn Store>,
        after: impl Fn(&Object, &Range<u64>, &mut Vec<u8>) + Send + Sync + 'static,
    ) -> Arc<dyn Store> {
        Arc::new(Self { inner: inner.clone(), before: Box::new(|_| {}), after: Box::new(after) })
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
        self.inner.put(key, bytes, mode)
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        (self.before)(key);
        self.inner.get(key, range)
    }
    fn get_known(&self, object: &Object, range: Range<u64>, arrived: &Arrived) -> Result<Vec<u8>> {
        (self.before)(&object.key);
        let mut bytes = self.inner.get_known(object, range.clone(), arrived)?;
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
