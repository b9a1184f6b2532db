//! Samples and prompts as records of the log.

use driftless_buffer::{Kind, PromptState, Record, Sample, Scalars};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Rollouts;
use super::group::{Group, Made, Outcome};
use super::parts::Kept;
use crate::error::{Place, Result};
use crate::sample::{Prompt, Trajectory, sample_id};

/// A longer label is left out of the log.
const LABEL_BYTES_MAX: usize = 1 << 20;

/// The metadata of a prompt's record, as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct PromptNote {
    /// Where the prompt is from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Place>,
    /// What rewards compared with. Absent while the prompt is in flight, and in logs of earlier releases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<Box<RawValue>>,
    /// Why its samples are not learned from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<String>,
}

impl PromptNote {
    /// What a prompt's record says; nothing if it is another program's.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        serde_json::from_slice(record.metadata()).unwrap_or_default()
    }

    pub(super) fn in_flight(prompt: &Prompt) -> Self {
        PromptNote { source: Some(prompt.place.clone()), ..PromptNote::default() }
    }

    fn done(group: &Group) -> Self {
        let label = group.prompt.label.clone().filter(|label| label.get().len() <= LABEL_BYTES_MAX);
        let dropped = match &group.outcome {
            Outcome::Kept(_) => None,
            Outcome::Failed(error) => Some(error.clone()),
            Outcome::Filtered(why) => Some(format!("filtered: {why}")),
        };
        PromptNote { label, dropped, ..PromptNote::in_flight(&group.prompt) }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        // Texts and JSON are always JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

pub(super) fn prompt<'a>(
    number: u64,
    rollout: u64,
    state: PromptState,
    tokens: &'a [i32],
    note: &'a [u8],
) -> Sample<'a> {
    Sample {
        kind: Kind::Prompt,
        scalars: Scalars {
            sample_id: number,
            group_id: number,
            rollout_id: rollout,
            status: state.code(),
            ..Scalars::default()
        },
        prompt_len: tokens.len(),
        tokens,
        metadata: note,
        ..Sample::default()
    }
}

/// What is kept beside the first part of an answer.
fn kept(made: &Made) -> Vec<u8> {
    let metadata = made.parts.iter().rev().find_map(|part| part.metadata.as_deref());
    Kept::bytes(made.parts.len(), metadata)
}

fn sample<'a>(scalars: Scalars, trajectory: &'a Trajectory, metadata: &'a [u8]) -> Sample<'a> {
    Sample {
        scalars: Scalars { status: trajectory.finish.code(), ..scalars },
        prompt_len: trajectory.prompt_len,
        tokens: &trajectory.tokens,
        log_probs: &trajectory.log_probs,
        loss_mask: &trajectory.loss_mask,
        spans: &trajectory.spans,
        engine: &trajectory.engine,
        metadata,
        ..Sample::default()
    }
}

impl Rollouts {
    /// Makes groups durable together: their samples, then that their prompts are done.
    pub(super) fn append(&self, rollout: u64, groups: &[Group]) -> Result<()> {
        let notes: Vec<_> = groups.iter().map(|group| PromptNote::done(group).bytes()).collect();
        let kept: Vec<Vec<Vec<u8>>> = groups
            .iter()
            .map(|group| match &group.outcome {
                Outcome::Kept(made) => made.iter().map(kept).collect(),
                _ => Vec::new(),
            })
            .collect();
        let mut records = Vec::new();
        for ((group, note), kept) in groups.iter().zip(&notes).zip(&kept) {
            if let Outcome::Kept(made) = &group.outcome {
                for (made, kept) in made.iter().zip(kept) {
                    let scalars = Scalars {
                        group_id: group.number,
                        rollout_id: rollout,
                        reward: made.reward,
                        ..Scalars::default()
                    };
                    // The first part comes last: where it is, all are.
                    records.extend(made.parts.iter().enumerate().rev().map(|(part, trajectory)| {
                        let kept = if part == 0 { kept.as_slice() } else { &[] };
                        let scalars = Scalars { sample_id: sample_id(made.answer, part), ..scalars };
                        sample(scalars, trajectory, kept)
                    }));
                }
            }
            records.push(prompt(group.number, rollout, PromptState::Done, &group.prompt.tokens, note));
        }
        if !records.is_empty() {
            self.log.append_all(&records)?;
        }
        Ok(())
    }
}
