//! Generation with token ids in and out: the request, the reply, and what a reply must satisfy.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Error, Result};

/// A request's id: 36 hex digits, always.
///
/// The length is fixed because an engine aborts every request whose id *starts with* the given one: aborting `7` would abort `71` too.
/// The last four digits count attempts, because an engine refuses an id that it still works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rid {
    scope: u64,
    sample: u64,
    attempt: u16,
}

impl Rid {
    /// Id of `sample` within `scope`, first attempt. A scope is whatever keeps two trainers apart on a shared engine: digits of the run's id.
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

/// How tokens are drawn. SGLang's names and meanings; everything is sent, nothing is left to the engine's defaults.
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
            ignore_eos: false,
            sampling_seed: None,
        }
    }
}

impl SamplingParams {
    fn to_json(&self) -> Value {
        let mut value = json!({
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        });
        if let (Some(seed), Some(object)) = (self.sampling_seed, value.as_object_mut()) {
            object.insert("sampling_seed".into(), seed.into());
        }
        value
    }
}

/// One sample to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The request's id.
    pub rid: Rid,
    /// The prompt's token ids.
    pub input_ids: Vec<i32>,
    /// How to draw.
    pub sampling: SamplingParams,
}

impl GenerateRequest {
    /// Refuses what an engine would misbehave on. A token id outside the vocabulary ends a CPU engine's process altogether.
    ///
    /// # Errors
    /// [`Error::Request`] for an empty prompt or an id that is negative or not below `vocabulary` (where known).
    pub(crate) fn validate(&self, vocabulary: Option<u64>) -> Result<()> {
        let fail = |what, expected: String, found: String| {
            Err(Error::Request { rid: self.rid.to_string(), what, expected, found })
        };
        if self.input_ids.is_empty() {
            return fail("input_ids", "at least one token".into(), "none".into());
        }
        let bound = vocabulary.unwrap_or(i32::MAX as u64);
        for ids in [&self.input_ids, &self.sampling.stop_token_ids] {
            if let Some(id) = ids.iter().find(|id| u64::try_from(**id).map_or(true, |id| id >= bound)) {
                return fail("a token id", format!("in 0..{bound}"), id.to_string());
            }
        }
        Ok(())
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "rid": self.rid.to_string(),
            "input_ids": self.input_ids,
            "sampling_params": self.sampling.to_json(),
            "return_logprob": true,
            "stream": false,
        })
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
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
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
    /// Log-probability of each under the distribution it was drawn from, temperature included, before top-p and top-k cut it.
    pub log_probs: Vec<f32>,
    /// Which weights drew which tokens: contiguous and complete; empty only when there are no tokens.
    pub spans: Vec<VersionSpan>,
    /// False where the engine reports one label per reply only: a change of weights in the middle would not show.
    pub spans_reported: bool,
    /// Why it ended.
    pub finish: Finish,
    /// How often a pause sent the request back to the queue.
    pub retractions: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RawGeneration {
    #[serde(default)]
    output_ids: Vec<i32>,
    meta_info: RawMeta,
}

#[derive(Debug, Deserialize)]
struct RawMeta {
    id: Option<String>,
    finish_reason: RawFinish,
    weight_version: Option<String>,
    weight_versions: Option<Vec<VersionSpan>>,
    #[serde(default)]
    num_retractions: u64,
    output_token_logprobs: Option<Vec<RawLogProb>>,
}

/// `[log-probability, token id, text or null]`.
type RawLogProb = (Option<f32>, i32, Option<String>);

#[derive(Debug, Deserialize)]
struct RawFinish {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    message: Option<String>,
}

/// What a reply should have been, and what it was.
pub(crate) type Mismatch = (String, String);

impl RawGeneration {
    /// Checks a reply against its request and gives it its final form.
    pub(crate) fn check(self, request: &GenerateRequest, engine: &str) -> Result<Generation, Mismatch> {
        let meta = self.meta_info;
        let rid = request.rid.to_string();
        // A request aborted in the queue is answered without its id.
        if meta.id.as_ref().is_some_and(|id| *id != rid) {
            return Err((format!("meta_info.id {rid}"), format!("{:?}", meta.id)));
        }
        let finish = meta.finish_reason.check()?;
        let log_probs = log_probs(&self.output_ids, meta.output_token_logprobs)?;
        if self.output_ids.len() > request.sampling.max_new_tokens as usize {
            return Err((
                format!("at most {} output_ids", request.sampling.max_new_tokens),
                self.output_ids.len().to_string(),
            ));
        }
        let spans_reported = meta.weight_versions.is_some();
        let spans = spans(self.output_ids.len(), meta.weight_versions, meta.weight_version)?;
        Ok(Generation {
            rid: request.rid,
            engine: engine.to_owned(),
            output_ids: self.output_ids,
            log_probs,
            spans,
            spans_reported,
            finish,
            retractions: meta.num_retractions,
        })
    }
}

impl RawFinish {
    fn check(self) -> Result<Finish, Mismatch> {
        match self.kind.as_str() {
            "stop" => Ok(Finish::Stop),
            "length" => Ok(Finish::Length),
            "abort" => Ok(Finish::Abort { message: self.message.unwrap_or_default() }),
            other => Err(("finish_reason.type stop, length or abort".into(), other.to_owned())),
        }
    }
}

fn log_probs(ids: &[i32], entries: Option<Vec<RawLogProb>>) -> Result<Vec<f32>, Mismatch> {
    let entries = entries.unwrap_or_default();
    if entries.len() != ids.len() {
        return Err((
            format!("{} entries of output_token_logprobs, one per output id", ids.len()),
            entries.len().to_string(),
        ));
    }
    let mut out = Vec::with_capacity(ids.len());
    for (at, ((log_prob, id, _), sampled)) in entries.into_iter().zip(ids).enumerate() {
        if id != *sampled || id < 0 {
            return Err((format!("output_token_logprobs[{at}] of token {sampled}"), format!("token {id}")));
        }
        match log_prob {
            // A little above 0 is rounding of the engine's log-softmax.
            Some(value) if value.is_finite() && value <= 1e-3 => out.push(value.min(0.0)),
            other => {
                return Err((
                    format!("output_token_logprobs[{at}] finite and not positive"),
                    format!("{other:?}"),
                ));
            }
        }
    }
    Ok(out)
}

fn spans(
    tokens: usize,
    reported: Option<Vec<VersionSpan>>,
    label: Option<String>,
) -> Result<Vec<VersionSpan>, Mismatch> {
    let tokens =
        u32::try_from(tokens).map_err(|_| ("fewer than 2^32 tokens".to_owned(), tokens.to_string()))?;
    let Some(mut spans) = reported else {
        let label = label.ok_or_else(|| ("meta_info.weight_version".to_owned(), "none".to_owned()))?;
        return Ok(if tokens == 0 { Vec::new() } else { vec![VersionSpan { label, start: 0, end: tokens }] });
    };
    spans.retain(|span| span.start != span.end);
    let mut next = 0;
    for span in &spans {
        if span.start != next || span.end < span.start {
            return Err((
                format!("a weight_versions span from {next}"),
                format!("{}..{}", span.start, span.end),
            ));
        }
        next = span.end;
    }
    if next != tokens {
        return Err((format!("weight_versions up to token {tokens}"), format!("up to {next}")));
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> GenerateRequest {
        GenerateRequest {
            rid: Rid::new(1, 2),
            input_ids: vec![1],
            sampling: SamplingParams { max_new_tokens: 4, ..Default::default() },
        }
    }

    fn reply(meta: &str) -> Result<Generation, Mismatch> {
        let text = format!(
            r#"{{"output_ids":[5,6],"meta_info":{{"finish_reason":{{"type":"length","length":2}},{meta}}}}}"#
        );
        serde_json::from_str::<RawGeneration>(&text).unwrap().check(&request(), "http://e:1")
    }

    const LOGPROBS: &str = r#""output_token_logprobs":[[-0.5,5,null],[-1.5,6,"x"]]"#;

    #[test]
    fn rids_have_one_length_and_one_per_attempt() {
        let (small, large) = (Rid::new(0, 7), Rid::new(u64::MAX, u64::MAX));
        assert_eq!((small.to_string().len(), large.to_string().len()), (36, 36));
        assert_ne!(small.to_string(), small.next_attempt().to_string());
    }

    #[test]
    fn a_good_reply_is_taken() {
        let spans =
            r#""weight_versions":[{"version":"a","start":0,"end":1},{"version":"b","start":1,"end":2}]"#;
        let generation =
            reply(&format!(r#""id":"{}","weight_version":"b",{LOGPROBS},{spans}"#, Rid::new(1, 2))).unwrap();
        assert_eq!(generation.output_ids, [5, 6]);
        assert_eq!(generation.log_probs, [-0.5, -1.5]);
        assert_eq!(generation.spans[1], VersionSpan { label: "b".into(), start: 1, end: 2 });
        assert!(generation.spans_reported);
    }

    #[test]
    fn without_spans_the_reply_has_one_label() {
        let generation = reply(&format!(r#""weight_version":"a",{LOGPROBS}"#)).unwrap();
        assert_eq!(generation.spans, [VersionSpan { label: "a".into(), start: 0, end: 2 }]);
        assert!(!generation.spans_reported);
    }

    #[test]
    fn lies_are_found() {
        let other = Rid::new(9, 9);
        for (meta, word) in [
            (format!(r#""id":"{other}","weight_version":"a",{LOGPROBS}"#), "meta_info.id"),
            (r#""weight_version":"a","output_token_logprobs":[[-0.5,5,null]]"#.into(), "one per output id"),
            (
                r#""weight_version":"a","output_token_logprobs":[[-0.5,5,null],[-1.5,7,null]]"#.into(),
                "of token 6",
            ),
            (
                r#""weight_version":"a","output_token_logprobs":[[-0.5,5,null],[null,6,null]]"#.into(),
                "finite",
            ),
            (
                r#""weight_version":"a","output_token_logprobs":[[-0.5,5,null],[0.5,6,null]]"#.into(),
                "not positive",
            ),
            (LOGPROBS.into(), "weight_version"),
            (
                format!(r#""weight_versions":[{{"version":"a","start":0,"end":1}}],{LOGPROBS}"#),
                "up to token 2",
            ),
            (format!(r#""weight_versions":[{{"version":"a","start":1,"end":2}}],{LOGPROBS}"#), "span from 0"),
        ] {
            let (expected, _) = reply(&meta).unwrap_err();
            assert!(expected.contains(word), "{meta}: {expected}");
        }
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
