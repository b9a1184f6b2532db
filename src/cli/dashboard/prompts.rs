//! The answers to one prompt at other steps: what the policy makes of it, as it learns.

use driftless::buffer::{Reader, Record};
use driftless::trainer::rollout::PromptNote;
use driftless::trainer::sample::part_of;
use serde::Serialize;

use super::read::Taken;

/// Prompts that are looked at, from the newest on.
const LOOKED_MAX: usize = 16_384;
/// Groups that are listed.
const LISTED_MAX: usize = 32;

/// Another group of the same prompt.
#[derive(Serialize)]
pub(super) struct Again {
    /// The step that learned from it, or that it was generated for.
    step: u64,
    /// The mean of the rewards that its answers were given.
    reward: f64,
    answers: usize,
    /// Of its first answer.
    position: u64,
}

/// The other groups of the prompt of this one, by their steps: the newest that the log still has.
pub(super) fn again(reader: &Reader, group: u64, note: &PromptNote, taken: &Taken) -> Vec<Again> {
    let Some(source) = &note.source else { return Vec::new() };
    let others = (0..reader.next_prompt()).rev().take(LOOKED_MAX).filter(|number| *number != group);
    // What is damaged is told by `log verify`.
    let prompts = others.filter_map(|number| reader.prompt(number).ok().flatten());
    let same = prompts.filter(|prompt| PromptNote::of(prompt).source.as_ref() == Some(source));
    let mut found: Vec<Again> =
        same.filter_map(|prompt| of_group(reader, &prompt, taken)).take(LISTED_MAX).collect();
    found.sort_by_key(|again| (again.step, again.position));
    found
}

fn of_group(reader: &Reader, prompt: &Record, taken: &Taken) -> Option<Again> {
    let (number, seat) = (prompt.scalars().sample_id, prompt.scalars().rollout_id);
    let group = reader.group_of(seat, number, 1)?;
    // As it was given, once an answer.
    let answers: Vec<&Record> =
        group.records.iter().filter(|record| part_of(record.scalars().sample_id) == 0).collect();
    let reward = |record: &&Record| record.rewards().first().copied().unwrap_or(record.scalars().reward);
    Some(Again {
        step: taken.step_of(number, seat).unwrap_or(seat),
        reward: answers.iter().map(|record| f64::from(reward(record))).sum::<f64>()
            / answers.len().max(1) as f64,
        answers: answers.len(),
        position: answers.first()?.position().0,
    })
}
