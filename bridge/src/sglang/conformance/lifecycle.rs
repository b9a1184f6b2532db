//! Aborting and flushing.

use serde_json::Value;

use super::{Checked, Subject, raw_request};
use crate::engine::{Drawn, Piece, Rid};
use crate::fleet::{Fleet, FleetOptions};
use crate::keys::Keys;

pub(super) async fn abort(subject: &Subject) -> Checked {
    let running = subject.start_long().await?;
    subject.client.abort(&running.rid).await?;
    let reply = running.finish_aborted().await?;
    let partial = reply.output_ids.len() < subject.long_tokens as usize;
    ensure!(partial, "fewer than {} tokens expected", subject.long_tokens)
}

/// An answer that is aborted goes on behind the tokens that it has, as if the engine had read them.
pub(super) async fn continued(subject: &Subject) -> Checked {
    let (url, keys) = (subject.client.url().to_owned(), Keys::default());
    let fleet = Fleet::attach(&[url], &keys, &subject.expected()?, FleetOptions::default()).await?;
    let request = subject.request(subject.long_tokens);
    let mut kept = Drawn::default();
    let mut told = |piece: Piece<'_>| kept.push(piece);
    let abort = async {
        subject.until_running(1).await?;
        Checked::Ok(subject.client.abort(&request.rid).await?)
    };
    let (whole, aborted) = tokio::join!(fleet.stream(request.clone(), None, &mut told), abort);
    aborted?;
    let (whole, kept) = (whole?, kept.output_ids);
    let length = whole.output_ids.len();
    ensure!(length == subject.long_tokens as usize, "all tokens expected, found {length}")?;
    ensure!(whole.rid != request.rid, "a second attempt expected")?;
    let behind = whole.output_ids.strip_prefix(&kept[..]);
    let behind = behind.ok_or_else(|| format!("{kept:?} first expected: {:?}", whole.output_ids))?;
    let mut rest = subject.request(8.min(behind.len() as u32));
    rest.input_ids.extend(kept);
    let again = subject.client.generate(&rest).await?.output_ids;
    ensure!(behind.starts_with(&again), "{again:?} behind the abort expected, found {behind:?}")
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
