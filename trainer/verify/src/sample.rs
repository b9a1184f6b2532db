//! One sample of the log against the digests of its replies.

use std::collections::HashSet;
use std::ops::Range;

use driftless_buffer::Record;
use driftless_buffer::sample::{ColumnId, Element};

use crate::digest::{Reply, behind};
use crate::{Fault, answer_of};

/// The tokens of a group that are trained on, by the request that drew each and the context of the ids before it.
pub(super) type Trained = HashSet<([u64; 3], u64)>;

/// What a sample comes to that was checked.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// Replies whose digests it has; unknown of samples of earlier releases.
    pub(super) replies: Option<u64>,
    /// Tokens that are trained on.
    pub(super) trained: u64,
    pub(super) faults: Vec<Fault>,
}

/// Checks that each trained token is in one reply and in no other sample of its group, that each reply is the one of its digest,
/// and that no weights are newer than `newest`.
pub(super) fn check(record: &Record, newest: Option<u64>, of_group: &mut Trained) -> Checked {
    let trained = record.loss_mask().iter().filter(|keep| **keep != 0).count() as u64;
    let mut checked = Checked { trained, ..Checked::default() };
    if let Some(newest) = newest {
        checked.faults.extend(too_new(record, newest));
    }
    let Some((element, column)) = record.column(ColumnId::REPLIES) else { return checked };
    let entries = column.chunks(Reply::BYTES).map(Reply::from_bytes);
    let replies = entries.collect::<Option<Vec<_>>>().filter(|_| element == Element::U8);
    let Some(replies) = replies else {
        let expected = format!("entries of {} bytes", Reply::BYTES);
        let found = format!("{} bytes, or others", column.len());
        checked.faults.push(Fault::of("digests of replies", expected, found).at(record, None));
        return checked;
    };
    checked.replies = Some(replies.len() as u64);
    let mut next = 0;
    for reply in &replies {
        let tokens = reply.start..reply.end;
        let fault = if reply.start < next || reply.end <= reply.start {
            Some(Fault::of("tokens of a reply", format!("some from {next} on"), format!("{tokens:?}")))
        } else if reply.end as usize > record.response().len() {
            let expected = format!("tokens below {}, the end of the response", record.response().len());
            Some(Fault::of("tokens of a reply", expected, format!("{tokens:?}")))
        } else {
            wrong(record, reply).or_else(|| again(record, reply, of_group))
        };
        checked.faults.extend(fault.map(|fault| fault.at(record, Some(tokens))));
        next = next.max(reply.end);
    }
    checked.faults.extend(uncovered(record, &replies));
    checked
}

/// What is wrong with a reply whose tokens are in the response.
fn wrong(record: &Record, reply: &Reply) -> Option<Fault> {
    let (answer, [_, found, _]) = (answer_of(record.scalars().sample_id), reply.request);
    if found != answer {
        let found = format!("of answer {found}, request {}", reply.rid());
        return Some(Fault::of("reply", format!("of answer {answer}"), found));
    }
    let before = record.tokens().get(..record.prompt_len() + reply.start as usize).unwrap_or_default();
    let read = before.iter().fold(0, |context, id| behind(context, *id));
    if read != reply.context {
        let (expected, found) = (format!("{:016x}", reply.context), format!("{read:016x}"));
        return Some(Fault::of("ids before the reply, which its engine read", expected, found));
    }
    let digest = tokens(record, reply).fold(0_u128, |sum, (at, context)| {
        let (id, log_prob) = (record.response()[at as usize], record.log_probs()[at as usize]);
        let span = record.spans().iter().find(|span| (span.start..span.end).contains(&at));
        sum.wrapping_add(reply.of_token(context, id, log_prob, span.map(|span| span.version)))
    });
    (digest != reply.digest).then(|| {
        let (expected, found) = (format!("{:032x}", reply.digest), format!("{digest:032x}"));
        Fault::of("digest of the reply's ids, log-probabilities and versions", expected, found)
    })
}

/// The tokens of a reply, each with the context of the ids before it.
fn tokens(record: &Record, reply: &Reply) -> impl Iterator<Item = (u32, u64)> {
    let response = record.response();
    (reply.start..reply.end).scan(reply.context, |context, at| {
        let before = *context;
        *context = behind(before, response[at as usize]);
        Some((at, before))
    })
}

/// Tokens that are trained on here, and in another sample of the group.
fn again(record: &Record, reply: &Reply, of_group: &mut Trained) -> Option<Fault> {
    let trained = tokens(record, reply).filter(|(at, _)| record.loss_mask()[*at as usize] != 0);
    let known = trained.filter(|(_, context)| !of_group.insert((reply.request, *context))).count();
    (known > 0).then(|| {
        let found = format!("{known} that another sample of the answer trains on");
        Fault::of("tokens that are trained on", "each once", found)
    })
}

/// Trained tokens that no reply has.
fn uncovered(record: &Record, replies: &[Reply]) -> Option<Fault> {
    let in_none = |at: u32| !replies.iter().any(|reply| (reply.start..reply.end).contains(&at));
    let trained = (0..).zip(record.loss_mask()).filter(|(_, keep)| **keep != 0).map(|(at, _)| at);
    let foreign: Vec<u32> = trained.filter(|at| in_none(*at)).collect();
    let (first, last) = (*foreign.first()?, *foreign.last()?);
    let found = format!("{} of none", foreign.len());
    let fault = Fault::of("tokens that are trained on", "each of an engine's reply", found);
    Some(fault.at(record, Some(first..last + 1)))
}

/// Tokens of weights that did not exist when they were learned from.
fn too_new(record: &Record, newest: u64) -> Option<Fault> {
    let span = record.spans().iter().find(|span| span.version > newest)?;
    let expected = format!("at most {newest}, the newest version before the step");
    let fault = Fault::of("version of the weights", expected, span.version.to_string());
    Some(fault.at(record, Some(span.start..span.end)))
}

impl Fault {
    /// The same of tokens of a sample.
    fn at(self, record: &Record, tokens: Option<Range<u32>>) -> Self {
        let (position, sample) = (Some(record.position().0), Some(record.scalars().sample_id));
        Fault { position, sample, tokens: tokens.map(|tokens| [tokens.start, tokens.end]), ..self }
    }
}
