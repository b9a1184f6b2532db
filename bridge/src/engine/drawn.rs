//! Tokens of an answer that is not finished: what stays of them when an engine dies, and how another goes on behind them.

use super::reply::{Tokens, version};
use super::{Digester, GenerateRequest, Generation, ReplyDigest, Rid, VersionSpan};

/// The tokens of an answer that were drawn so far.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Drawn {
    /// The sampled token ids.
    pub output_ids: Vec<i32>,
    /// Log-probability of each, as [`Generation::log_probs`].
    pub log_probs: Vec<f32>,
    /// Which weights drew which tokens: contiguous and complete.
    pub spans: Vec<VersionSpan>,
    /// Digests of the replies that had them, ascending. Tokens that an earlier release kept have none.
    pub replies: Vec<ReplyDigest>,
}

/// Tokens that one version drew, behind those drawn before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece<'a> {
    /// The sampled token ids.
    pub output_ids: &'a [i32],
    /// Log-probability of each.
    pub log_probs: &'a [f32],
    /// The label of the weights.
    pub label: &'a str,
    /// Whether the engine says so of each of these tokens, and not of the whole reply only.
    pub located: bool,
    /// Digest of these tokens, counted from the first; unknown of those that an earlier release kept.
    pub digest: Option<ReplyDigest>,
}

/// Hears of pieces, in order.
pub type Tell<'a> = &'a mut (dyn for<'p> FnMut(Piece<'p>) + Send);

impl Piece<'_> {
    /// The same with the digest of its tokens, which the reply to this request has behind such a [`context`](super::context).
    #[must_use]
    pub fn digested(self, rid: Rid, context: u64) -> Self {
        let mut digester = Digester::new(rid, context);
        let version = version(self.label);
        for (id, log_prob) in self.output_ids.iter().zip(self.log_probs) {
            digester.push(*id, *log_prob, version);
        }
        // A request is for fewer than 2^32 tokens.
        let end = u32::try_from(self.output_ids.len()).unwrap_or(u32::MAX);
        let digest = ReplyDigest { rid, start: 0, end, context, digest: digester.digest() };
        Self { digest: (end > 0).then_some(digest), ..self }
    }
}

impl Drawn {
    /// How many tokens there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.output_ids.len()
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.output_ids.is_empty()
    }

    /// Puts a piece behind the others.
    pub fn push(&mut self, piece: Piece<'_>) {
        let Piece { output_ids, log_probs, label, digest, .. } = piece;
        let start = self.end();
        ReplyDigest::append(&mut self.replies, digest, start);
        self.output_ids.extend_from_slice(output_ids);
        self.log_probs.extend_from_slice(log_probs);
        let end = self.end();
        match self.spans.last_mut() {
            _ if start == end => {}
            Some(last) if last.label == label => last.end = end,
            _ => self.spans.push(VersionSpan { label: label.to_owned(), start, end }),
        }
    }

    /// Its pieces from token `from` on.
    pub fn pieces(&self, from: usize) -> impl Iterator<Item = Piece<'_>> {
        let mut at = u32::try_from(from).unwrap_or(u32::MAX);
        std::iter::from_fn(move || {
            let span = self.spans.iter().find(|span| span.start <= at && at < span.end)?;
            let reply = self.replies.iter().find(|reply| at < reply.end);
            let (end, reply) = match reply {
                Some(reply) if reply.start <= at => (span.end.min(reply.end), Some(reply)),
                Some(next) => (span.end.min(next.start), None),
                None => (span.end, None),
            };
            let places = at as usize..end as usize;
            let (output_ids, log_probs) = (self.output_ids.get(places.clone())?, self.log_probs.get(places)?);
            let digest = reply.map(|reply| {
                let part = self.tokens().part(reply, at..end);
                ReplyDigest { start: 0, end: end - at, ..part }
            });
            at = end;
            Some(Piece { output_ids, log_probs, label: &span.label, located: true, digest })
        })
    }

    /// Keeps the first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        let end = u32::try_from(length).unwrap_or(u32::MAX).min(self.end());
        let mut replies = std::mem::take(&mut self.replies);
        replies.retain(|reply| reply.start < end);
        if let Some(last) = replies.last_mut().filter(|last| last.end > end) {
            *last = self.tokens().cut(last, end);
        }
        self.replies = replies;
        self.output_ids.truncate(length);
        self.log_probs.truncate(length);
        self.spans.retain(|span| span.start < end);
        if let Some(last) = self.spans.last_mut() {
            last.end = last.end.min(end);
        }
    }

    /// Puts what an engine generated behind them.
    pub(crate) fn append(&mut self, generation: &Generation) {
        let behind = self.end();
        ReplyDigest::append(&mut self.replies, generation.replies.iter().copied(), behind);
        for span in &generation.spans {
            let range = span.start as usize..span.end as usize;
            let (output_ids, log_probs) =
                (&generation.output_ids[range.clone()], &generation.log_probs[range]);
            self.push(Piece { output_ids, log_probs, label: &span.label, located: true, digest: None });
        }
    }

    /// The answer of which these are the first tokens and `rest` the others.
    pub(crate) fn whole(mut self, rest: Generation) -> Generation {
        self.append(&rest);
        let Self { output_ids, log_probs, spans, replies } = self;
        Generation { output_ids, log_probs, spans, replies, ..rest }
    }

    fn tokens(&self) -> Tokens<'_> {
        let Self { output_ids, log_probs, spans, .. } = self;
        Tokens { output_ids, log_probs, spans }
    }

    /// One past the last token.
    fn end(&self) -> u32 {
        // A request is for fewer than 2^32 tokens.
        u32::try_from(self.output_ids.len()).unwrap_or(u32::MAX)
    }
}

impl Generation {
    /// Digests of its first `length` tokens.
    #[must_use]
    pub fn replies_until(&self, length: usize) -> Vec<ReplyDigest> {
        if length >= self.output_ids.len() {
            return self.replies.clone();
        }
        let mut drawn = Drawn::default();
        drawn.append(self);
        drawn.truncate(length);
        drawn.replies
    }
}

impl GenerateRequest {
    /// What an engine is asked for, so that it goes on behind the tokens that are drawn. Its draws are others than those
    /// of the request, for engines that count them from a request's first token.
    pub(crate) fn rest(&self) -> Self {
        let mut rest = Self { drawn: Drawn::default(), ..self.clone() };
        let drawn = self.drawn.end();
        if drawn > 0 {
            rest.input_ids.extend_from_slice(&self.drawn.output_ids);
            rest.sampling.max_new_tokens = self.sampling.max_new_tokens.saturating_sub(drawn);
            let seed = |seed: u64| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(drawn)) >> 1;
            rest.sampling.sampling_seed = self.sampling.sampling_seed.map(seed);
        }
        rest
    }

    /// The answer, if all of its tokens are drawn.
    pub(crate) fn is_drawn(&self) -> Option<Generation> {
        let most = self.sampling.max_new_tokens as usize;
        (!self.drawn.is_empty() && self.drawn.len() >= most).then(|| {
            let mut drawn = self.drawn.clone();
            drawn.truncate(most);
            drawn.whole(Generation::without_tokens(self.rid))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Finish;
    use crate::engine::{Rid, SamplingParams};

    fn piece<'a>(output_ids: &'a [i32], label: &'a str) -> Piece<'a> {
        Piece { output_ids, log_probs: &[-0.5; 8][..output_ids.len()], label, located: true, digest: None }
    }

    #[test]
    fn pieces_of_drawn_tokens_are_those_that_were_pushed() {
        let mut drawn = Drawn::default();
        for (ids, label) in [(&[1, 2][..], "a"), (&[], "b"), (&[3], "a"), (&[4, 5], "b")] {
            drawn.push(piece(ids, label));
        }
        let pieces = |from| drawn.pieces(from).map(|piece| (piece.output_ids.to_vec(), piece.label));
        assert_eq!(pieces(0).collect::<Vec<_>>(), [(vec![1, 2, 3], "a"), (vec![4, 5], "b")]);
        assert_eq!(pieces(4).collect::<Vec<_>>(), [(vec![5], "b")]);
        assert_eq!(pieces(5).count(), 0);
        let mut cut = drawn.clone();
        cut.truncate(3);
        assert_eq!((cut.len(), cut.spans.len(), cut.spans[0].end), (3, 1, 3));
        cut.truncate(2);
        assert_eq!(cut.spans[0].end, 2);
    }

    #[test]
    fn rest_of_a_request_is_behind_what_is_drawn() {
        let sampling = SamplingParams { max_new_tokens: 5, sampling_seed: Some(9), ..Default::default() };
        let mut request = GenerateRequest::new(Rid::new(1, 2), vec![7], sampling);
        assert_eq!(request.rest(), request);
        request.drawn.push(piece(&[1, 2], "a"));
        let rest = request.rest();
        assert_eq!((rest.input_ids, rest.sampling.max_new_tokens), (vec![7, 1, 2], 3));
        let seed = rest.sampling.sampling_seed.unwrap();
        assert!(seed != 9 && seed <= i64::MAX as u64);
        assert_eq!(request.is_drawn(), None);
        request.drawn.push(piece(&[3, 4, 5, 6], "b"));
        let whole = request.is_drawn().unwrap();
        assert_eq!((whole.output_ids, whole.finish), (vec![1, 2, 3, 4, 5], Finish::Length));
        assert_eq!(whole.spans.last().unwrap().end, 5);
    }
}
