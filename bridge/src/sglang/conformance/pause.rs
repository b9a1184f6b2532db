//! The three pause modes.

use std::time::Duration;

use serde_json::json;

use super::{Checked, Subject, ensure};
use crate::engine::{Finish, PauseMode};
use crate::sglang::Feature;

/// How long a held request must stay unanswered to count as held. Unpaused, the engine answers it in a
/// fraction of that.
const HELD: Duration = Duration::from_millis(700);

pub(super) async fn holds_requests(subject: &Subject) -> Checked {
    for mode in [PauseMode::Retract, PauseMode::InPlace, PauseMode::Abort] {
        subject.client.pause(mode).await?;
        if subject.has(Feature::Ready) {
            ensure(subject.client.ready().await? == Some(false), || {
                format!("ready false expected while paused ({mode:?})")
            })?;
        }
        let (client, request) = (subject.client.clone(), subject.request(2));
        let mut held = tokio::spawn(async move { client.generate(&request).await });
        let early = tokio::time::timeout(HELD, &mut held).await;
        ensure(early.is_err(), || format!("no answer expected while paused ({mode:?}), found {early:?}"))?;
        subject.client.resume().await?;
        let reply = held.await??;
        ensure(reply.finish == Finish::Length && reply.output_ids.len() == 2, || {
            format!("the held request's 2 tokens expected: {reply:?}")
        })?;
    }
    Ok(())
}

pub(super) async fn retract(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::Retract).await?;
    subject.client.resume().await?;
    let reply = running.finish().await?;
    ensure(reply.retractions >= 1, || "num_retractions of 1 or more expected, found 0".into())?;
    ensure(reply.output_ids.len() == subject.long_tokens as usize, || {
        format!("all tokens expected, found {}", reply.output_ids.len())
    })
}

pub(super) async fn in_place(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::InPlace).await?;
    subject.client.resume().await?;
    let reply = running.finish().await?;
    ensure(reply.retractions == 0, || format!("num_retractions 0 expected, found {}", reply.retractions))?;
    ensure(reply.output_ids.len() == subject.long_tokens as usize, || {
        format!("all tokens expected, found {}", reply.output_ids.len())
    })
}

pub(super) async fn abort(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::Abort).await?;
    subject.client.resume().await?;
    let reply = running.finish().await?;
    ensure(matches!(reply.finish, Finish::Abort { .. }), || {
        format!("finish abort expected: {:?}", reply.finish)
    })
}

/// Activation depends on this, and on what it does where the flush is refused: a second pause in abort mode
/// empties the queue.
pub(super) async fn flush_retracted(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::Retract).await?;
    let flushed = subject.client.flush_cache().await?;
    let expected = subject.has(Feature::FlushWhileRetracted);
    ensure(flushed == expected, || format!("flush {expected} expected while retracted, found {flushed}"))?;
    subject.client.pause(PauseMode::Abort).await?;
    let reply = running.finish().await?;
    ensure(matches!(reply.finish, Finish::Abort { .. }), || {
        format!("finish abort expected: {:?}", reply.finish)
    })?;
    ensure(subject.client.flush_cache().await?, || "the emptied engine should flush".into())
}

pub(super) async fn repeat(subject: &Subject) -> Checked {
    subject.client.resume().await?;
    subject.client.pause(PauseMode::Retract).await?;
    subject.client.pause(PauseMode::Retract).await?;
    subject.client.resume().await?;
    subject.client.resume().await?;
    subject.status("POST", "/pause_generation", json!({"mode": "driftless"}), &[400, 422]).await?;
    subject.signature().await.map(drop)
}
