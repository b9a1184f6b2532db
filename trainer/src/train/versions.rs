//! `versions.jsonl`: the optimiser step of each version, in the run's own directory. The store says it too, until it
//! collects the version; a run that learns old samples again still needs it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::lines::{self, Lines, Opened};

/// Its name.
const FILE: &str = "versions.jsonl";

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    version: u64,
    step: u64,
}

/// The versions of a run that are known in its directory.
#[derive(Debug)]
pub(super) struct Versions {
    lines: Lines,
    steps: BTreeMap<u64, u64>,
}

impl Versions {
    /// Reads the file, or begins it. What a torn line said may still be in the store.
    pub(super) fn open(save: &Path) -> Result<Self> {
        let Opened { lines, said } = Lines::open(save.join(FILE))?;
        Ok(Versions { lines, steps: by_version(said) })
    }

    /// The optimiser step of a version.
    pub(super) fn step_of(&self, version: u64) -> Option<u64> {
        self.steps.get(&version).copied()
    }

    /// Remembers the step of a version.
    pub(super) fn note(&mut self, version: u64, step: u64) -> Result<()> {
        if self.steps.insert(version, step) == Some(step) {
            return Ok(());
        }
        self.lines.append(&Line { version, step })
    }
}

/// The optimiser step of each version that the run in `save` knows.
pub(super) fn read(save: &Path) -> Result<BTreeMap<u64, u64>> {
    Ok(by_version(lines::read(&save.join(FILE))?))
}

fn by_version(lines: Vec<Line>) -> BTreeMap<u64, u64> {
    lines.into_iter().map(|line| (line.version, line.step)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn torn_line_is_left_out_and_the_next_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        Versions::open(dir.path()).unwrap().note(1, 2).unwrap();
        let mut torn = File::options().append(true).open(dir.path().join("versions.jsonl")).unwrap();
        torn.write_all(b"{\"version\":2,\"st").unwrap();
        Versions::open(dir.path()).unwrap().note(3, 4).unwrap();
        assert_eq!(read(dir.path()).unwrap(), [(1, 2), (3, 4)].into());
        let versions = Versions::open(dir.path()).unwrap();
        assert_eq!([1, 2, 3].map(|version| versions.step_of(version)), [Some(2), None, Some(4)]);
    }
}
