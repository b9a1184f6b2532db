//! Whether a run trained on what its engines drew: each step's samples in the log against the digests that were made of the
//! engines' replies. It reads `ledger.jsonl`, `versions.jsonl` and the digests by itself, and shares nothing with what wrote
//! them but their forms.

mod digest;
mod ledger;
mod sample;
#[cfg(test)]
mod tests;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use driftless_buffer::sample::Scalars;
use driftless_buffer::{self as buffer, Kind, Position, Reader, Record, Result};
use serde::Serialize;

use ledger::Learned;
use sample::Trained;

/// Faults that a report names. It counts all.
const NAMED_MAX: usize = 20;

/// What was checked of a run, and what was found.
#[derive(Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Steps that `ledger.jsonl` has.
    pub steps: u64,
    /// Groups that they learned from.
    pub groups: u64,
    /// Answers of these groups that the log has.
    pub answers: u64,
    /// Samples of these answers.
    pub samples: u64,
    /// Replies of engines whose digests were compared.
    pub replies: u64,
    /// Tokens that were trained on and are in one of these replies, unless a fault says otherwise.
    pub tokens: u64,
    /// Samples of which the ledger's own digest was compared.
    pub samples_learned: u64,
    /// What could not be checked.
    pub unchecked: Unchecked,
    /// How many faults there are.
    pub faults: u64,
    /// The first of them.
    pub first: Vec<Fault>,
}

/// What could not be checked, and why.
#[derive(Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Unchecked {
    /// Samples of a release that kept no digests of replies.
    pub earlier_release: u64,
    /// Trained tokens of theirs.
    pub tokens: u64,
    /// Groups of which retention has removed something.
    pub removed: u64,
    /// Steps whose newest version is not known, so that versions were compared with none.
    pub steps_without_version: u64,
}

/// Something that is not as it has to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Fault {
    /// The step that learned from it.
    pub step: u64,
    /// The group.
    pub group: u64,
    /// Position of the record in the log.
    pub position: Option<u64>,
    /// Id of the sample.
    pub sample: Option<u64>,
    /// First of its response tokens, and one past the last.
    pub tokens: Option<[u32; 2]>,
    /// What is wrong.
    pub what: &'static str,
    /// What it has to be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl Fault {
    fn of(what: &'static str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Fault { what, expected: expected.into(), found: found.into(), ..Fault::default() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, group {}", self.step, self.group)?;
        if let (Some(position), Some(sample)) = (self.position, self.sample) {
            write!(f, ", position {position}, answer {}, part {}", answer_of(sample), part_of(sample))?;
        }
        if let Some([start, end]) = self.tokens {
            write!(f, ", response tokens {start}..{end}")?;
        }
        write!(f, ": {}: expected {}, found {}", self.what, self.expected, self.found)
    }
}

/// Checks what the run in `save` learned from, as far as its log has it.
///
/// # Errors
/// Those of the log's reader, and [`buffer::Error::Io`] for other files that cannot be read. What is wrong with them is in the
/// report.
pub fn verify(save: &Path, log: &Path) -> Result<Report> {
    // First: what a run that goes on notes after this is in the log that is read after it.
    let steps = ledger::read(save)?;
    let versions = ledger::versions(save)?;
    let log = Log::read(log, steps.values().flat_map(|learned| learned.groups.iter().copied()).collect())?;
    let mut verifier = Verifier { log, report: Report::default(), taken: BTreeMap::new() };
    for (step, learned) in &steps {
        verifier.step(*step, learned, newest(&versions, *step))?;
    }
    Ok(verifier.report)
}

/// The newest version that there was when a step began.
fn newest(versions: &BTreeMap<u64, u64>, step: u64) -> Option<u64> {
    versions.iter().rev().find(|(_, made)| **made <= step).map(|(version, _)| *version)
}

/// The answer of a sample.
fn answer_of(sample_id: u64) -> u64 {
    sample_id % Scalars::ANSWERS_MAX
}

/// Which of its answer's samples it is.
fn part_of(sample_id: u64) -> usize {
    usize::try_from(sample_id / Scalars::ANSWERS_MAX).unwrap_or(usize::MAX)
}

/// The samples that a log has of some groups.
struct Log {
    reader: Reader,
    /// Of each group, by answer and part: where the newest record of it is.
    groups: BTreeMap<u64, BTreeMap<(u64, usize), Position>>,
}

impl Log {
    fn read(dir: &Path, wanted: BTreeSet<u64>) -> Result<Self> {
        let reader = Reader::open(dir)?;
        let mut groups: BTreeMap<u64, BTreeMap<_, _>> = BTreeMap::new();
        for record in reader.iter(reader.oldest()) {
            // An answer that is damaged is missed where its group is looked for.
            let Ok(record) = record else { continue };
            let scalars = record.scalars();
            if record.kind() == Kind::Sample && !scalars.evaluation && wanted.contains(&scalars.group_id) {
                let place = (answer_of(scalars.sample_id), part_of(scalars.sample_id));
                groups.entry(scalars.group_id).or_default().insert(place, record.position());
            }
        }
        Ok(Log { reader, groups })
    }

    /// Answers that a group went on without.
    fn failed(&self, group: u64) -> BTreeSet<u64> {
        let prompt = self.reader.prompt(group).ok().flatten();
        prompt.map_or_else(BTreeSet::new, |prompt| ledger::failed(prompt.metadata()))
    }

    /// The samples of a group, by id. A part of which the first says nothing is of an earlier try.
    fn samples(&self, group: u64) -> Result<Vec<Record>> {
        let mut samples = Vec::new();
        let mut parts = BTreeMap::new();
        for ((answer, part), position) in self.groups.get(&group).into_iter().flatten() {
            let record = match self.reader.get(*position) {
                Ok(Some(record)) => record,
                Ok(None) | Err(buffer::Error::Retired { .. } | buffer::Error::Damaged { .. }) => continue,
                Err(error) => return Err(error),
            };
            if *part == 0 {
                // Earlier releases say elsewhere how many there are.
                let said = usize::from(record.scalars().parts);
                parts.insert(*answer, if said == 0 { usize::MAX } else { said });
            }
            if parts.get(answer).is_some_and(|parts| part < parts) {
                samples.push(record);
            }
        }
        // In the order of the ledger's digests.
        samples.sort_by_key(|record| record.scalars().sample_id);
        Ok(samples)
    }
}

struct Verifier {
    log: Log,
    report: Report,
    /// The step of each group.
    taken: BTreeMap<u64, u64>,
}

impl Verifier {
    fn step(&mut self, step: u64, learned: &Learned, newest: Option<u64>) -> Result<()> {
        self.report.steps += 1;
        self.report.unchecked.steps_without_version += u64::from(newest.is_none());
        let (mut digests, mut is_whole) = (Vec::new(), true);
        for &group in &learned.groups {
            self.report.groups += 1;
            if let Some(fault) = self.take(group, step) {
                self.found(step, group, fault);
            }
            let failed = self.log.failed(group);
            let mut samples = self.log.samples(group)?;
            // One that got no reward has samples that no step learned from.
            samples.retain(|record| !failed.contains(&answer_of(record.scalars().sample_id)));
            let expected = learned.answers.unwrap_or(1).saturating_sub(failed.len() as u64);
            is_whole &= self.is_whole(step, group, learned.answers.is_some(), expected, &samples);
            let mut trained = Trained::default();
            for record in &samples {
                self.sample(step, group, record, newest, &mut trained);
                digests.push((group, record.clone()));
            }
        }
        if is_whole && !learned.samples.is_empty() {
            self.learned(step, learned, &digests);
        }
        Ok(())
    }

    /// Notes that a step learned from a group; what is wrong if another did.
    fn take(&mut self, group: u64, step: u64) -> Option<Fault> {
        match self.taken.entry(group) {
            Entry::Vacant(free) => {
                free.insert(step);
                None
            }
            Entry::Occupied(taken) => {
                let found = format!("one of step {}", taken.get());
                Some(Fault::of("group", "one that no other step learned from", found))
            }
        }
    }

    /// Whether the log has so many answers of a group, or more where that `is_exact` not, each with all its samples.
    fn is_whole(&mut self, step: u64, group: u64, is_exact: bool, expected: u64, samples: &[Record]) -> bool {
        let mut answers: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
        for record in samples {
            let scalars = record.scalars();
            let parts = usize::from(scalars.parts);
            let found = answers.entry(answer_of(scalars.sample_id)).or_insert((parts, 0));
            found.1 += 1;
        }
        self.report.answers += answers.len() as u64;
        let whole = answers.values().filter(|(parts, found)| *parts == 0 || parts == found).count() as u64;
        let is_whole = whole == answers.len() as u64 && whole >= expected;
        if !is_whole && self.log.reader.oldest().0 > 0 {
            self.report.unchecked.removed += 1;
        } else if !is_whole || (is_exact && whole > expected) {
            let fault =
                Fault::of("whole answers of the group in the log", expected.to_string(), whole.to_string());
            self.found(step, group, fault);
        }
        is_whole
    }

    fn sample(
        &mut self,
        step: u64,
        group: u64,
        record: &Record,
        newest: Option<u64>,
        of_group: &mut Trained,
    ) {
        let sample::Checked { replies, trained, faults } = sample::check(record, newest, of_group);
        self.report.samples += 1;
        match replies {
            Some(replies) => {
                self.report.replies += replies;
                self.report.tokens += trained;
            }
            None if faults.is_empty() => {
                self.report.unchecked.earlier_release += 1;
                self.report.unchecked.tokens += trained;
            }
            None => {}
        }
        faults.into_iter().for_each(|fault| self.found(step, group, fault));
    }

    /// Compares the samples of a step with the digests that the ledger has of them.
    fn learned(&mut self, step: u64, learned: &Learned, samples: &[(u64, Record)]) {
        if learned.samples.len() != samples.len() {
            let (expected, found) = (learned.samples.len().to_string(), samples.len().to_string());
            let group = learned.groups.first().copied().unwrap_or_default();
            return self.found(step, group, Fault::of("samples of the step in the log", expected, found));
        }
        for ((group, record), expected) in samples.iter().zip(&learned.samples) {
            self.report.samples_learned += 1;
            let found = digest::of_sample(record);
            if found != *expected {
                let fault = Fault::of("digest of the sample in ledger.jsonl", expected, found);
                let (position, sample) = (Some(record.position().0), Some(record.scalars().sample_id));
                self.found(step, *group, Fault { position, sample, ..fault });
            }
        }
    }

    fn found(&mut self, step: u64, group: u64, fault: Fault) {
        self.report.faults += 1;
        if self.report.first.len() < NAMED_MAX {
            self.report.first.push(Fault { step, group, ..fault });
        }
    }
}
