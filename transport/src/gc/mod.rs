//! Collecting old versions: what no reader needs any more is removed, oldest first.
//!
//! All versions from a *floor* on are kept. They include the newest anchor and what is behind it, what live
//! followers need, and as many of the newest versions as asked for. The floor is made durable first. Then
//! each version below it loses its manifest, its objects and everything else. So a reader meets a whole
//! version, or learns from the floor that it is gone, and where to start. The next collection finishes one
//! that stopped anywhere. A number that was used stays used, because commits and reads check the floor.
//!
//! Objects that no manifest names are removed where the version's number is taken: nothing can commit them
//! any more.

mod ack;
mod lease;
mod plan;

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use derive_setters::Setters;
use driftless_store::probe::store_time;
use driftless_store::{Error as StoreError, Key, if_found};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::ids::Version;
use crate::run::{Floor, Run, Tombstone};
use plan::Places;

pub use ack::{Ack, Compared, EngineStatus, How, PHASES_MAX, Phases};
pub use lease::{Lease, lease, leases_at};
pub(crate) use lease::{Record, writer_of};
pub(crate) use plan::is_publishers;

/// A lease this many times as old as one that has run out is forgotten: its follower is not coming back.
const FORGOTTEN: u32 = 96;

/// What to keep.
#[derive(Debug, Clone, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct GcOptions {
    /// The model whose versions are collected.
    #[setters(into)]
    pub model: String,
    /// How many of the newest versions are kept in any case; at least 1, the default.
    pub keep: u64,
    /// How old a lease may be, by the store's clock, and still count: 15 minutes by default. Followers renew
    /// every minute.
    pub lease_ttl: Duration,
    /// Only tell what would be removed.
    pub dry_run: bool,
}

impl GcOptions {
    /// The defaults, for a model.
    #[must_use]
    pub fn new(model: impl Into<String>) -> Self {
        Self { model: model.into(), keep: 1, lease_ttl: Duration::from_secs(900), dry_run: false }
    }
}

/// What a collection removed from one version's place, or would remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Removed {
    /// The version.
    pub version: Version,
    /// True if the version itself was collected, false if only what failed attempts at it had left.
    pub collected: bool,
    /// Objects removed, the manifest not counted.
    pub objects: u64,
    /// Their bytes, and those of the manifest.
    pub bytes: u64,
}

/// What a collection found and did.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Collection {
    /// The newest version; `None` if there is none, and nothing was done.
    pub newest: Option<Version>,
    /// The newest anchor. Without one nothing is collected: a late joiner needs every version.
    pub anchor: Option<Version>,
    /// The oldest version that is kept.
    pub floor: Version,
    /// The leases on the model.
    pub leases: Vec<Lease>,
    /// What was removed, ascending by version.
    pub removed: Vec<Removed>,
}

/// The leases of followers on a model, those that ran out included, as [`collect`] sees them.
///
/// # Errors
/// What the store reports.
pub fn leases(run: &Run, options: &GcOptions) -> Result<Vec<Lease>> {
    leases_at(run, options, store_time(&**run.store())?)
}

/// Collects the versions of a model that no reader needs. May run beside the publisher, followers and other
/// collections.
///
/// # Errors
/// [`Error::BadSetting`] for a `keep` of 0; [`Error::Corrupt`] or
/// [`NotFound`](driftless_store::Error::NotFound) if something is missing of what is to be kept (nothing is
/// removed then); whatever the store reports, after which the next call goes on.
pub fn collect(run: &Run, options: &GcOptions) -> Result<Collection> {
    collect_at(run, options, store_time(&**run.store())?)
}

/// [`collect`] for a time that is known already, such as a host's own: with `dry_run` nothing is written. `None`: no lease
/// has an age.
///
/// # Errors
/// As [`collect`].
pub fn collect_at(run: &Run, options: &GcOptions, now: Option<SystemTime>) -> Result<Collection> {
    if options.keep == 0 {
        return Err(Error::BadSetting { name: "keep", expected: "at least 1".into(), found: "0".into() });
    }
    let model = options.model.as_str();
    let root = run.model_root(model)?;
    let Some(newest) = run.newest_version(model)? else { return Ok(Collection::default()) };
    // Leases before the listing: a follower that takes one later reads a version that is kept, or meets the
    // floor.
    let leases = leases_at(run, options, now)?;
    let places = Places::of(run.store().list(&root)?, &root);
    let (anchor, mut kept) = down_to_anchor(run, model, newest, &places)?;
    let needed = leases.iter().filter(|lease| lease.live).map(|lease| lease.needs);
    let before = run.oldest(model)?;
    // What is gone stays gone, whatever a lease that ran out or came too late asks for.
    let floor = plan::floor(newest, anchor, options.keep, needed).max(before);
    for version in (floor.0..anchor.unwrap_or(Version(0)).0).rev() {
        match run.get(model, Version(version)) {
            Ok(committed) => kept.extend(committed.manifest.objects.into_iter().map(|object| object.key)),
            // Below a tombstone that an earlier release left.
            Err(Error::Collected { .. }) => break,
            Err(error) => return Err(error),
        }
    }
    if !options.dry_run {
        forget(run, &leases, options.lease_ttl.saturating_mul(FORGOTTEN))?;
    }
    let mut collection = Collection { newest: Some(newest), anchor, floor, leases, removed: Vec::new() };
    let fresh = fresh_below(run, model, before, floor)?;
    if floor > before && !options.dry_run {
        fail::fail_point!("gc.floor");
        run.raise_floor(model, Floor { version: floor, anchor: anchor.unwrap_or(floor) })?;
        fail::fail_point!("gc.manifest");
    }
    for (version, place) in places.range(..=newest) {
        let dead = place.dead(&kept, *version < floor);
        let manifest = place.manifest.as_ref().filter(|_| *version < floor);
        if manifest.is_none() && dead.is_empty() {
            continue;
        }
        let collected = fresh.contains(version);
        let removed = Removed {
            version: *version,
            collected,
            objects: dead.len() as u64,
            bytes: dead.iter().copied().chain(manifest).map(|entry| entry.size).sum(),
        };
        if !options.dry_run {
            if let Some(manifest) = manifest {
                run.store().delete(&manifest.key)?;
                fail::fail_point!("gc.objects");
            }
            for entry in dead {
                run.store().delete(&entry.key)?;
            }
            tracing::info!(run = %run.id(), model, %version, collected, objects = removed.objects, "removed");
        }
        collection.removed.push(removed);
    }
    Ok(collection)
}

/// Removes the leases that nobody has renewed for longer than `age`. A follower that comes back all the same writes its
/// own anew.
fn forget(run: &Run, leases: &[Lease], age: Duration) -> Result<()> {
    for lease in leases.iter().filter(|lease| lease.age.is_some_and(|found| found > age)) {
        run.store().delete(&lease.key)?;
    }
    Ok(())
}

/// The newest anchor, and the keys of all objects from it to the newest version. Each must be there, whole:
/// older versions are the last resort of a run whose newest ones are damaged.
fn down_to_anchor(
    run: &Run,
    model: &str,
    newest: Version,
    places: &Places,
) -> Result<(Option<Version>, BTreeSet<Key>)> {
    let mut kept = BTreeSet::new();
    let mut version = newest;
    loop {
        let manifest = run.read(model, version)?.manifest;
        for object in &manifest.objects {
            let found = places.size(&object.key).ok_or_else(|| {
                Error::Store(StoreError::NotFound { key: object.key.clone(), store: run.store().to_string() })
            })?;
            if found != object.size {
                return Err(Error::Corrupt {
                    subject: format!("object `{}`", object.key),
                    what: "its size",
                    expected: object.size.to_string(),
                    found: found.to_string(),
                });
            }
        }
        kept.extend(manifest.objects.iter().map(|object| object.key.clone()));
        if manifest.is_anchor() {
            return Ok((Some(version), kept));
        }
        match manifest.base {
            Some(base) => version = base.version,
            None => return Ok((None, kept)),
        }
    }
}

/// The versions from `before` up to `floor` that have their manifests. Everything below the newest tombstone
/// has one too.
fn fresh_below(run: &Run, model: &str, before: Version, floor: Version) -> Result<BTreeSet<Version>> {
    let mut fresh = BTreeSet::new();
    for version in (before.0..floor.0).rev().map(Version) {
        match if_found(run.store().get(&run.manifest_key(model, version)?, None))? {
            Some(bytes) if Tombstone::parse(&bytes).is_none() => fresh.insert(version),
            // Or another collection is at it.
            _ => break,
        };
    }
    Ok(fresh)
}
