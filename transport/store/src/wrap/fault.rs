//! A store that fails on command.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::key::Key;
use crate::store::{Entry, Object, OnBytes, PutMode, Store};
use crate::wait::lock;

/// On which side of the real call a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// The call never reaches the store inside.
    Before,
    /// The call takes effect, but its caller gets an error: a lost answer.
    After,
}

#[derive(Debug, Default)]
struct Plan {
    calls: u64,
    faults: Option<(Range<u64>, When)>,
}

/// Fails chosen calls of the store inside with [`Error::Injected`]; passes everything through until armed.
#[derive(Debug)]
pub struct Fault {
    inner: Arc<dyn Store>,
    plan: Mutex<Plan>,
}

impl Fault {
    /// A wrapper that fails nothing yet.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self { inner, plan: Mutex::default() }
    }

    /// Lets `skip` more calls pass, then fails the following `count` ones; `u64::MAX` fails all that follow.
    pub fn arm(&self, skip: u64, count: u64, when: When) {
        let mut plan = lock(&self.plan);
        let first = plan.calls.saturating_add(skip);
        plan.faults = Some((first..first.saturating_add(count), when));
    }

    /// Fails nothing from here on.
    pub fn disarm(&self) {
        lock(&self.plan).faults = None;
    }

    /// Calls so far, failed ones included.
    #[must_use]
    pub fn calls(&self) -> u64 {
        lock(&self.plan).calls
    }

    fn run<T>(&self, operation: &'static str, key: &Key, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut plan = lock(&self.plan);
        let number = plan.calls;
        plan.calls += 1;
        let armed = plan.faults.clone();
        drop(plan);
        let strike = armed.filter(|(faults, _)| faults.contains(&number)).map(|(_, when)| when);
        let injected = || Error::Injected { call: number, operation, key: key.clone() };
        match strike {
            None => call(),
            Some(When::Before) => Err(injected()),
            Some(When::After) => call().and_then(|_| Err(injected())),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for Fault {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.run("put", key, || self.inner.put(key, bytes, mode))
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.run("get", key, || self.inner.get(key, range))
    }

    fn get_cached(&self, object: &Object, range: Range<u64>, arrived: &OnBytes) -> Result<Vec<u8>> {
        self.run("get", &object.key, || self.inner.get_cached(object, range, arrived))
    }

    fn report_corrupt(&self, object: &Object) -> bool {
        self.inner.report_corrupt(object)
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        self.run("head", key, || self.inner.head(key))
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.run("list", prefix, || self.inner.list(prefix))
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.run("delete", key, || self.inner.delete(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    #[test]
    fn exactly_the_chosen_calls_fail() {
        let inner = Arc::new(Memory::new());
        let store = Fault::new(inner.clone());
        let [a, b] = ["a", "b"].map(|text| Key::new(text).unwrap());
        store.arm(1, 1, When::Before);
        store.put(&a, b"1", PutMode::Create).unwrap();
        let error = store.put(&b, b"2", PutMode::Create).unwrap_err();
        assert!(matches!(error, Error::Injected { call: 1, operation: "put", .. }), "{error:?}");
        assert!(inner.get(&b, None).is_err());
        store.put(&b, b"3", PutMode::Create).unwrap();

        store.arm(0, u64::MAX, When::After);
        store.put(&a, b"4", PutMode::Overwrite).unwrap_err();
        store.get(&a, None).unwrap_err();
        store.disarm();
        assert_eq!(store.get(&a, None).unwrap(), b"4", "the call took effect before its answer was lost");
        assert_eq!(store.calls(), 6);
    }
}
