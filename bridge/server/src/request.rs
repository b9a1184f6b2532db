//! The body of `/generate`: parsing, SGLang's defaults, and everything that is refused before it is queued.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};

use serde::Deserialize;
use serde_json::Value;

use crate::reply::Refusal;
use crate::{Facts, Request, Sampling};
use driftless_bridge::sglang::{Dialect, Feature};

/// `top_k` that keeps the whole vocabulary.
const TOP_K_ALL: i64 = 1 << 30;
/// Temperatures below this are greedy.
const TEMPERATURE_MIN: f64 = 1e-6;
/// Most requests that one call may hold.
const BATCH_MAX: usize = 4096;

/// A whole call: one request, or a batch whose answer is a list.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) requests: Vec<Request>,
    pub(super) is_list: bool,
    /// Whether log-probabilities of the output are returned.
    pub(super) log_probs: bool,
    /// How many tokens come at a time, where the one request's come in pieces.
    pub(super) stream: Option<usize>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// Keys of the body that mean something here; SGLang ignores unknown ones, so they are ignored too.
#[derive(Deserialize)]
struct Body {
    text: Option<Value>,
    input_embeds: Option<Value>,
    input_ids: Option<OneOrMany<Vec<i64>>>,
    sampling_params: Option<OneOrMany<Value>>,
    rid: Option<OneOrMany<String>>,
    return_logprob: Option<bool>,
    logprob_start_len: Option<i64>,
    stream: Option<bool>,
    top_logprobs_num: Option<i64>,
    token_ids_logprob: Option<Value>,
}

/// SGLang's sampling parameters, in its order: the order shows in the error for an unknown key.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    #[serde(deserialize_with = "present")]
    max_new_tokens: Option<Option<i64>>,
    stop: Option<Value>,
    stop_token_ids: Option<Vec<i64>>,
    stop_regex: Option<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    min_new_tokens: Option<i64>,
    n: Option<i64>,
    json_schema: Option<Value>,
    regex: Option<Value>,
    ebnf: Option<Value>,
    structural_tag: Option<Value>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<Value>,
    spaces_between_special_tokens: Option<Value>,
    no_stop_trim: Option<Value>,
    stream_interval: Option<i64>,
    logit_bias: Option<Value>,
    sampling_seed: Option<i64>,
    custom_params: Option<Value>,
    beam_width: Option<i64>,
    watermark: Option<Value>,
    choice: Option<Value>,
}

/// Tells an explicit null, which means "as many as fit", from an absent key, which means 128.
fn present<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Option<i64>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// Parses and checks a body.
///
/// # Errors
/// The refusal that SGLang would answer with, or, where SGLang would crash (a token id outside the
/// vocabulary), a 400.
pub(super) fn parse(body: &[u8], facts: &Facts) -> Result<Call, Refusal> {
    let body: Body = serde_json::from_slice(body).map_err(Refusal::malformed)?;
    refuse_unsupported(&body)?;
    let (prompts, mut is_list) = match body.input_ids {
        None => return Err(Refusal::invalid("Either text, input_ids or input_embeds should be provided.")),
        Some(OneOrMany::One(prompt)) => (vec![prompt], false),
        Some(OneOrMany::Many(prompts)) => (prompts, true),
    };
    let count = prompts.len();
    if count == 0 || count > BATCH_MAX {
        return Err(Refusal::invalid(format!("input_ids must hold 1..={BATCH_MAX} prompts, got {count}")));
    }
    let params = each(body.sampling_params, count, "sampling_params")?;
    let rids = rids(body.rid, count, is_list)?;
    let log_probs = body.return_logprob.unwrap_or(false);
    let mut requests = Vec::with_capacity(prompts.len());
    let mut interval = 1;
    for ((prompt, params), rid) in prompts.into_iter().zip(params).zip(rids) {
        let params = read_params(params, facts.dialect)?;
        check_prompt(&prompt, facts)?;
        let copies = copies(&params)?;
        interval = stream_interval(&params)?;
        let sampling = sampling(params, prompt.len(), facts)?;
        let start = body.logprob_start_len.filter(|_| log_probs);
        let prompt_log_probs_from = prompt_log_probs_from(start, prompt.len())?;
        is_list |= copies > 1;
        for _ in 1..copies {
            let (rid, prompt, sampling) = (new_rid(), prompt.clone(), sampling.clone());
            requests.push(Request { rid, prompt, sampling, prompt_log_probs_from });
        }
        // As in SGLang, a given id does not come back when one request becomes several.
        let rid = if copies > 1 { new_rid() } else { rid };
        requests.push(Request { rid, prompt, sampling, prompt_log_probs_from });
    }
    let is_stream = body.stream == Some(true);
    if is_stream && is_list {
        return Err(Refusal::invalid("stream of several requests is not supported by this engine."));
    }
    Ok(Call { requests, is_list, log_probs, stream: is_stream.then_some(interval) })
}

/// Tokens of a piece of a stream.
fn stream_interval(params: &Params) -> Result<usize, Refusal> {
    let interval = params.stream_interval.unwrap_or(1);
    let found = usize::try_from(interval).ok().filter(|interval| *interval > 0);
    found.ok_or_else(|| Refusal::invalid(format!("stream_interval must be at least 1, got {interval}.")))
}

fn refuse_unsupported(body: &Body) -> Result<(), Refusal> {
    if body.text.is_some() {
        return Err(Refusal::invalid(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please provide \
             input_ids or re-initialize the engine with skip_tokenizer_init=False.",
        ));
    }
    refuse_any(&[
        ("input_embeds", body.input_embeds.is_some()),
        ("top_logprobs_num", body.top_logprobs_num.is_some_and(|n| n > 0)),
        ("token_ids_logprob", body.token_ids_logprob.is_some()),
    ])
}

/// Refuses the first field that is asked for.
fn refuse_any(fields: &[(&str, bool)]) -> Result<(), Refusal> {
    match fields.iter().find(|(_, asked)| *asked) {
        Some((name, _)) => Err(Refusal::invalid(format!("{name} is not supported by this engine."))),
        None => Ok(()),
    }
}

/// One value per prompt: a list as it is, a single one for all, or null.
fn each(given: Option<OneOrMany<Value>>, prompts: usize, what: &str) -> Result<Vec<Value>, Refusal> {
    match given {
        None => Ok(vec![Value::Null; prompts]),
        Some(OneOrMany::Many(values)) if values.len() == prompts => Ok(values),
        Some(OneOrMany::Many(values)) => {
            Err(Refusal::invalid(format!("{what} holds {} entries for {prompts} prompts", values.len())))
        }
        Some(OneOrMany::One(value)) => Ok(vec![value; prompts]),
    }
}

/// One id per prompt: given, derived from a given prefix, or fresh.
fn rids(given: Option<OneOrMany<String>>, prompts: usize, is_list: bool) -> Result<Vec<String>, Refusal> {
    let rids: Vec<String> = match given {
        None => (0..prompts).map(|_| new_rid()).collect(),
        Some(OneOrMany::One(rid)) if is_list => (0..prompts).map(|i| format!("{rid}_{i}")).collect(),
        Some(OneOrMany::One(rid)) => vec![rid],
        Some(OneOrMany::Many(rids)) => rids,
    };
    if rids.len() != prompts {
        return Err(Refusal::invalid(format!("rid holds {} entries for {prompts} prompts", rids.len())));
    }
    let mut seen = HashSet::new();
    match rids.iter().find(|rid| !seen.insert(rid.as_str())) {
        Some(rid) => {
            Err(Refusal::invalid(format!("Duplicate request IDs detected within the request: ['{rid}']")))
        }
        None => Ok(rids),
    }
}

/// A fresh id: 32 hex digits.
pub(super) fn new_rid() -> String {
    // Each has keys of its own, at random.
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

fn read_params(value: Value, dialect: Dialect) -> Result<Params, Refusal> {
    match value {
        Value::Null => Ok(Params::default()),
        Value::Object(_) => {
            Params::deserialize(value).map_err(|error| match dialect.has(Feature::StrictSampling) {
                true => Refusal::contract(error.to_string()),
                false => Refusal::internal(),
            })
        }
        other => Err(Refusal::malformed(format!(
            "sampling_params: Input should be a valid dictionary, got {other}"
        ))),
    }
}

fn check_prompt(prompt: &[i64], facts: &Facts) -> Result<(), Refusal> {
    let (tokens, context, vocabulary) = (prompt.len(), facts.context, facts.vocabulary);
    let outside = prompt.iter().find(|id| !(0..vocabulary).contains(*id));
    let wrong = match outside {
        _ if tokens == 0 => "input_ids cannot be empty.".to_owned(),
        _ if tokens >= context => format!(
            "The input ({tokens} tokens) is longer than the model's context length ({context} tokens)."
        ),
        Some(id) => format!("input_ids holds {id}, which is outside the vocabulary [0, {vocabulary})."),
        None => return Ok(()),
    };
    Err(Refusal::invalid(wrong))
}

/// Number of samples for one prompt.
fn copies(params: &Params) -> Result<i64, Refusal> {
    match params.n.unwrap_or(1) {
        n @ 1..=256 => Ok(n),
        n => Err(Refusal::invalid(format!("n must be in [1, 256], got {n}."))),
    }
}

fn sampling(params: Params, prompt: usize, facts: &Facts) -> Result<Sampling, Refusal> {
    refuse_params(&params)?;
    let mut temperature = params.temperature.unwrap_or(1.0);
    let mut top_k = params.top_k.unwrap_or(-1);
    let (top_p, min_p) = (params.top_p.unwrap_or(1.0), params.min_p.unwrap_or(0.0));
    if (0.0..TEMPERATURE_MIN).contains(&temperature) {
        (temperature, top_k) = (1.0, 1);
    }
    if top_k == -1 {
        top_k = TOP_K_ALL;
    }
    let wrong = if !temperature.is_finite() || temperature < 0.0 {
        format!("temperature must be a non-negative finite number, got {temperature}.")
    } else if !(top_p > 0.0 && top_p <= 1.0) {
        format!("top_p must be in (0, 1], got {top_p}.")
    } else if !(0.0..=1.0).contains(&min_p) {
        format!("min_p must be in [0, 1], got {min_p}.")
    } else if top_k < 1 {
        format!("top_k must be -1 (disable) or at least 1, got {top_k}.")
    } else {
        let max_new_tokens = max_new_tokens(params.max_new_tokens.unwrap_or(Some(128)), prompt, facts)?;
        let mut stop = params.stop_token_ids.unwrap_or_default();
        stop.extend(&facts.eos);
        // SGLang's `ignore_eos` switches the request's own stop tokens off too.
        if params.ignore_eos == Some(true) {
            stop.clear();
        }
        let seed = params.sampling_seed;
        return Ok(Sampling { temperature, top_p, top_k, min_p, max_new_tokens, stop, seed });
    };
    Err(Refusal::invalid(wrong))
}

/// Refuses parameters that change the result and are not implemented, unless they hold their default.
fn refuse_params(params: &Params) -> Result<(), Refusal> {
    let set = |value: &Option<Value>| value.as_ref().is_some_and(|value| !is_empty(value));
    let skipped = [
        ("stop", set(&params.stop)),
        ("stop_regex", set(&params.stop_regex)),
        ("min_new_tokens", params.min_new_tokens.is_some_and(|n| n != 0)),
    ];
    if let Some((name, _)) = skipped.iter().find(|(_, set)| *set) {
        return Err(Refusal::invalid(format!("{name} is unavailable when skip_tokenizer_init=True")));
    }
    refuse_any(&[
        ("frequency_penalty", params.frequency_penalty.is_some_and(|p| p != 0.0)),
        ("presence_penalty", params.presence_penalty.is_some_and(|p| p != 0.0)),
        ("repetition_penalty", params.repetition_penalty.is_some_and(|p| p != 1.0)),
        ("json_schema", set(&params.json_schema)),
        ("regex", set(&params.regex)),
        ("ebnf", set(&params.ebnf)),
        ("structural_tag", set(&params.structural_tag)),
        ("logit_bias", set(&params.logit_bias)),
        ("custom_params", set(&params.custom_params)),
        ("beam_width", params.beam_width.is_some_and(|width| width != 1)),
        ("watermark", set(&params.watermark)),
        ("choice", set(&params.choice)),
    ])
}

/// Whether a value means "not set".
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    }
}

fn max_new_tokens(asked: Option<i64>, prompt: usize, facts: &Facts) -> Result<usize, Refusal> {
    let room = facts.context.min(facts.max_total_tokens).saturating_sub(prompt);
    let Some(asked) = asked else { return Ok(room) };
    let Ok(asked) = usize::try_from(asked) else {
        return Err(Refusal::invalid(format!("max_new_tokens must be at least 0, got {asked}.")));
    };
    let total = asked.saturating_add(prompt);
    if total > facts.context {
        return Err(Refusal::invalid(format!(
            "Requested token count exceeds the model's maximum context length of {} tokens. You requested a \
             total of {total} tokens: {prompt} tokens from the input messages and {asked} tokens for the \
             completion. Please reduce the number of tokens in the input messages or the completion to fit \
             within the limit.",
            facts.context
        )));
    }
    if total > facts.max_total_tokens {
        let held = facts.max_total_tokens;
        let wrong = format!("Requested {total} tokens, but the cache holds {held} (max_total_tokens).");
        return Err(Refusal::invalid(wrong));
    }
    Ok(asked)
}

/// First prompt position whose log-probability is wanted; negative means none but the last, which has none.
fn prompt_log_probs_from(start: Option<i64>, prompt: usize) -> Result<Option<usize>, Refusal> {
    match start.map(usize::try_from) {
        None | Some(Err(_)) => Ok(None),
        Some(Ok(start)) if start <= prompt => Ok(Some(start)),
        Some(Ok(start)) => Err(Refusal::invalid(format!(
            "req.logprob_start_len={start} is higher than the number of input tokens \
             len(req.origin_input_ids)={prompt}. Please use a smaller logprob_start_len."
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Weights;

    fn facts() -> Facts {
        let [model_path, load_format, weight_version] = ["/m", "auto", "default"].map(str::to_owned);
        let mut facts = Facts::new(Weights { model_path, load_format, weight_version }, "Qwen3ForCausalLM");
        (facts.vocabulary, facts.context, facts.max_total_tokens) = (256, 2048, 1024);
        facts.eos = vec![7];
        facts
    }

    fn parse_with(dialect: Dialect, body: &Value) -> Result<Call, Refusal> {
        parse(body.to_string().as_bytes(), &Facts { dialect, ..facts() })
    }

    fn refusal(sampling: Value) -> (u16, String) {
        let body = json!({"input_ids": [1, 2, 3], "sampling_params": sampling});
        let refusal = parse_with(Dialect::default(), &body).unwrap_err();
        (refusal.status.as_u16(), refusal.body)
    }

    #[test]
    fn defaults_are_those_of_sglang() {
        let call = parse_with(Dialect::default(), &json!({"input_ids": [1], "unknown_top": 3})).unwrap();
        let sampling = &call.requests[0].sampling;
        assert!(!call.is_list && !call.log_probs);
        assert_eq!((sampling.max_new_tokens, sampling.top_k, &sampling.stop), (128, TOP_K_ALL, &vec![7]));
        assert_eq!(call.requests[0].rid.len(), 32);
        let params = json!({"max_new_tokens": null, "temperature": 0, "stop_token_ids": [3]});
        let call =
            parse_with(Dialect::default(), &json!({"input_ids": [1], "sampling_params": params})).unwrap();
        let sampling = &call.requests[0].sampling;
        assert_eq!((sampling.max_new_tokens, sampling.top_k), (1023, 1));
        assert_eq!((sampling.temperature, &sampling.stop), (1.0, &vec![3, 7]));
        let params = json!({"stop_token_ids": [3], "ignore_eos": true});
        let call =
            parse_with(Dialect::default(), &json!({"input_ids": [1], "sampling_params": params})).unwrap();
        assert!(call.requests[0].sampling.stop.is_empty());
    }

    #[test]
    fn batches_ids_and_samples() {
        let rids = |body: Value| -> Vec<String> {
            let call = parse_with(Dialect::default(), &body).unwrap();
            assert!(call.is_list);
            call.requests.into_iter().map(|request| request.rid).collect()
        };
        assert_eq!(rids(json!({"input_ids": [[1], [2]], "rid": ["x", "y"]})), ["x", "y"]);
        assert_eq!(rids(json!({"input_ids": [[1], [2]], "rid": "base"})), ["base_0", "base_1"]);
        let sampled = rids(json!({"input_ids": [1], "rid": "x", "sampling_params": {"n": 3}}));
        assert!(sampled.len() == 3 && !sampled.contains(&"x".to_owned()));
    }

    #[test]
    fn refusals_read_like_sglangs() {
        let message = |text: &str| (400, json!({"error": {"message": text}}).to_string());
        assert_eq!(
            refusal(json!({"temperature": -1})),
            message("temperature must be a non-negative finite number, got -1.")
        );
        assert_eq!(refusal(json!({"top_p": 0})), message("top_p must be in (0, 1], got 0."));
        assert_eq!(
            refusal(json!({"max_new_tokens": -1})),
            message("max_new_tokens must be at least 0, got -1.")
        );
        assert_eq!(
            refusal(json!({"max_new_tokens": 1.5})),
            (400, json!({"error": "invalid type: floating point `1.5`, expected i64"}).to_string())
        );
        let (status, body) = refusal(json!({"bogus": 1}));
        assert_eq!(status, 400);
        assert!(
            body.starts_with(r#"{"error":"unknown field `bogus`, expected one of `max_new_tokens`, `stop`"#)
        );
        assert!(body.ends_with(r#"`beam_width`, `watermark`, `choice`"}"#));
        let (_, body) = refusal(json!({"max_new_tokens": 2046}));
        assert!(body.contains("You requested a total of 2049 tokens: 3 tokens from"), "{body}");
        let (_, body) = refusal(json!({"max_new_tokens": 1022}));
        assert!(body.contains("the cache holds 1024"), "{body}");
    }

    #[test]
    fn an_old_dialect_fails_on_unknown_parameters() {
        let body = json!({"input_ids": [1], "sampling_params": {"bogus": 1}});
        let refusal = parse_with(Dialect::V0_5_17, &body).unwrap_err();
        assert_eq!((refusal.status.as_u16(), refusal.body.as_str()), (500, "Internal Server Error"));
    }

    #[test]
    fn bad_bodies_are_400() {
        let params = json!({"max_new_tokens": 1});
        for body in [
            json!({"input_ids": [], "sampling_params": params}),
            json!({"input_ids": [[]], "sampling_params": params}),
            json!({"input_ids": [256]}),
            json!({"input_ids": [-1]}),
            json!({"input_ids": ["a"]}),
            json!({"input_ids": [1.5]}),
            json!({"input_ids": "hi"}),
            json!({"input_ids": vec![1; 2048]}),
            json!({"input_ids": [1], "sampling_params": "x"}),
            json!({"input_ids": [1], "rid": 5}),
            json!({"input_ids": [[1], [2]], "stream": true}),
            json!({"input_ids": [1], "stream": true, "sampling_params": {"stream_interval": 0}}),
            json!({"input_ids": [1], "return_logprob": true, "logprob_start_len": 9}),
            json!({"input_ids": [1], "return_logprob": "yes"}),
            json!({"input_ids": [1], "sampling_params": {"stop": ["a"]}}),
            json!({"input_ids": [1], "sampling_params": {"n": 0}}),
            json!({"input_ids": [[1], [2]], "rid": ["x", "x"]}),
            json!({"input_ids": [[1], [2]], "rid": ["x"]}),
            json!({"text": "hi"}),
            json!({}),
            json!([1, 2]),
            json!(null),
        ] {
            let refusal = parse_with(Dialect::default(), &body).unwrap_err();
            assert_eq!(refusal.status.as_u16(), 400, "{body}");
        }
        for raw in [&b""[..], b"{bad json", b"{\"input_ids\": [1", b"\xff\xfe"] {
            assert_eq!(parse(raw, &facts()).unwrap_err().status.as_u16(), 400);
        }
    }
}
