//! vLLM's form of a generation: the body of `POST /v1/completions`, and what its reply must satisfy.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::{Finish, GenerateRequest, Generation, Mismatch, VersionSpan, log_probability};
use crate::error::{Error, Result};
use crate::events::Failure;

/// How a log-probability names its token, when asked to by id.
const TOKEN_ID: &str = "token_id:";

/// Refuses what a server would answer with log-probabilities of another distribution than it draws from: they
/// are computed before the temperature.
///
/// # Errors
/// [`Error::Request`] for a temperature other than 1 and 0.
pub(super) fn check_request(request: &GenerateRequest) -> Result<()> {
    let temperature = request.sampling.temperature;
    if temperature == 1.0 || temperature == 0.0 {
        return Ok(());
    }
    let (rid, found) = (request.rid.to_string(), temperature.to_string());
    let expected = "1 or 0: vLLM's log-probabilities leave the temperature out".into();
    Err(Error::Request { rid, what: "temperature", expected, found })
}

/// The body of `POST /v1/completions`, of a stream or not. Everything is sent: the server's defaults may come from the model's
/// `generation_config.json`.
pub(super) fn body(request: &GenerateRequest, stream: bool) -> Value {
    let params = &request.sampling;
    let mut body = json!({
        "request_id": request.rid.to_string(),
        "prompt": request.input_ids,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        // vLLM keeps all tokens with 0.
        "top_k": params.top_k.max(0),
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": params.stop_token_ids,
        "stop": params.stop,
        // Token ids are what is trained on: the text that they end with stays.
        "include_stop_str_in_output": true,
        "ignore_eos": params.ignore_eos,
        "n": 1,
        "stream": stream,
        "logprobs": 1,
        "return_token_ids": true,
        "return_tokens_as_token_ids": true,
    });
    if let Some(seed) = params.sampling_seed {
        // Seeds are signed there.
        body["seed"] = seed.cast_signed().into();
    }
    if let Some(salt) = &request.salt {
        body["cache_salt"] = salt.as_str().into();
    }
    body
}

/// A reply, or an event of a stream, whose choice has new tokens only.
#[derive(Debug, Deserialize)]
pub(super) struct RawCompletion {
    #[serde(default)]
    id: String,
    #[serde(default)]
    choices: Vec<RawChoice>,
    /// Of a stream, in place of the others.
    pub(super) error: Option<Failure>,
}

#[derive(Debug, Deserialize)]
struct RawChoice {
    finish_reason: Option<String>,
    token_ids: Option<Vec<i32>>,
    prompt_token_ids: Option<Vec<i32>>,
    logprobs: Option<RawLogProbs>,
}

#[derive(Debug, Deserialize)]
struct RawLogProbs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
}

impl RawCompletion {
    /// Checks a reply against its request and gives it its final form. `label` is what the server carried
    /// after the reply.
    pub(super) fn check(
        self,
        request: &GenerateRequest,
        engine: &str,
        label: Option<String>,
    ) -> Result<Generation, Mismatch> {
        let mut streamed = Streamed::default();
        let finish = streamed.take(self, request)?.ok_or_else(unfinished)?;
        streamed.whole(request, engine, finish, label)
    }
}

/// What a reply lacks that ends before its request does.
pub(super) fn unfinished() -> Mismatch {
    ("finish_reason stop, length or abort".to_owned(), "None".to_owned())
}

/// The tokens of a reply, as far as it has come.
#[derive(Debug, Default)]
pub(super) struct Streamed {
    pub(super) output_ids: Vec<i32>,
    pub(super) log_probs: Vec<f32>,
}

impl Streamed {
    /// Takes the next piece, and checks it against the request. Returns why the request ended, if it did.
    pub(super) fn take(
        &mut self,
        raw: RawCompletion,
        request: &GenerateRequest,
    ) -> Result<Option<Finish>, Mismatch> {
        let rid = request.rid.to_string();
        if !raw.id.contains(&rid) {
            return Err((format!("an id with {rid}"), raw.id));
        }
        let [choice] = <[RawChoice; 1]>::try_from(raw.choices)
            .map_err(|choices| ("one choice".to_owned(), choices.len().to_string()))?;
        let ids = choice
            .token_ids
            .ok_or_else(|| ("token_ids, as return_token_ids asks".to_owned(), "none".to_owned()))?;
        if choice.prompt_token_ids.as_ref().is_some_and(|prompt| *prompt != request.input_ids) {
            return Err(("the prompt's token ids".into(), "others".into()));
        }
        let (tokens, most) = (self.output_ids.len() + ids.len(), request.sampling.max_new_tokens as usize);
        if tokens > most {
            return Err((format!("at most {most} token_ids"), tokens.to_string()));
        }
        let finish = choice.finish_reason.as_deref().map(finish).transpose()?;
        self.log_probs.extend(log_probs(&ids, choice.logprobs)?);
        self.output_ids.extend(ids);
        Ok(finish)
    }

    /// The whole reply; `label` is what the server carried after it.
    pub(super) fn whole(
        self,
        request: &GenerateRequest,
        engine: &str,
        finish: Finish,
        label: Option<String>,
    ) -> Result<Generation, Mismatch> {
        let Self { output_ids, log_probs } = self;
        // It was asked for with a bound that is one.
        let end = u32::try_from(output_ids.len()).unwrap_or(u32::MAX);
        let label =
            label.ok_or_else(|| ("a weight_version of /weight_info".to_owned(), "none".to_owned()))?;
        let spans = if end == 0 { Vec::new() } else { vec![VersionSpan { label, start: 0, end }] };
        let generation = Generation {
            rid: request.rid,
            engine: engine.to_owned(),
            output_ids,
            log_probs,
            spans,
            spans_reported: false,
            finish,
            retractions: 0,
            cached_tokens: None,
            replies: Vec::new(),
        };
        Ok(generation.digested(&request.input_ids))
    }
}

fn finish(reason: &str) -> Result<Finish, Mismatch> {
    match reason {
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "abort" => Ok(Finish::Abort { message: "the server aborted it".into() }),
        other => Err(("finish_reason stop, length or abort".into(), other.into())),
    }
}

fn log_probs(ids: &[i32], raw: Option<RawLogProbs>) -> Result<Vec<f32>, Mismatch> {
    let (tokens, values) = raw.map_or_else(Default::default, |raw| (raw.tokens, raw.token_logprobs));
    if tokens.len() != ids.len() || values.len() != ids.len() {
        let found = format!("{} tokens and {} token_logprobs", tokens.len(), values.len());
        return Err((format!("{} of each in logprobs, one per output id", ids.len()), found));
    }
    let entries = ids.iter().zip(tokens).zip(values).enumerate();
    entries
        .map(|(at, ((id, token), value))| {
            if *id < 0 || token.strip_prefix(TOKEN_ID) != Some(id.to_string().as_str()) {
                return Err((format!("logprobs.tokens[{at}] {TOKEN_ID}{id}"), token));
            }
            log_probability(value, || format!("logprobs.token_logprobs[{at}]"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Rid, SamplingParams};

    fn request() -> GenerateRequest {
        let sampling = SamplingParams { max_new_tokens: 2, ..SamplingParams::default() };
        GenerateRequest::new(Rid::new(1, 2), vec![1, 3], sampling)
    }

    /// A sound reply, with one thing changed by its JSON pointer.
    fn reply(pointer: &str, value: Value) -> Result<Generation, Mismatch> {
        let mut reply = json!({"id": format!("cmpl-{}", Rid::new(1, 2)), "choices": [{"index": 0, "text": "x",
            "finish_reason": "length", "token_ids": [5, 6], "prompt_token_ids": [1, 3],
            "logprobs": {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.5, -1.5], "top_logprobs": []}}]});
        *reply.pointer_mut(pointer).unwrap() = value;
        serde_json::from_value::<RawCompletion>(reply).unwrap().check(
            &request(),
            "http://e:1",
            Some("a".into()),
        )
    }

    #[test]
    fn check_sound_reply_is_one_span_of_the_label() {
        let generation = reply("/choices/0/text", json!("y")).unwrap();
        assert_eq!((generation.output_ids, generation.log_probs), (vec![5, 6], vec![-0.5, -1.5]));
        assert_eq!(generation.spans, [VersionSpan { label: "a".into(), start: 0, end: 2 }]);
        assert!(!generation.spans_reported);
    }

    #[test]
    fn check_unsound_reply_is_refused() {
        for (pointer, value, word) in [
            ("/id", json!("cmpl-other"), "an id with"),
            ("/choices", json!([]), "one choice"),
            ("/choices/0/finish_reason", json!("error"), "finish_reason"),
            ("/choices/0/finish_reason", json!(null), "finish_reason"),
            ("/choices/0/token_ids", json!(null), "return_token_ids"),
            ("/choices/0/token_ids", json!([5]), "one per output id"),
            ("/choices/0/token_ids", json!([5, 6, 7]), "at most 2"),
            ("/choices/0/token_ids", json!([5, 7]), "token_id:7"),
            ("/choices/0/token_ids", json!([5, -1]), "token_id:-1"),
            ("/choices/0/prompt_token_ids", json!([1, 4]), "prompt"),
            ("/choices/0/logprobs", json!(null), "one per output id"),
            ("/choices/0/logprobs/tokens/1", json!("token_id:06"), "token_id:6"),
            ("/choices/0/logprobs/token_logprobs/0", json!(null), "finite"),
            ("/choices/0/logprobs/token_logprobs/0", json!(0.5), "not positive"),
        ] {
            let (expected, _) = reply(pointer, value.clone()).unwrap_err();
            assert!(expected.contains(word), "{pointer} {value}: {expected}");
        }
    }

    #[test]
    fn body_names_every_parameter_in_the_servers_words() {
        let mut request = request();
        request.sampling.sampling_seed = Some(u64::MAX);
        let body = body(&request, false);
        assert_eq!((&body["top_k"], &body["seed"], &body["max_tokens"]), (&json!(0), &json!(-1), &json!(2)));
        assert_eq!(body["request_id"], request.rid.to_string());
    }

    #[test]
    fn check_request_other_temperature_is_refused() {
        let mut request = request();
        assert!(check_request(&request).is_ok());
        request.sampling.temperature = 0.0;
        assert!(check_request(&request).is_ok());
        request.sampling.temperature = 0.7;
        assert!(matches!(check_request(&request), Err(Error::Request { what: "temperature", .. })));
    }

    #[test]
    fn pieces_of_a_stream_come_to_its_whole() {
        let piece = |ids: &[i32], finish: Value| {
            let tokens: Vec<_> = ids.iter().map(|id| format!("{TOKEN_ID}{id}")).collect();
            let log_probs = json!({ "tokens": tokens, "token_logprobs": vec![-0.5; ids.len()] });
            let choice = json!({ "finish_reason": finish, "token_ids": ids, "logprobs": log_probs });
            let piece = json!({"id": format!("cmpl-{}-0", Rid::new(1, 2)), "choices": [choice]});
            serde_json::from_value::<RawCompletion>(piece).unwrap()
        };
        let mut streamed = Streamed::default();
        assert_eq!(streamed.take(piece(&[5], json!(null)), &request()).unwrap(), None);
        let finish = streamed.take(piece(&[6], json!("length")), &request()).unwrap().unwrap();
        let (expected, _) = streamed.take(piece(&[7], json!(null)), &request()).unwrap_err();
        assert!(expected.contains("at most 2"), "{expected}");
        let whole = streamed.whole(&request(), "e", finish, Some("a".into())).unwrap();
        assert_eq!((whole.output_ids, whole.log_probs), (vec![5, 6], vec![-0.5; 2]));
    }
}
