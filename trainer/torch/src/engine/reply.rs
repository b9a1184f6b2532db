//! The JSON that goes out, field for field as SGLang writes it.

use std::fmt::Display;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::checksum::{Checksums, engine, overall};
use super::dialect::Dialect;
use super::sequence::{Finish, Outcome};
use super::worker::Updated;

/// An answer that is not the one asked for.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) body: String,
    is_json: bool,
}

impl Refusal {
    /// A request that parses but cannot be served.
    pub(super) fn invalid(message: impl Display) -> Refusal {
        Refusal::message(StatusCode::BAD_REQUEST, message)
    }

    /// `{"error": {"message": …}}` with a status.
    pub(super) fn message(status: StatusCode, message: impl Display) -> Refusal {
        Refusal::json(status, &json!({"error": {"message": message.to_string()}}))
    }

    /// A body that breaks the schema of `/generate`.
    pub(super) fn contract(message: String) -> Refusal {
        Refusal::json(StatusCode::BAD_REQUEST, &json!({"error": message}))
    }

    /// A body that is not the JSON expected of it.
    pub(super) fn malformed(error: impl Display) -> Refusal {
        let message = format!("1 validation error: {error}");
        let body =
            json!({"object": "error", "message": message, "type": "Bad Request", "param": null, "code": 400});
        Refusal::json(StatusCode::BAD_REQUEST, &body)
    }

    /// What SGLang answers when a handler raises.
    pub(super) fn internal() -> Refusal {
        let (status, body) = (StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error".to_owned());
        Refusal { status, body, is_json: false }
    }

    /// The generating thread does not take or answer commands.
    pub(super) fn unavailable() -> Refusal {
        Refusal::message(StatusCode::SERVICE_UNAVAILABLE, "the engine's generating thread does not answer")
    }

    pub(super) fn json(status: StatusCode, body: &Value) -> Refusal {
        Refusal { status, body: body.to_string(), is_json: true }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let kind = if self.is_json { "application/json" } else { "text/plain; charset=utf-8" };
        (self.status, [(header::CONTENT_TYPE, kind)], self.body).into_response()
    }
}

/// `{"success": …, "message": …}` with 200 or 400.
pub(super) fn verdict(success: bool, message: &str) -> Response {
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    (status, Json(json!({"success": success, "message": message}))).into_response()
}

/// One entry of a `/generate` reply.
///
/// # Errors
/// When the engine failed the request.
pub(super) fn generated(
    outcome: Outcome,
    log_probs: bool,
    shown_version: &str,
    received: Instant,
    dialect: Dialect,
) -> Result<Value, Refusal> {
    let finish = match &outcome.finish {
        Finish::Stop(token) => json!({"type": "stop", "matched": token}),
        Finish::Length => json!({"type": "length", "length": outcome.max_new_tokens}),
        Finish::Aborted => {
            json!({"type": "abort", "message": "Aborted", "status_code": null, "err_type": null})
        }
        Finish::AbortedWaiting => json!({"type": "abort", "message": "Abort in waiting queue"}),
        Finish::Failed(reason) => return Err(Refusal::message(StatusCode::INTERNAL_SERVER_ERROR, reason)),
    };
    let waiting = outcome.finish == Finish::AbortedWaiting;
    let mut meta = Map::new();
    meta.insert("id".into(), json!(outcome.rid));
    meta.insert("finish_reason".into(), finish);
    if !waiting {
        meta.insert("prompt_tokens".into(), json!(outcome.prompt_tokens));
        meta.insert("num_retractions".into(), json!(outcome.retractions));
        for (name, value) in [
            ("reasoning_tokens", json!(0)),
            ("cached_tokens", json!(0)),
            ("cached_tokens_details", json!(null)),
        ] {
            meta.insert(name.into(), value);
        }
        meta.insert("dp_rank".into(), json!(null));
    }
    meta.insert("weight_version".into(), json!(shown_version));
    if dialect.has_spans() {
        let last = outcome.spans.last().map_or(shown_version, |span| span.version.as_str());
        meta.insert("weight_version".into(), json!(last));
        let span = |s: &super::sequence::Span| json!({"version": s.version, "start": s.start, "end": s.end});
        meta.insert("weight_versions".into(), outcome.spans.iter().map(span).collect());
    }
    if log_probs {
        let output = outcome.log_probs.iter().zip(&outcome.output_ids);
        let output: Value = output.map(|(log_prob, id)| json!([log_prob, id, null])).collect();
        let prompt = outcome.prompt_log_probs.iter();
        let prompt: Value = prompt.map(|(log_prob, id)| json!([log_prob, id, null])).collect();
        meta.insert("input_token_logprobs".into(), prompt);
        meta.insert("output_token_logprobs".into(), output);
        meta.insert("output_token_logprobs_length".into(), json!(outcome.output_ids.len()));
    }
    meta.insert("completion_tokens".into(), json!(outcome.output_ids.len()));
    meta.insert("e2e_latency".into(), json!(received.elapsed().as_secs_f64()));
    meta.insert("response_sent_to_client_ts".into(), json!(unix_seconds()));
    let mut entry = Map::new();
    if waiting {
        entry.insert("text".into(), json!(""));
    }
    entry.insert("output_ids".into(), json!(outcome.output_ids));
    entry.insert("meta_info".into(), Value::Object(meta));
    Ok(Value::Object(entry))
}

/// The reply of `/update_weights_from_disk`.
pub(super) fn updated(updated: &Updated, version: Option<&str>) -> Response {
    let message = match updated {
        Updated::Loaded => match version {
            Some(version) => {
                format!("Succeeded to update model weights. Weight version updated to {version}.")
            }
            None => "Succeeded to update model weights.".to_owned(),
        },
        Updated::NotFlushed => {
            "Weights were updated, but the cache was not flushed because requests are still \
             running or queued. Retract or finish them, then call /flush_cache."
                .to_owned()
        }
        Updated::WouldEnd => "Cache flush failed after updating weights: requests are running or queued. \
             SGLang of this version would have ended here; nothing was changed."
            .to_owned(),
        Updated::Refused(reason) => {
            format!("Failed to update weights: {reason}. The old weights keep serving.")
        }
    };
    let success = *updated == Updated::Loaded;
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    let body = json!({"success": success, "message": message, "num_paused_requests": 0});
    (status, Json(body)).into_response()
}

/// The reply of `/weights_checker` with the action `checksum`.
pub(super) fn checked(sums: &Checksums, dialect: Dialect) -> Response {
    let mut place = json!({
        "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1
    });
    if dialect.has_roles() {
        place["role"] = json!("target");
        place = json!([place]);
    }
    let mut rank = json!({"checksums": sums, "parallelism_info": place});
    let mut body = json!({"success": true, "message": "Success."});
    if dialect.has_engine_checksum() {
        let sum = overall(sums);
        body["per_engine_checksum"] = json!(engine(&sum));
        rank["per_gpu_checksum"] = json!(sum);
    }
    body["ranks"] = json!([rank]);
    Json(body).into_response()
}

/// Seconds since 1970, as SGLang stamps replies.
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
