//! The suite that every [`Store`] passes, bare and wrapped. It is for tests: a broken rule panics.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test, and its panic names the line")]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::{Error, Key, PutMode, Store, probe_conditional_put};

/// Threads that race for one key, and rounds they do it.
const RACERS: usize = 8;
const ROUNDS: usize = 8;

/// Runs every check on an empty store; leaves objects behind.
///
/// # Panics
/// At the first rule that the store breaks.
pub fn check(store: &dyn Store) {
    objects_come_back(store);
    ranges_are_cut_at_the_end(store);
    missing_objects_are_told(store);
    overwriting_replaces_all(store);
    creating_never_replaces(store);
    listing_is_complete_sorted_and_bounded_by_segments(store);
    one_of_many_creates_wins(store);
    readers_see_whole_objects(store);
    probe_conditional_put(store).unwrap();
    assert!(store.list(&key("probes")).unwrap().is_empty(), "the probe leaves nothing behind");
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn objects_come_back(store: &dyn Store) {
    let large: Vec<u8> = (0..5_000_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (name, bytes) in [("round/empty", &b""[..]), ("round/small", b"\0\xff\n"), ("round/large", &large)] {
        let key = key(name);
        store.put(&key, bytes, PutMode::Create).unwrap();
        assert!(store.get(&key, None).unwrap() == bytes, "{name} changed");
        let entry = store.head(&key).unwrap();
        assert_eq!((entry.key, entry.size), (key, bytes.len() as u64));
    }
}

fn ranges_are_cut_at_the_end(store: &dyn Store) {
    let key = key("range/object");
    store.put(&key, b"0123456789", PutMode::Overwrite).unwrap();
    for (range, expected) in [
        (0..10, &b"0123456789"[..]),
        (3..5, b"34"),
        (9..10, b"9"),
        (4..4, b""),
        (8..99, b"89"),
        (10..12, b""),
        (0..u64::MAX, b"0123456789"),
    ] {
        assert_eq!(store.get(&key, Some(range.clone())).unwrap(), expected, "{range:?}");
    }
    let error = store.get(&key, Some(11..12)).unwrap_err();
    assert!(matches!(error, Error::RangeOutside { start: 11, size: 10, .. }), "{error:?}");
}

fn missing_objects_are_told(store: &dyn Store) {
    let missing = key("missing/object");
    assert!(matches!(store.get(&missing, None), Err(Error::NotFound { key, .. }) if key == missing));
    assert!(matches!(store.get(&missing, Some(0..1)), Err(Error::NotFound { .. })));
    assert!(matches!(store.head(&missing), Err(Error::NotFound { .. })));
    store.delete(&missing).unwrap();
    store.put(&missing, b"x", PutMode::Create).unwrap();
    store.delete(&missing).unwrap();
    assert!(matches!(store.get(&missing, None), Err(Error::NotFound { .. })));
    store.put(&missing, b"y", PutMode::Create).unwrap();
}

fn overwriting_replaces_all(store: &dyn Store) {
    let key = key("overwrite/object");
    store.put(&key, &[1; 1000], PutMode::Overwrite).unwrap();
    let first = store.head(&key).unwrap();
    store.put(&key, &[2; 10], PutMode::Overwrite).unwrap();
    let second = store.head(&key).unwrap();
    assert_eq!(store.get(&key, None).unwrap(), [2; 10]);
    assert_eq!(second.size, 10);
    if let (Some(first), Some(second)) = (first.modified, second.modified) {
        assert!(second >= first, "the store's own dates never go back");
    }
}

fn creating_never_replaces(store: &dyn Store) {
    let key = key("create/object");
    store.put(&key, b"first", PutMode::Create).unwrap();
    let error = store.put(&key, b"second", PutMode::Create).unwrap_err();
    assert!(matches!(&error, Error::AlreadyExists { key: taken, .. } if *taken == key), "{error:?}");
    assert_eq!(store.get(&key, None).unwrap(), b"first");
}

fn listing_is_complete_sorted_and_bounded_by_segments(store: &dyn Store) {
    assert!(store.list(&key("list")).unwrap().is_empty());
    let names = ["list/a", "list/a-b", "list/b/c", "list/b/c-d", "list/b/e/f", "listing", "list-2/a"];
    for name in names {
        store.put(&key(name), name.as_bytes(), PutMode::Create).unwrap();
    }
    let listed = store.list(&key("list")).unwrap().into_iter();
    let listed: Vec<(String, u64)> = listed.map(|entry| (entry.key.to_string(), entry.size)).collect();
    let expected: Vec<(String, u64)> =
        names[..5].iter().map(|name| ((*name).to_owned(), name.len() as u64)).collect();
    assert_eq!(listed, expected);
    assert_eq!(store.list(&key("list/b")).unwrap().len(), 3);
    assert!(store.list(&key("list/a")).unwrap().is_empty(), "an object is not under itself");
}

fn one_of_many_creates_wins(store: &dyn Store) {
    for round in 0..ROUNDS {
        let key = key(&format!("race/{round}"));
        let start = Barrier::new(RACERS);
        let winners: Vec<usize> = thread::scope(|scope| {
            let racers: Vec<_> = (0..RACERS)
                .map(|racer| {
                    let (key, start) = (&key, &start);
                    scope.spawn(move || {
                        start.wait();
                        match store.put(key, &[racer as u8; 4096], PutMode::Create) {
                            Ok(()) => Some(racer),
                            Err(Error::AlreadyExists { .. }) => None,
                            Err(error) => panic!("racer {racer}: {error:?}"),
                        }
                    })
                })
                .collect();
            racers.into_iter().filter_map(|racer| racer.join().unwrap()).collect()
        });
        assert_eq!(winners.len(), 1, "winners of round {round}: {winners:?}");
        assert_eq!(store.get(&key, None).unwrap(), [winners[0] as u8; 4096], "the winner's bytes stay");
    }
}

fn readers_see_whole_objects(store: &dyn Store) {
    let key = key("atomic/object");
    let done = AtomicBool::new(false);
    store.put(&key, &[0; 60_000], PutMode::Overwrite).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let bytes = match store.get(&key, None) {
                    // A store that reads in parts gives up when the object is replaced over and over.
                    Err(Error::Busy { .. }) => continue,
                    read => read.unwrap(),
                };
                assert_eq!(
                    bytes.len(),
                    60_000 + usize::from(bytes[0]) * 1000,
                    "a part of an object was seen"
                );
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mixture of two objects was seen");
            }
        });
        for round in 0..20u8 {
            store.put(&key, &vec![round; 60_000 + usize::from(round) * 1000], PutMode::Overwrite).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}
