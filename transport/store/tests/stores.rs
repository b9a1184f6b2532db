//! Every store keeps the same promises, bare and wrapped.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::ops::Range;
use std::sync::Arc;

use driftless_store::wrap::{Count, Fault};
use driftless_store::{
    Disk, Entry, Error, Key, Memory, PutMode, Result, Store, conformance, open, probe_conditional_put,
};

fn bare_and_wrapped(make: impl Fn() -> Arc<dyn Store>) {
    conformance::check(&*make());
    conformance::check(&Count::new(make()));
    conformance::check(&Fault::new(make()));
}

#[test]
fn memory_conforms() {
    bare_and_wrapped(|| Arc::new(Memory::new()));
}

#[test]
fn disk_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let next = std::cell::Cell::new(0);
    bare_and_wrapped(|| {
        next.set(next.get() + 1);
        Arc::new(Disk::new(directory.path().join(next.get().to_string())))
    });
}

#[test]
fn two_handles_on_one_directory_are_one_store() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}", directory.path().display());
    let (one, other) = (open(&url).unwrap(), open(directory.path().to_str().unwrap()).unwrap());
    let key = Key::new("a/b").unwrap();
    one.put(&key, b"x", PutMode::Create).unwrap();
    assert!(matches!(other.put(&key, b"y", PutMode::Create), Err(Error::AlreadyExists { .. })));
    assert_eq!(other.get(&key, None).unwrap(), b"x");

    let below = Key::new("a/b/c").unwrap();
    assert!(matches!(one.get(&below, None), Err(Error::NotFound { .. })), "nothing lies under an object");
    assert!(matches!(one.head(&below), Err(Error::NotFound { .. })));
    one.delete(&below).unwrap();
    assert!(
        matches!(one.get(&Key::new("a").unwrap(), None), Err(Error::NotFound { .. })),
        "a directory is no object"
    );
}

#[test]
fn files_that_are_no_objects_are_not_listed() {
    let directory = tempfile::tempdir().unwrap();
    let store = Disk::new(directory.path());
    store.put(&Key::new("a/b").unwrap(), b"x", PutMode::Create).unwrap();
    std::fs::write(directory.path().join("a/.hidden"), b"x").unwrap();
    std::fs::write(directory.path().join("a/not a key"), b"x").unwrap();
    let listed = store.list(&Key::new("a").unwrap()).unwrap();
    assert_eq!(listed.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>(), ["a/b"]);
}

/// A server, or what lies before it, that carries out puts in a way of its own.
#[derive(Debug)]
struct Odd(Memory, fn(&Memory, &Key, &[u8], PutMode) -> Result<()>);

impl std::fmt::Display for Odd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("odd:")
    }
}

impl Store for Odd {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.1(&self.0, key, bytes, mode)
    }
    fn get(&self, key: &Key, range: Option<Range<u64>>) -> Result<Vec<u8>> {
        self.0.get(key, range)
    }
    fn head(&self, key: &Key) -> Result<Entry> {
        self.0.head(key)
    }
    fn list(&self, prefix: &Key) -> Result<Vec<Entry>> {
        self.0.list(prefix)
    }
    fn delete(&self, key: &Key) -> Result<()> {
        self.0.delete(key)
    }
}

#[test]
fn a_store_that_ignores_create_is_refused() {
    let store = Odd(Memory::new(), |store, key, bytes, _| store.put(key, bytes, PutMode::Overwrite));
    let error = probe_conditional_put(&store).unwrap_err();
    assert!(matches!(&error, Error::ConditionalPutIgnored { store } if store == "odd:"), "{error:?}");
    assert!(store.list(&Key::new("probes").unwrap()).unwrap().is_empty());
}

#[test]
fn put_that_a_proxy_sends_twice_is_no_sign_of_a_careless_store() {
    let twice = |store: &Memory, key: &Key, bytes: &[u8], mode| {
        store.put(key, bytes, mode)?;
        store.put(key, bytes, mode)
    };
    let store = Odd(Memory::new(), twice);
    probe_conditional_put(&store).unwrap();
    assert!(store.list(&Key::new("probes").unwrap()).unwrap().is_empty());
}
