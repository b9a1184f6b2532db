//! One request on its way through the engine.

use driftless_bridge::engine::VersionSpan;
use driftless_server::{Completion, Ended, Job, Progress, Sampling};
use tokio::sync::oneshot;

use super::sampler::{Row, uniform};

/// A request that waits or runs.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) rid: String,
    /// Prompt and output.
    pub(super) tokens: Vec<i64>,
    pub(super) prompt_tokens: usize,
    pub(super) sampling: Sampling,
    pub(super) seed: i64,
    pub(super) prompt_log_probs_from: Option<usize>,
    pub(super) prompt_log_probs: Vec<(Option<f32>, i64)>,
    pub(super) slot: usize,
    /// Set by an abort; takes effect before the next forward pass.
    pub(super) aborted: bool,
    log_probs: Vec<f32>,
    changes: Vec<(String, usize)>,
    /// How often it went back to the queue: its cache was gone, its tokens stayed.
    pub(super) retractions: u32,
    reply: oneshot::Sender<Completion>,
    progress: Option<Progress>,
}

impl Sequence {
    /// `fallback_seed` is used when the request names none.
    pub(super) fn new(job: Job, fallback_seed: i64) -> Sequence {
        let request = job.request;
        Sequence {
            rid: request.rid,
            prompt_tokens: request.prompt.len(),
            tokens: request.prompt,
            seed: request.sampling.seed.unwrap_or(fallback_seed),
            sampling: request.sampling,
            prompt_log_probs_from: request.prompt_log_probs_from,
            prompt_log_probs: Vec::new(),
            slot: 0,
            aborted: false,
            log_probs: Vec::new(),
            changes: Vec::new(),
            retractions: 0,
            reply: job.reply,
            progress: job.progress,
        }
    }

    /// Number of generated tokens.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// How to sample the next token.
    pub(super) fn row(&self) -> Row {
        Row {
            temperature: self.sampling.temperature,
            top_p: self.sampling.top_p,
            top_k: self.sampling.top_k,
            min_p: self.sampling.min_p,
            uniform: uniform(self.seed, self.generated()),
        }
    }

    /// Takes the next token, and says whether it was the last.
    pub(super) fn push(&mut self, token: i64, log_prob: f32, stop_beats_length: bool) -> Option<Ended> {
        self.tokens.push(token);
        self.log_probs.push(log_prob);
        let stop = self.sampling.stop.contains(&token).then_some(Ended::Stop(token));
        let length = (self.generated() >= self.sampling.max_new_tokens).then_some(Ended::Length);
        let ended = if stop_beats_length { stop.or(length) } else { length.or(stop) };
        if let Some(progress) = self.progress.as_mut().filter(|_| ended.is_none()) {
            progress.tell(&self.tokens[self.prompt_tokens..], &self.log_probs);
        }
        ended
    }

    /// Notes that tokens up to now came from `old` weights.
    pub(super) fn version_changed(&mut self, old: &str) {
        let generated = self.generated();
        if generated > 0 {
            self.changes.push((old.to_owned(), generated));
        }
    }

    /// Whether the client has gone.
    pub(super) fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    /// Answers the request. A client that has gone is no error.
    pub(super) fn finish(self, finish: Ended, version: &str) {
        let kept = if finish == Ended::AbortedWaiting { 0 } else { self.generated() };
        let _gone = self.reply.send(Completion {
            rid: self.rid,
            finish,
            prompt_tokens: self.prompt_tokens,
            output_ids: self.tokens[self.prompt_tokens..self.prompt_tokens + kept].to_vec(),
            log_probs: self.log_probs[..kept].to_vec(),
            prompt_log_probs: self.prompt_log_probs,
            spans: spans(self.changes, version, kept),
            retractions: self.retractions,
            max_new_tokens: self.sampling.max_new_tokens,
        });
    }
}

/// Spans of `generated` tokens from the changes noted on the way: `(old version, tokens generated under it)`.
/// An empty output has one empty span; a change back to the same label is no change.
fn spans(changes: Vec<(String, usize)>, current: &str, generated: usize) -> Vec<VersionSpan> {
    let mut spans: Vec<VersionSpan> = Vec::new();
    for (label, end) in changes.into_iter().chain([(current.to_owned(), generated)]) {
        let end = end.min(generated) as u32;
        match spans.last_mut() {
            Some(last) if end <= last.end => {}
            Some(last) if last.label == label => last.end = end,
            last => {
                let start = last.map_or(0, |last| last.end);
                spans.push(VersionSpan { label, start, end });
            }
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use driftless_server::Request;

    use super::*;

    fn of(changes: &[(&str, usize)], current: &str, generated: usize) -> Vec<(String, u32, u32)> {
        let changes = changes.iter().map(|(version, end)| ((*version).to_owned(), *end)).collect();
        spans(changes, current, generated).into_iter().map(|s| (s.label, s.start, s.end)).collect()
    }

    #[test]
    fn spans_are_those_of_sglang() {
        let s = |version: &str, start, end| (version.to_owned(), start, end);
        assert_eq!(of(&[], "a", 0), [s("a", 0, 0)]);
        assert_eq!(of(&[], "a", 4), [s("a", 0, 4)]);
        assert_eq!(of(&[("a", 15)], "b", 400), [s("a", 0, 15), s("b", 15, 400)]);
        assert_eq!(of(&[("a", 3), ("b", 3)], "c", 5), [s("a", 0, 3), s("c", 3, 5)], "no token of b");
        assert_eq!(of(&[("a", 3), ("b", 4)], "a", 5), [s("a", 0, 3), s("b", 3, 4), s("a", 4, 5)]);
        assert_eq!(of(&[("a", 5)], "b", 5), [s("a", 0, 5)], "changed after the last token");
    }

    #[test]
    fn the_last_allowed_token_may_be_a_stop_token() {
        let sampling = Sampling {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 1,
            min_p: 0.0,
            max_new_tokens: 2,
            stop: vec![9],
            seed: None,
        };
        let new = || {
            let (reply, _) = oneshot::channel();
            let (rid, prompt) = ("r".to_owned(), vec![1]);
            let request = Request { rid, prompt, sampling: sampling.clone(), prompt_log_probs_from: None };
            Sequence::new(Job { request, reply, progress: None }, 0)
        };
        for (stop_beats_length, expected) in [(true, Ended::Stop(9)), (false, Ended::Length)] {
            let mut sequence = new();
            assert_eq!(sequence.push(3, -1.0, stop_beats_length), None);
            assert_eq!(sequence.push(9, -1.0, stop_beats_length), Some(expected));
        }
        assert!(new().is_abandoned());
    }
}
