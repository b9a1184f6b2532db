//! The suite and what only real servers can show, on the servers that the lane `stores` starts.
//!
//! `DRIFTLESS_STORES` has their URLs, separated by spaces; credentials are where object stores look for them.
#![cfg(feature = "object")]
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::sync::Arc;

use driftless_store::wrap::{Count, Fault};
use driftless_store::{Error, Key, PutMode, Store, conformance, open_with};

fn settings() -> Vec<(String, String)> {
    let ours = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|prefix| name.starts_with(prefix));
    std::env::vars().filter(|(name, _)| ours(name)).collect()
}

fn urls() -> Vec<String> {
    let urls = std::env::var("DRIFTLESS_STORES").unwrap();
    urls.split_whitespace().map(str::to_owned).collect()
}

/// A place of its own in the bucket of `url`.
fn fresh(url: &str) -> String {
    let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
    let name: [u8; 8] = rand::random();
    format!("{place}/{}?{parameters}", hex::encode(name))
}

fn store(url: &str) -> Arc<dyn Store> {
    open_with(&fresh(url), &settings()).unwrap()
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7]).collect()
}

#[test]
#[ignore = "needs servers: cargo xtask test stores"]
fn servers_conform_bare_and_wrapped() {
    for url in urls() {
        println!("{url}");
        conformance::check(&*store(&url));
        conformance::check(&Count::new(store(&url)));
        conformance::check(&Fault::new(store(&url)));
    }
}

#[test]
#[ignore = "needs servers: cargo xtask test stores"]
fn large_objects_come_back_in_parallel_parts() {
    let large = bytes((40 << 20) + 7);
    for url in urls() {
        println!("{url}");
        let store = store(&url);
        let key = key("large");
        store.put(&key, &large, PutMode::Overwrite).unwrap();
        assert!(store.get(&key, None).unwrap() == large);
        let inner = 1_000_001..30_000_003;
        let found = store.get(&key, Some(inner.start..inner.end)).unwrap();
        assert!(found == large[inner.start as usize..inner.end as usize]);
        let error = store.put(&key, &large[1..], PutMode::Create).unwrap_err();
        assert!(matches!(error, Error::AlreadyExists { .. }), "{error:?}");
        assert_eq!(store.head(&key).unwrap().size, large.len() as u64);
        store.delete(&key).unwrap();
    }
}

#[test]
#[ignore = "needs servers: cargo xtask test stores"]
fn listings_are_whole_and_dated_by_the_server() {
    for url in urls() {
        println!("{url}");
        let store = store(&url);
        // More than a page of the largest page size that any of them has.
        let keys: Vec<Key> = (0..1003).map(|index| key(&format!("many/{index:04}"))).collect();
        std::thread::scope(|scope| {
            for keys in keys.chunks(126) {
                scope.spawn(|| keys.iter().for_each(|key| store.put(key, b"x", PutMode::Overwrite).unwrap()));
            }
        });
        let listed = store.list(&key("many")).unwrap();
        assert!(listed.iter().map(|entry| &entry.key).eq(&keys), "{} of {}", listed.len(), keys.len());
        assert!(listed.iter().all(|entry| entry.modified.is_some()));
    }
}

#[test]
#[ignore = "needs servers: cargo xtask test stores"]
fn wrong_credentials_and_buckets_are_named_without_secrets() {
    const WRONG: &str = "V1JPTkctU0VDUkVULUtFWQ==";
    for url in urls() {
        println!("{url}");
        let wrong = |(name, value): (String, String)| match name.as_str() {
            "AWS_SECRET_ACCESS_KEY" | "AZURE_STORAGE_ACCOUNT_KEY" => (name, WRONG.to_owned()),
            _ => (name, value),
        };
        let settings_wrong: Vec<_> = settings().into_iter().map(wrong).collect();
        let refused = open_with(&fresh(&url), &settings_wrong).unwrap().list(&key("a"));
        // The mock lets everybody in.
        if let Err(error) = refused {
            assert!(matches!(error, Error::Refused { .. }), "{error:?}");
            assert!(!format!("{error:?}").contains(WRONG), "{error:?}");
            println!("  {error}: {}", std::error::Error::source(&error).unwrap());
        }
        let missing = fresh(&url.replacen("//driftless", "//no-such-bucket", 1));
        let error = open_with(&missing, &settings()).unwrap().get(&key("a"), None).unwrap_err();
        assert!(
            matches!(&error, Error::Refused { store, .. } if store.contains("no-such-bucket")),
            "{error:?}"
        );
        println!("  {error}: {}", std::error::Error::source(&error).unwrap());
    }
}
