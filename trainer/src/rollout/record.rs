//! Samples and prompts as records of the log.

use driftless_buffer::{Kind, PromptState, Record, Sample, Scalars};
use serde_json::json;

use super::Rollouts;
use super::group::{Group, Made, Outcome};
use super::parts::Kept;
use crate::error::Result;
use crate::sample::{Prompt, Trajectory, sample_id};

/// The metadata of a prompt's record: where it is from, and why it is not learned from.
pub(super) fn source(prompt: &Prompt, dropped: Option<&str>) -> String {
    match dropped {
        None => json!({ "source": prompt.source }),
        Some(why) => json!({ "source": prompt.source, "dropped": why }),
    }
    .to_string()
}

/// The file of a prompt's record, without the row.
pub(crate) fn file_of(record: &Record) -> String {
    let metadata: serde_json::Value = serde_json::from_slice(record.metadata()).unwrap_or_default();
    let source = metadata["source"].as_str().unwrap_or_default();
    source.rsplit_once(':').map_or(source, |(file, _)| file).to_owned()
}

pub(super) fn prompt<'a>(
    number: u64,
    rollout: u64,
    state: PromptState,
    tokens: &'a [i32],
    source: &'a str,
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
        metadata: source.as_bytes(),
        ..Sample::default()
    }
}

/// What is kept beside the first part of an answer.
fn kept(made: &Made) -> Vec<u8> {
    let metadata = made.parts.iter().rev().find_map(|part| part.metadata.as_deref());
    Kept::bytes(made.parts.len(), metadata)
}

fn sample<'a>(
    rollout: u64,
    group: u64,
    sample_id: u64,
    reward: f32,
    trajectory: &'a Trajectory,
    metadata: &'a [u8],
) -> Sample<'a> {
    Sample {
        scalars: Scalars {
            sample_id,
            group_id: group,
            rollout_id: rollout,
            reward,
            status: trajectory.finish.code(),
            clock_us: 0,
        },
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
        let sources: Vec<_> =
            groups.iter().map(|group| source(&group.prompt, why(group).as_deref())).collect();
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
                    // The first part comes last: where it is, all are.
                    records.extend(made.parts.iter().enumerate().rev().map(|(part, trajectory)| {
                        let kept = if part == 0 { kept.as_slice() } else { &[] };
                        let id = sample_id(made.answer, part);
                        sample(rollout, group.number, id, made.reward, trajectory, kept)
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
