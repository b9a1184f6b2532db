//! Answers that became several samples. The log has a record for each; in advantages and in the loss they
//! count as one.

use driftless_buffer::{Group, Reader, Record};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::sample::{answer_of, part_of};

/// What the log keeps beside the first part of an answer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Kept {
    /// How many parts there are; 1 if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<usize>,
    /// What rewards are given in place of the prompt's metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<Box<RawValue>>,
}

impl Kept {
    /// As bytes: none for a single part without metadata.
    pub(super) fn bytes(parts: usize, metadata: Option<&RawValue>) -> Vec<u8> {
        let parts = (parts > 1).then_some(parts);
        if parts.is_none() && metadata.is_none() {
            return Vec::new();
        }
        // Numbers and JSON are always JSON.
        serde_json::to_vec(&Kept { parts, metadata: metadata.map(ToOwned::to_owned) }).unwrap_or_default()
    }

    pub(super) fn of(record: &Record) -> Self {
        serde_json::from_slice(record.metadata()).unwrap_or_default()
    }

    pub(super) fn parts(&self) -> usize {
        self.parts.unwrap_or(1)
    }
}

/// The groups of a rollout that have `answers` answers in the log, each with all its parts.
///
/// The first part is written after the others and says how many there are. An answer with a first part is whole;
/// further parts are from an earlier try that a crash cut off.
pub(crate) fn groups(log: &Reader, rollout: u64, answers: usize) -> Vec<Group> {
    let mut groups = log.groups(rollout, answers);
    for group in &mut groups {
        let first = group.records.iter().filter(|record| part_of(record.scalars().sample_id) == 0);
        let parts: std::collections::BTreeMap<u64, usize> =
            first.map(|record| (record.scalars().sample_id, Kept::of(record).parts())).collect();
        group.records.retain(|record| {
            let id = record.scalars().sample_id;
            parts.get(&answer_of(id)).is_some_and(|parts| part_of(id) < *parts)
        });
    }
    let whole = |group: &Group| {
        group.records.iter().filter(|record| part_of(record.scalars().sample_id) == 0).count() >= answers
    };
    groups.retain(whole);
    groups
}
