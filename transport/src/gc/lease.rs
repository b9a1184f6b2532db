//! Leases: which versions the followers of a run still need, dated by the store.

use std::time::{Duration, SystemTime};

use driftless_store::{Entry, Key, if_found};
use serde::{Deserialize, Serialize};

use super::{Ack, GcOptions};
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
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Its acknowledgement, once it has one; or why what is there cannot be read.
    #[serde(skip)]
    pub ack: std::result::Result<Option<Ack>, String>,
    #[serde(skip)]
    pub(super) key: Key,
}

/// [`leases`](super::leases) for a time that is known already, such as a host's own: nothing is written. `None`: no lease
/// has an age.
///
/// # Errors
/// What the store reports.
pub fn leases_at(run: &Run, options: &GcOptions, now: Option<SystemTime>) -> Result<Vec<Lease>> {
    let mut leases = Vec::new();
    for entry in run.followers()? {
        // None: withdrawn since it was listed.
        let found = if_found(run.store().get(&entry.key, Some(0..LEASE_BYTES_MAX)))?;
        leases.extend(found.and_then(|bytes| lease(&entry, &bytes, options, now)));
    }
    Ok(leases)
}

/// A lease as the store has it; `None` if it is for another model.
#[must_use]
pub fn lease(entry: &Entry, json: &[u8], options: &GcOptions, now: Option<SystemTime>) -> Option<Lease> {
    let stored = serde_json::from_slice::<Stored>(json);
    let ack = match &stored {
        Ok(Stored { version: None, .. }) => Ok(None),
        _ => serde_json::from_slice(json).map(Some).map_err(|error| error.to_string()),
    };
    let stored = stored.ok();
    if stored.as_ref().and_then(|stored| stored.model.as_deref()).is_some_and(|other| other != options.model)
    {
        return None;
    }
    let version = stored.as_ref().and_then(|stored| stored.version);
    let needs = stored.and_then(|stored| stored.needs).or(version).unwrap_or_default();
    // A lease from the store's future was renewed just now.
    let age = now.zip(entry.modified).map(|(now, then)| now.duration_since(then).unwrap_or_default());
    let live = age.is_none_or(|age| age <= options.lease_ttl);
    let (follower, key) = (entry.key.name().to_owned(), entry.key.clone());
    Some(Lease { follower, version, needs, age, live, ack, key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_dated_by_the_store_and_doubt_keeps_them_alive() {
        let options = GcOptions::new("policy").with_lease_ttl(Duration::from_secs(60));
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let entry = |age: Option<i64>| {
            let then = age.map(|age| SystemTime::UNIX_EPOCH + Duration::from_secs((1000 - age) as u64));
            Entry::new(Key::new("r/followers/host").unwrap(), 1, then)
        };
        let live = |age, now| lease(&entry(age), b"{\"needs\":4}", &options, now).unwrap().live;
        assert!(live(Some(0), Some(now)) && live(Some(60), Some(now)) && live(Some(-500), Some(now)));
        assert!(!live(Some(61), Some(now)));
        assert!(live(None, Some(now)) && live(Some(900), None), "what cannot be dated counts as live");
    }

    #[test]
    fn lease_needs_its_own_its_version_or_everything() {
        let entry = Entry::new(Key::new("r/followers/host").unwrap(), 1, None);
        let needs = |text: &str| {
            lease(&entry, text.as_bytes(), &GcOptions::new("policy"), None).map(|lease| lease.needs.0)
        };
        assert_eq!(needs(r#"{"model":"policy","needs":7}"#), Some(7));
        assert_eq!(needs(r#"{"model":"critic","needs":7}"#), None);
        assert_eq!(needs(r#"{"version":9,"label":"x"}"#), Some(9), "an acknowledgement without a lease");
        assert_eq!(needs(r#"{"needs":7,"version":9}"#), Some(7));
        assert_eq!(needs("{}"), Some(0));
        assert_eq!(needs("garbage"), Some(0), "one that cannot be read needs everything");
    }
}
