//! Samples and prompts as records of the log.

use driftless_buffer::{Kind, PromptState, Record, Sample, Scalars};
use serde::{Deserialize, Serialize};

use super::Rollouts;
use super::group::{Group, Made, Outcome};
use super::parts::Kept;
use crate::error::{Place, Result};
use crate::sample::{Prompt, Trajectory, sample_id};

/// The metadata of a prompt's record.
#[derive(Serialize, Deserialize)]
struct Origin {
    /// Where the prompt is from.
    source: Place,
    /// Why it is not learned from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dropped: Option<String>,
}

/// The metadata of the record of `prompt`, which is not learned from if it was `dropped`.
pub(super) fn source(prompt: &Prompt, dropped: Option<String>) -> Vec<u8> {
    // Text is always JSON.
    serde_json::to_vec(&Origin { source: prompt.place.clone(), dropped }).unwrap_or_default()
}

/// Where the prompt of a record is from; nothing if the record does not say.
pub(crate) fn place_of(record: &Record) -> Option<Place> {
    serde_json::from_slice::<Origin>(record.metadata()).ok().map(|origin| origin.source)
}

pub(super) fn prompt<'a>(
    number: u64,
    rollout: u64,
    state: PromptState,
    tokens: &'a [i32],
    source: &'a [u8],
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
        metadata: source,
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
        let why = |group: &Group| match &group.outcome {
            Outcome::Kept(_) => None,
            Outcome::Failed(error) => Some(error.clone()),
            Outcome::Filtered(why) => Some(format!("filtered: {why}")),
        };
        let sources: Vec<_> = groups.iter().map(|group| source(&group.prompt, why(group))).collect();
        let kept: Vec<Vec<Vec<u8>>> = groups
            .iter()
            .map(|group| match &group.outcome {
                Outcome::Kept(made) => made.iter().map(kept).collect(),
                _ => Vec::new(),
            })
            .collect();
        let mut records = Vec::new();
        for ((group, source), kept) in groups.iter().zip(&sources).zip(&kept) {
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
            records.push(prompt(group.number, rollout, PromptState::Done, &group.prompt.tokens, source));
        }
        if !records.is_empty() {
            self.log.append_all(&records)?;
        }
        Ok(())
    }
}
