//! One sample of the log against the digests of its replies.

use std::ops::Range;

use driftless_bridge::engine::{Digester, ReplyDigest, context};
use driftless_buffer::Record;
use driftless_buffer::sample::{ColumnId, Element};

use super::Fault;
use crate::sample::answer_of;

/// What a sample comes to that was checked.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// Replies whose digests it has; unknown of samples of earlier releases.
    pub(super) replies: Option<u64>,
    /// Tokens that are trained on.
    pub(super) trained: u64,
    pub(super) faults: Vec<Fault>,
}

/// Checks that each trained token is in one reply, that each reply is the one of its digest, and that no weights are newer
/// than `newest`.
pub(super) fn check(record: &Record, newest: Option<u64>) -> Checked {
    let trained = record.loss_mask().iter().filter(|keep| **keep != 0).count() as u64;
    let mut checked = Checked { trained, ..Checked::default() };
    if let Some(newest) = newest {
        checked.faults.extend(too_new(record, newest));
    }
    let Some((element, column)) = record.column(ColumnId::REPLIES) else { return checked };
    let entries = column.chunks(ReplyDigest::BYTES).map(ReplyDigest::from_bytes);
    let replies = entries.collect::<Option<Vec<_>>>().filter(|_| element == Element::U8);
    let Some(replies) = replies else {
        let expected = format!("entries of {} bytes", ReplyDigest::BYTES);
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
            wrong(record, reply)
        };
        checked.faults.extend(fault.map(|fault| fault.at(record, Some(tokens))));
        next = next.max(reply.end);
    }
    checked.faults.extend(uncovered(record, &replies));
    checked
}

/// What is wrong with a reply whose tokens are in the response.
fn wrong(record: &Record, reply: &ReplyDigest) -> Option<Fault> {
    let answer = answer_of(record.scalars().sample_id);
    if reply.rid.sample() != answer {
        let found = format!("of answer {}, request {}", reply.rid.sample(), reply.rid);
        return Some(Fault::of("reply", format!("of answer {answer}"), found));
    }
    let tokens = record.tokens();
    let before = tokens.get(..record.prompt_len() + reply.start as usize).unwrap_or_default();
    let behind = context(0, before);
    if behind != reply.context {
        let (expected, found) = (format!("{:016x}", reply.context), format!("{behind:016x}"));
        return Some(Fault::of("ids before the reply, which its engine read", expected, found));
    }
    let mut digester = Digester::new(reply.rid, reply.context);
    for at in reply.start..reply.end {
        let (id, log_prob) = (record.response()[at as usize], record.log_probs()[at as usize]);
        let span = record.spans().iter().find(|span| (span.start..span.end).contains(&at));
        digester.push(id, log_prob, span.map(|span| span.version));
    }
    (digester.digest() != reply.digest).then(|| {
        let (expected, found) = (format!("{:032x}", reply.digest), format!("{:032x}", digester.digest()));
        Fault::of("digest of the reply's ids, log-probabilities and versions", expected, found)
    })
}

/// Trained tokens that no reply has.
fn uncovered(record: &Record, replies: &[ReplyDigest]) -> Option<Fault> {
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
