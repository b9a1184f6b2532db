//! Activation of a version that the engine's plugin has prepared: one call for weights, cache and label.
//!
//! Requests that keep their cache let SGLang generate until the call reaches its ranks, which write between two
//! steps ([`running`]). Otherwise the call stands between a pause and its end ([`transact`]).
//!
//! SGLang is not fenced meanwhile. It has its old weights under the old label until the plugin has written all of
//! the delta at all ranks; a delta that cannot be written at one is taken back at each. Then SGLang takes the label,
//! whether or not this process lives. vLLM takes the label by another call than the weights, so it is fenced.

use std::time::Duration;

use driftless_transport::activate::How;

use super::pause::{Ask, Pause, partial, relabel};
use super::{Done, Plan, compare, empty_and_fence, end, load};
use crate::engine::{Engine, Patched, PauseMode, Reload};
use crate::error::{Error, Result};

/// Why an engine loads whose plugin has written nothing.
const REFUSED: &str = "its plugin refused to write the delta, as the log says";
/// Why an engine loads that took the call for a patch for one.
const GONE: &str = "its plugin did not answer";

/// What became of an engine that was to be patched while it generates.
pub(super) enum Ran {
    /// It was, and stood still for so long.
    Patched(Duration),
    /// It has to load: it is as it was, or may be anything.
    Not { why: String },
}

/// Patches an engine while it generates.
pub(super) async fn running(engine: &dyn Engine, pause: &mut Pause, plan: &Plan<'_>) -> Result<Ran> {
    let (url, label) = (engine.url(), plan.label);
    match engine.patch_running(request(plan)).await {
        Ok(Some(stood_still)) => {
            tracing::info!(engine = url, label, ?stood_still, "activation");
            pause.passed(engine, plan.pause, stood_still).await.map(|()| Ran::Patched(stood_still))
        }
        Ok(None) => Ok(Ran::Not { why: REFUSED.into() }),
        // It did not answer as its plugin does, and may have done anything: it is loaded.
        Err(
            error @ (Error::Status { .. }
            | Error::Reply { .. }
            | Error::Refused { .. }
            | Error::LabelMismatch { .. }),
        ) => {
            tracing::warn!(engine = url, label, %error, "loads instead of being patched");
            pause.touched();
            Ok(Ran::Not { why: error.to_string() })
        }
        Err(error) => Err(error),
    }
}

/// What an engine's plugin is asked for.
pub(super) fn request<'a>(plan: &'a Plan<'_>) -> Reload<'a> {
    let Plan { label, directory, pause, identity, .. } = plan;
    Reload { directory, label, pause: *pause, identity }
}

/// Pause, patch, continue; as for a load, `serving` is the label that the engine has now. With `prove`,
/// its checksums are compared.
pub(super) async fn transact(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    plan: &Plan<'_>,
    prove: bool,
) -> Result<(Duration, Done)> {
    pause.begin(plan.pause);
    let outcome = match make_ready(engine, plan).await {
        Ok(()) => {
            pause.touched();
            let patched = patch(engine, plan, prove).await;
            if patched.is_err() {
                // If it keeps its label, what it has is not believed here, and loaded over.
                let _ = relabel(engine, &partial(plan.label)).await;
            }
            patched
        }
        Err(failed) => Err(failed),
    };
    end(engine, pause, serving, plan.label, Ask::TokenIfIdle, outcome).await
}

async fn make_ready(engine: &dyn Engine, plan: &Plan<'_>) -> Result<()> {
    engine.pause(plan.pause).await?;
    fail::fail_point!("activate.paused");
    if plan.pause != PauseMode::InPlace && !plan.identity.flushes_with_patch(plan.pause) {
        engine.empty_cache(plan.pause).await?;
    }
    if plan.identity.labels_with_patch {
        return Ok(());
    }
    relabel(engine, &partial(plan.label)).await
}

/// Patches, and makes sure of the outcome: the engine then has the version's label with its weights.
async fn patch(engine: &dyn Engine, plan: &Plan<'_>, prove: bool) -> Result<Done> {
    let Plan { label, pause, .. } = plan;
    let there = plan.checkpoint.is_written() == Some(true);
    match engine.patch(request(plan)).await? {
        Patched::Patched if !prove => Ok(Done { how: How::Patched, whole: None }),
        Patched::Untouched => reload(engine, plan, REFUSED).await,
        // What it loaded was written meanwhile.
        Patched::Loaded if !there => reload(engine, plan, GONE).await,
        patched => {
            if patched == Patched::Loaded && *pause == PauseMode::InPlace {
                engine.empty_cache(*pause).await?;
            }
            relabel(engine, &partial(label)).await?;
            let whole = Some(compare::look(engine, plan).await?);
            relabel(engine, label).await?;
            let how = match patched {
                Patched::Loaded => How::Loaded { why: Some(GONE.into()) },
                _ => How::Patched,
            };
            Ok(Done { how, whole })
        }
    }
}

/// Has a paused engine load the checkpoint, once it is there.
async fn reload(engine: &dyn Engine, plan: &Plan<'_>, why: &str) -> Result<Done> {
    empty_and_fence(engine, plan.pause, plan.label).await?;
    plan.wait()?;
    load(engine, plan, Some(why.into())).await
}
