//! Leases: which versions the followers of a run still need, dated by the store.

use std::time::{Duration, SystemTime};

use driftless_store::{Entry, Key, if_found};
use serde::{Deserialize, Serialize};

use super::Ack;
use crate::error::Result;
use crate::ids::Version;
use crate::run::Run;

/// Largest lease in bytes that is read.
const LEASE_BYTES_MAX: u64 = 1 << 20;

/// What a follower writes: its lease, and in the same object its acknowledgement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Record {
    pub(crate) model: String,
    /// The oldest version whose publication the follower may still read.
    pub(crate) needs: Version,
    /// The process that wrote it, by a random name.
    pub(crate) writer: String,
    #[serde(flatten)]
    pub(crate) ack: Option<Ack>,
}

/// What is read of it. An acknowledgement without a lease needs what lies behind its version; one without a
/// model counts for every model.
#[derive(Deserialize)]
struct Stored {
    model: Option<String>,
    needs: Option<Version>,
    version: Option<Version>,
    writer: Option<String>,
}

/// The process that wrote a lease, if that is in it.
pub(crate) fn writer_of(bytes: &[u8]) -> Option<String> {
    serde_json::from_slice::<Stored>(bytes).ok()?.writer
}

/// A follower's lease on the versions of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Lease {
    /// The follower's name.
    pub follower: String,
    /// The version on its disk, if it has one.
    pub version: Option<Version>,
    /// The oldest version that it needs; version 0 if its lease cannot be read.
    pub needs: Version,
    /// How long ago it was renewed, by the store's clock; `None` if the store cannot tell.
    pub age: Option<Duration>,
    /// Whether it holds back the collection. One that cannot be dated does.
    pub live: bool,
    #[serde(skip)]
    pub(super) key: Key,
}

/// The leases on `model`, those that ran out included. A lease is live up to an age of `ttl`.
pub(super) fn leases(run: &Run, model: &str, now: Option<SystemTime>, ttl: Duration) -> Result<Vec<Lease>> {
    let mut leases = Vec::new();
    for entry in run.followers()? {
        // None: withdrawn since it was listed.
        let found = if_found(run.store().get(&entry.key, Some(0..LEASE_BYTES_MAX)))?;
        leases.extend(found.and_then(|bytes| lease(&entry, &bytes, model, now, ttl)));
    }
    Ok(leases)
}

/// One lease; `None` if it is for another model.
fn lease(entry: &Entry, bytes: &[u8], model: &str, now: Option<SystemTime>, ttl: Duration) -> Option<Lease> {
    let stored = serde_json::from_slice::<Stored>(bytes).ok();
    if stored.as_ref().and_then(|stored| stored.model.as_deref()).is_some_and(|other| other != model) {
        return None;
    }
    let version = stored.as_ref().and_then(|stored| stored.version);
    let needs = stored.and_then(|stored| stored.needs).or(version).unwrap_or_default();
    // A lease from the store's future was renewed just now.
    let age = now.zip(entry.modified).map(|(now, then)| now.duration_since(then).unwrap_or_default());
    let live = age.is_none_or(|age| age <= ttl);
    let (follower, key) = (entry.key.name().to_owned(), entry.key.clone());
    Some(Lease { follower, version, needs, age, live, key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_dated_by_the_store_and_doubt_keeps_them_alive() {
        let ttl = Duration::from_secs(60);
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let entry = |age: Option<i64>| {
            let then = age.map(|age| SystemTime::UNIX_EPOCH + Duration::from_secs((1000 - age) as u64));
            Entry::new(Key::new("r/followers/host").unwrap(), 1, then)
        };
        let live = |age, now| lease(&entry(age), b"{\"needs\":4}", "policy", now, ttl).unwrap().live;
        assert!(live(Some(0), Some(now)) && live(Some(60), Some(now)) && live(Some(-500), Some(now)));
        assert!(!live(Some(61), Some(now)));
        assert!(live(None, Some(now)) && live(Some(900), None), "what cannot be dated counts as live");
    }

    #[test]
    fn lease_needs_its_own_its_version_or_everything() {
        let entry = Entry::new(Key::new("r/followers/host").unwrap(), 1, None);
        let needs = |text: &str| {
            lease(&entry, text.as_bytes(), "policy", None, Duration::ZERO).map(|lease| lease.needs.0)
        };
        assert_eq!(needs(r#"{"model":"policy","needs":7}"#), Some(7));
        assert_eq!(needs(r#"{"model":"critic","needs":7}"#), None);
        assert_eq!(needs(r#"{"version":9,"label":"x"}"#), Some(9), "an acknowledgement without a lease");
        assert_eq!(needs(r#"{"needs":7,"version":9}"#), Some(7));
        assert_eq!(needs("{}"), Some(0));
        assert_eq!(needs("garbage"), Some(0), "one that cannot be read needs everything");
    }
}
