//! Digests of replies, made where an engine's reply is parsed. A reader of the rollout log tells by them whether what was
//! trained on is what an engine drew.

use std::ops::Range;

use super::{Generation, Label, Rid, VersionSpan};

/// Says which tokens one request drew, and behind what.
///
/// The digest is a sum over the tokens, each with all ids before it. However a reply comes in pieces, they add up to the same,
/// and what is cut off is subtracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReplyDigest {
    /// The request, with the attempt that drew them.
    pub rid: Rid,
    /// First of the tokens.
    pub start: u32,
    /// One past the last.
    pub end: u32,
    /// [`context`] of all ids before the first.
    pub context: u64,
    /// Of all tokens, as [`Digester::digest`].
    pub digest: u128,
}

/// Adds up the digests of tokens that come one after another.
#[derive(Debug, Clone)]
pub struct Digester {
    rid: Rid,
    context: u64,
    digest: u128,
}

/// Goes on behind `before`, which is 0 at the first id, with further ids. Sequences that differ in one id have different
/// contexts.
#[must_use]
pub fn context(before: u64, ids: &[i32]) -> u64 {
    ids.iter().fold(before, |context, id| {
        (context.rotate_left(5) ^ (u64::from(id.cast_unsigned()) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

impl Digester {
    /// Of the tokens that this request drew behind such a context.
    #[must_use]
    pub fn new(rid: Rid, context: u64) -> Self {
        Digester { rid, context, digest: 0 }
    }

    /// Takes the next token, with its log-probability and the version of the weights; without one where they are none of a
    /// run.
    pub fn push(&mut self, id: i32, log_prob: f32, version: Option<u64>) {
        let (scope, sample, attempt) = self.rid.parts();
        let mut bytes = [0; 42];
        bytes[..8].copy_from_slice(&scope.to_le_bytes());
        bytes[8..16].copy_from_slice(&sample.to_le_bytes());
        bytes[16..18].copy_from_slice(&attempt.to_le_bytes());
        bytes[18..26].copy_from_slice(&self.context.to_le_bytes());
        bytes[26..30].copy_from_slice(&id.to_le_bytes());
        bytes[30..34].copy_from_slice(&log_prob.to_bits().to_le_bytes());
        bytes[34..].copy_from_slice(&version.unwrap_or(u64::MAX).to_le_bytes());
        let mut first = [0; 16];
        first.copy_from_slice(&blake3::hash(&bytes).as_bytes()[..16]);
        self.digest = self.digest.wrapping_add(u128::from_le_bytes(first));
        self.context = context(self.context, &[id]);
    }

    /// The sum so far.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.digest
    }
}

impl ReplyDigest {
    /// Bytes of one in the rollout log.
    pub const BYTES: usize = 56;

    /// As the rollout log has it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let (scope, sample, attempt) = self.rid.parts();
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.start.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.end.to_le_bytes());
        for (place, number) in
            bytes[8..40].chunks_exact_mut(8).zip([scope, sample, attempt.into(), self.context])
        {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes[40..].copy_from_slice(&self.digest.to_le_bytes());
        bytes
    }

    /// From what the rollout log has; `None` if it is none.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let number = |at: usize| bytes[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        let tokens = number(0)?;
        Some(ReplyDigest {
            rid: Rid::of_parts(number(8)?, number(16)?, u16::try_from(number(24)?).ok()?),
            start: tokens as u32,
            end: (tokens >> 32) as u32,
            context: number(32)?,
            digest: u128::from(number(40)?) | u128::from(number(48)?) << 64,
        })
    }

    /// Puts digests behind others, whose tokens are `behind` before theirs. What one request drew without a gap becomes one.
    pub fn append(replies: &mut Vec<Self>, more: impl IntoIterator<Item = Self>, behind: u32) {
        for reply in more {
            let (start, end) = (reply.start.saturating_add(behind), reply.end.saturating_add(behind));
            match replies.last_mut().filter(|last| last.rid == reply.rid && last.end == start) {
                Some(last) => {
                    (last.end, last.digest) = (end, last.digest.wrapping_add(reply.digest));
                }
                None => replies.push(ReplyDigest { start, end, ..reply }),
            }
        }
    }
}

impl Generation {
    /// With the digest of its tokens, which an engine drew behind these ids in one reply.
    #[must_use]
    pub fn digested(self, input_ids: &[i32]) -> Self {
        let Generation { rid, output_ids, log_probs, spans, .. } = &self;
        let end = u32::try_from(output_ids.len()).unwrap_or(u32::MAX);
        let mut reply = ReplyDigest { rid: *rid, start: 0, end, context: context(0, input_ids), digest: 0 };
        reply.digest = Tokens { output_ids, log_probs, spans }.digest(&reply, 0..end);
        Generation { replies: if end == 0 { Vec::new() } else { vec![reply] }, ..self }
    }
}

/// Tokens with all that a digest says of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub(super) output_ids: &'a [i32],
    pub(super) log_probs: &'a [f32],
    /// Contiguous and complete.
    pub(super) spans: &'a [VersionSpan],
}

impl Tokens<'_> {
    /// Digest of those of a reply's tokens that are in `range`, as they are here.
    pub(super) fn digest(self, reply: &ReplyDigest, range: Range<u32>) -> u128 {
        let before = self.output_ids.get(reply.start as usize..range.start as usize).unwrap_or_default();
        let mut digester = Digester::new(reply.rid, context(reply.context, before));
        let mut push = |places: Range<u32>, version| {
            let places = places.start as usize..places.end as usize;
            let ids = self.output_ids.get(places.clone()).unwrap_or_default();
            let log_probs = self.log_probs.get(places).unwrap_or_default();
            ids.iter().zip(log_probs).for_each(|(id, log_prob)| digester.push(*id, *log_prob, version));
        };
        let mut next = range.start;
        for span in self.spans {
            let start = span.start.clamp(next, range.end);
            let end = span.end.clamp(start, range.end);
            push(next..start, None);
            push(start..end, version(&span.label));
            next = end;
        }
        push(next..range.end, None);
        digester.digest
    }

    /// The digest of a range of a reply's tokens. What is at its end is told from the digest of the whole, so that all
    /// parts of a reply add up to what the engine's reply was, and not to what these tokens are.
    pub(super) fn part(self, reply: &ReplyDigest, range: Range<u32>) -> ReplyDigest {
        let before = self.output_ids.get(reply.start as usize..range.start as usize).unwrap_or_default();
        let digest = match range.end == reply.end {
            true => reply.digest.wrapping_sub(self.digest(reply, reply.start..range.start)),
            false => self.digest(reply, range.clone()),
        };
        let context = context(reply.context, before);
        ReplyDigest { rid: reply.rid, start: range.start, end: range.end, context, digest }
    }

    /// The digest of a reply without its tokens from `end` on.
    pub(super) fn cut(self, reply: &ReplyDigest, end: u32) -> ReplyDigest {
        let digest = reply.digest.wrapping_sub(self.digest(reply, end..reply.end));
        ReplyDigest { end, digest, ..*reply }
    }
}

/// The version that a label names, if it is one of a run.
pub(super) fn version(label: &str) -> Option<u64> {
    label.parse::<Label>().ok().map(|label| label.version())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Drawn, Finish, Piece};
    use proptest::prelude::*;

    const RUN: &str = "0123456789ab";

    /// What a reader has of a token: id, log-probability and version.
    type Token = (i32, f32, u64);

    /// The digest of a reply as docs/format/log.md has it, written from there.
    fn by_the_page(rid: (u64, u64, u16), before: &[i32], tokens: &[Token]) -> u128 {
        let mut ids = before.to_vec();
        let mut sum = 0_u128;
        for (id, log_prob, version) in tokens {
            let mut context = 0_u64;
            for id in &ids {
                context = (context.rotate_left(5) ^ (*id as u32 as u64 + 1)).wrapping_mul(0x9e3779b97f4a7c15);
            }
            let parts = [rid.0.to_le_bytes(), rid.1.to_le_bytes()].concat();
            let mut bytes = [parts, rid.2.to_le_bytes().to_vec(), context.to_le_bytes().to_vec()].concat();
            bytes.extend(id.to_le_bytes().iter().chain(&log_prob.to_le_bytes()));
            bytes.extend(version.to_le_bytes());
            let hash = blake3::hash(&bytes);
            sum = sum.wrapping_add(u128::from_le_bytes(hash.as_bytes()[..16].try_into().unwrap()));
            ids.push(*id);
        }
        sum
    }

    fn label(version: u64) -> String {
        Label::new(RUN, version).unwrap().to_string()
    }

    /// A whole reply of these tokens.
    fn reply(rid: Rid, before: &[i32], tokens: &[Token]) -> Generation {
        let mut drawn = Drawn::default();
        for (id, log_prob, version) in tokens {
            let (label, digest) = (label(*version), None);
            drawn.push(Piece {
                output_ids: &[*id],
                log_probs: &[*log_prob],
                label: &label,
                located: true,
                digest,
            });
        }
        let generation = Generation {
            rid,
            engine: String::new(),
            output_ids: drawn.output_ids,
            log_probs: drawn.log_probs,
            spans: drawn.spans,
            spans_reported: true,
            finish: Finish::Length,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        };
        generation.digested(before)
    }

    /// The first tokens of a reply, as they are streamed in pieces that end at `cuts`.
    fn streamed(whole: &Generation, before: &[i32], cuts: &[usize], end: usize) -> Drawn {
        let (mut drawn, mut told) = (Drawn::default(), Drawn::default());
        drawn.append(&Generation { replies: Vec::new(), ..whole.clone() });
        drawn.truncate(end);
        let mut behind = context(0, before);
        for piece in drawn.pieces(0) {
            let mut at = 0;
            let stops = cuts.iter().map(|cut| cut % piece.output_ids.len().max(1));
            let mut stops: Vec<_> = stops.chain([piece.output_ids.len()]).collect();
            stops.sort_unstable();
            for stop in stops {
                let (output_ids, log_probs) = (&piece.output_ids[at..stop], &piece.log_probs[at..stop]);
                told.push(Piece { output_ids, log_probs, ..piece }.digested(whole.rid, behind));
                (at, behind) = (stop, context(behind, output_ids));
            }
        }
        told
    }

    fn tokens(most: usize) -> impl Strategy<Value = Vec<Token>> {
        proptest::collection::vec((0..9_i32, 0..4_u8, 0..3_u64), 1..most)
            .prop_map(|tokens| tokens.into_iter().map(|(id, p, v)| (id, -f32::from(p), v)).collect())
    }

    proptest! {
        /// An answer whose first engine dies in the middle of its stream, and that another finishes.
        #[test]
        fn pieces_of_any_split_add_up_to_the_reply(
            before in proptest::collection::vec(0..9_i32, 1..5),
            all in tokens(40), cuts in proptest::collection::vec(0..40_usize, 0..6),
            died in 0..40_usize, end in 0..41_usize,
        ) {
            let (first, second) = (Rid::new(1, 2), Rid::new(1, 2).next_attempt());
            let died = died % (all.len() + 1);
            let kept = streamed(&reply(first, &before, &all), &before, &cuts, died);
            prop_assert_eq!(kept.replies.len(), usize::from(died > 0));
            let read: Vec<i32> = before.iter().chain(&kept.output_ids).copied().collect();
            let whole = kept.whole(reply(second, &read, &all[died..]));
            let end = end.min(all.len());
            let replies = whole.replies_until(end);
            for (reply, (rid, range)) in replies.iter().zip(
                [((1, 2, 0), 0..died.min(end)), ((1, 2, 1), died..end)].into_iter().filter(|(_, range)| !range.is_empty())
            ) {
                let read: Vec<i32> = before.iter().chain(&whole.output_ids[..range.start]).copied().collect();
                prop_assert_eq!((reply.start as usize, reply.end as usize), (range.start, range.end));
                prop_assert_eq!(reply.context, context(0, &read));
                prop_assert_eq!(reply.digest, by_the_page(rid, &read, &all[range]));
                prop_assert_eq!(ReplyDigest::from_bytes(&reply.to_bytes()), Some(*reply));
            }
            prop_assert_eq!(replies.last().map_or(0, |last| last.end as usize), end);
        }

        /// What an aborted reply has beyond its stream is kept too, and nothing of it counts twice.
        #[test]
        fn rest_of_a_reply_is_its_digest_without_the_stream(
            all in tokens(40), cuts in proptest::collection::vec(0..40_usize, 0..6), heard in 0..40_usize,
        ) {
            let whole = reply(Rid::new(1, 2), &[7], &all);
            let mut kept = streamed(&whole, &[7], &cuts, heard % all.len());
            let mut rest = Drawn::default();
            rest.append(&whole);
            rest.pieces(kept.len()).for_each(|piece| kept.push(piece));
            prop_assert_eq!(kept.replies, whole.replies);
        }

        #[test]
        fn digest_changes_with_all_that_it_says(all in tokens(9), at in 0..9_usize, what in 0..6) {
            let before = reply(Rid::new(1, 2), &[7], &all).replies[0].digest;
            let (mut changed, at) = (all.clone(), at % all.len());
            let mut read = vec![7];
            let mut rid = Rid::new(1, 2);
            match what {
                0 => changed[at].0 += 1,
                1 => changed[at].1 = f32::from_bits(changed[at].1.to_bits() ^ 1),
                2 => changed[at].2 += 1,
                3 => rid = Rid::new(1, 3),
                4 => rid = rid.next_attempt(),
                _ => read = vec![8],
            }
            prop_assert_ne!(reply(rid, &read, &changed).replies[0].digest, before);
        }
    }

    /// `cargo test --release` prints what it costs.
    #[test]
    fn digest_of_a_reply_of_512_tokens_is_the_same_each_time() {
        let (before, tokens): (Vec<i32>, Vec<Token>) =
            ((0..1024).collect(), (0..512).map(|id| (id, -0.5, 3)).collect());
        let whole = reply(Rid::new(1, 2), &before, &tokens);
        let begin = std::time::Instant::now();
        for _ in 0..100 {
            assert_eq!(whole.clone().digested(&before).replies, whole.replies);
        }
        println!("digest of 512 tokens behind 1024: {:?}", begin.elapsed() / 100);
    }
}
