//! Updates from disk, labels, checksums.

use std::path::Path;

use driftless_transport::Checkpoint;
use serde_json::json;

use super::{Checked, Subject, update_of};
use crate::engine::{Attached, LiveWeights, PauseMode};
use crate::error::Error;
use crate::sglang::{DiskUpdated, Feature};

const FIRST: &str = "c0ffee000000:1";
const SECOND: &str = "c0ffee000000:2";
const THIRD: &str = "c0ffee000000:3";

pub(super) async fn load_first(subject: &Subject) -> Checked {
    subject.client.resume().await?;
    subject.load(&subject.first, FIRST).await
}

pub(super) async fn missing(subject: &Subject) -> Checked {
    let before = subject.signature().await?;
    subject.settle().await?;
    let nowhere = Path::new("/driftless/no/such/checkpoint");
    match subject.client.update_weights_from_disk(&update_of(nowhere, SECOND, false)).await {
        Err(Error::Status { status: 400, body, .. })
            if body.contains("success") && body.contains("message") => {}
        other => return Err(format!("400 with success and message expected, found {other:?}").into()),
    }
    subject
        .status("POST", "/update_weights_from_disk", json!({"weight_version": SECOND}), &[400, 422])
        .await?;
    subject.serves(FIRST).await?;
    let after = subject.signature().await?;
    ensure!(after.output_ids == before.output_ids, "the old weights expected, found {:?}", after.output_ids)
}

pub(super) async fn paused(subject: &Subject) -> Checked {
    let before = subject.signature().await?;
    let running = subject.start_long().await?;
    subject.update_in(PauseMode::Retract, &subject.second, SECOND).await?;
    let reply = running.finish().await?;
    if subject.has(Feature::Spans) {
        let labels: Vec<_> = reply.spans.iter().map(|span| span.label.as_str()).collect();
        ensure!(labels == [FIRST, SECOND], "spans of {FIRST} and {SECOND} expected: {:?}", reply.spans)?;
    }
    subject.serves(SECOND).await?;
    let path = subject.client.model_info().await?.model_path;
    ensure!(Path::new(&path) == subject.second, "model_path of the update expected, found {path}")?;
    subject.settle().await?;
    let after = subject.signature().await?;
    ensure!(after.output_ids != before.output_ids, "another output expected of other weights")?;
    ensure!(after.spans[0].label == SECOND, "label {SECOND} expected: {:?}", after.spans)
}

pub(super) async fn checksums(subject: &Subject) -> Checked {
    let engine = Attached::attach(subject.engine(), &subject.expected()?).await?;
    let second = engine.sums(&Checkpoint::open(&subject.second)?, &subject.second)?;
    let found = engine.check_live(&second).await?;
    if engine.identity().no_checksums.is_some() {
        return ensure!(matches!(found, LiveWeights::Unchecked { .. }), "{found:?}");
    }
    let first = engine.sums(&Checkpoint::open(&subject.first)?, &subject.first)?;
    match engine.check_live(&first).await {
        Err(Error::LiveWeights { .. }) => {}
        other => return Err(format!("checksums of other weights should differ, found {other:?}").into()),
    }
    let reply = subject.status("POST", "/weights_checker", json!({"action": "driftless"}), &[400]).await?;
    ensure!(reply.get("success") == Some(&false.into()), "success false expected: {reply}")
}

/// Weights change under a request that keeps running: each token must say whose it is.
pub(super) async fn spans(subject: &Subject) -> Checked {
    subject.load(&subject.first, FIRST).await?;
    let running = subject.start_long().await?;
    subject.update_in(PauseMode::InPlace, &subject.second, SECOND).await?;
    let (reply, reported) = (running.finish().await?, subject.has(Feature::Spans));
    ensure!(reply.spans_reported == reported, "spans reported: {reported} expected")?;
    let labels: Vec<_> = reply.spans.iter().map(|span| span.label.as_str()).collect();
    let expected: &[&str] = if reported { &[FIRST, SECOND] } else { &[SECOND] };
    ensure!(labels == expected, "spans of {expected:?} expected: {:?}", reply.spans)
}

/// The answer that looks like a failure and is not: the weights are live, but neither cache nor reported
/// label followed.
pub(super) async fn refused_flush(subject: &Subject) -> Checked {
    if !subject.has(Feature::SurvivesRefusedFlush) {
        return Ok(());
    }
    subject.load(&subject.first, FIRST).await?;
    let before = subject.signature().await?;
    let running = subject.start_long().await?;
    subject.client.pause(PauseMode::InPlace).await?;
    let done = subject.client.update_weights_from_disk(&update_of(&subject.second, THIRD, true)).await?;
    ensure!(done == DiskUpdated::Unflushed, "a refused flush expected, found {done:?}")?;
    subject.serves(FIRST).await?;
    subject.client.resume().await?;
    subject.client.abort(&running.rid).await?;
    running.finish().await?;
    subject.settle().await?;
    subject.client.set_weight_version(THIRD).await?;
    subject.serves(THIRD).await?;
    let after = subject.signature().await?;
    ensure!(after.output_ids != before.output_ids, "the new weights expected")
}

pub(super) async fn relabel(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.set_weight_version(SECOND).await?;
    subject.serves(SECOND).await?;
    let reply = running.finish().await?;
    let whole = reply.output_ids.len() == subject.long_tokens as usize;
    ensure!(whole, "no abort expected, found {:?}", reply.finish)?;
    subject.status("POST", "/update_weight_version", json!({}), &[400, 422]).await?;
    subject.serves(SECOND).await
}

pub(super) async fn sessions(subject: &Subject) -> Checked {
    let expected: [u16; 4] = if subject.has(Feature::Sessions) { [200, 400, 200, 400] } else { [404; 4] };
    let calls = ["/begin_weight_update", "/begin_weight_update", "/end_weight_update", "/end_weight_update"];
    for (path, status) in calls.into_iter().zip(expected) {
        subject.status("POST", path, json!({}), &[status]).await?;
    }
    Ok(())
}
