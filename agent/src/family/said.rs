//! What a model said, out of its tokens.

use super::Family;
use crate::error::Result;
use crate::message::{Ended, Message, Role, ToolCall};

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";

/// An answer as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Said {
    pub(crate) message: Message,
    pub(crate) ended: Ended,
}

impl Family {
    /// Reads sampled tokens. Calls get ids that begin with `call_id`; a text of `stop` ends the answer before it.
    pub(crate) fn said(&self, ids: &[i32], is_cut: bool, stop: &[String], call_id: &str) -> Result<Said> {
        let body = if self.is_closed(ids) { &ids[..ids.len() - 1] } else { ids };
        let mut text = self.tokenizer.decode(body)?;
        let mut ended = if is_cut { Ended::Length } else { Ended::Stop };
        let stops = stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stops.filter_map(|stop| text.find(stop.as_str())).min() {
            text.truncate(at);
            ended = Ended::StopText;
        }
        let (reasoning, rest) = thoughts(&text);
        let (content, calls) = (self.rules.calls)(rest);
        if !calls.is_empty() && ended == Ended::Stop {
            ended = Ended::ToolCalls;
        }
        let id = |at: usize| format!("{call_id}_{at}");
        let calls = calls.into_iter().enumerate();
        let calls = calls.map(|(at, (name, arguments))| ToolCall { id: id(at), name, arguments }).collect();
        Ok(Said {
            message: Message { role: Role::Assistant, content, reasoning, calls, call_id: None },
            ended,
        })
    }

    /// Given and sampled ids of a turn without its thoughts, as a family's template leaves them out behind a later
    /// question. Tokens are left out and none is encoded.
    pub(crate) fn without_thoughts(&self, given: &[i32], sampled: &[i32]) -> Vec<i32> {
        let at = |token: &str, ids: &[i32]| {
            let id = self.tokenizer.id(token)?;
            ids.iter().rposition(|here| *here == id)
        };
        let Some(end) = at(THOUGHT, sampled) else { return [given, sampled].concat() };
        // The start of an answer may have the mark that begins thoughts, and a newline.
        let begun = at(THINK, given).filter(|begun| begun + 2 >= given.len()).unwrap_or(given.len());
        let is_blank = |id: &&i32| {
            self.tokenizer.decode(&[**id]).is_ok_and(|text| !text.is_empty() && text.trim().is_empty())
        };
        let blank = sampled[end + 1..].iter().take_while(is_blank).count();
        [&given[..begun], &sampled[end + 1 + blank..]].concat()
    }

    /// Whether sampled tokens end with one that ends an answer.
    pub(crate) fn is_closed(&self, ids: &[i32]) -> bool {
        ids.last().is_some_and(|last| self.stops.contains(last))
    }
}

/// Thoughts, and what stands behind them. A template may have begun them, and a bound on tokens may have cut them.
fn thoughts(text: &str) -> (Option<String>, &str) {
    let begun = text.trim_start().strip_prefix(THINK);
    match text.split_once(THOUGHT) {
        Some((before, after)) => {
            let before = before.trim_start().strip_prefix(THINK).unwrap_or(before);
            (kept(before), after.trim_start_matches('\n'))
        }
        None if begun.is_some() => (kept(begun.unwrap_or_default()), ""),
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
        assert_eq!(thoughts("<think>\nhm\n</think>\n\nYes"), (thought("hm"), "Yes"));
        assert_eq!(thoughts("hm\n</think>\nYes"), (thought("hm"), "Yes"));
        assert_eq!(thoughts("<think>\n\n</think>\n\nYes"), (None, "Yes"));
        assert_eq!(thoughts("<think>hm"), (thought("hm"), ""));
        assert_eq!(thoughts("Yes\n"), (None, "Yes\n"));
    }
}
