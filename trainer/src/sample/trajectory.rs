//! What a sample is made of, token by token.

use std::collections::BTreeMap;

use driftless_bridge::engine::{self, ReplyDigest};
use driftless_bridge::{Generation, Label};
use driftless_buffer::{Finish, VersionSpan};
use serde_json::value::RawValue;

/// What an engine read, without its ids: a conversation of many turns would have its history as often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Read {
    len: usize,
    digest: blake3::Hash,
}

impl Read {
    pub(crate) fn of(ids: &[i32]) -> Self {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Read { len: ids.len(), digest: blake3::hash(&bytes) }
    }

    /// What stands behind it in these tokens, if they begin with it.
    fn behind<'a>(&self, tokens: &'a [i32]) -> Option<&'a [i32]> {
        let (read, behind) = tokens.split_at_checked(self.len)?;
        (Read::of(read) == *self).then_some(behind)
    }
}

/// What a sample is made of: a prompt and a response, token by token.
#[derive(Debug, Clone)]
pub struct Trajectory {
    /// Prompt and response.
    pub tokens: Vec<i32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Per response token: its log-probability when it was sampled; 0 where no engine sampled it.
    pub log_probs: Vec<f32>,
    /// Per response token: 1 to train on it, 0 not to.
    pub loss_mask: Vec<u8>,
    /// Which versions made which response tokens.
    pub spans: Vec<VersionSpan>,
    /// Which replies of engines had which response tokens.
    pub replies: Vec<ReplyDigest>,
    /// Why it ended.
    pub finish: Finish,
    /// URL of the engine that wrote its end.
    pub engine: String,
    /// What rewards are given in place of the prompt's metadata, as a JSON object.
    pub metadata: Option<Box<RawValue>>,
    /// The reward of its answer, where what made it gave one. Of several parts the last that has one counts.
    pub reward: Option<f32>,
    /// What it is made of, by name, where what made the answer says so. The last part that says any counts.
    pub components: BTreeMap<String, f32>,
}

impl Trajectory {
    /// A trajectory of these tokens. Until a generation is taken, no engine wrote any of them.
    pub(crate) fn new(tokens: Vec<i32>, prompt_len: usize) -> Self {
        let response = tokens.len() - prompt_len;
        Trajectory {
            tokens,
            prompt_len,
            log_probs: vec![0.0; response],
            loss_mask: vec![0; response],
            spans: Vec::new(),
            replies: Vec::new(),
            finish: Finish::Stop,
            engine: String::new(),
            metadata: None,
            reward: None,
            components: BTreeMap::new(),
        }
    }

    /// How many tokens of what an engine wrote stand here behind exactly what it had read.
    pub(crate) fn matched(&self, read: &Read, output_ids: &[i32]) -> Option<usize> {
        let behind = read.behind(&self.tokens)?;
        Some(behind.iter().zip(output_ids).take_while(|(ours, theirs)| ours == theirs).count())
    }

    /// Takes log-probs and versions of what an engine wrote, as far as the trajectory has it behind exactly what the
    /// engine had read, and behind all that was taken before.
    pub(crate) fn take(&mut self, read: &Read, generation: &Generation) {
        let Generation { output_ids, log_probs, .. } = generation;
        let Some(length) = self.matched(read, output_ids) else { return };
        let taken = self.loss_mask.iter().rposition(|keep| *keep == 1).map_or(0, |at| at + 1);
        let start = match read.len.checked_sub(self.prompt_len) {
            Some(start) if start >= taken => start,
            _ => return,
        };
        let whole = length == output_ids.len();
        if length == 0 && !whole {
            return;
        }
        self.log_probs[start..start + length].copy_from_slice(&log_probs[..length]);
        self.loss_mask[start..start + length].fill(1);
        self.spans.extend(spans(generation).filter_map(|span| {
            let end = span.end.min(length as u32);
            let shift = start as u32;
            (span.start < end).then(|| VersionSpan { start: span.start + shift, end: end + shift, ..span })
        }));
        ReplyDigest::append(&mut self.replies, generation.replies_until(length), start as u32);
        self.finish = finish(if whole { &generation.finish } else { &engine::Finish::Stop });
        if !generation.engine.is_empty() {
            self.engine.clone_from(&generation.engine);
        }
    }
}

/// Which versions wrote which tokens of a generation.
fn spans(generation: &Generation) -> impl Iterator<Item = VersionSpan> + '_ {
    generation.spans.iter().filter_map(|span| {
        // Engines without updates serve weights that are no version of ours. Only debugging asks them.
        let label: Label = span.label.parse().ok()?;
        Some(VersionSpan { version: label.version(), start: span.start, end: span.end })
    })
}

/// Why a generation ended, as the log has it.
fn finish(finish: &engine::Finish) -> Finish {
    match finish {
        engine::Finish::Stop => Finish::Stop,
        engine::Finish::Length => Finish::Length,
        _ => Finish::Abort,
    }
}
