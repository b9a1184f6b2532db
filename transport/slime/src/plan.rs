//! Says what following a trainer's directory would do, without doing it.
//!
//! A version of this layout says neither how much it changes nor what it builds on. Only applying it shows
//! both, so it is applied to copies of the tensors in memory.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use driftless_store::os::regular;
use driftless_store::pool::{Bounds, in_order, threads};
use driftless_transport::foreign::{OnDisk, position, refuse_foreign};
use driftless_transport::manifest::Manifest;
use driftless_transport::replica::{Plan, PlannedVersion};
use driftless_transport::{Checkpoint, Error, Result, Version};

use crate::feed::{Feed, check_forward};
use crate::release::Release;
use crate::{frame, identity};

/// More threads than this only wait for memory.
const WORKERS_MAX: usize = 16;
/// Tensors under way at once, in bytes; a single one may be larger.
const MEMORY_MAX: u64 = 1 << 30;

/// What bringing `dir` to the newest version up to `until` would take, with every version tried as following
/// it would.
///
/// # Errors
/// Those that [`Feed::survey`] and [`Feed::advance`] would give; [`Error::Busy`] if another process moved `dir`
/// meanwhile.
pub(crate) fn plan(mut feed: Feed, dir: &Path, until: Option<Version>) -> Result<Plan> {
    let held = OnDisk::read(dir)?;
    let planned = plan_on(&mut feed, dir, &held, until);
    if OnDisk::read(dir)? == held {
        return planned;
    }
    Err(Error::Busy { what: format!("`{}`", dir.display()), with: "a follower that moves it".into() })
}

fn plan_on(feed: &mut Feed, dir: &Path, held: &OnDisk, until: Option<Version>) -> Result<Plan> {
    let last = |newest: Version| until.map_or(newest, |until| until.min(newest));
    let mut versions = Vec::new();
    let (checkpoint, base, mut run_id, to) = match &held.version {
        Some((applied, manifest)) => {
            feed.check_pins(dir, manifest, applied)?;
            let to = last(feed.newest(applied.version)?);
            check_forward(dir, applied, to)?;
            (Checkpoint::open_replica(dir)?, manifest.clone(), applied.run_id, to)
        }
        None => {
            let (checkpoint, committed) = feed.version_0()?;
            // What was begun here is ours, and the reference itself may be adopted where it lies.
            if !held.begun && checkpoint.dir().canonicalize().ok() != dir.canonicalize().ok() {
                refuse_foreign(dir)?;
            }
            let changed = Some(committed.manifest.changed);
            versions.push(PlannedVersion::new(Version(0), true, 0, 0, changed));
            let to = last(feed.newest(Version(0))?);
            let run_id = committed.manifest.run_id;
            (checkpoint, committed.manifest, run_id, to)
        }
    };
    let numbers = base.version.0 + 1..=to.0;
    let releases =
        numbers.map(|number| Release::read(feed.store(), Version(number))).collect::<Result<Vec<_>>>()?;
    if let Some(first) = releases.first().filter(|first| first.version == Version(1)) {
        run_id = identity::run_id(identity::content(first));
    }
    // The reference is whole whatever happened to the directory.
    let torn = held.unfinished && held.version.is_some();
    let changed = rehearse(feed, &base, &checkpoint, &releases, !torn)?;
    versions.extend(releases.iter().zip(changed).map(|(release, changed)| planned(release, changed)));
    let from = held.version.as_ref().map(|(applied, _)| applied.version);
    Ok(Plan::of(run_id, &base.model, from, to, held.unfinished, versions))
}

fn planned(release: &Release, changed: Option<u64>) -> PlannedVersion {
    let files: BTreeSet<_> = release.tensors.values().map(|frame| &frame.key).collect();
    let bytes = release.tensors.values().map(|frame| frame.range.end - frame.range.start).sum();
    PlannedVersion::new(release.version, false, files.len() as u64, bytes, changed)
}

/// Takes every tensor through all versions, unless what is on disk is not `whole`. Returns how many elements
/// each changes.
fn rehearse(
    feed: &Feed,
    base: &Manifest,
    checkpoint: &Checkpoint,
    releases: &[Release],
    whole: bool,
) -> Result<Vec<Option<u64>>> {
    let names: BTreeSet<&str> =
        releases.iter().flat_map(|release| release.tensors.keys().map(String::as_str)).collect();
    let tensors = names
        .into_iter()
        .map(|name| Ok(base.tensors[position(base, name)?].info()))
        .collect::<Result<Vec<_>>>()?;
    if !whole {
        return Ok(vec![None; releases.len()]);
    }
    // What a tensor was and what it becomes.
    let weights = tensors.iter().map(|info| Ok(2 * info.byte_len()?)).collect::<Result<Vec<_>>>()?;
    let bounds = Bounds { threads: threads(WORKERS_MAX), weight: MEMORY_MAX };
    let mut total = vec![0; releases.len()];
    in_order(
        &weights,
        bounds,
        |index| Ok(&tensors[index]),
        |info| {
            let bytes = read(checkpoint, &info.name)?;
            changes(feed, &info.name, info.dtype.element().size(), bytes, releases)
        },
        |_, changed: Vec<u64>| {
            total.iter_mut().zip(changed).for_each(|(total, changed)| *total += changed);
            Ok(())
        },
    )?;
    Ok(total.into_iter().map(Some).collect())
}

/// Takes a tensor through the versions that change it.
fn changes(
    feed: &Feed,
    name: &str,
    element_bytes: usize,
    bytes: Vec<u8>,
    releases: &[Release],
) -> Result<Vec<u64>> {
    let mut now = bytes;
    let mut new = Vec::with_capacity(now.len());
    let change = |release: &Release| {
        let Some(frame) = release.tensors.get(name) else { return Ok(0) };
        new.clear();
        let (encoding, checksum) = (release.encoding, release.checksum);
        frame::rewrite(feed.store(), name, frame, encoding, checksum, &now, &mut |slice| {
            new.extend_from_slice(slice);
            Ok(())
        })?;
        std::mem::swap(&mut now, &mut new);
        let pairs = now.chunks(element_bytes).zip(new.chunks(element_bytes));
        Ok(pairs.filter(|(now, before)| now != before).count() as u64)
    };
    releases.iter().map(change).collect()
}

/// The bytes of a tensor, read and not mapped: without the directory's lock a follower may write to it.
fn read(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u8>> {
    let Some(place) = checkpoint.position(name).and_then(|index| checkpoint.place(index)) else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; place.length as usize];
    regular::open(place.path)
        .and_then(|file| file.read_exact_at(&mut bytes, place.offset))
        .map_err(|source| Error::io("read", place.path, source))?;
    Ok(bytes)
}
