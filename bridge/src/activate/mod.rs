//! Activation from disk: an engine loads the checkpoint directory that a follower brought to a version.
//!
//! The order is the same for every kind and release, and none dies of it: pause, flush, fence, load without
//! flush, look, label, continue. SGLang before 0.5.22 ends the whole server when an update that flushes meets
//! a request; a flush of its own is merely refused. While the engine is paused nothing can fill the cache
//! again between the flush and the load.
//!
//! A load that fails leaves new weights, old ones or a mixture: what SGLang calls a rollback loads the new
//! path once more, and vLLM says nothing. So the engine carries a label that no request accepts from before
//! the load until its weights were looked at, and stays paused until then.
//!
//! An engine whose plugin has prepared the version is patched instead, by fewer calls (`patch`).

mod patch;
pub(crate) mod pause;
mod plugin;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use derive_setters::Setters;
use driftless_http::runtime::{self, wait};
use driftless_store::BoxError;
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Activated, Limit, Target};
use tokio::runtime::Handle;

pub use self::plugin::PluginOptions;

use self::pause::{Ask, Pause, partial, relabel};
use crate::engine::{
    Attached, Check, ClientOptions, Engine, Expected, Identity, Label, PauseMode, Reload, Sums, check,
    check_tensors, check_tied,
};
use crate::error::{Error, Result};
use crate::kinds::connect;
use crate::live::rank::sweep;

/// Options of a [`DiskActivator`]. The default: no keys, default deadlines, running requests go back to the queue, one
/// path for both, no plugin.
#[derive(Debug, Clone, Default, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct DiskOptions {
    /// Keys and deadlines of the engine's client.
    pub client: ClientOptions,
    /// What happens to running requests. With [`PauseMode::InPlace`] they keep the KV cache of the old
    /// weights, and so does the prefix cache where any request was running.
    pub pause: PauseMode,
    /// The checkpoint directory as the engine sees it, where that differs from how the follower sees it.
    #[setters(into)]
    pub engine_checkpoint_dir: Option<PathBuf>,
    /// A checkpoint directory of the model that the engine was started with, for engines whose own model path
    /// cannot be read from here.
    #[setters(into)]
    pub base: Option<PathBuf>,
    /// How engines' plugins are used; `None`: not at all.
    pub plugin: Option<PluginOptions>,
}

/// Activates versions on one engine, which loads the checkpoint directory. Blocking, as followers want it.
#[derive(Debug)]
pub struct DiskActivator {
    runtime: Handle,
    engine: Arc<dyn Engine>,
    options: DiskOptions,
    identity: Option<Identity>,
    /// Label of the last successful activation: while the engine reports it, it is still the process that was
    /// attached.
    activated: Option<String>,
    /// Versions that were patched since the engine's weights were last proved.
    unproved: u32,
    pause: Pause,
}

/// Everything about an activation that is decided before the engine is paused.
struct Plan<'a> {
    label: &'a str,
    /// The checkpoint as the engine sees it.
    directory: PathBuf,
    identity: &'a Identity,
    pause: PauseMode,
    checkpoint: &'a Checkpoint,
    limit: &'a Limit,
}

impl DiskActivator {
    /// An activator of the engine at an address of [`connect`]. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form of address; [`Error::SetUp`] when the threads of this process's
    /// connections cannot be started.
    pub fn new(address: &str, options: DiskOptions) -> Result<Self> {
        let runtime = runtime::handle().map_err(Error::threads)?;
        let engine = connect(address, options.client.clone())?;
        if let Some(plugin) = &options.plugin {
            sweep(&plugin.dir);
        }
        let (identity, activated, pause) = (None, None, Pause::default());
        Ok(Self { runtime, engine, options, identity, activated, unproved: 0, pause })
    }
}

impl Activate for DiskActivator {
    fn name(&self) -> String {
        self.engine.url().to_owned()
    }

    fn serving(&mut self) -> Result<Option<String>, BoxError> {
        let (engine, pause) = (self.engine.limited(&pause::last_words()), &mut self.pause);
        let label = wait(&self.runtime, pause.look(&*engine))?;
        Ok(label.filter(|label| label.parse::<Label>().is_ok()))
    }

    fn waits(&self) -> bool {
        self.options.plugin.is_some()
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        if self.identity.is_none() {
            // It is compared with files that it may have loaded from the same directory.
            target.checkpoint.wait(target.limit.left())?;
        }
        let (engine, options, pause) = (self.engine.limited(target.limit), &self.options, &mut self.pause);
        let (known, activated, unproved) = (self.identity.take(), self.activated.take(), self.unproved);
        let (identity, patched, paused_for) = wait(&self.runtime, async move {
            let serving = pause.look(&*engine).await?;
            let identity = attach(engine.clone(), options.base.as_deref(), target, known, activated).await?;
            let plan = plan(engine.url(), &identity, options, target)?;
            let proof = match &options.plugin {
                Some(plugin) => proof(&*engine, &plan, plugin, unproved, target.limit).await?,
                None => Proof::Load,
            };
            // Weights that may be anything are no base.
            let proof = if serving.is_some() { proof } else { Proof::Load };
            if proof != Proof::None {
                plan.wait()?;
            }
            let paused_for = match (proof, &options.plugin) {
                (Proof::None, Some(plugin)) => patch(&*engine, pause, serving, &plan, plugin).await?,
                (Proof::Checksums, _) => patch::transact(&*engine, pause, serving, &plan, true).await?,
                _ => transact(&*engine, pause, serving, &plan).await?,
            };
            Ok::<_, Error>((identity, proof == Proof::None, paused_for))
        })?;
        self.unproved = if patched { unproved + 1 } else { 0 };
        self.identity = Some(identity);
        self.activated = Some(target.label.to_owned());
        Ok(Activated { pause: paused_for })
    }

    fn is_paused(&self) -> bool {
        self.pause.is_on()
    }
}

/// What the engine said when it was attached; it is attached anew where it is no longer the process that
/// served the last version.
pub(crate) async fn attach(
    engine: Arc<dyn Engine>,
    base: Option<&Path>,
    target: &Target<'_>,
    known: Option<Identity>,
    activated: Option<String>,
) -> Result<Identity> {
    let serving = engine.label().await?;
    if let (Some(identity), true) = (known, activated.is_some() && serving == activated) {
        return Ok(identity);
    }
    let expected = Expected::from_snapshot(target.checkpoint, target.checkpoint.dir())?;
    let attached = Attached::attach(engine, &expected).await?;
    let identity = attached.identity().clone();
    if identity.config_compared {
        return Ok(identity);
    }
    // Without the engine's own config nothing says which shapes it loaded, and other shapes would end it.
    match base.map(Expected::from_checkpoint).transpose()? {
        Some(base) => {
            Check { engine: attached.engine().url() }.config(&expected, &base)?;
            Ok(identity)
        }
        None => {
            let what = "config.json of the model it was started with";
            let found = "not readable here, and no base checkpoint given";
            Err(Error::refused(attached.engine().url(), what, "readable", found))
        }
    }
}

fn plan<'a>(
    engine: &str,
    identity: &'a Identity,
    options: &DiskOptions,
    target: &Target<'a>,
) -> Result<Plan<'a>> {
    let (checkpoint, place) = (target.checkpoint, target.checkpoint.dir());
    let expected = Expected::from_snapshot(checkpoint, place)?;
    check_tensors(checkpoint, place, &expected.config, identity.dtype)?;
    check_tied(checkpoint, place, target.manifest)?;
    let directory = engine_path(options, checkpoint)?;
    check_directory(engine, identity, &directory)?;
    let Target { label, limit, .. } = *target;
    Ok(Plan { label, directory, identity, pause: options.pause, checkpoint, limit })
}

/// How an activation makes sure of all of an engine's weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// Its plugin compares what it changes, and nothing compares the rest.
    None,
    /// It is patched, and then its checksums are compared.
    Checksums,
    /// It loads all of them.
    Load,
}

/// Decides whether the engine can be patched, and waits until its ranks are ready.
async fn proof(
    engine: &dyn Engine,
    plan: &Plan<'_>,
    plugin: &PluginOptions,
    unproved: u32,
    limit: &Limit,
) -> Result<Proof> {
    if !plugin::are_ready(engine, plan, plugin, limit).await? {
        return Ok(Proof::Load);
    }
    let is_due = unproved >= plugin.prove_every;
    Ok(match plan.identity.checksums_comparable() {
        _ if !is_due => Proof::None,
        true => Proof::Checksums,
        false => Proof::Load,
    })
}

/// Patches an engine that is ready to be: while it generates, where requests keep their cache and its server can.
async fn patch(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    plan: &Plan<'_>,
    plugin: &PluginOptions,
) -> Result<Duration> {
    if plan.pause != PauseMode::InPlace || !plugin::hands_on(engine, plugin) {
        return patch::transact(engine, pause, serving, plan, false).await;
    }
    if let Some(stood_still) = patch::running(engine, pause, plan).await? {
        return Ok(stood_still);
    }
    plan.wait()?;
    transact(engine, pause, serving, plan).await
}

/// The directory as the engine sees it, absolute: a relative path would be taken for the name of a model on a
/// hub.
fn engine_path(options: &DiskOptions, checkpoint: &Checkpoint) -> Result<PathBuf> {
    match &options.engine_checkpoint_dir {
        Some(path) => Ok(path.clone()),
        None => std::fs::canonicalize(checkpoint.dir())
            .map_err(|source| Error::Read { path: checkpoint.dir().into(), source }),
    }
}

/// Refuses an engine that would load another directory than this one.
fn check_directory(engine: &str, identity: &Identity, directory: &Path) -> Result<()> {
    let Some(only) = &identity.loads_only else { return Ok(()) };
    // The engine may name it in another way, where it can be read here.
    let same = only == directory || std::fs::canonicalize(only).is_ok_and(|found| found == directory);
    if same {
        return Ok(());
    }
    let what = "the model that it was started with, the only one it can load again,";
    Err(Error::refused(engine, what, directory.display().to_string(), only.display().to_string()))
}

/// Pause, load, look, continue. `serving` is the label of the weights that the engine has now, if they are
/// known.
async fn transact(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    plan: &Plan<'_>,
) -> Result<Duration> {
    let sums = plan.sums(engine)?;
    pause.begin(plan.pause);
    let outcome = match make_ready(engine, plan.pause, plan.label).await {
        Ok(()) => {
            pause.touched();
            load(engine, plan, &sums).await
        }
        failed => failed,
    };
    end(engine, pause, serving, plan.label, Ask::Token, outcome).await
}

/// Ends the pause of an activation that went like `outcome`, and returns how long it was.
async fn end(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    label: &str,
    ask: Ask,
    outcome: Result<()>,
) -> Result<Duration> {
    let last = engine.limited(&pause::last_words());
    let ended = pause.end(&*last, serving.as_deref(), ask, outcome.as_ref().err()).await;
    let paused_for = pause.took();
    let (engine, failed) = (engine.url(), outcome.is_err());
    tracing::info!(engine, label, ?paused_for, failed, "activation");
    ended.and(outcome).map(|()| paused_for)
}

/// Brings an engine to where its weights may be changed: paused, without its cache, and fenced.
pub(crate) async fn make_ready(engine: &dyn Engine, mode: PauseMode, label: &str) -> Result<()> {
    engine.pause(mode).await?;
    // A follower that dies here leaves the engine paused, for the next one to find.
    fail::fail_point!("activate.paused");
    empty_and_fence(engine, mode, label).await
}

/// Fences a paused engine, which loses its cache.
async fn empty_and_fence(engine: &dyn Engine, mode: PauseMode, label: &str) -> Result<()> {
    engine.empty_cache(mode).await?;
    relabel(engine, &partial(label)).await
}

async fn load(engine: &dyn Engine, plan: &Plan<'_>, sums: &Sums) -> Result<()> {
    // The version's own label comes when its weights were looked at.
    let label = partial(plan.label);
    let Plan { directory, pause, identity, .. } = plan;
    engine.load(Reload { directory, label: &label, pause: *pause, identity }).await?;
    check(engine, sums).await?;
    relabel(engine, plan.label).await
}

impl Plan<'_> {
    /// Waits until the checkpoint's files have the version, for a load or a comparison.
    fn wait(&self) -> Result<()> {
        self.checkpoint.wait(self.limit.left()).map_err(|source| {
            let path = self.checkpoint.dir().into();
            Error::Open { path, source: source.into() }
        })
    }

    /// What the engine has to report afterwards.
    fn sums(&self, engine: &dyn Engine) -> Result<Sums> {
        engine.sums(self.identity, self.checkpoint, self.checkpoint.dir())
    }
}
