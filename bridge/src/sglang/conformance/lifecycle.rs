//! Aborting and flushing.

use serde_json::Value;

use super::{Checked, Subject, raw_request};
use crate::engine::Rid;

pub(super) async fn abort(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.abort(&running.rid).await?;
    let reply = running.finish_aborted().await?;
    let partial = reply.output_ids.len() < subject.long_tokens as usize;
    ensure!(partial, "fewer than {} tokens expected", subject.long_tokens)
}

/// The trap that fixed-length ids avoid: the engine aborts every request whose id starts with the given one.
pub(super) async fn abort_prefix(subject: &Subject) -> Checked {
    let short = Rid::probe().to_string();
    let long = format!("{short}0");
    let start = |rid: &str| {
        let (client, body) = (subject.client.clone(), raw_request(rid, subject.long_tokens));
        tokio::spawn(async move { client.raw("POST", "/generate", &body).await })
    };
    let both = [start(&short), start(&long)];
    subject.until_running(2).await?;
    subject.status("POST", "/abort_request", serde_json::json!({ "rid": short }), &[200]).await?;
    for reply in both {
        let (status, reply) = reply.await??;
        let kind = reply.pointer("/meta_info/finish_reason/type").and_then(Value::as_str);
        ensure!(
            status == 200 && kind == Some("abort"),
            "200 and finish abort expected, found {status}: {kind:?}"
        )?;
    }
    Ok(())
}

pub(super) async fn abort_unknown(subject: &Subject) -> Checked {
    subject.client.abort(&Rid::probe()).await?;
    Ok(())
}

pub(super) async fn flush(subject: &Subject) -> Checked {
    subject.settle().await?;
    ensure!(subject.client.flush_cache().await?, "an idle engine should flush")?;
    let running = subject.start_long().await?;
    let flushed = subject.client.flush_cache().await?;
    subject.client.abort(&running.rid).await?;
    running.finish().await?;
    ensure!(!flushed, "an engine that generates should refuse to flush")
}
