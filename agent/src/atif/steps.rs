//! A sample of the rollout log as steps.

use std::borrow::Cow;
use std::ops::Range;

use driftless_bridge::engine::ReplyDigest;

use super::{Extra, Message, Metrics, Own, Source, Step};

/// What the rollout log knows of the tokens of a sample. Places are counted in the response.
#[derive(Debug, Clone)]
pub struct Sampled<'a> {
    /// Prompt and response.
    pub tokens: &'a [i32],
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// Of each token of the response.
    pub log_probs: &'a [f32],
    /// Of each token of the response, as it was written.
    pub loss_mask: &'a [u8],
    /// Whether no token is trained on, whatever the mask says.
    pub is_masked: bool,
    /// Version, first token, and one past the last.
    pub spans: Vec<(u64, u32, u32)>,
    /// Digests of the engines' replies.
    pub replies: Vec<ReplyDigest>,
}

impl<'a> Sampled<'a> {
    /// Its steps: a turn for each run of tokens that the policy drew, and what stands between them as steps of the user,
    /// since the log does not say whose it is.
    ///
    /// # Errors
    /// Those of `text`, which tells what ids say.
    pub fn steps<E>(&self, text: impl Fn(&[i32]) -> Result<String, E>) -> Result<Vec<Step<'a>>, E> {
        let (mut steps, mut told) = (Vec::new(), 0);
        let prompt_len = self.prompt_len.min(self.tokens.len());
        for turn in self.turns() {
            let (start, end) = (prompt_len + turn.start, prompt_len + turn.end);
            if told < start {
                steps.push(step(&steps, Source::User, text(&self.tokens[told..start])?));
            }
            let mut said = step(&steps, Source::Agent, text(&self.tokens[start..end])?);
            said.llm_call_count = Some(1);
            said.metrics = Some(Metrics {
                prompt_tokens: Some(start as u64),
                completion_tokens: Some(turn.len() as u64),
                prompt_token_ids: Some(Cow::Borrowed(&self.tokens[..start])),
                completion_token_ids: Some(Cow::Borrowed(&self.tokens[start..end])),
                logprobs: self.log_probs(&turn),
            });
            said.extra = Some(Extra { driftless: Some(self.own(&turn)) });
            steps.push(said);
            told = end;
        }
        let rest = &self.tokens[told..];
        if !rest.is_empty() {
            let own = Own { token_ids: Some(Cow::Borrowed(rest)), ..Own::default() };
            let extra = Some(Extra { driftless: Some(own) });
            steps.push(Step { extra, ..step(&steps, Source::User, text(rest)?) });
        }
        Ok(steps)
    }

    /// The tokens that the policy drew: those of replies and those that are trained on. Where neither is known, those of
    /// versions, and else all.
    fn turns(&self) -> Vec<Range<usize>> {
        let mut drawn = vec![false; self.tokens.len().saturating_sub(self.prompt_len)];
        let mark = |drawn: &mut Vec<bool>, start: u32, end: u32| {
            if let Some(tokens) = drawn.get_mut(start as usize..end as usize) {
                tokens.fill(true);
            }
        };
        self.replies.iter().for_each(|reply| mark(&mut drawn, reply.start, reply.end));
        drawn.iter_mut().zip(self.loss_mask).for_each(|(drawn, keep)| *drawn |= *keep != 0);
        if !drawn.contains(&true) {
            self.spans.iter().for_each(|(_, start, end)| mark(&mut drawn, *start, *end));
        }
        if !drawn.contains(&true) {
            drawn.fill(true);
        }
        let (mut turns, mut start) = (Vec::new(), 0);
        for run in drawn.chunk_by(|one, other| one == other) {
            if run[0] {
                turns.push(start..start + run.len());
            }
            start += run.len();
        }
        if turns.is_empty() {
            // A turn that drew nothing.
            turns.push(0..0);
        }
        turns
    }

    /// None where one of them is no number that JSON has.
    fn log_probs(&self, turn: &Range<usize>) -> Option<Cow<'a, [f32]>> {
        let log_probs = self.log_probs.get(turn.clone())?;
        log_probs.iter().all(|log_prob| log_prob.is_finite()).then_some(Cow::Borrowed(log_probs))
    }

    fn own(&self, turn: &Range<usize>) -> Own<'a> {
        let (first, end) = (turn.start as u32, turn.end as u32);
        let inside = |(version, from, to): &(u64, u32, u32)| {
            let (from, to) = ((*from).max(first), (*to).min(end));
            (from < to).then(|| (*version, from - first, to - first))
        };
        let replies = self.replies.iter().filter(|reply| first <= reply.start && reply.end <= end);
        let shifted = |reply: &ReplyDigest| ReplyDigest {
            start: reply.start - first,
            end: reply.end.saturating_sub(first),
            ..*reply
        };
        let mask = match self.is_masked {
            true => Some(Cow::Owned(vec![0; turn.len()])),
            false => self.loss_mask.get(turn.clone()).map(Cow::Borrowed),
        };
        Own {
            weight_versions: self.spans.iter().filter_map(inside).collect(),
            loss_mask: mask,
            replies: replies.map(|reply| hex::encode(shifted(reply).to_bytes())).collect(),
            token_ids: None,
        }
    }
}

/// The next step, which says this.
fn step<'a>(before: &[Step<'_>], source: Source, message: String) -> Step<'a> {
    Step {
        step_id: before.len() as u64 + 1,
        source,
        message: Message::Text(message),
        reasoning_content: None,
        metrics: None,
        is_copied_context: None,
        llm_call_count: None,
        extra: None,
    }
}
