//! Repairs a directory after a crash from what is in it, without a store or a follower.

use std::path::Path;

use driftless_store::os::remove_file;
use serde::Serialize;

use super::state::{Applied, Layout, Marker};
use super::{Replica, withhold};
use crate::error::{Error, Result};
use crate::ids::Version;

/// What [`Replica::repair`] found and did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Repaired {
    /// The version that the directory holds, every byte of it.
    pub applied: Applied,
    /// The version that it was marked with before.
    pub before: Option<Version>,
    /// Whether an apply had been interrupted: it was finished if `applied` is another version than `before`.
    /// Otherwise it was finished or had changed nothing, and what it left is gone.
    pub interrupted: bool,
}

impl Replica {
    /// Finishes or undoes what a crash interrupted in `dir`, and compares all of it with its digests. A
    /// directory that turns out to be damaged is left without its `config.json`, so that no engine starts
    /// from it; a follower builds it anew.
    ///
    /// # Errors
    ///
    /// [`Error::NothingApplied`] for a directory without a version;
    /// [`Locked`](driftless_store::Error::Locked) while another process has it; [`Error::DamagedReplica`];
    /// the file system's errors.
    pub fn repair(dir: &Path) -> Result<Repaired> {
        let layout = Layout::new(dir);
        let nothing = || Error::NothingApplied { path: dir.to_owned() };
        if !layout.root.is_dir() {
            return Err(nothing());
        }
        let before = Marker::read(&layout.marker()).ok().flatten().map(|marker| marker.applied.version);
        let interrupted = layout.journal().exists();
        let replica = Self::open(dir)?;
        let applied = replica.applied().cloned().ok_or_else(nothing)?;
        match replica.verify().map_err(|error| replica.classify(error)) {
            Err(damage @ Error::DamagedReplica { .. }) => {
                replica.distrust()?;
                Err(damage)
            }
            verified => verified.map(|()| Repaired { applied, before, interrupted }),
        }
    }

    /// Has the next open hash all of the directory, and engines refuse it until then.
    fn distrust(&self) -> Result<()> {
        withhold::take(&self.layout)?;
        let digests = self.layout.digests();
        remove_file(&digests).map_err(|source| Error::io("remove", digests, source))
    }
}
