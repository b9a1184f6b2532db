//! A store behind a slow link, for tests.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::key::Key;
use crate::store::{Entry, Object, OnBytes, PutMode, Store};
use crate::wait::lock;

/// Delays the calls of the store inside as one shared link would: a latency per call, and a rate that all
/// bytes share.
#[derive(Debug)]
pub struct Throttle {
    inner: Arc<dyn Store>,
    latency: Duration,
    bytes_per_second: u64,
    /// When the link has sent everything it was given so far.
    free: Mutex<Instant>,
}

impl Throttle {
    /// A link with this latency per call and this rate; a rate of 0 is no limit.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>, latency: Duration, bytes_per_second: u64) -> Self {
        Self { inner, latency, bytes_per_second, free: Mutex::new(Instant::now()) }
    }

    /// Waits until `bytes` have passed the link and the latency is over.
    fn pass(&self, bytes: usize) {
        let now = Instant::now();
        let nanos =
            (bytes as u64).saturating_mul(1_000_000_000).checked_div(self.bytes_per_second).unwrap_or(0);
        let sent = {
            let mut free = lock(&self.free);
            *free = (*free).max(now) + Duration::from_nanos(nanos);
            *free
        };
        thread::sleep(sent + self.latency - now);
    }
}

impl fmt::Display for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for Throttle {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.pass(bytes.len());
        self.inner.put(key, bytes, mode)
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        let bytes = self.inner.get(key, range);
        self.pass(bytes.as_ref().map_or(0, Vec::len));
        bytes
    }

    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        let bytes = self.inner.get_cached(object, range, arrived);
        self.pass(bytes.as_ref().map_or(0, Vec::len));
        bytes
    }

    fn report_corrupt(&self, object: &Object) -> bool {
        self.inner.report_corrupt(object)
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        self.pass(0);
        self.inner.head(key)
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.pass(0);
        self.inner.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.pass(0);
        self.inner.delete(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    #[test]
    fn a_call_takes_at_least_its_share_of_the_link() {
        let store = Throttle::new(Arc::new(Memory::new()), Duration::from_millis(5), 1_000_000);
        let begin = Instant::now();
        store.put(&Key::new("a").unwrap(), &[0; 20_000], PutMode::Create).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(25), "20 kB at 1 MB/s and 5 ms");
    }
}
