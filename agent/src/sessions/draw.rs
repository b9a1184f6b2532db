//! What draws tokens, and what becomes of a draw that is broken off.

use std::sync::Arc;

use async_trait::async_trait;
use driftless_bridge::engine::{Finish, ReplyDigest, VersionSpan};
use driftless_bridge::{Generation, SamplingParams};

use crate::message::Refusal;

/// Draws tokens: a fleet, or what stands in for one in tests.
#[async_trait]
pub trait Draw: Send + Sync + 'static {
    /// One generation of a session. `nth` follows from what is asked, and not from when: the same number asks for the
    /// same draws, another one for others.
    ///
    /// # Errors
    /// [`Refusal::Busy`] if no engine can be asked now, [`Refusal::Broken`] for all else.
    async fn draw(
        &self,
        session: &str,
        nth: u64,
        input_ids: Vec<i32>,
        sampling: SamplingParams,
    ) -> Result<Generation, Refusal>;
}

#[async_trait]
impl<T: Draw + ?Sized> Draw for Arc<T> {
    async fn draw(
        &self,
        session: &str,
        nth: u64,
        input_ids: Vec<i32>,
        sampling: SamplingParams,
    ) -> Result<Generation, Refusal> {
        T::draw(self, session, nth, input_ids, sampling).await
    }
}

/// Generations in a row that may be broken off without a token.
const EMPTY_MAX: usize = 16;

/// A generation that nobody broke off, and how many were drawn for it: one that is broken off is gone on with behind
/// its tokens.
pub(super) async fn whole(
    draw: &dyn Draw,
    session: &str,
    first: u64,
    mut input_ids: Vec<i32>,
    mut sampling: SamplingParams,
) -> Result<(Generation, u64), Refusal> {
    let mut whole: Option<Generation> = None;
    let (mut draws, mut empty) = (0, 0);
    loop {
        let next = draw.draw(session, first.wrapping_add(draws), input_ids.clone(), sampling.clone()).await?;
        checked(&next, &sampling)?;
        draws += 1;
        let is_over = !matches!(next.finish, Finish::Abort { .. });
        let drawn = next.output_ids.len();
        empty = if drawn == 0 { empty + 1 } else { 0 };
        input_ids.extend(&next.output_ids);
        sampling.max_new_tokens -= drawn as u32;
        let mut joined = match whole.take() {
            None => next,
            Some(before) => join(before, next),
        };
        if is_over {
            return Ok((joined, draws));
        }
        if sampling.max_new_tokens == 0 {
            joined.finish = Finish::Length;
            return Ok((joined, draws));
        }
        if empty > EMPTY_MAX {
            return Err(Refusal::Busy(format!("engines broke off {empty} generations in a row")));
        }
        whole = Some(joined);
    }
}

/// Refuses what no engine of ours replies.
fn checked(made: &Generation, sampling: &SamplingParams) -> Result<(), Refusal> {
    let (tokens, most) = (made.output_ids.len(), sampling.max_new_tokens as usize);
    if tokens > most || made.log_probs.len() != tokens {
        let found = made.log_probs.len();
        let expected = format!("at most {most} tokens, each with a log-probability");
        return Err(Refusal::Broken(format!("expected {expected}, found {tokens} tokens and {found}")));
    }
    Ok(())
}

fn join(mut before: Generation, next: Generation) -> Generation {
    let shift = before.output_ids.len() as u32;
    for VersionSpan { label, start, end } in next.spans {
        match before.spans.last_mut().filter(|last| last.label == label && last.end == start + shift) {
            Some(last) => last.end = end + shift,
            None => before.spans.push(VersionSpan { label, start: start + shift, end: end + shift }),
        }
    }
    ReplyDigest::append(&mut before.replies, next.replies, shift);
    before.output_ids.extend(next.output_ids);
    before.log_probs.extend(next.log_probs);
    let engine = if next.engine.is_empty() { before.engine } else { next.engine };
    let spans_reported = before.spans_reported && next.spans_reported;
    let retractions = before.retractions + next.retractions;
    Generation { rid: next.rid, engine, finish: next.finish, spans_reported, retractions, ..before }
}
