//! Answers, scores and prompts as records of the log.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use driftless_bridge::engine::ReplyDigest;
use driftless_buffer::sample::{ColumnId, Element, Verdict};
use driftless_buffer::{Kind, Log, PromptState, Record, Sample, Scalars};
use driftless_store::chain_text;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::group::{Group, Outcome};
use super::parts::Kept;
use super::{Begun, Rollouts};
use crate::error::{Error, Place, Result};
use crate::failure::Failure;
use crate::metrics::unix_us;
use crate::reward::Given;
use crate::sample::{Prompt, Trajectory, answer_of, sample_id};

/// How the note of a group begins that the task's filter left out.
pub(super) const FILTERED: &str = "filtered: ";

/// A longer label, or longer metadata, is left out of the log.
const NOTE_BYTES_MAX: usize = 1 << 20;

/// The metadata of a prompt's record, as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct PromptNote {
    /// Where the prompt is from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Place>,
    /// What rewards compare with. In logs of earlier releases absent while the prompt is in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<Box<RawValue>>,
    /// What else rewards are given. Absent in logs of earlier releases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Box<RawValue>>,
    /// Why its samples are not learned from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<String>,
    /// What kind of failure that was, where an answer failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Failure>,
    /// Which prompt of the source it is, where that is not the group's own number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<u64>,
    /// How often in a row its prompt was easy, this time included, where a threshold says what is easy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub easy: Option<u64>,
    /// Its answers that failed, which its group went on without. Where the log has samples of one, it has no reward.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedAnswer>,
}

/// An answer that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedAnswer {
    /// Its number, which would be the id of its first sample.
    pub answer: u64,
    /// What kind of failure it was.
    pub outcome: Failure,
    /// What went wrong.
    pub why: String,
}

impl FailedAnswer {
    pub(super) fn new(answer: u64, error: &Error) -> Self {
        FailedAnswer { answer, outcome: error.failure(), why: chain_text(error) }
    }
}

impl PromptNote {
    /// What a prompt's record says; nothing if it is another program's.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        serde_json::from_slice(record.metadata()).unwrap_or_default()
    }

    /// Which prompt of the source it is, of a group of this number.
    #[must_use]
    pub fn asked(&self, group: u64) -> u64 {
        self.asked.unwrap_or(group)
    }

    /// Why the answer that a sample is part of failed, if its group went on without it.
    #[must_use]
    pub fn failed_of(&self, sample: &Record) -> Option<&FailedAnswer> {
        let answer = answer_of(sample.scalars().sample_id);
        self.failed.iter().find(|failed| failed.answer == answer)
    }

    fn of_group(begun: &Begun) -> Self {
        let asked = Some(begun.asked).filter(|asked| *asked != begun.number);
        PromptNote { asked, easy: begun.easy, ..PromptNote::in_flight(&begun.prompt) }
    }

    fn in_flight(prompt: &Prompt) -> Self {
        let short =
            |json: &Option<Box<RawValue>>| json.clone().filter(|json| json.get().len() <= NOTE_BYTES_MAX);
        let (label, metadata) = (short(&prompt.label), short(&prompt.metadata));
        PromptNote { source: Some(prompt.place.clone()), label, metadata, ..PromptNote::default() }
    }

    fn done(group: &Group) -> Self {
        let (dropped, outcome) = match &group.outcome {
            Outcome::Kept(_) | Outcome::Returned(_) => (None, None),
            Outcome::Failed(error, failure) => (Some(error.clone()), Some(*failure)),
            Outcome::Filtered(_, why) => (Some(format!("{FILTERED}{why}")), None),
        };
        let failed = group.failed.clone();
        PromptNote { dropped, outcome, failed, ..PromptNote::of_group(&group.begun) }
    }

    fn bytes(&self) -> Vec<u8> {
        // Texts and JSON are always JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

fn prompt<'a>(
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
            clock_us: unix_us(SystemTime::now()),
            ..Scalars::default()
        },
        prompt_len: tokens.len(),
        tokens,
        metadata: note,
        ..Sample::default()
    }
}

/// An answer that is finished.
pub(super) struct Answered {
    pub(super) answer: u64,
    /// At least one, and as many as a record can count.
    pub(super) parts: Vec<Trajectory>,
    /// What all its samples share.
    pub(super) scalars: Scalars,
    /// When it was asked for, when its first token came, if known, and when its last: [`ColumnId::TIMES`].
    pub(super) times: [i64; 3],
    /// What is kept beside its first sample.
    pub(super) beside: Vec<u8>,
}

impl Answered {
    /// Its samples as records, with the further columns of each. The first comes last: where it is, all are.
    pub(super) fn samples<'a>(&'a self, extra: &'a [Beside<'a>]) -> impl Iterator<Item = Sample<'a>> {
        let shared = Scalars {
            parts: u16::try_from(self.parts.len()).unwrap_or(u16::MAX),
            clock_us: self.times[2].cast_unsigned(),
            ..self.scalars
        };
        self.parts.iter().zip(extra).enumerate().rev().map(move |(part, (trajectory, extra))| Sample {
            scalars: Scalars {
                sample_id: sample_id(self.answer, part),
                status: trajectory.finish.code(),
                ..shared
            },
            prompt_len: trajectory.prompt_len,
            tokens: &trajectory.tokens,
            log_probs: &trajectory.log_probs,
            loss_mask: &trajectory.loss_mask,
            spans: &trajectory.spans,
            engine: &trajectory.engine,
            metadata: if part == 0 { &self.beside } else { &[] },
            extra,
            ..Sample::default()
        })
    }
}

/// One further column.
type Extra<'a> = [(ColumnId, Element, &'a [u8]); 1];

/// The metadata of the first sample of an answer that was measured, as JSON.
#[derive(Debug, Default, Serialize)]
#[non_exhaustive]
pub struct EvaluationNote {
    /// Name of the set.
    pub set: String,
    /// What a prompt's record says of the prompt.
    #[serde(flatten)]
    pub prompt: PromptNote,
}

impl EvaluationNote {
    /// What a record of an evaluation says; nothing if it is another program's.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        #[derive(Default, Deserialize)]
        struct Set {
            set: String,
        }
        // Each for itself: JSON that is kept as it is cannot be flattened back.
        let Set { set } = serde_json::from_slice(record.metadata()).unwrap_or_default();
        EvaluationNote { set, prompt: PromptNote::of(record) }
    }

    pub(super) fn new(set: &str, prompt: &Prompt) -> Self {
        EvaluationNote { set: set.to_owned(), prompt: PromptNote::in_flight(prompt) }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        // Texts and JSON are always JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Makes answers durable together.
pub(super) fn append_answers(log: &Log, answers: &[Arc<Answered>]) -> Result<()> {
    let columns: Vec<Columns> = answers.iter().map(|answer| Columns::of(answer)).collect();
    let extra: Vec<Vec<Beside<'_>>> = columns.iter().map(Columns::beside).collect();
    let samples = answers.iter().zip(&extra).flat_map(|(answer, extra)| answer.samples(extra));
    log.append_all(&samples.collect::<Vec<_>>())?;
    Ok(())
}

/// The further columns of an answer's samples, as bytes.
pub(super) struct Columns {
    times: Vec<u8>,
    /// Of each sample.
    replies: Vec<Vec<u8>>,
}

/// Those of one sample.
pub(super) type Beside<'a> = [(ColumnId, Element, &'a [u8]); 2];

impl Columns {
    pub(super) fn of(answer: &Answered) -> Self {
        let times = answer.times.map(i64::to_le_bytes).concat();
        Columns { times, replies: answer.parts.iter().map(|part| replies(&part.replies)).collect() }
    }

    /// Of a piece of an answer, which has no times.
    pub(super) fn of_piece(drawn: &[ReplyDigest]) -> Self {
        Columns { times: Vec::new(), replies: vec![replies(drawn)] }
    }

    pub(super) fn beside(&self) -> Vec<Beside<'_>> {
        let beside = |replies| {
            [(ColumnId::TIMES, Element::I64, &self.times[..]), (ColumnId::REPLIES, Element::U8, replies)]
        };
        self.replies.iter().map(|replies| beside(replies)).collect()
    }
}

/// Digests as a column has them: [`ColumnId::REPLIES`].
fn replies(replies: &[ReplyDigest]) -> Vec<u8> {
    replies.iter().flat_map(ReplyDigest::to_bytes).collect()
}

/// The reward of an answer.
#[derive(Debug, Clone)]
pub(super) struct Scored {
    pub(super) answer: u64,
    /// As it is learned from.
    pub(super) reward: f32,
    /// As it was given, as it is learned from, and what it is made of by the order of names.
    pub(super) rewards: Vec<f32>,
    pub(super) verdict: Verdict,
    /// The names, where the reward gave them: what is kept beside the score.
    beside: Vec<u8>,
}

impl Scored {
    /// What a reward has given, and what is learned from it; `made_of` is what the hook of the answer said of it.
    pub(super) fn new(
        answer: u64,
        given: &Given,
        reward: f32,
        made_of: BTreeMap<String, f32>,
        verdict: Verdict,
    ) -> Self {
        let components = if given.components.is_empty() { &made_of } else { &given.components };
        let rewards = [given.reward, reward].into_iter().chain(components.values().copied()).collect();
        Scored { answer, reward, rewards, verdict, beside: Kept::of_score(&given.components) }
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
        let notes: Vec<_> = begun.iter().map(|begun| PromptNote::of_group(begun).bytes()).collect();
        let records = begun.iter().zip(&notes).map(|(begun, note)| {
            prompt(begun.number, begun.seat, PromptState::InFlight, &begun.prompt.tokens, note)
        });
        let records: Vec<_> = records.collect();
        self.log.append_all(&records)?;
        Ok(())
    }

    /// Makes durable together how groups ended: the scores of their answers, then that their prompts are done. Those
    /// that are tried again are in flight as they were.
    pub(super) fn append(&self, groups: &[Group]) -> Result<()> {
        let ended = groups.iter().filter(|group| !matches!(group.outcome, Outcome::Returned(_)));
        let ended: Vec<&Group> = ended.collect();
        let notes: Vec<_> = ended.iter().map(|group| PromptNote::done(group).bytes()).collect();
        let rewards = |score: &Scored| score.rewards.iter().flat_map(|one| one.to_le_bytes()).collect();
        let rewards: Vec<Vec<Vec<u8>>> =
            ended.iter().map(|group| group.scores().iter().map(rewards).collect()).collect();
        let extra = rewards.iter().map(|group| {
            group.iter().map(|rewards| [(ColumnId::REWARDS, Element::F32, &rewards[..])]).collect()
        });
        let extra: Vec<Vec<Extra<'_>>> = extra.collect();
        let clock_us = unix_us(SystemTime::now());
        let mut records = Vec::new();
        for ((group, note), extra) in ended.iter().zip(&notes).zip(&extra) {
            let Begun { number, seat, prompt: taken, .. } = &group.begun;
            records.extend(group.scores().iter().zip(extra).map(|(score, extra)| Sample {
                kind: Kind::Score,
                scalars: Scalars {
                    sample_id: score.answer,
                    group_id: *number,
                    rollout_id: *seat,
                    reward: score.reward,
                    status: score.verdict.code(),
                    clock_us,
                    ..Scalars::default()
                },
                metadata: &score.beside,
                extra,
                ..Sample::default()
            }));
            records.push(prompt(*number, *seat, PromptState::Done, &taken.tokens, note));
        }
        if !records.is_empty() {
            // A step reads what the queue says is there. Another task may be writing an answer before these.
            self.log.append_seen(&records)?;
        }
        Ok(())
    }
}
