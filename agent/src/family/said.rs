//! What a model said, out of its tokens.

use super::Family;
use crate::error::Result;
use crate::message::{Ended, Json, Message, Role};

pub(super) const THINK: &str = "<think>";
pub(super) const THOUGHT: &str = "</think>";
/// What stands between them while it is tried whether a template leaves it out.
pub(super) const THOUGHTS: &str = "(thoughts)";

/// What was drawn for a prompt.
pub(crate) struct Drawn<'a> {
    /// Ids before the answer.
    pub(crate) given: &'a [i32],
    /// Sampled ids.
    pub(crate) sampled: &'a [i32],
    /// Whether a bound on tokens ended them.
    pub(crate) is_cut: bool,
    /// Texts that end the answer before them.
    pub(crate) stop: &'a [String],
    /// Tools that may be called.
    pub(crate) tools: &'a [Json],
}

/// An answer as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Said {
    pub(crate) message: Message,
    pub(crate) ended: Ended,
}

impl Family {
    /// Reads sampled tokens. Calls get ids that begin with `call_id`, where the model writes none.
    pub(crate) fn said(&self, drawn: &Drawn<'_>, call_id: &str) -> Result<Said> {
        let ids = drawn.sampled;
        let body = if self.is_closed(ids) { &ids[..ids.len() - 1] } else { ids };
        let mut text =
            self.tokenizer.decode_keeping(body, &[self.rules.marks, &[THINK, THOUGHT]].concat())?;
        let mut ended = if drawn.is_cut { Ended::Length } else { Ended::Stop };
        let stops = drawn.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stops.filter_map(|stop| text.find(stop.as_str())).min() {
            text.truncate(at);
            ended = Ended::StopText;
        }
        let (reasoning, rest) = thoughts(&text, self.begun(drawn.given).is_some());
        let (content, mut calls) = (self.rules.calls)(rest, drawn.tools);
        if !calls.is_empty() && ended == Ended::Stop {
            ended = Ended::ToolCalls;
        }
        for (at, call) in calls.iter_mut().enumerate().filter(|(_, call)| call.id.is_empty()) {
            call.id = format!("{call_id}_{at}");
        }
        Ok(Said {
            message: Message { role: Role::Assistant, content, reasoning, calls, call_id: None },
            ended,
        })
    }

    /// Given and sampled ids of a turn without its thoughts, as a family's template leaves them out behind a later
    /// question. Nothing that was sampled is encoded again.
    pub(crate) fn without_thoughts(&self, given: &[i32], sampled: &[i32]) -> Vec<i32> {
        let at = |token: &str, ids: &[i32]| {
            let id = self.tokenizer.id(token)?;
            ids.iter().rposition(|here| *here == id)
        };
        let Some(end) = at(THOUGHT, sampled) else { return [given, sampled].concat() };
        let begun = self.begun(given).unwrap_or(given.len());
        let is_blank = |id: &&i32| {
            self.tokenizer.decode(&[**id]).is_ok_and(|text| !text.is_empty() && text.trim().is_empty())
        };
        let blank = sampled[end + 1..].iter().take_while(is_blank).count();
        [&given[..begun], &self.thoughtless, &sampled[end + 1 + blank..]].concat()
    }

    /// Where the start of an answer begins thoughts. A newline may stand behind the mark.
    fn begun(&self, given: &[i32]) -> Option<usize> {
        let (think, thought) = (self.tokenizer.id(THINK)?, self.tokenizer.id(THOUGHT));
        let at = given.iter().rposition(|id| *id == think)?;
        (at + 2 >= given.len() && given.last() != thought.as_ref()).then_some(at)
    }

    /// How many sampled tokens are thoughts, with the marks around them.
    pub(crate) fn thoughts(&self, given: &[i32], sampled: &[i32]) -> usize {
        let end = self.tokenizer.id(THOUGHT).and_then(|end| sampled.iter().position(|id| *id == end));
        match end {
            Some(end) => end + 1,
            None if self.is_thinking(given, sampled) => sampled.len() - usize::from(self.is_closed(sampled)),
            None => 0,
        }
    }

    /// Whether an answer ends within its thoughts.
    pub(super) fn is_thinking(&self, given: &[i32], sampled: &[i32]) -> bool {
        let has = |token: &str| self.tokenizer.id(token).is_some_and(|id| sampled.contains(&id));
        (self.begun(given).is_some() || has(THINK)) && !has(THOUGHT)
    }

    /// Whether sampled tokens end with one that ends an answer.
    pub(crate) fn is_closed(&self, ids: &[i32]) -> bool {
        ids.last().is_some_and(|last| self.stops.contains(last))
    }
}

/// Thoughts, and what stands behind them. The start of the answer may have `begun` them, and a bound on tokens may have
/// cut them.
fn thoughts(text: &str, begun: bool) -> (Option<String>, &str) {
    let marked = text.trim_start().strip_prefix(THINK);
    match text.split_once(THOUGHT) {
        Some((before, after)) => {
            let before = before.trim_start().strip_prefix(THINK).unwrap_or(before);
            (kept(before), after.trim_start_matches('\n'))
        }
        None if begun || marked.is_some() => (kept(marked.unwrap_or(text)), ""),
        None => (None, text),
    }
}

fn kept(thoughts: &str) -> Option<String> {
    Some(thoughts.trim_matches('\n').to_owned()).filter(|thoughts| !thoughts.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_stand_before_the_answer() {
        let thought = |text: &str| Some(text.to_owned());
        for begun in [false, true] {
            assert_eq!(thoughts("<think>\nhm\n</think>\n\nYes", begun), (thought("hm"), "Yes"));
            assert_eq!(thoughts("hm\n</think>\nYes", begun), (thought("hm"), "Yes"));
            assert_eq!(thoughts("<think>\n\n</think>\n\nYes", begun), (None, "Yes"));
            assert_eq!(thoughts("<think>hm", begun), (thought("hm"), ""));
        }
        assert_eq!(thoughts("Yes\n", false), (None, "Yes\n"));
        assert_eq!(thoughts("hm\n", true), (thought("hm"), ""));
    }
}
