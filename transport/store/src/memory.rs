//! The reference store: a map in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::key::Key;
use crate::store::{Entry, PutMode, Store};
use crate::wait::lock;

struct Object {
    bytes: Arc<[u8]>,
    modified: SystemTime,
}

impl Object {
    fn entry(&self, key: &Key) -> Entry {
        Entry::new(key.clone(), self.bytes.len() as u64, Some(self.modified))
    }
}

/// A store in this process's memory: the reference for what a store does, and a fast one for tests.
#[derive(Default)]
pub struct Memory {
    objects: Mutex<BTreeMap<Key, Object>>,
}

impl Memory {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Object>> {
        // Every critical section below is a single map operation, so a panic elsewhere leaves the map whole.
        lock(&self.objects)
    }

    fn not_found(&self, key: &Key) -> Error {
        Error::NotFound { key: key.clone(), store: self.to_string() }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory:")
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("objects", &self.lock().len()).finish()
    }
}

impl Store for Memory {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        let object = Object { bytes: bytes.into(), modified: SystemTime::now() };
        let mut objects = self.lock();
        if mode == PutMode::Create && objects.contains_key(key) {
            return Err(Error::AlreadyExists { key: key.clone(), store: self.to_string() });
        }
        objects.insert(key.clone(), object);
        Ok(())
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        let object = self.lock().get(key).map(|object| object.bytes.clone());
        let bytes = object.ok_or_else(|| self.not_found(key))?;
        let range = crate::store::clamp(key, range, bytes.len() as u64)?;
        Ok(bytes[range.start as usize..range.end as usize].to_vec())
    }

    fn head(&self, key: &Key) -> Result<Entry> {
        self.lock().get(key).map(|object| object.entry(key)).ok_or_else(|| self.not_found(key))
    }

    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        let objects = self.lock();
        Ok(objects
            .iter()
            .filter(|(key, _)| key.under(prefix).is_some())
            .map(|(key, object)| object.entry(key))
            .collect())
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.lock().remove(key);
        Ok(())
    }
}
