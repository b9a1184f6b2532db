//! The three pause modes.

use std::time::Duration;

use serde_json::json;

use super::{Checked, Subject};
use crate::engine::{Finish, PauseMode};
use crate::sglang::Feature;

/// How long a held request must stay unanswered to count as held. Unpaused, the engine answers it in a
/// fraction of that.
const HELD: Duration = Duration::from_millis(700);

pub(super) async fn holds_requests(subject: &Subject) -> Checked {
    for mode in [PauseMode::Retract, PauseMode::InPlace, PauseMode::Abort] {
        subject.client.pause(mode).await?;
        if subject.has(Feature::Ready) {
            ensure!(
                subject.client.ready().await? == Some(false),
                "ready false expected while paused ({mode:?})"
            )?;
        }
        let (client, request) = (subject.client.clone(), subject.request(2));
        let mut held = tokio::spawn(async move { client.generate(&request).await });
        let early = tokio::time::timeout(HELD, &mut held).await;
        ensure!(early.is_err(), "no answer expected while paused ({mode:?}), found {early:?}")?;
        subject.client.resume().await?;
        let reply = held.await??;
        ensure!(
            reply.finish == Finish::Length && reply.output_ids.len() == 2,
            "the held request's 2 tokens expected: {reply:?}"
        )?;
    }
    Ok(())
}

pub(super) async fn retract(subject: &Subject) -> Checked {
    let retractions = through(subject, PauseMode::Retract).await?;
    ensure!(retractions >= 1, "num_retractions of 1 or more expected, found 0")
}

pub(super) async fn in_place(subject: &Subject) -> Checked {
    let retractions = through(subject, PauseMode::InPlace).await?;
    ensure!(retractions == 0, "num_retractions 0 expected, found {retractions}")
}

/// How often a request was retracted that went on through a pause, and gave all of its tokens.
async fn through(subject: &Subject, mode: PauseMode) -> Checked<u64> {
    let running = subject.start_long().await?;
    subject.client.pause(mode).await?;
    subject.client.resume().await?;
    let reply = running.finish().await?;
    let tokens = reply.output_ids.len();
    ensure!(tokens == subject.long_tokens as usize, "all tokens expected, found {tokens}")?;
    Ok(reply.retractions)
}

pub(super) async fn abort(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::Abort).await?;
    subject.client.resume().await?;
    running.finish_aborted().await.map(drop)
}

/// Activation depends on this, and on what it does where the flush is refused: a second pause in abort mode
/// empties the queue.
pub(super) async fn flush_retracted(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::Retract).await?;
    let flushed = subject.client.flush_cache().await?;
    let expected = subject.has(Feature::FlushWhileRetracted);
    ensure!(flushed == expected, "flush {expected} expected while retracted, found {flushed}")?;
    subject.client.pause(PauseMode::Abort).await?;
    running.finish_aborted().await?;
    ensure!(subject.client.flush_cache().await?, "the emptied engine should flush")
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
