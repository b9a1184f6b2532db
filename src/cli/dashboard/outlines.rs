//! Answers of all steps, by what the log's index has of each: no record is read but those that are listed.

use super::samples::{Ask, Order};
use driftless::buffer::query::Outline;
use driftless::buffer::{Position, Reader, Record};
use driftless::trainer::rollout::PromptNote;
use std::collections::{BTreeMap, BTreeSet};

/// Answers that are listed.
const ROWS_MAX: usize = 200;
/// Causes that are told apart, and the longest name of one that no release knows.
const CAUSES_MAX: usize = 32;
const CAUSE_CHARS: usize = 40;

/// What was found.
pub(super) struct Found {
    /// In the order that was asked for.
    pub(super) records: Vec<Record>,
    /// Answers that the filter leaves, and those that were looked at.
    pub(super) total: usize,
    pub(super) looked: usize,
}

/// The first of the answers that are asked for.
pub(super) fn find(reader: &Reader, ask: &Ask) -> Found {
    let (mut first, mut total, mut looked) = (BTreeSet::<(u32, Position)>::new(), 0, 0);
    reader.outlines(|outline| {
        looked += 1;
        if !ask.is_wanted(outline) {
            return;
        }
        total += 1;
        let place = (rank(ask.order, outline), outline.position);
        if first.len() < ROWS_MAX || first.last().is_some_and(|last| place < *last) {
            first.insert(place);
        }
        if first.len() > ROWS_MAX {
            first.pop_last();
        }
    });
    // What is damaged is told by `log verify`.
    let records = first.iter().filter_map(|(_, position)| reader.get(*position).ok().flatten()).collect();
    Found { records, total, looked }
}

/// Where an answer stands, the first lowest; those without a reward are last by it.
fn rank(order: Order, outline: &Outline) -> u32 {
    let tokens = u32::try_from(outline.tokens).unwrap_or(u32::MAX);
    match order {
        Order::Log | Order::Mismatch => 0,
        Order::Worst => outline.reward.map_or(u32::MAX, ascending),
        Order::Best => outline.reward.map_or(u32::MAX, |reward| !ascending(reward)),
        Order::Longest => !tokens,
        Order::Shortest => tokens,
    }
}

/// A number in the order of floats.
fn ascending(float: f32) -> u32 {
    let bits = float.to_bits();
    if float.is_sign_negative() { !bits } else { bits | (1 << 31) }
}

/// What the index would have of a record.
pub(super) fn outline(record: &Record) -> Outline {
    let scalars = record.scalars();
    Outline {
        position: record.position(),
        rollout_id: scalars.rollout_id,
        group_id: scalars.group_id,
        reward: record.is_scored().then_some(scalars.reward),
        finish: record.finish(),
        tokens: record.response().len(),
        versions: record.versions(),
    }
}

/// Why no step learns from a group, in a word or a few; `None` where one may.
pub(super) fn cause(note: &PromptNote) -> Option<String> {
    let dropped = note.dropped.as_deref()?;
    Some(match note.outcome {
        Some(outcome) => outcome.name().to_owned(),
        None if dropped.contains("too old") => "too old".to_owned(),
        None => dropped.split(':').next().unwrap_or_default().chars().take(CAUSE_CHARS).collect(),
    })
}

/// Groups by their cause. Of many causes some are counted together.
pub(super) fn count(causes: impl IntoIterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for cause in causes {
        let is_told = counts.len() < CAUSES_MAX || counts.contains_key(&cause);
        *counts.entry(if is_told { cause } else { "others".to_owned() }).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_rewards_are_in_their_order() {
        let rewards = [f32::NEG_INFINITY, -2.0, -0.5, 0.0, 0.25, 1.0, f32::INFINITY];
        assert!(rewards.windows(2).all(|pair| ascending(pair[0]) < ascending(pair[1])));
        assert!(rewards.windows(2).all(|pair| !ascending(pair[0]) > !ascending(pair[1])));
    }

    #[test]
    fn causes_are_few_words_each_and_not_many() {
        let cause = |json: &str| cause(&serde_json::from_str(json).expect("a note"));
        assert_eq!(cause("{}"), None);
        assert_eq!(cause(r#"{"dropped": "x", "outcome": "environment"}"#).as_deref(), Some("environment"));
        assert_eq!(cause(r#"{"dropped": "filtered: all 1"}"#).as_deref(), Some("filtered"));
        assert_eq!(cause(r#"{"dropped": "all of its tokens are too old"}"#).as_deref(), Some("too old"));
        let counts = count((0..100).map(|number: u32| (number % 40).to_string()));
        assert_eq!((counts.len(), counts.values().sum::<usize>()), (CAUSES_MAX + 1, 100));
    }
}
