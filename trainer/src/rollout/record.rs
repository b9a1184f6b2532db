//! Samples and prompts as records of the log.

use driftless_buffer::{Kind, Log, PromptState, Record, Sample, Scalars};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::group::{Group, Made, Outcome};
use super::parts::Kept;
use super::{Begun, Rollouts};
use crate::error::{Place, Result};
use crate::metrics::unix_us;
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
        let label = group.begun.prompt.label.clone().filter(|label| label.get().len() <= LABEL_BYTES_MAX);
        let dropped = match &group.outcome {
            Outcome::Kept(_) | Outcome::Returned(_) => None,
            Outcome::Failed(error) => Some(error.clone()),
            Outcome::Filtered(why) => Some(format!("filtered: {why}")),
        };
        PromptNote { label, dropped, ..PromptNote::in_flight(&group.begun.prompt) }
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

/// What is kept beside the parts of an answer.
struct Beside {
    first: Vec<u8>,
    others: Vec<u8>,
}

fn beside(made: &Made) -> Beside {
    let metadata = made.parts.iter().rev().find_map(|part| part.metadata.as_deref());
    let first = Kept::first(made.parts.len(), metadata, made.raw_reward);
    Beside { first: first.bytes(), others: Kept::other(made.raw_reward).bytes() }
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

/// Makes durable that no step learns from a group that is done, for this reason.
pub(crate) fn leave_out(log: &Log, number: u64, why: &str) -> Result<()> {
    let Some(record) = log.reader().prompt(number)? else { return Ok(()) };
    let note = PromptNote { dropped: Some(why.to_owned()), ..PromptNote::of(&record) }.bytes();
    let seat = record.scalars().rollout_id;
    log.append_all(&[prompt(number, seat, PromptState::Done, record.tokens(), &note)])?;
    Ok(())
}

impl Rollouts {
    /// Makes durable that groups are under way.
    pub(super) fn append_begun(&self, begun: &[Begun]) -> Result<()> {
        let notes: Vec<_> = begun.iter().map(|begun| PromptNote::in_flight(&begun.prompt).bytes()).collect();
        let records = begun.iter().zip(&notes).map(|(begun, note)| {
            prompt(begun.number, begun.seat, PromptState::InFlight, &begun.prompt.tokens, note)
        });
        let records: Vec<_> = records.collect();
        self.log.append_all(&records)?;
        Ok(())
    }

    /// Makes groups durable together: their samples, then that their prompts are done. Those that are tried again are
    /// in flight as they were.
    pub(super) fn append(&self, groups: &[Group]) -> Result<()> {
        let ended = groups.iter().filter(|group| !matches!(group.outcome, Outcome::Returned(_)));
        let ended: Vec<&Group> = ended.collect();
        let notes: Vec<_> = ended.iter().map(|group| PromptNote::done(group).bytes()).collect();
        let kept: Vec<Vec<Beside>> = ended
            .iter()
            .map(|group| match &group.outcome {
                Outcome::Kept(made) => made.iter().map(beside).collect(),
                _ => Vec::new(),
            })
            .collect();
        let mut records = Vec::new();
        for ((group, note), kept) in ended.iter().zip(&notes).zip(&kept) {
            let Begun { number, seat, prompt: taken, .. } = &group.begun;
            if let Outcome::Kept(made) = &group.outcome {
                for (made, kept) in made.iter().zip(kept) {
                    let scalars = Scalars {
                        group_id: *number,
                        rollout_id: *seat,
                        reward: made.reward,
                        clock_us: unix_us(made.at),
                        ..Scalars::default()
                    };
                    // The first part comes last: where it is, all are.
                    records.extend(made.parts.iter().enumerate().rev().map(|(part, trajectory)| {
                        let kept = if part == 0 { &kept.first } else { &kept.others };
                        let scalars = Scalars { sample_id: sample_id(made.answer, part), ..scalars };
                        sample(scalars, trajectory, kept)
                    }));
                }
            }
            records.push(prompt(*number, *seat, PromptState::Done, &taken.tokens, note));
        }
        if !records.is_empty() {
            self.log.append_all(&records)?;
        }
        Ok(())
    }
}
