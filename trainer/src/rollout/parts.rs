//! Groups as they lie in the log. An answer may have become several samples: the log has a record for each, and in
//! advantages and in the loss they count as one.

use std::collections::BTreeMap;

use driftless_buffer::sample::Verdict;
use driftless_buffer::{Group, Kind, Reader, Record};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::record::PromptNote;
use crate::sample::{Trajectory, answers_of, sample_id};

/// What the log keeps beside the first part of an answer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// What rewards are given in place of the prompt's metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<Box<RawValue>>,
    /// The reward, where what made the answer gave one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reward: Option<f32>,
    /// What it is made of, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) components: BTreeMap<String, f32>,
    /// How many parts there are. Of releases before, like all that follows.
    #[serde(skip_serializing)]
    parts: Option<usize>,
    /// The reward before it was processed, where that changed it. Beside each part.
    #[serde(skip_serializing)]
    raw_reward: Option<f32>,
}

impl Kept {
    /// What is kept beside an answer, as bytes: none where nothing is.
    pub(super) fn bytes(parts: &[Trajectory]) -> Vec<u8> {
        let kept = Kept {
            metadata: parts.iter().rev().find_map(|part| part.metadata.clone()),
            reward: parts.iter().rev().find_map(|part| part.reward),
            components: components(parts),
            ..Kept::default()
        };
        kept.json()
    }

    /// What is kept beside a score.
    pub(super) fn of_score(components: &BTreeMap<String, f32>) -> Vec<u8> {
        Kept { components: components.clone(), ..Kept::default() }.json()
    }

    fn json(&self) -> Vec<u8> {
        // JSON is always JSON.
        serde_json::to_vec(self).ok().filter(|kept| kept != b"{}").unwrap_or_default()
    }

    /// What is kept beside a sample and its score.
    pub(crate) fn of(record: &Record) -> Self {
        let of = |record: &Record| serde_json::from_slice::<Kept>(record.metadata()).unwrap_or_default();
        let kept = of(record);
        let components = record.score().map_or_else(BTreeMap::new, |score| of(score).components);
        if components.is_empty() { kept } else { Kept { components, ..kept } }
    }
}

/// What the reward of an answer is made of, by name.
pub(super) fn components(parts: &[Trajectory]) -> BTreeMap<String, f32> {
    let last = parts.iter().rev().find(|part| !part.components.is_empty());
    last.map(|part| part.components.clone()).unwrap_or_default()
}

/// The reward of a sample as it was given, before a hook processed it.
pub(crate) fn raw_reward(record: &Record) -> f32 {
    let raw = record.rewards().first().copied().or_else(|| Kept::of(record).raw_reward);
    raw.unwrap_or(record.scalars().reward)
}

/// The parts of an answer of `group`, if the log has them all, with or without a score. The first part is written after
/// the others and says how many there are. Further parts are from an earlier try that a crash cut off.
pub(super) fn parts(log: &Reader, group: u64, answer: u64) -> Option<Vec<Record>> {
    let part = |part| {
        let record = log.sample(sample_id(answer, part)).ok().flatten();
        record.filter(|record| record.scalars().group_id == group && record.kind() == Kind::Sample)
    };
    let first = part(0)?;
    let count = match first.scalars().parts {
        0 => Kept::of(&first).parts.unwrap_or(1),
        parts => usize::from(parts),
    };
    let others = (1..count).map(part).collect::<Option<Vec<_>>>()?;
    Some(std::iter::once(first).chain(others).collect())
}

/// A group with all parts of its `answers` answers, by sample id, if the log has them with their scores, and none is left
/// out. Those that failed for good, or got no reward, are in none.
pub(crate) fn group(log: &Reader, group: u64, answers: u64) -> Option<Group> {
    let prompt = log.prompt(group).ok().flatten();
    let failed = prompt.map_or_else(Vec::new, |prompt| PromptNote::of(&prompt).failed);
    let is_ready = |record: &Record| record.is_scored() && record.verdict() != Verdict::LeftOut;
    let mut records = Vec::new();
    for answer in answers_of(group, answers).ok()? {
        // One that failed may have a score of an earlier try, which a crash cut off.
        if failed.iter().all(|failed| failed.answer != answer) {
            records.extend(parts(log, group, answer).filter(|parts| parts.iter().all(is_ready))?);
        }
    }
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
