//! Samples and prompts as records of the log.

use driftless_buffer::{Kind, PromptState, Sample, Scalars};
use serde_json::json;

use super::Rollouts;
use super::group::{Group, Made, Outcome};
use crate::error::Result;
use crate::tasks::Prompt;

/// The metadata of a prompt's record: where it is from, and why it is not learned from.
pub(super) fn source(prompt: &Prompt, dropped: Option<&str>) -> String {
    match dropped {
        None => json!({ "source": prompt.source }),
        Some(why) => json!({ "source": prompt.source, "dropped": why }),
    }
    .to_string()
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

fn sample(rollout: u64, number: u64, made: &Made) -> Sample<'_> {
    let trajectory = &made.trajectory;
    Sample {
        scalars: Scalars {
            sample_id: made.sample,
            group_id: number,
            rollout_id: rollout,
            reward: made.reward,
            status: trajectory.finish.code(),
            clock_us: 0,
        },
        prompt_len: trajectory.prompt_len,
        tokens: &trajectory.tokens,
        log_probs: &trajectory.log_probs,
        loss_mask: &trajectory.loss_mask,
        spans: &trajectory.spans,
        engine: &trajectory.engine,
        ..Sample::default()
    }
}

impl Rollouts {
    /// Makes groups durable together: their samples, then that their prompts are done.
    pub(super) fn append(&self, rollout: u64, groups: &[Group]) -> Result<()> {
        let why = |group: &Group| match &group.outcome {
            Outcome::Kept(_) => None,
            Outcome::Failed(error) => Some(error.clone()),
            Outcome::Filtered => Some("filtered".to_owned()),
        };
        let sources: Vec<_> =
            groups.iter().map(|group| source(&group.prompt, why(group).as_deref())).collect();
        let mut records = Vec::new();
        for (group, source) in groups.iter().zip(&sources) {
            if let Outcome::Kept(made) = &group.outcome {
                records.extend(made.iter().map(|made| sample(rollout, group.number, made)));
            }
            records.push(prompt(group.number, rollout, PromptState::Done, &group.prompt.tokens, source));
        }
        if !records.is_empty() {
            self.log.append_all(&records)?;
        }
        Ok(())
    }
}
