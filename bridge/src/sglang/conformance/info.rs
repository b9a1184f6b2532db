//! Information calls, and what follows from them.

use serde_json::json;

use super::{Checked, Subject, ensure};
use crate::engine::Attached;
use crate::error::Error;
use crate::sglang::{Capabilities, Feature};

pub(super) async fn model_info(subject: &Subject) -> Checked {
    let info = subject.client.model_info().await?;
    let architecture = subject.expected()?.config.architecture;
    ensure(info.architectures.as_deref() == Some(&[architecture.clone()][..]), || {
        format!("architectures {architecture} expected: {info:?}")
    })?;
    ensure(info.is_generation == Some(true), || format!("is_generation true expected: {info:?}"))?;
    ensure(info.weight_version.is_some(), || format!("weight_version expected: {info:?}"))?;
    let shown = subject.has(Feature::ShownLoadFormat);
    ensure(info.load_format.is_some() == shown, || {
        format!("{} load_format expected: {info:?}", if shown { "a" } else { "no" })
    })?;
    ensure(info.model_path == subject.first.to_string_lossy(), || {
        format!("model_path of the last update expected: {info:?}")
    })
}

pub(super) async fn server_info(subject: &Subject) -> Checked {
    let info = subject.client.server_info().await?;
    ensure((info.tp_size, info.pp_size, info.dp_size) == (Some(1), Some(1), Some(1)), || {
        format!("sizes of 1 expected: {info:?}")
    })?;
    ensure(info.frontend.as_deref().is_none_or(|frontend| frontend == "python"), || {
        format!("frontend python expected: {info:?}")
    })?;
    ensure(info.dtype.is_some() && info.load_format.is_some() && info.version.is_some(), || {
        format!("dtype, load_format, version expected: {info:?}")
    })?;
    ensure(info.disaggregation_mode.as_deref().unwrap_or("null") == "null", || {
        format!("disaggregation_mode null expected: {info:?}")
    })?;
    ensure(info.device.is_some(), || format!("device expected: {info:?}"))
}

pub(super) async fn liveness(subject: &Subject) -> Checked {
    subject.client.health().await?;
    subject.settle().await?;
    let loads = subject.client.loads().await?;
    ensure(!loads.is_empty(), || "one entry of loads per rank expected, found none".into())?;
    let idle = loads.iter().all(|load| load.num_running_reqs + load.num_waiting_reqs == 0);
    ensure(idle, || format!("an idle engine expected, found {loads:?}"))?;
    let ready = subject.client.ready().await?;
    let expected = subject.has(Feature::Ready).then_some(true);
    ensure(ready == expected, || format!("ready {expected:?} expected, found {ready:?}"))
}

pub(super) async fn capabilities(subject: &Subject) -> Checked {
    let found = Capabilities::probe(&subject.client).await?;
    let fits = found.sessions == subject.has(Feature::Sessions)
        && found.spans == subject.has(Feature::Spans)
        && found.ready == subject.has(Feature::Ready)
        && found.survives_refused_flush == subject.has(Feature::SurvivesRefusedFlush);
    ensure(fits, || format!("those of {} expected, found {found:?}", subject.dialect))
}

pub(super) async fn attach(subject: &Subject) -> Checked {
    let mut expected = subject.expected()?;
    Attached::attach(subject.engine(), &expected).await?;
    expected.config.architecture.insert_str(0, "Other");
    match Attached::attach(subject.engine(), &expected).await {
        Err(Error::Refused { what, .. }) if what == "architectures" => Ok(()),
        other => Err(format!("another architecture should be refused, found {other:?}").into()),
    }
}

pub(super) async fn unknown_route(subject: &Subject) -> Checked {
    subject.status("GET", "/driftless_no_such_call", json!({}), &[404]).await?;
    subject.status("POST", "/driftless_no_such_call", json!({}), &[404]).await?;
    subject.status("GET", "/pause_generation", json!({}), &[405]).await.map(drop)
}
