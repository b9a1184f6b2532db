//! What is damaged in a log, and how badly.

use std::path::PathBuf;

use crate::position::Position;

/// How bad a damaged place is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Severity {
    /// Incomplete after a crash; nothing shows that it was ever acknowledged.
    Torn,
    /// Was on stable storage and has changed since. The record is lost; its neighbours are not.
    Corrupt,
    /// Redundant bytes have changed; no record is affected.
    Redundant,
}

/// One damaged place.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// Byte offset in it.
    pub offset: u64,
    /// The position that is lost there, when it is known.
    pub position: Option<Position>,
    /// How bad it is.
    pub severity: Severity,
    /// What is damaged.
    pub what: &'static str,
}

/// What opening a log found.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Recovery {
    /// Segments that were not sealed and had to be scanned.
    pub scanned: usize,
    /// Positions in the log: records, and what was given up.
    pub positions: u64,
    /// Places in segments that had to be scanned, and in headers and trailers, that are not what was written.
    /// [`crate::check::verify`] checks everything.
    pub damage: Vec<Damage>,
}

/// What is wrong with one file.
pub(crate) struct Faults {
    pub(crate) path: PathBuf,
    pub(crate) found: Vec<Damage>,
}

impl Faults {
    pub(crate) fn of(path: PathBuf) -> Self {
        Self { path, found: Vec::new() }
    }

    pub(crate) fn note(
        &mut self,
        offset: usize,
        position: Option<u64>,
        severity: Severity,
        what: &'static str,
    ) {
        let (path, offset, position) = (self.path.clone(), offset as u64, position.map(Position));
        self.found.push(Damage { path, offset, position, severity, what });
    }
}
