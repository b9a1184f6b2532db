//! `ledger.jsonl`: the groups that each optimiser step learned from, in the run's own directory.
//!
//! A line is written before its step begins. A run that goes on learns from the same groups again, whatever else has
//! finished meanwhile. Where a step stands twice, the later line counts.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::lines::{self, Lines, Opened};

/// Its name.
const FILE: &str = "ledger.jsonl";

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    step: u64,
    groups: Vec<u64>,
}

/// The ledger of a run that goes on.
#[derive(Debug)]
pub(crate) struct Ledger {
    lines: Lines,
    steps: BTreeMap<u64, Vec<u64>>,
}

impl Ledger {
    /// Reads it, or begins it.
    pub(crate) fn open(save: &Path) -> Result<Self> {
        let Opened { lines, said } = Lines::open(save.join(FILE))?;
        Ok(Ledger { lines, steps: by_step(said) })
    }

    /// The groups of each step.
    pub(crate) fn steps(&self) -> &BTreeMap<u64, Vec<u64>> {
        &self.steps
    }

    /// Makes durable that `step` learns from these groups.
    pub(crate) fn note(&mut self, step: u64, groups: &[u64]) -> Result<()> {
        if self.steps.get(&step).is_some_and(|then| then == groups) {
            return Ok(());
        }
        self.lines.append(&Line { step, groups: groups.to_vec() })?;
        self.lines.sync()?;
        self.steps.insert(step, groups.to_vec());
        Ok(())
    }
}

/// The groups that each step of the run in `save` learned from. Runs of releases before it have none.
///
/// # Errors
/// [`crate::Error::Io`] with the path.
pub fn read(save: &Path) -> Result<BTreeMap<u64, Vec<u64>>> {
    Ok(by_step(lines::read(&save.join(FILE))?))
}

fn by_step(lines: Vec<Line>) -> BTreeMap<u64, Vec<u64>> {
    lines.into_iter().map(|line| (line.step, line.groups)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_line_of_a_step_counts_and_a_torn_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        ledger.note(0, &[0, 2]).unwrap();
        ledger.note(1, &[1, 3]).unwrap();
        let path = dir.path().join(FILE);
        let mut torn = std::fs::File::options().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut torn, b"{\"step\":2,\"gro").unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        ledger.note(1, &[3, 4]).unwrap();
        ledger.note(1, &[3, 4]).unwrap();
        assert_eq!(read(dir.path()).unwrap(), [(0, vec![0, 2]), (1, vec![3, 4])].into());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
    }
}
