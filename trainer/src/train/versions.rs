//! `versions.jsonl`: the optimiser step of each version, in the run's own directory. The store says it too, until it
//! collects the version; a run that learns old samples again still needs it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, io};

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    version: u64,
    step: u64,
}

/// The versions of a run that are known in its directory.
#[derive(Debug)]
pub(super) struct Versions {
    path: PathBuf,
    file: File,
    steps: BTreeMap<u64, u64>,
}

impl Versions {
    /// Reads the file, or begins it. A line that a crash tore is left out: what it said may still be in the store.
    pub(super) fn open(save: &Path) -> Result<Self> {
        let path = save.join("versions.jsonl");
        let options = File::options().read(true).append(true).create(true).open(&path);
        let file = options.map_err(io("open", &path))?;
        let bytes = std::fs::read(&path).map_err(io("read", &path))?;
        let lines = bytes.split(|byte| *byte == b'\n');
        let known = lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok());
        let steps = known.map(|line| (line.version, line.step)).collect();
        let mut versions = Versions { path, file, steps };
        if bytes.last().is_some_and(|last| *last != b'\n') {
            versions.write("\n")?;
        }
        Ok(versions)
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
        let line = serde_json::to_string(&Line { version, step })
            .map_err(|source| Error::Json { path: self.path.clone(), source })?;
        self.write(&format!("{line}\n"))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_line_is_left_out_and_the_next_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        Versions::open(dir.path()).unwrap().note(1, 2).unwrap();
        let mut torn = File::options().append(true).open(dir.path().join("versions.jsonl")).unwrap();
        torn.write_all(b"{\"version\":2,\"st").unwrap();
        Versions::open(dir.path()).unwrap().note(3, 4).unwrap();
        let versions = Versions::open(dir.path()).unwrap();
        assert_eq!([1, 2, 3].map(|version| versions.step_of(version)), [Some(2), None, Some(4)]);
    }
}
