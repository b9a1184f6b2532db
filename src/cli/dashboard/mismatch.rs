//! Which answers of a run the learner and the engines disagree on most, out of what its log holds of each step.

use crate::cli::shared::error::Result;
use driftless::buffer::{Position, Reader, learned::Learned};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::SystemTime;

/// Answers of a run that are kept.
const WORST_MAX: usize = 200;

/// The step that learned from an answer, and the furthest that the log-probs of one of its tokens are apart, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Mismatch {
    pub(super) step: u64,
    pub(super) nats: f32,
}

/// Mismatches of answers.
pub(super) type Mismatches = BTreeMap<Position, Mismatch>;

/// Those of a step.
pub(super) fn of_step(learned: &Learned, step: u64) -> Mismatches {
    let rows = learned.rows().iter();
    rows.filter_map(|row| Some((row.position, Mismatch { step, nats: row.mismatch? }))).collect()
}

/// The largest of a run. What was read once is read again only where it changed.
#[derive(Debug, Default)]
pub(super) struct Worst {
    /// Steps that were read, and when each was written.
    read: BTreeMap<u64, SystemTime>,
    largest: Mismatches,
}

impl Worst {
    /// Reads what is new. A step that cannot be read is left out; what it has to say comes back.
    pub(super) fn look(&mut self, reader: &Reader) -> Result<(&Mismatches, Option<String>)> {
        let (steps, mut untold) = (reader.learned_steps()?, None);
        let is_known = |step: &u64, at: Option<&SystemTime>| at.is_some_and(|at| steps.get(step) == Some(at));
        let read = std::mem::take(&mut self.read);
        // What a run did again, or retention has removed, counts no more.
        self.largest.retain(|_, worst| is_known(&worst.step, read.get(&worst.step)));
        for (step, at) in &steps {
            if !is_known(step, read.get(step)) {
                match reader.learned(*step) {
                    Ok(learned) => self.add(&learned.map(|some| of_step(&some, *step)).unwrap_or_default()),
                    Err(error) => {
                        untold = Some(error.to_string());
                        continue;
                    }
                }
            }
            self.read.insert(*step, *at);
        }
        Ok((&self.largest, untold))
    }

    /// Keeps the largest of what it has and of these.
    fn add(&mut self, others: &Mismatches) {
        let mut all: Vec<_> = self.largest.iter().chain(others).map(|(at, worst)| (*at, *worst)).collect();
        all.sort_by(|(_, one), (_, other)| other.nats.total_cmp(&one.nats));
        all.truncate(WORST_MAX);
        self.largest = all.into_iter().collect();
    }
}

/// The order of answers by their mismatch, the largest first; those without one last.
pub(super) fn rank(mismatch: Option<&Mismatch>) -> Reverse<u32> {
    // Bits of floats that are not negative are in the order of their values.
    Reverse(mismatch.map_or(0, |mismatch| mismatch.nats.to_bits() + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless::buffer::learned::Column;
    use driftless::buffer::{Identity, Log, Options};

    fn log(dir: &std::path::Path) -> Log {
        let identity = Identity { run_id: [1; 16], model: "policy".into(), tokenizer_digest: [0; 32] };
        Log::open(dir, Options::new(identity)).expect("a log")
    }

    fn write(log: &Log, step: u64, mismatches: &[(u64, f32)]) {
        let values: Vec<_> = mismatches.iter().map(|(position, nats)| (*position, [-nats])).collect();
        let columns = values.iter().map(|(position, log_probs)| Column {
            position: Position(*position),
            log_probs,
            engine_log_probs: &[0.0],
        });
        log.reader().write_learned(step, &columns.collect::<Vec<_>>()).expect("a disk");
    }

    #[test]
    fn largest_mismatches_are_of_all_steps_as_they_were_done_last() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = log(dir.path());
        let many: Vec<_> = (0..300).map(|at| (at, at as f32 / 1000.0)).collect();
        write(&log, 0, &many);
        write(&log, 1, &[(400, 2.0), (401, 0.001)]);
        let (mut worst, reader) = (Worst::default(), log.reader());
        let (found, untold) = worst.look(&reader).expect("files");
        assert_eq!((found.len(), untold), (WORST_MAX, None));
        let first = found.iter().min_by_key(|(_, mismatch)| rank(Some(mismatch))).expect("some");
        assert_eq!(first, (&Position(400), &Mismatch { step: 1, nats: 2.0 }));
        assert!(!found.contains_key(&Position(100)) && found.contains_key(&Position(101)));
        let path = dir.path().join("learned/00000000000000000001.columns");
        std::fs::write(path, "not columns").expect("a file");
        write(&log, 2, &[(500, 3.0)]);
        let (found, untold) = worst.look(&reader).expect("files");
        assert!(!found.contains_key(&Position(400)) && found.contains_key(&Position(500)));
        assert!(untold.is_some_and(|why| why.contains("damaged header of columns")));
    }
}
