//! Says what an advance would fetch and apply, without doing any of it.

use std::collections::BTreeSet;
use std::path::Path;

use driftless_store::Error as StoreError;
use serde::Serialize;

use super::Applied;
use super::state::{Copy, Layout, Marker, read_optional};
use super::{Replica, check_model, fold, quarantine};
use crate::error::{Error, Result};
use crate::ids::{RunId, Version};
use crate::manifest::{Base, File, Kind, Manifest};
use crate::run::{Committed, Run};

/// What [`Replica::advance`] would do to a directory as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// The run.
    pub run_id: RunId,
    /// The model within the run.
    pub model: String,
    /// The version in the directory; `None` if it holds none that could be built upon.
    pub from: Option<Version>,
    /// The version that it would be brought to.
    pub to: Version,
    /// Whether an apply was interrupted, which would be finished first and may be one of these already.
    pub unfinished: bool,
    /// Objects that would be fetched.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Elements that would change: by the manifests' account, or counted where versions say nothing of it.
    /// `None` for slime's layout while an apply is unfinished, because there is nothing whole to compare
    /// with.
    pub changed: Option<u64>,
    /// The publications, oldest first; none if the version is there.
    pub versions: Vec<PlannedVersion>,
}

/// One publication of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlannedVersion {
    /// Its version.
    pub version: Version,
    /// Whether it would be taken in full: fetched whole, or copied from the reference directory.
    pub full: bool,
    /// Objects of it that would be fetched.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Elements that it changes; `None` as in [`Plan::changed`].
    pub changed: Option<u64>,
}

impl Replica {
    /// What bringing `dir` to version `to` of `model` would take. Reads manifests and the directory's state,
    /// and writes nothing, not even a lock: what other processes do to the directory meanwhile is not seen.
    /// The weights are taken at their word.
    ///
    /// # Errors
    ///
    /// [`Error::Rewind`](crate::Error), `ForeignRun` and `ForeignModel` as [`Replica::advance`] would give;
    /// the store's and the file system's errors.
    pub fn plan(dir: &Path, run: &Run, model: &str, to: Version) -> Result<Plan> {
        let layout = Layout::new(dir);
        // A state that cannot be read is one that would be built anew.
        let state = read(&layout).ok().flatten();
        let pinned = match &state {
            Some((marker, _)) => Some(marker.applied.clone()),
            None => quarantine::pinned(&layout)?,
        };
        if let Some(pinned) = pinned {
            run.check_id(dir.display(), pinned.run_id)?;
            check_model(dir, &pinned.model, model)?;
        }
        let base = state.as_ref().map(|(_, copy)| Committed::new(copy.manifest.clone(), copy.digest));
        let chain = run.chain(model, base.as_ref().map(Committed::identity), to)?;
        let start = base.as_ref().filter(|_| !chain.restart);
        let versions = planned(start.map(|base| (base.identity(), &base.manifest)), &chain.versions);
        let from = base.map(|base| base.manifest.version);
        Ok(Plan::of(run.id(), model, from, to, layout.journal().exists(), versions))
    }
}

impl PlannedVersion {
    /// A publication in as many objects and bytes.
    #[must_use]
    pub fn new(version: Version, full: bool, objects: u64, bytes: u64, changed: Option<u64>) -> Self {
        Self { version, full, objects, bytes, changed }
    }
}

impl Plan {
    /// The plan that takes `versions` of a model of a run, from one version to another.
    #[must_use]
    pub fn of(
        run_id: RunId,
        model: &str,
        from: Option<Version>,
        to: Version,
        unfinished: bool,
        versions: Vec<PlannedVersion>,
    ) -> Self {
        Self {
            run_id,
            model: model.to_owned(),
            from,
            to,
            unfinished,
            objects: versions.iter().map(|committed| committed.objects).sum(),
            bytes: versions.iter().map(|committed| committed.bytes).sum(),
            changed: versions.iter().map(|committed| committed.changed).sum(),
            versions,
        }
    }
}

/// What a directory says that it holds.
#[derive(Debug, PartialEq)]
pub struct OnDisk {
    /// The version, unless there is none that could be built upon.
    pub version: Option<(Applied, Manifest)>,
    /// Whether an apply is under way, or was interrupted.
    pub unfinished: bool,
    /// Whether a replica was ever begun in it.
    pub begun: bool,
}

impl OnDisk {
    /// Reads the state of `dir`, which need not exist, and writes nothing. One that is damaged counts as
    /// none: following builds it anew.
    ///
    /// # Errors
    /// The file system's.
    pub fn read(dir: &Path) -> Result<Self> {
        let layout = Layout::new(dir);
        let state = match read(&layout) {
            Err(error @ Error::Store(StoreError::Io { .. })) => return Err(error),
            state => state.ok().flatten(),
        };
        let version = state.map(|(marker, copy)| (marker.applied, copy.manifest));
        let unfinished = layout.journal().exists();
        Ok(Self { version, unfinished, begun: unfinished || layout.marker().exists() })
    }
}

fn read(layout: &Layout) -> Result<Option<(Marker, Copy)>> {
    let Some(marker) = Marker::read(&layout.marker())? else { return Ok(None) };
    let Some(bytes) = read_optional(&layout.manifest())? else { return Ok(None) };
    Ok(Some((marker, Copy::parse(&bytes)?)))
}

/// The versions in the portions in which [`Replica::advance`] applies them.
fn planned(base: Option<(Base, &Manifest)>, chain: &[Committed]) -> Vec<PlannedVersion> {
    let mut planned = Vec::with_capacity(chain.len());
    let mut base = base;
    let mut rest = chain;
    while let Some(first) = rest.first() {
        let builds = |(base, _): &(Base, &Manifest)| {
            first.manifest.kind == Kind::Delta && first.manifest.base == Some(*base)
        };
        let on = base.filter(builds).map(|(_, manifest)| manifest);
        let length =
            if first.manifest.kind == Kind::Reference { 1 } else { fold::fold_length(rest, on.is_none()) };
        let (portion, behind) = rest.split_at(length.clamp(1, rest.len()));
        let wanted = wanted(on, portion);
        planned.extend(portion.iter().enumerate().map(|(number, committed)| {
            let objects = wanted.range((number, 0)..(number + 1, 0));
            let sizes = objects.filter_map(|(_, object)| committed.manifest.objects.get(*object as usize));
            PlannedVersion {
                version: committed.manifest.version,
                full: number == 0 && on.is_none(),
                objects: sizes.clone().count() as u64,
                bytes: sizes.map(|object| object.size).sum(),
                changed: Some(committed.manifest.changed),
            }
        }));
        base = portion.last().map(|last| (last.identity(), &last.manifest));
        rest = behind;
    }
    planned
}

/// The objects of versions that are applied at once, on `base` or in full, that hold anything needed.
fn wanted(base: Option<&Manifest>, versions: &[Committed]) -> BTreeSet<(usize, u32)> {
    let mut wanted = BTreeSet::new();
    for (number, committed) in versions.iter().enumerate() {
        for tensor in &committed.manifest.tensors {
            let full = committed.manifest.full_pieces(tensor).filter(|_| number == 0 && base.is_none());
            let pieces = full.unwrap_or(&tensor.pieces);
            wanted.extend(pieces.iter().map(|piece| (number, piece.object)));
        }
    }
    let kept: &[File] = base.map_or(&[], |base| &base.files);
    for (number, file) in fold::carried_files(kept, versions) {
        wanted.extend(file.parts.iter().map(|part| (number, part.object)));
    }
    wanted
}
