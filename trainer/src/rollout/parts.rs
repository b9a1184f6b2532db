//! Groups as they lie in the log. An answer may have become several samples: the log has a record for each, and in
//! advantages and in the loss they count as one.

use driftless_buffer::{Group, Reader, Record};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::sample::{answers_of, sample_id};

/// What the log keeps beside the first part of an answer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Kept {
    /// How many parts there are; 1 if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<usize>,
    /// What rewards are given in place of the prompt's metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<Box<RawValue>>,
    /// The reward before it was processed, where that changed it. Beside each part.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw_reward: Option<f32>,
}

impl Kept {
    /// What is kept beside the first of so many parts.
    pub(super) fn first(parts: usize, metadata: Option<&RawValue>, raw_reward: Option<f32>) -> Self {
        let parts = (parts > 1).then_some(parts);
        Kept { parts, metadata: metadata.map(ToOwned::to_owned), raw_reward }
    }

    /// What is kept beside the others.
    pub(super) fn other(raw_reward: Option<f32>) -> Self {
        Kept { raw_reward, ..Kept::default() }
    }

    /// As bytes: none where nothing is kept.
    pub(super) fn bytes(&self) -> Vec<u8> {
        if self.parts.is_none() && self.metadata.is_none() && self.raw_reward.is_none() {
            return Vec::new();
        }
        // Finite numbers and JSON are always JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn of(record: &Record) -> Self {
        serde_json::from_slice(record.metadata()).unwrap_or_default()
    }

    fn parts(&self) -> usize {
        self.parts.unwrap_or(1)
    }
}

/// The reward of a sample as it was given, before a hook processed it.
pub(crate) fn raw_reward(record: &Record) -> f32 {
    Kept::of(record).raw_reward.unwrap_or(record.scalars().reward)
}

/// The parts of an answer of `group`, if the log has them all. The first part is written after the others and says how
/// many there are. Further parts are from an earlier try that a crash cut off.
pub(super) fn parts(log: &Reader, group: u64, answer: u64) -> Option<Vec<Record>> {
    let part = |part| {
        let record = log.sample(sample_id(answer, part)).ok().flatten();
        record.filter(|record| record.scalars().group_id == group)
    };
    let first = part(0)?;
    let others = (1..Kept::of(&first).parts()).map(part).collect::<Option<Vec<_>>>()?;
    Some(std::iter::once(first).chain(others).collect())
}

/// A group with all parts of its `answers` answers, by sample id, if the log has them.
pub(crate) fn group(log: &Reader, group: u64, answers: u64) -> Option<Group> {
    let answers = answers_of(group, answers).ok()?.map(|answer| parts(log, group, answer));
    let mut records: Vec<Record> = answers.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect();
    records.sort_by_key(|record| record.scalars().sample_id);
    let spans = records.iter().flat_map(|record| record.spans().to_vec()).map(|span| span.version);
    Some(Group {
        rollout_id: records.first()?.scalars().rollout_id,
        group_id: group,
        completed: records.iter().map(Record::position).max()?,
        versions: spans.fold(None, |range: Option<(u64, u64)>, version| {
            let (oldest, newest) = range.unwrap_or((version, version));
            Some((oldest.min(version), newest.max(version)))
        }),
        records,
    })
}
