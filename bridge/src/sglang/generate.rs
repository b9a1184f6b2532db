//! SGLang's form of a generation: the body of `POST /generate`, and what its reply must satisfy.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::{
    Finish, GenerateRequest, Generation, Mismatch, Piece, SamplingParams, Tell, VersionSpan, context,
    log_probability, plain,
};
use crate::error::Result;
use crate::events::Failure;

/// The body of `POST /generate`; with an interval, of a stream whose pieces have so many tokens.
pub(crate) fn body(request: &GenerateRequest, stream_interval: Option<u32>) -> Value {
    let mut sampling = sampling(&request.sampling);
    if let Some(interval) = stream_interval {
        sampling["stream_interval"] = interval.into();
    }
    let mut body = json!({
        "rid": request.rid.to_string(),
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": true,
        "stream": stream_interval.is_some(),
    });
    if let Some(salt) = &request.salt {
        // Releases before 0.5.23 have no `cache_salt`.
        body["extra_key"] = salt.as_str().into();
    }
    body
}

/// Everything is sent: the server's defaults may come from its `--preferred-sampling-params`.
fn sampling(params: &SamplingParams) -> Value {
    let mut value = json!({
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
    });
    if let Some(seed) = params.sampling_seed {
        value["sampling_seed"] = seed.into();
    }
    if !params.stop.is_empty() {
        value["stop"] = params.stop.clone().into();
        // Token ids are what is trained on: the text that they end with stays.
        value["no_stop_trim"] = true.into();
    }
    value
}

#[derive(Debug, Deserialize)]
pub(crate) struct RawGeneration {
    #[serde(default)]
    output_ids: Vec<i32>,
    meta_info: Option<RawMeta>,
    /// Of a stream, in place of the others.
    pub(crate) error: Option<Failure>,
}

#[derive(Debug, Deserialize)]
struct RawMeta {
    id: Option<String>,
    /// Absent while there is more to come.
    finish_reason: Option<RawFinish>,
    /// Tokens drawn so far. A piece of a stream has all of them, or the last ones only.
    completion_tokens: Option<usize>,
    weight_version: Option<String>,
    weight_versions: Option<Vec<VersionSpan>>,
    #[serde(default)]
    num_retractions: u64,
    cached_tokens: Option<u32>,
    output_token_logprobs: Option<Vec<RawLogProb>>,
    /// What the plugin tells of each token that a piece has: the label of the weights that drew it, empty where that is the
    /// one before, absent where it is not known.
    driftless_labels: Option<Vec<Option<String>>>,
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

impl RawGeneration {
    /// Checks a reply against its request and gives it its final form.
    pub(crate) fn check(self, request: &GenerateRequest, engine: &str) -> Result<Generation, Mismatch> {
        Streamed::default().take(self, request, engine, &mut |_| {})?.ok_or_else(unfinished)
    }
}

/// What a reply lacks that ends before its request does.
pub(crate) fn unfinished() -> Mismatch {
    ("meta_info.finish_reason".to_owned(), "none".to_owned())
}

/// The tokens of a reply, as far as it has come.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    output_ids: Vec<i32>,
    log_probs: Vec<f32>,
    /// As far as the plugin told of each token.
    spans: Vec<VersionSpan>,
    /// Of the tokens that were told of, and all ids before them; unknown before the first.
    context: Option<u64>,
}

impl Streamed {
    /// Takes the next piece, checks it against the request, and tells `seen` of its tokens. The last one makes it a
    /// generation.
    pub(crate) fn take(
        &mut self,
        raw: RawGeneration,
        request: &GenerateRequest,
        engine: &str,
        seen: Tell<'_>,
    ) -> Result<Option<Generation>, Mismatch> {
        let meta = raw.meta_info.ok_or_else(|| ("meta_info".to_owned(), "none".to_owned()))?;
        let rid = request.rid.to_string();
        // A request aborted in the queue is answered without its id.
        if meta.id.as_ref().is_some_and(|id| *id != rid) {
            return Err((format!("meta_info.id {rid}"), format!("{:?}", meta.id)));
        }
        let before = self.output_ids.len();
        let start = self.extend(raw.output_ids, meta.completion_tokens, meta.output_token_logprobs)?;
        self.locate(before, meta.driftless_labels.as_deref().and_then(|labels| labels.get(before - start..)));
        if self.output_ids.len() > request.sampling.max_new_tokens as usize {
            let expected = format!("at most {} output_ids", request.sampling.max_new_tokens);
            return Err((expected, self.output_ids.len().to_string()));
        }
        let Some(finish) = meta.finish_reason else {
            self.tell(request, before, meta.weight_version.as_deref().unwrap_or_default(), seen);
            return Ok(None);
        };
        let finish = finish.check()?;
        // They are exact where an engine's own count a step that was under way to the weights after it.
        let reported =
            if self.is_located(0) { Some(std::mem::take(&mut self.spans)) } else { meta.weight_versions };
        let spans_reported = reported.is_some();
        let spans = spans(self.output_ids.len(), reported, meta.weight_version)?;
        let (rid, engine) = (request.rid, engine.to_owned());
        let (retractions, cached_tokens) = (meta.num_retractions, meta.cached_tokens);
        let Self { output_ids, log_probs, .. } = std::mem::take(self);
        let replies = Vec::new();
        let generation = Generation {
            rid,
            engine,
            output_ids,
            log_probs,
            spans,
            spans_reported,
            finish,
            retractions,
            cached_tokens,
            replies,
        };
        Ok(Some(generation.digested(&request.input_ids)))
    }

    /// Takes what the plugin told of the tokens from `before` on. Behind a token of which it told nothing, nothing counts.
    fn locate(&mut self, before: usize, labels: Option<&[Option<String>]>) {
        let Some(labels) = labels.filter(|labels| before + labels.len() == self.output_ids.len()) else {
            return;
        };
        for (at, label) in (u32::try_from(before).unwrap_or(u32::MAX)..).zip(labels) {
            let Some(label) = label else { return };
            // Between load and label an engine generates nothing: what it drew with the fence's label is of the version.
            let label = plain(label);
            let last = self.spans.last_mut().filter(|last| last.end == at);
            match last {
                Some(last) if label.is_empty() || label == last.label => last.end += 1,
                None if at > 0 || label.is_empty() => return,
                _ => self.spans.push(VersionSpan { label: label.to_owned(), start: at, end: at + 1 }),
            }
        }
    }

    /// Whether the plugin told of each token from `from` on.
    fn is_located(&self, from: usize) -> bool {
        let told = self.spans.last().map_or(0, |last| last.end as usize);
        told == self.output_ids.len() && told > from
    }

    /// Tells of the tokens from `from` on, which are of these weights unless the plugin knows better.
    fn tell(&mut self, request: &GenerateRequest, from: usize, label: &str, seen: Tell<'_>) {
        let mut behind = self.context.unwrap_or_else(|| context(0, &request.input_ids));
        let mut tell = |range: std::ops::Range<usize>, label: &str, located: bool| {
            let (output_ids, log_probs) = (&self.output_ids[range.clone()], &self.log_probs[range]);
            let piece = Piece { output_ids, log_probs, label, located, digest: None };
            seen(piece.digested(request.rid, behind));
            behind = context(behind, output_ids);
        };
        if self.is_located(from) {
            for span in self.spans.iter().filter(|span| span.end as usize > from) {
                tell((span.start as usize).max(from)..span.end as usize, &span.label, true);
            }
        } else {
            tell(from..self.output_ids.len(), label, false);
        }
        self.context = Some(behind);
    }

    /// Takes ids and log-probabilities of a piece, of which `drawn` tokens were drawn by then; returns where the piece
    /// begins.
    fn extend(
        &mut self,
        ids: Vec<i32>,
        drawn: Option<usize>,
        entries: Option<Vec<RawLogProb>>,
    ) -> Result<usize, Mismatch> {
        let log_probs = log_probs(&ids, entries)?;
        // Without tokens before it, a piece is the whole.
        let start = match (self.output_ids.len(), drawn) {
            (0, _) | (_, None) => 0,
            (_, Some(drawn)) => drawn.saturating_sub(ids.len()),
        };
        let known = self.output_ids.get(start..).ok_or_else(|| {
            (format!("tokens from {} on", self.output_ids.len()), format!("those from {start} on"))
        })?;
        if !ids.starts_with(known) {
            return Err(("the tokens that were streamed before".to_owned(), "others".to_owned()));
        }
        let known = known.len();
        self.output_ids.extend_from_slice(&ids[known..]);
        self.log_probs.extend_from_slice(&log_probs[known..]);
        Ok(start)
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
        let expected = format!("{} entries of output_token_logprobs, one per output id", ids.len());
        return Err((expected, entries.len().to_string()));
    }
    let mut out = Vec::with_capacity(ids.len());
    for (at, ((log_prob, id, _), sampled)) in entries.into_iter().zip(ids).enumerate() {
        if id != *sampled || id < 0 {
            return Err((format!("output_token_logprobs[{at}] of token {sampled}"), format!("token {id}")));
        }
        out.push(log_probability(log_prob, || format!("output_token_logprobs[{at}]"))?);
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
            let found = format!("{}..{}", span.start, span.end);
            return Err((format!("a weight_versions span from {next}"), found));
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
    use crate::engine::Rid;

    fn request() -> GenerateRequest {
        let sampling = SamplingParams { max_new_tokens: 4, ..Default::default() };
        GenerateRequest::new(Rid::new(1, 2), vec![1], sampling)
    }

    fn reply(meta: &str) -> Result<Generation, Mismatch> {
        let text = format!(
            r#"{{"output_ids":[5,6],"meta_info":{{"finish_reason":{{"type":"length","length":2}},{meta}}}}}"#
        );
        serde_json::from_str::<RawGeneration>(&text).unwrap().check(&request(), "http://e:1")
    }

    #[test]
    fn body_leaves_nothing_to_preferred_sampling_params() {
        let body = body(&request(), None);
        for (name, neutral) in [
            ("min_p", 0.0),
            ("frequency_penalty", 0.0),
            ("presence_penalty", 0.0),
            ("repetition_penalty", 1.0),
        ] {
            assert_eq!(body["sampling_params"][name], json!(neutral), "{name}");
        }
        assert!(body.get("extra_key").is_none(), "the server's own requests have none");
        assert_eq!(super::body(&request().with_salt("a:1".to_owned()), None)["extra_key"], "a:1");
    }

    const LOGPROBS: &str = r#""output_token_logprobs":[[-0.5,5,null],[-1.5,6,"x"]]"#;

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

    /// A piece that says how many tokens were drawn by then.
    fn piece(ids: &[i32], drawn: usize, finish: &str) -> RawGeneration {
        let entries: Vec<_> = ids.iter().map(|id| json!([-0.5, id, null])).collect();
        let finish: Value = serde_json::from_str(finish).unwrap();
        let meta = json!({
            "finish_reason": finish, "completion_tokens": drawn, "weight_version": "a", "output_token_logprobs": entries,
        });
        serde_json::from_value(json!({ "output_ids": ids, "meta_info": meta })).unwrap()
    }

    const GOES_ON: &str = "null";
    const LENGTH: &str = r#"{"type":"length"}"#;

    #[test]
    fn pieces_of_a_stream_come_to_its_whole_whatever_they_repeat() {
        for pieces in [
            [piece(&[1], 1, GOES_ON), piece(&[2, 3], 3, GOES_ON), piece(&[4], 4, LENGTH)],
            [piece(&[1], 1, GOES_ON), piece(&[1, 2, 3], 3, GOES_ON), piece(&[1, 2, 3, 4], 4, LENGTH)],
            [piece(&[], 0, GOES_ON), piece(&[1, 2, 3], 3, GOES_ON), piece(&[3, 4], 4, LENGTH)],
        ] {
            let (mut streamed, mut seen, mut whole) = (Streamed::default(), Vec::new(), None);
            for piece in pieces {
                let mut tell = |piece: Piece<'_>| seen.extend_from_slice(piece.output_ids);
                whole = streamed.take(piece, &request(), "e", &mut tell).unwrap();
            }
            let whole = whole.unwrap();
            assert_eq!((whole.output_ids, whole.log_probs), (vec![1, 2, 3, 4], vec![-0.5; 4]));
            assert_eq!(seen, [1, 2, 3]);
        }
    }

    /// The same with what the plugin tells of its tokens.
    fn told(ids: &[i32], drawn: usize, finish: &str, labels: Value) -> RawGeneration {
        let mut raw = piece(ids, drawn, finish);
        raw.meta_info.as_mut().unwrap().driftless_labels = serde_json::from_value(labels).unwrap();
        raw
    }

    #[test]
    fn labels_of_the_plugin_say_which_weights_drew_which_token() {
        let span = |label: &str, start, end| VersionSpan { label: label.into(), start, end };
        for pieces in [
            [
                told(&[1], 1, GOES_ON, json!(["b?partial"])),
                told(&[2, 3], 3, GOES_ON, json!(["", "c"])),
                told(&[4], 4, LENGTH, json!([""])),
            ],
            [
                told(&[1], 1, GOES_ON, json!(["b"])),
                told(&[1, 2, 3], 3, GOES_ON, json!(["b", "", "c"])),
                told(&[1, 2, 3, 4], 4, LENGTH, json!(["b", "", "c", "c"])),
            ],
        ] {
            let (mut streamed, mut seen, mut whole) = (Streamed::default(), Vec::new(), None);
            for piece in pieces {
                let mut tell = |piece: Piece<'_>| {
                    seen.push((piece.output_ids.to_vec(), piece.label.to_owned(), piece.located));
                };
                whole = streamed.take(piece, &request(), "e", &mut tell).unwrap();
            }
            let whole = whole.unwrap();
            assert_eq!((whole.spans, whole.spans_reported), (vec![span("b", 0, 2), span("c", 2, 4)], true));
            let expected = [(vec![1], "b"), (vec![2], "b"), (vec![3], "c")];
            assert_eq!(seen, expected.map(|(ids, label)| (ids, label.to_owned(), true)));
        }
    }

    #[test]
    fn tokens_that_the_plugin_does_not_know_are_of_the_reply() {
        for labels in
            [json!([null, "b"]), json!(["b", null]), json!(["", "b"]), json!(["b"]), json!(["b", "", ""])]
        {
            let whole = told(&[1, 2], 2, LENGTH, labels.clone()).check(&request(), "e").unwrap();
            assert_eq!(whole.spans, [VersionSpan { label: "a".into(), start: 0, end: 2 }], "{labels}");
            assert!(!whole.spans_reported, "{labels}");
        }
        // Once one is not known, those behind it are not either.
        let mut streamed = Streamed::default();
        let mut located = Vec::new();
        for piece in [told(&[1], 1, GOES_ON, json!([null])), told(&[2], 2, GOES_ON, json!(["b"]))] {
            streamed.take(piece, &request(), "e", &mut |piece| located.push(piece.located)).unwrap();
        }
        assert_eq!(located, [false, false]);
    }

    #[test]
    fn stream_that_lies_is_found() {
        for (next, word) in [
            (piece(&[4], 4, GOES_ON), "tokens from 2 on"),
            (piece(&[1, 9, 3], 3, GOES_ON), "streamed before"),
            (piece(&[1], 1, LENGTH), "streamed before"),
            (piece(&[3, 4, 5], 5, GOES_ON), "at most 4"),
        ] {
            let mut streamed = Streamed::default();
            streamed.take(piece(&[1, 2], 2, GOES_ON), &request(), "e", &mut |_| {}).unwrap();
            let (expected, _) = streamed.take(next, &request(), "e", &mut |_| {}).unwrap_err();
            assert!(expected.contains(word), "{expected}");
        }
        let whole = piece(&[1, 2], 2, GOES_ON).check(&request(), "e").unwrap_err();
        assert!(whole.0.contains("finish_reason"));
    }
}
