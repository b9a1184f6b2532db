//! The JSON that goes out, field for field as SGLang writes it.

use std::fmt::Display;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::job::Tokens;
use crate::{Checksums, Completion, Ended, Facts, Updated};
use driftless_bridge::sglang::{Dialect, Feature};

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

    /// The same as the last event of a stream.
    pub(super) fn event(&self) -> Value {
        let code = self.status.as_u16();
        json!({"error": {"message": self.body, "type": "engine_error", "code": code, "retryable": code >= 500}})
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
    with_verdict(success, json!({"success": success, "message": message}))
}

fn with_verdict(success: bool, body: Value) -> Response {
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    (status, Json(body)).into_response()
}

/// One entry of a `/generate` reply, with the output from token `from` on.
///
/// # Errors
/// When the engine failed the request.
pub(super) fn generated(
    completion: &Completion,
    from: usize,
    log_probs: bool,
    facts: &Facts,
    received: Instant,
) -> Result<Value, Refusal> {
    let from = from.min(completion.output_ids.len());
    let output_ids = &completion.output_ids[from..];
    let shown_version = facts.serving.weight_version.as_str();
    let finish = match &completion.finish {
        Ended::Stop(token) => json!({"type": "stop", "matched": token}),
        Ended::Length => json!({"type": "length", "length": completion.max_new_tokens}),
        Ended::Aborted => {
            json!({"type": "abort", "message": "Aborted", "status_code": null, "err_type": null})
        }
        Ended::AbortedWaiting => json!({"type": "abort", "message": "Abort in waiting queue"}),
        Ended::Failed(reason) => return Err(Refusal::message(StatusCode::INTERNAL_SERVER_ERROR, reason)),
    };
    let waiting = completion.finish == Ended::AbortedWaiting;
    let mut meta = json!({
        "id": completion.rid,
        "finish_reason": finish,
        "weight_version": shown_version,
        "completion_tokens": completion.output_ids.len(),
        "e2e_latency": received.elapsed().as_secs_f64(),
        "response_sent_to_client_ts": unix_seconds(),
    });
    if !waiting {
        meta["prompt_tokens"] = json!(completion.prompt_tokens);
        meta["num_retractions"] = json!(completion.retractions);
        meta["reasoning_tokens"] = json!(0);
        meta["cached_tokens"] = json!(0);
        meta["cached_tokens_details"] = json!(null);
        meta["dp_rank"] = json!(null);
    }
    if facts.dialect.has(Feature::Spans) {
        let last = completion.spans.last().map_or(shown_version, |span| span.label.as_str());
        meta["weight_version"] = json!(last);
        meta["weight_versions"] = json!(completion.spans);
    }
    if log_probs {
        let output = completion.log_probs[from..].iter().zip(output_ids);
        let prompt = completion.prompt_log_probs.iter();
        meta["input_token_logprobs"] = prompt.map(|(log_prob, id)| json!([log_prob, id, null])).collect();
        meta["output_token_logprobs"] = output.map(|(log_prob, id)| json!([log_prob, id, null])).collect();
        meta["output_token_logprobs_length"] = json!(completion.output_ids.len());
    }
    let mut entry = json!({"output_ids": output_ids, "meta_info": meta});
    if waiting {
        entry["text"] = json!("");
    }
    Ok(entry)
}

/// A piece of a `/generate` reply of which `drawn` tokens were drawn by then.
pub(super) fn piece(rid: &str, tokens: &Tokens, drawn: usize, log_probs: bool, facts: &Facts) -> Value {
    let mut meta = json!({
        "id": rid,
        "finish_reason": null,
        "weight_version": facts.serving.weight_version,
        "completion_tokens": drawn,
    });
    if log_probs {
        let entries = tokens.log_probs.iter().zip(&tokens.output_ids);
        meta["output_token_logprobs"] = entries.map(|(log_prob, id)| json!([log_prob, id, null])).collect();
        meta["output_token_logprobs_length"] = json!(drawn);
    }
    json!({"output_ids": tokens.output_ids, "meta_info": meta})
}

/// The reply of `/update_weights_from_disk`.
pub(super) fn updated(updated: &Updated, version: Option<&str>) -> Response {
    let message = match updated {
        Updated::Loaded => {
            let renamed = version.map(|version| format!(" Weight version updated to {version}."));
            format!("Succeeded to update model weights.{}", renamed.unwrap_or_default())
        }
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
    with_verdict(success, json!({"success": success, "message": message, "num_paused_requests": 0}))
}

/// The reply of `/weights_checker` with the action `checksum`.
pub(super) fn checked(sums: &Checksums, dialect: Dialect) -> Response {
    let mut place = json!({
        "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1
    });
    if dialect.has(Feature::Roles) {
        place["role"] = json!("target");
        place = json!([place]);
    }
    let mut rank = json!({"checksums": sums, "parallelism_info": place});
    let mut body = json!({"success": true, "message": "Success."});
    if dialect.has(Feature::EngineChecksum) {
        let sum = overall(sums);
        // Over ranks, of which there is one.
        body["per_engine_checksum"] = json!(hex(&Sha256::digest(&sum)));
        rank["per_gpu_checksum"] = json!(sum);
    }
    body["ranks"] = json!([rank]);
    Json(body).into_response()
}

/// Seconds since 1970, as SGLang stamps replies.
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// One digest of many sums: SHA-256 over names and sums, sorted by name.
fn overall(sums: &Checksums) -> String {
    let mut hash = Sha256::new();
    for (name, sum) in sums {
        hash.update(name);
        hash.update(sum);
    }
    hex(&hash.finalize())
}

/// Lower-case hex.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overall_sums_are_those_of_sglang() {
        // A reply of SGLang 0.5.23 on a CPU, with skip_tensor_list ["mlp", "norm"].
        let sums: Checksums = [
            ("model.embed_tokens.weight", "1ce9f4ca6e52a9c6"),
            ("model.layers.0.self_attn.qkv_proj.weight", "d0d673719bab76a9"),
            ("model.layers.0.self_attn.o_proj.weight", "aa724f73e78f7fa3"),
            ("model.layers.1.self_attn.qkv_proj.weight", "3c5b115952019c3f"),
            ("model.layers.1.self_attn.o_proj.weight", "11b69d85dae54aa8"),
            ("lm_head.weight", "d3ccf51444c3f1a9"),
        ]
        .map(|(name, sum)| (name.to_owned(), sum.to_owned()))
        .into();
        let rank = overall(&sums);
        assert_eq!(rank, "01d7c5999389ad3a8f7645794ced7fb6abc70cba9835c12878d6c793cb2fe526");
        assert!(hex(&Sha256::digest(&rank)).starts_with("16d3aec42213c8d3500a21c5c7dbcc6f975482"));
    }
}
