//! Generation with token ids in and out: the request and the finished sample, whatever kind of engine makes
//! it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use derive_setters::Setters;
use serde::{Deserialize, Serialize};

use super::{Drawn, Meter, ReplyDigest};
use crate::error::{Error, Result};

/// A request's id: 36 hex digits, always.
///
/// The length is fixed because an engine aborts every request whose id *starts with* the given one: aborting
/// `7` would abort `71` too. The last four digits count attempts, because an engine refuses an id that it
/// still works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rid {
    scope: u64,
    sample: u64,
    attempt: u16,
}

impl Rid {
    /// Id of `sample` within `scope`, first attempt. A scope is whatever keeps two trainers apart on a shared
    /// engine: digits of the run's id.
    pub fn new(scope: u64, sample: u64) -> Self {
        Self { scope, sample, attempt: 0 }
    }

    /// A new id for a probe of an engine, apart from every sample's.
    pub(crate) fn probe() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // The process id keeps two processes that probe one engine at a time apart.
        let scope = u64::from(std::process::id()) | (0xffff_ffff << 32);
        Self::new(scope, NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Number of the sample that it was made for.
    #[must_use]
    pub fn sample(self) -> u64 {
        self.sample
    }

    /// Scope, sample and attempt.
    pub(super) fn parts(self) -> (u64, u64, u16) {
        (self.scope, self.sample, self.attempt)
    }

    /// From scope, sample and attempt.
    pub(super) fn of_parts(scope: u64, sample: u64, attempt: u16) -> Self {
        Self { scope, sample, attempt }
    }

    /// Id of the `nth` generation of the same sample, apart from those of others; 0 is the id itself.
    #[must_use]
    pub fn generation(self, nth: u64) -> Self {
        // Odd: no two numbers come to the same scope.
        Self { scope: self.scope ^ nth.wrapping_mul(0x9e37_79b9_7f4a_7c15), ..self }
    }

    /// The same sample's next attempt.
    #[must_use]
    pub fn next_attempt(self) -> Self {
        Self { attempt: self.attempt.wrapping_add(1), ..self }
    }
}

impl fmt::Display for Rid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}{:04x}", self.scope, self.sample, self.attempt)
    }
}

/// How tokens are drawn. SGLang's names and meanings; everything is sent, nothing is left to the engine's
/// defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Nucleus: smallest set of tokens with this much probability. 1 keeps all.
    pub top_p: f64,
    /// Number of likeliest tokens to keep; -1 keeps all.
    pub top_k: i64,
    /// Bound on the output's length, in tokens.
    pub max_new_tokens: u32,
    /// Tokens that end the output, themselves included in it.
    pub stop_token_ids: Vec<i32>,
    /// Texts that end the output; engines without a tokenizer refuse them.
    pub stop: Vec<String>,
    /// Whether to generate past the model's own end token.
    pub ignore_eos: bool,
    /// Seed of this request's draws; engines honour it with deterministic inference only.
    pub sampling_seed: Option<u64>,
}

impl Default for SamplingParams {
    /// Plain sampling from the model's distribution, 128 tokens at most.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: -1,
            max_new_tokens: 128,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
            sampling_seed: None,
        }
    }
}

/// One sample to generate.
#[derive(Debug, Clone, PartialEq, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct GenerateRequest {
    /// The request's id.
    pub rid: Rid,
    /// The prompt's token ids.
    pub input_ids: Vec<i32>,
    /// How to draw.
    pub sampling: SamplingParams,
    /// Requests with the same number begin with the same tokens. A fleet keeps them on one engine, whose cache then
    /// has the prompt; engines do not see it.
    pub affinity: Option<u64>,
    /// Number of the conversation that the request goes on with. A fleet sends it where the last one of that went, before
    /// it looks at `affinity`; engines do not see it.
    pub conversation: Option<u64>,
    /// In a [`Fleet`](crate::Fleet), requests of a higher one get free places first; those of the same one in the order in
    /// which they ask. Engines do not see it.
    pub priority: u8,
    /// Requests of different ones share nothing of an engine's prefix cache. Without one, a [`Fleet`](crate::Fleet)
    /// takes the label that the engine has.
    pub salt: Option<String>,
    /// The first tokens of the answer, drawn before. A [`Fleet`](crate::Fleet) has an engine go on behind them, and its
    /// reply has them too; an engine that is asked by itself does not see them.
    pub drawn: Drawn,
    /// A [`Fleet`](crate::Fleet) adds what the request takes to it.
    pub meter: Meter,
}

impl GenerateRequest {
    /// A request of priority 0 that shares its prompt with no other.
    #[must_use]
    pub fn new(rid: Rid, input_ids: Vec<i32>, sampling: SamplingParams) -> Self {
        let (drawn, meter) = (Drawn::default(), Meter::default());
        let (affinity, conversation, priority, salt) = (None, None, 0, None);
        Self { rid, input_ids, sampling, affinity, conversation, priority, salt, drawn, meter }
    }

    /// A greedy request of our own, which ends with `max_new_tokens` only.
    pub(crate) fn probe(input_ids: Vec<i32>, max_new_tokens: u32) -> Self {
        let sampling = SamplingParams {
            temperature: 0.0,
            max_new_tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        Self::new(Rid::probe(), input_ids, sampling)
    }

    /// Refuses what an engine would misbehave on. A token id outside the vocabulary ends a CPU engine's
    /// process altogether.
    ///
    /// # Errors
    /// [`Error::Request`] for an empty prompt or an id that is negative or not below `vocabulary` (where
    /// known).
    pub(crate) fn validate(&self, vocabulary: Option<u64>) -> Result<()> {
        let fail = |what, expected: String, found: String| {
            Err(Error::Request { rid: self.rid.to_string(), what, expected, found })
        };
        if self.input_ids.is_empty() {
            return fail("input_ids", "at least one token".into(), "none".into());
        }
        let bound = vocabulary.unwrap_or(i32::MAX as u64);
        for ids in [&self.input_ids, &self.drawn.output_ids, &self.sampling.stop_token_ids] {
            if let Some(id) = outside(ids, bound) {
                return fail("a token id", format!("in 0..{bound}"), id.to_string());
            }
        }
        Ok(())
    }
}

/// Why an output ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// A stop token or the model's end token.
    Stop,
    /// `max_new_tokens`.
    Length,
    /// Somebody aborted it; the output is what there was.
    Abort {
        /// The engine's reason.
        message: String,
    },
}

/// Output tokens `start..end` were drawn from the weights with this label.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct VersionSpan {
    /// The label.
    #[serde(rename = "version")]
    pub label: String,
    /// First output token.
    pub start: u32,
    /// One past the last.
    pub end: u32,
}

/// A finished sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The request, with the attempt that succeeded.
    pub rid: Rid,
    /// URL of the engine that made it.
    pub engine: String,
    /// The sampled token ids.
    pub output_ids: Vec<i32>,
    /// Log-probability of each under the distribution it was drawn from, temperature included, before top-p
    /// and top-k cut it.
    pub log_probs: Vec<f32>,
    /// Which weights drew which tokens: contiguous and complete; empty only when there are no tokens.
    pub spans: Vec<VersionSpan>,
    /// False where the engine reports one label per reply only: a change of weights in the middle would not
    /// show.
    pub spans_reported: bool,
    /// Why it ended.
    pub finish: Finish,
    /// How often a pause sent the request back to the queue.
    pub retractions: u64,
    /// Tokens of the prompt that the engine had in its prefix cache; `None` where it does not say.
    pub cached_tokens: Option<u32>,
    /// Digests of the replies that it is made of, ascending. Together they have all tokens that an engine's reply had.
    pub replies: Vec<ReplyDigest>,
}

impl Generation {
    /// One without tokens that ends by its length: the context has no room for any, or what was drawn before is all.
    #[must_use]
    pub fn without_tokens(rid: Rid) -> Self {
        Generation {
            rid,
            engine: String::new(),
            output_ids: Vec::new(),
            log_probs: Vec::new(),
            spans: Vec::new(),
            spans_reported: true,
            finish: Finish::Length,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        }
    }

    /// Refuses a reply without a token, unless it was aborted, and tokens that the model does not have: a learner
    /// looks each of them up in a table of `vocabulary` rows.
    ///
    /// # Errors
    /// [`Error::Reply`] for no token, and for an id that is negative or not below `vocabulary`.
    pub(crate) fn validate(&self, vocabulary: u64) -> Result<()> {
        if self.output_ids.is_empty() && !matches!(self.finish, Finish::Abort { .. }) {
            return Err(self.refused("at least one token".into(), "none".into()));
        }
        let Some(id) = outside(&self.output_ids, vocabulary) else { return Ok(()) };
        let expected = format!("token ids in 0..{vocabulary}, the model's vocabulary");
        Err(self.refused(expected, format!("token {id}")))
    }

    /// The error of an engine whose reply is no sample.
    fn refused(&self, expected: String, found: String) -> Error {
        Error::Reply { engine: self.engine.clone(), call: "a generation".into(), expected, found }
    }
}

/// The first id that is no token of a vocabulary of this size.
pub(crate) fn outside(ids: &[i32], vocabulary: u64) -> Option<&i32> {
    ids.iter().find(|id| u64::try_from(**id).map_or(true, |id| id >= vocabulary))
}

/// What a reply should have been, and what it was.
pub(crate) type Mismatch = (String, String);

/// A token's log-probability as a reply says it; `name` is what the reply calls it.
pub(crate) fn log_probability(value: Option<f32>, name: impl FnOnce() -> String) -> Result<f32, Mismatch> {
    match value {
        // A little above 0 is rounding of the engine's log-softmax.
        Some(value) if value.is_finite() && value <= 1e-3 => Ok(value.min(0.0)),
        other => Err((format!("{} finite and not positive", name()), format!("{other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> GenerateRequest {
        let sampling = SamplingParams { max_new_tokens: 4, ..Default::default() };
        GenerateRequest::new(Rid::new(1, 2), vec![1], sampling)
    }

    #[test]
    fn rids_have_one_length_and_one_per_attempt() {
        let (small, large) = (Rid::new(0, 7), Rid::new(u64::MAX, u64::MAX));
        assert_eq!((small.to_string().len(), large.to_string().len()), (36, 36));
        assert_ne!(small.to_string(), small.next_attempt().to_string());
        assert_eq!(small.generation(0), small);
        assert_ne!(small.generation(1).next_attempt(), small.generation(2).next_attempt());
    }

    #[test]
    fn requests_that_would_end_an_engine_are_refused() {
        let mut bad = request();
        assert!(bad.validate(Some(2)).is_ok());
        assert!(bad.validate(Some(1)).is_err());
        bad.input_ids = vec![-1];
        assert!(bad.validate(None).is_err());
        bad.input_ids.clear();
        assert!(bad.validate(None).is_err());
        let mut stop = request();
        stop.sampling.stop_token_ids = vec![300];
        assert!(stop.validate(Some(256)).is_err());
    }
}
