//! What a run's own files say of its steps and versions.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;

use driftless_buffer::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// What a step learned from.
#[derive(Debug)]
pub(crate) struct Learned {
    pub(crate) groups: Vec<u64>,
    /// A digest of each sample. Runs of earlier releases have none.
    pub(crate) samples: Vec<String>,
    /// Of each group; unknown of runs of earlier releases.
    pub(crate) answers: Option<u64>,
}

/// What each step learned from, as `ledger.jsonl` has it. Where a step stands twice, the later line counts.
pub(crate) fn read(save: &Path) -> Result<BTreeMap<u64, Learned>> {
    #[derive(Deserialize)]
    struct Recipe {
        n_samples_per_prompt: u64,
    }
    #[derive(Deserialize)]
    struct Line {
        step: u64,
        groups: Vec<u64>,
        #[serde(default)]
        samples: Vec<String>,
        /// Absent where it is that of the line before.
        recipe: Option<Recipe>,
    }
    let (mut steps, mut last) = (BTreeMap::new(), None);
    for Line { step, groups, samples, recipe } in lines::<Line>(&save.join("ledger.jsonl"))? {
        last = recipe.map(|recipe| recipe.n_samples_per_prompt).or(last);
        // A line without samples is of an earlier release, which knew no recipe.
        let answers = last.filter(|_| !samples.is_empty());
        steps.insert(step, Learned { groups, samples, answers });
    }
    Ok(steps)
}

/// The answers of a group that failed, as the note of its prompt has them. The group went on without them.
pub(crate) fn failed(note: &[u8]) -> BTreeSet<u64> {
    #[derive(Deserialize)]
    struct Failed {
        answer: u64,
    }
    #[derive(Default, Deserialize)]
    struct Note {
        #[serde(default)]
        failed: Vec<Failed>,
    }
    let Note { failed } = serde_json::from_slice(note).unwrap_or_default();
    failed.into_iter().map(|failed| failed.answer).collect()
}

/// The optimiser step of each version, as `versions.jsonl` has them.
pub(crate) fn versions(save: &Path) -> Result<BTreeMap<u64, u64>> {
    #[derive(Deserialize)]
    struct Line {
        version: u64,
        step: u64,
    }
    let lines = lines::<Line>(&save.join("versions.jsonl"))?;
    Ok(lines.into_iter().map(|line| (line.version, line.step)).collect())
}

/// The lines of a file that are whole; none if it is absent.
fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(Error::Io { action: "read", path: path.to_owned(), source }),
    };
    let lines = bytes.split(|byte| *byte == b'\n');
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}
