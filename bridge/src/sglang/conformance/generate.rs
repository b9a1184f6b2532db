//! Generation: token ids in and out, log-probabilities, and what is refused.

use serde_json::json;

use super::{Checked, Subject};
use crate::engine::{Drawn, Finish, Piece};
use crate::error::Error;
use crate::sglang::Feature;

pub(super) async fn greedy(subject: &Subject) -> Checked {
    let (first, second) = (subject.signature().await?, subject.signature().await?);
    let (ids, again) = (&first.output_ids, &second.output_ids);
    ensure!(ids == again, "{ids:?} expected again, found {again:?}")?;
    let whole = ids.len() == 8 && first.finish == Finish::Length;
    ensure!(whole, "8 tokens and finish length expected: {first:?}")?;
    let vocabulary = subject.expected()?.config.vocabulary;
    let inside = ids.iter().all(|id| u64::try_from(*id).is_ok_and(|id| id < vocabulary));
    ensure!(inside, "ids below {vocabulary} expected: {ids:?}")?;
    let gap = first.log_probs.iter().zip(&second.log_probs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // The second run reads the prompt from the prefix cache, which may group sums differently.
    ensure!(gap < 0.05, "log-probabilities repeat within 0.05 expected, found {gap}")?;
    let label = subject.client.model_info().await?.weight_version.unwrap_or_default();
    let one = first.spans.len() == 1 && first.spans[0].label == label;
    ensure!(one, "one span of {label} expected: {:?}", first.spans)
}

/// Tokens come before the end, and are those of the reply and of one that comes at once.
pub(super) async fn stream(subject: &Subject) -> Checked {
    let at_once = subject.client.generate(&subject.request(40)).await?;
    let mut pieces = Drawn::default();
    let request = subject.request(40);
    let streamed = subject.client.stream(&request, 8, &mut |piece| pieces.push(piece)).await?;
    let (ids, expected) = (&streamed.output_ids, &at_once.output_ids);
    ensure!(ids == expected, "{expected:?} expected of the stream, found {ids:?}")?;
    let (len, spans) = (pieces.len(), &streamed.spans);
    ensure!((1..40).contains(&len), "pieces before the end expected, found {len} tokens")?;
    let same = ids.starts_with(&pieces.output_ids) && streamed.log_probs.starts_with(&pieces.log_probs);
    ensure!(same, "pieces of {streamed:?} expected: {pieces:?}")?;
    let one = pieces.spans.len() == 1 && pieces.spans[0].label == spans[0].label;
    ensure!(one, "pieces of {spans:?} expected: {:?}", pieces.spans)
}

/// What an aborted stream has comes with its end.
pub(super) async fn aborted_stream(subject: &Subject) -> Checked {
    let request = subject.request(subject.long_tokens);
    let (begun, first) = tokio::sync::oneshot::channel();
    let (mut begun, mut pieces) = (Some(begun), Drawn::default());
    let mut seen = |piece: Piece<'_>| {
        pieces.push(piece);
        // Only the first is waited for.
        if let Some(begun) = begun.take() {
            let _ = begun.send(());
        }
    };
    let abort = async {
        let _ = first.await;
        subject.client.abort(&request.rid).await
    };
    let (streamed, aborted) = tokio::join!(subject.client.stream(&request, 8, &mut seen), abort);
    aborted?;
    let streamed = streamed?;
    ensure!(matches!(streamed.finish, Finish::Abort { .. }), "abort expected: {:?}", streamed.finish)?;
    let ids = &streamed.output_ids;
    ensure!(ids.starts_with(&pieces.output_ids), "pieces of {ids:?} expected: {:?}", pieces.output_ids)?;
    ensure!(ids.len() < subject.long_tokens as usize, "fewer than {} tokens expected", subject.long_tokens)
}

/// A stream that nobody reads any more is no request any more.
pub(super) async fn dropped_stream(subject: &Subject) -> Checked {
    let request = subject.request(subject.long_tokens);
    let (begun, first) = tokio::sync::oneshot::channel();
    let mut begun = Some(begun);
    let mut seen = |_: Piece<'_>| {
        if let Some(begun) = begun.take() {
            let _ = begun.send(());
        }
    };
    tokio::select! {
        whole = subject.client.stream(&request, 8, &mut seen) => ensure!(false, "{whole:?} came first")?,
        _ = first => {}
    }
    subject.settle().await
}

pub(super) async fn stop_token(subject: &Subject) -> Checked {
    let free = subject.signature().await?;
    // The first output token that did not occur before it: a stop token ends the output at its first
    // occurrence.
    let at = (1..free.output_ids.len())
        .find(|at| !free.output_ids[..*at].contains(&free.output_ids[*at]))
        .unwrap_or(0);
    let mut request = subject.request(8);
    request.sampling.stop_token_ids = vec![free.output_ids[at]];
    request.sampling.ignore_eos = false;
    let stopped = subject.client.generate(&request).await?;
    let expected = &free.output_ids[..=at];
    ensure!(stopped.output_ids == expected, "{expected:?}, the stop token included, expected: {stopped:?}")?;
    ensure!(stopped.finish == Finish::Stop, "finish stop expected: {:?}", stopped.finish)
}

/// The log-probability of a token at temperature T is that at 1, divided by T, and normalised over the whole
/// vocabulary: two tokens' difference at T = 0.5 is twice the difference at 1, whatever top-k left of the
/// others.
pub(super) async fn temperature(subject: &Subject) -> Checked {
    let greedy = subject.signature().await?;
    let warm = draws(subject, 1.0).await?;
    let cold = draws(subject, 0.5).await?;
    if let Some(whole) = warm.iter().find(|(id, _)| *id == greedy.output_ids[0]) {
        let gap = (whole.1 - greedy.log_probs[0]).abs();
        let (expected, found) = (greedy.log_probs[0], whole.1);
        ensure!(
            gap < 0.05,
            "the log-probability {expected} over the whole vocabulary expected, found {found}"
        )?;
    }
    let mut common = cold.iter().filter_map(|(id, at_half)| {
        warm.iter().find(|(other, _)| other == id).map(|(_, at_one)| (*at_half, *at_one))
    });
    let (Some(a), Some(b)) = (common.next(), common.next()) else {
        return Ok(());
    };
    let (half, twice) = (a.0 - b.0, 2.0 * (a.1 - b.1));
    ensure!((half - twice).abs() < 0.1, "a difference of {twice} at temperature 0.5 expected, found {half}")
}

/// First tokens drawn from the three likeliest, each once: id and log-probability.
async fn draws(subject: &Subject, temperature: f64) -> Checked<Vec<(i32, f32)>> {
    let mut found: Vec<(i32, f32)> = Vec::new();
    for _ in 0..12 {
        let mut request = subject.request(1);
        (request.sampling.temperature, request.sampling.top_k) = (temperature, 3);
        let drawn = subject.client.generate(&request).await?;
        let (id, log_prob) = (drawn.output_ids[0], drawn.log_probs[0]);
        if !found.iter().any(|(seen, _)| *seen == id) {
            found.push((id, log_prob));
        }
    }
    Ok(found)
}

pub(super) async fn malformed(subject: &Subject) -> Checked {
    for body in [
        json!({"sampling_params": {"max_new_tokens": 1}}),
        json!({"input_ids": [], "sampling_params": {"max_new_tokens": 1}}),
        json!({"input_ids": "1 2 3", "sampling_params": {"max_new_tokens": 1}}),
        json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "top_p": -1}}),
        json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 100_000_000}}),
    ] {
        subject.status("POST", "/generate", body, &[400, 422]).await?;
    }
    let mut request = subject.request(1);
    request.sampling.temperature = -1.0;
    match subject.client.generate(&request).await {
        Err(Error::Status { status: 400, .. }) => subject.signature().await.map(drop),
        other => Err(format!("a negative temperature should be 400, found {other:?}").into()),
    }
}

pub(super) async fn unknown_parameter(subject: &Subject) -> Checked {
    let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "driftless_unknown": 1}});
    if subject.has(Feature::StrictSampling) {
        subject.status("POST", "/generate", body, &[400]).await?;
    }
    // Unknown keys beside sampling_params are ignored by every release.
    let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "driftless_unknown": 1});
    subject.status("POST", "/generate", body, &[200]).await.map(drop)
}
