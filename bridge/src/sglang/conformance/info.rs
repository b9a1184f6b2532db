//! Information calls, and what follows from them.

use serde_json::json;

use super::{Checked, Subject};
use crate::engine::Attached;
use crate::error::Error;
use crate::sglang::{Capabilities, Feature};

pub(super) async fn model_info(subject: &Subject) -> Checked {
    let info = subject.client.model_info().await?;
    let architecture = subject.expected()?.config.architecture;
    let shown = subject.has(Feature::ShownLoadFormat);
    let architectures = info.architectures.clone().unwrap_or_default();
    for (holds, what) in [
        (architectures == [architecture.as_str()], format!("architectures {architecture}")),
        (info.is_generation == Some(true), "is_generation true".into()),
        (info.weight_version.is_some(), "weight_version".into()),
        (info.load_format.is_some() == shown, format!("{} load_format", if shown { "a" } else { "no" })),
        (info.model_path == subject.first.to_string_lossy(), "model_path of the last update".into()),
    ] {
        ensure!(holds, "{what} expected: {info:?}")?;
    }
    Ok(())
}

pub(super) async fn server_info(subject: &Subject) -> Checked {
    let info = subject.client.server_info().await?;
    let shown = info.dtype.is_some() && info.load_format.is_some() && info.version.is_some();
    for (holds, what) in [
        ((info.tp_size, info.pp_size, info.dp_size) == (Some(1), Some(1), Some(1)), "sizes of 1"),
        (info.frontend.as_deref().unwrap_or("python") == "python", "frontend python"),
        (shown, "dtype, load_format, version"),
        (info.disaggregation_mode.as_deref().unwrap_or("null") == "null", "disaggregation_mode null"),
        (info.device.is_some(), "device"),
    ] {
        ensure!(holds, "{what} expected: {info:?}")?;
    }
    let about = subject.engine().about().await?;
    let fits = (about.release, about.model) == (info.version, info.model_path);
    ensure!(fits, "the release and model of server_info expected")
}

pub(super) async fn liveness(subject: &Subject) -> Checked {
    subject.client.health().await?;
    subject.settle().await?;
    let loads = subject.client.loads().await?;
    ensure!(!loads.is_empty(), "one entry of loads per rank expected, found none")?;
    let idle = loads.iter().all(|load| load.num_running_reqs + load.num_waiting_reqs == 0);
    ensure!(idle, "an idle engine expected, found {loads:?}")?;
    let ready = subject.client.ready().await?;
    let expected = subject.has(Feature::Ready).then_some(true);
    ensure!(ready == expected, "ready {expected:?} expected, found {ready:?}")
}

pub(super) async fn capabilities(subject: &Subject) -> Checked {
    let found = Capabilities::probe(&subject.client).await?;
    let fits = found.sessions == subject.has(Feature::Sessions)
        && found.spans == subject.has(Feature::Spans)
        && found.ready == subject.has(Feature::Ready)
        && found.survives_refused_flush == subject.has(Feature::SurvivesRefusedFlush);
    ensure!(fits, "those of {} expected, found {found:?}", subject.dialect)
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
