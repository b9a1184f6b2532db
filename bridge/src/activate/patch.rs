//! Activation of a version that the engine's plugin has prepared: pause, one call for weights, cache and
//! label, continue.
//!
//! An SGLang engine of one rank is not fenced meanwhile. It is paused, with its old weights under the old label,
//! until the plugin has written all of the delta; a delta that cannot be written is taken back. Then SGLang
//! takes the label, whether or not this process lives. The ranks of a larger engine may differ in between, and
//! each tells in its file what it has; vLLM takes the label by another call than the weights, so these are fenced.

use std::time::Duration;

use driftless_transport::activate::Limit;

use super::PluginOptions;
use super::pause::{Ask, Pause, partial, relabel};
use super::plugin::agree;
use super::{Plan, empty_and_fence, end, load};
use crate::engine::{Engine, Patched, PauseMode, Reload};
use crate::error::Result;

/// Pause, patch, continue; as for a load, `serving` is the label that the engine has now. With `prove`,
/// its checksums are compared.
pub(super) async fn transact(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    plan: &Plan<'_>,
    prove: bool,
    (plugin, limit): (&PluginOptions, &Limit),
) -> Result<Duration> {
    pause.begin(plan.pause);
    let outcome = match make_ready(engine, plan).await {
        Ok(()) => {
            pause.touched();
            let patched = match patch(engine, plan, prove).await {
                Ok(()) => agree(engine, plan, plugin, limit).await,
                failed => failed,
            };
            if patched.is_err() {
                // If it keeps its label, what it has is not believed here, and loaded over.
                let _ = relabel(engine, &partial(plan.label)).await;
            }
            patched
        }
        failed => failed,
    };
    end(engine, pause, serving, plan.label, Ask::TokenIfIdle, outcome).await
}

async fn make_ready(engine: &dyn Engine, plan: &Plan<'_>) -> Result<()> {
    engine.pause(plan.pause).await?;
    fail::fail_point!("activate.paused");
    if plan.pause != PauseMode::InPlace && !plan.identity.flushes_with_patch(plan.pause) {
        engine.empty_cache(plan.pause).await?;
    }
    if plan.identity.tp == 1 && plan.identity.labels_with_patch {
        return Ok(());
    }
    relabel(engine, &partial(plan.label)).await
}

/// Patches, and makes sure of the outcome: the engine then has the version's label with its weights.
async fn patch(engine: &dyn Engine, plan: &Plan<'_>, prove: bool) -> Result<()> {
    let Plan { label, directory, pause, identity, .. } = plan;
    let request = Reload { directory, label, pause: *pause, identity };
    let there = plan.checkpoint.is_written() == Some(true);
    match engine.patch(request).await? {
        Patched::Patched if !prove => Ok(()),
        Patched::Untouched => reload(engine, plan).await,
        // What it loaded was written meanwhile.
        Patched::Loaded if !there => reload(engine, plan).await,
        patched => {
            if patched == Patched::Loaded && *pause == PauseMode::InPlace {
                engine.empty_cache(*pause).await?;
            }
            relabel(engine, &partial(label)).await?;
            if let Some(sums) = plan.sums()? {
                engine.check(identity, &sums).await?;
            }
            relabel(engine, label).await
        }
    }
}

/// Has a paused engine load the checkpoint, once it is there.
async fn reload(engine: &dyn Engine, plan: &Plan<'_>) -> Result<()> {
    empty_and_fence(engine, plan.pause, plan.label).await?;
    plan.wait()?;
    load(engine, plan, plan.sums()?.as_ref()).await
}
