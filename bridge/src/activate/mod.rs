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

mod compare;
mod outlook;
mod patch;
pub(crate) mod pause;
mod plugin;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_http::runtime::{self, wait};
use driftless_store::BoxError;
use driftless_transport::Checkpoint;
use driftless_transport::activate::{Activate, Activated, Compared, How, Limit, Target};
use tokio::runtime::Handle;

pub use self::compare::Compare;
pub use self::outlook::{Foreseen, Outlook, forecast, outlook, outlook_of};
pub use self::plugin::PluginOptions;

use self::patch::Ran;
use self::pause::{Ask, Pause, partial, relabel};
use crate::engine::{
    Attached, Check, ClientOptions, Comparison, Engine, Expected, Identity, Label, PauseMode, Reload, Sums,
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
    /// Whether engines are taken whose live weights cannot be compared.
    pub compare: Compare,
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
    /// Versions that were patched since all of the engine's weights were last compared or loaded.
    unproved: u32,
    /// What was compared then.
    whole: Option<Compared>,
    /// Whether another program was found to have written its weights since.
    is_foreign: bool,
    pause: Pause,
}

/// Everything about an activation that is decided before the engine is paused.
struct Plan<'a> {
    label: &'a str,
    /// The checkpoint as the engine sees it.
    directory: PathBuf,
    identity: &'a Identity,
    pause: PauseMode,
    plugin: Option<&'a PluginOptions>,
    compare: Compare,
    checkpoint: &'a Checkpoint,
    limit: &'a Limit,
    /// What the engine has to report afterwards, once that was computed.
    sums: OnceLock<Sums>,
}

/// What became of an engine that was to be brought to a version.
struct Done {
    how: How,
    /// What was compared of all its weights; `None` where only those that changed were.
    whole: Option<Compared>,
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
        let (identity, activated, whole, pause) = (None, None, None, Pause::default());
        let (unproved, is_foreign) = (0, false);
        Ok(Self { runtime, engine, options, identity, activated, unproved, whole, is_foreign, pause })
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
        let (whole, is_foreign) = (self.whole.take(), self.is_foreign);
        let began = Instant::now();
        let (identity, paused_for, whole, done, copy) = wait(&self.runtime, async move {
            let serving = pause.look(&*engine).await?;
            // Of another process nothing is known.
            let whole = whole.filter(|_| activated.is_some() && serving == activated);
            let identity = attach(engine.clone(), options.base.as_deref(), target, known, activated).await?;
            let plan = plan(engine.url(), &identity, options, target)?;
            compare::admit(&*engine, &plan)?;
            let proof = match &options.plugin {
                // Weights that may be anything are no base.
                Some(_) if serving.is_none() => Proof::load("its weights were not known"),
                Some(_) if is_foreign => Proof::load("another program wrote its weights"),
                Some(plugin) => {
                    let is_covered =
                        plan.compare == Compare::Auto || whole.as_ref().is_some_and(Compared::is_any);
                    proof(&*engine, &plan, plugin, !is_covered || unproved >= plugin.prove_every).await?
                }
                None => Proof::Load { why: None },
            };
            if proof != Proof::None {
                plan.wait()?;
            }
            let copy = began.elapsed();
            let (paused_for, done) = match proof {
                Proof::None => patch(&*engine, pause, serving, &plan).await?,
                Proof::Whole => patch::transact(&*engine, pause, serving, &plan, true).await?,
                Proof::Load { why } => transact(&*engine, pause, serving, &plan, why).await?,
            };
            Ok::<_, Error>((identity, paused_for, whole, done, copy))
        })?;
        let compared = self.note(whole, done.whole);
        self.identity = Some(identity);
        self.activated = Some(target.label.to_owned());
        self.is_foreign = false;
        let patch = began.elapsed().saturating_sub(copy);
        let activated =
            Activated::default().with_pause(paused_for).with_how(done.how).with_compared(compared);
        Ok(activated.with_copy(copy).with_patch(patch))
    }

    fn sample(&mut self, target: &Target<'_>, turn: u64) -> Result<Option<String>, BoxError> {
        let Some(plugin) = &self.options.plugin else { return Ok(None) };
        let (engine, options) = (self.engine.limited(target.limit), &self.options);
        let (known, activated) = (self.identity.clone(), self.activated.clone());
        let (identity, found) = wait(&self.runtime, async move {
            let identity = attach(engine.clone(), options.base.as_deref(), target, known, activated).await?;
            let found = {
                let plan = plan(engine.url(), &identity, options, target)?;
                plugin::compare(&*engine, &plan, plugin, Some(turn)).await?
            };
            Ok::<_, Error>((identity, found))
        })?;
        (self.identity, self.activated) = (Some(identity), Some(target.label.to_owned()));
        match found {
            Comparison::Compared(found) if found.differing.count > 0 => {
                self.is_foreign = true;
                Ok(Some(format!("{} tensors are others: {}", found.differing.count, found.differing)))
            }
            Comparison::Compared(_) => Ok(None),
            Comparison::Cannot { why } => {
                tracing::debug!(engine = self.engine.url(), why, "no sample of its weights");
                Ok(None)
            }
        }
    }

    fn is_paused(&self) -> bool {
        self.pause.is_on()
    }
}

impl DiskActivator {
    /// Notes what was compared: of all weights with this version, or of them `before` and of what changed since.
    fn note(&mut self, before: Option<Compared>, whole: Option<Compared>) -> Compared {
        if let Some(whole) = whole {
            (self.unproved, self.whole) = (0, Some(whole.clone()));
            return whole;
        }
        let compared = match &before {
            Some(before) if before.is_any() => Compared::Changes,
            Some(not) => not.clone(),
            None => Compared::Not { why: "only what changed was, since this follower began".into() },
        };
        (self.unproved, self.whole) = (self.unproved + 1, before);
        compared
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
    attach_anew(engine, base, &expected).await
}

/// Accepts an engine that is of the expected model, as its own config says it or that of `base`.
async fn attach_anew(engine: Arc<dyn Engine>, base: Option<&Path>, expected: &Expected) -> Result<Identity> {
    let attached = Attached::attach(engine, expected).await?;
    let identity = attached.identity().clone();
    if identity.config_compared {
        return Ok(identity);
    }
    // Without the engine's own config nothing says which shapes it loaded, and other shapes would end it.
    match base.map(Expected::from_checkpoint).transpose()? {
        Some(base) => {
            Check { engine: attached.engine().url() }.config(expected, &base)?;
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
    options: &'a DiskOptions,
    target: &Target<'a>,
) -> Result<Plan<'a>> {
    let (checkpoint, place) = (target.checkpoint, target.checkpoint.dir());
    let expected = Expected::from_snapshot(checkpoint, place)?;
    check_tensors(checkpoint, place, &expected.config, identity.dtype)?;
    check_tied(checkpoint, place, target.manifest)?;
    let directory = engine_path(options, checkpoint)?;
    check_directory(engine, identity, &directory)?;
    let Target { label, limit, .. } = *target;
    let (pause, plugin, compare, sums) =
        (options.pause, options.plugin.as_ref(), options.compare, OnceLock::new());
    Ok(Plan { label, directory, identity, pause, plugin, compare, checkpoint, limit, sums })
}

/// How an activation makes sure of all of an engine's weights.
#[derive(PartialEq, Eq)]
enum Proof {
    /// Its plugin compares what it changes, and nothing compares the rest.
    None,
    /// It is patched, and then all of them are compared.
    Whole,
    /// It loads all of them, and they are compared.
    Load {
        /// Why it is not patched, if anybody wanted it to be.
        why: Option<String>,
    },
}

impl Proof {
    fn load(why: impl Into<String>) -> Self {
        Self::Load { why: Some(why.into()) }
    }
}

/// Decides whether the engine can be patched, and waits until its ranks are ready.
async fn proof(engine: &dyn Engine, plan: &Plan<'_>, plugin: &PluginOptions, is_due: bool) -> Result<Proof> {
    if let Some(why) = plugin::why_not_ready(engine, plan, plugin).await? {
        return Ok(Proof::Load { why: Some(why) });
    }
    if !is_due {
        return Ok(Proof::None);
    }
    Ok(match compare::why_not(engine, plan) {
        None => Proof::Whole,
        Some(_) => Proof::load("all of its weights are due to be loaded: nothing can compare them"),
    })
}

/// Patches an engine that is ready to be: while it generates, where requests keep their cache and its server can.
async fn patch(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    plan: &Plan<'_>,
) -> Result<(Duration, Done)> {
    let hands_on = plan.plugin.is_some_and(|plugin| plugin::hands_on(engine, plugin));
    if plan.pause != PauseMode::InPlace || !hands_on {
        return patch::transact(engine, pause, serving, plan, false).await;
    }
    match patch::running(engine, pause, plan).await? {
        Ran::Patched(stood_still) => Ok((stood_still, Done { how: How::Patched, whole: None })),
        Ran::Not { why } => {
            plan.wait()?;
            transact(engine, pause, serving, plan, Some(why)).await
        }
    }
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
/// known; `why` it loads, if anybody wanted it to be patched.
async fn transact(
    engine: &dyn Engine,
    pause: &mut Pause,
    serving: Option<String>,
    plan: &Plan<'_>,
    why: Option<String>,
) -> Result<(Duration, Done)> {
    compare::ready(engine, plan)?;
    pause.begin(plan.pause);
    let outcome = match make_ready(engine, plan.pause, plan.label).await {
        Ok(()) => {
            pause.touched();
            load(engine, plan, why).await
        }
        Err(failed) => Err(failed),
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
    outcome: Result<Done>,
) -> Result<(Duration, Done)> {
    let last = engine.limited(&pause::last_words());
    let ended = pause.end(&*last, serving.as_deref(), ask, outcome.as_ref().err()).await;
    let paused_for = pause.took();
    let (engine, failed) = (engine.url(), outcome.is_err());
    tracing::info!(engine, label, ?paused_for, failed, "activation");
    ended.and(outcome).map(|done| (paused_for, done))
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

async fn load(engine: &dyn Engine, plan: &Plan<'_>, why: Option<String>) -> Result<Done> {
    // The version's own label comes when its weights were looked at.
    let label = partial(plan.label);
    let Plan { directory, pause, identity, .. } = plan;
    engine.load(Reload { directory, label: &label, pause: *pause, identity }).await?;
    let whole = Some(compare::look(engine, plan).await?);
    relabel(engine, plan.label).await?;
    Ok(Done { how: How::Loaded { why }, whole })
}

impl Plan<'_> {
    /// Waits until the checkpoint's files have the version, for a load or a comparison.
    fn wait(&self) -> Result<()> {
        self.checkpoint.wait(self.limit.left()).map_err(|source| {
            let path = self.checkpoint.dir().into();
            Error::Open { path, source: source.into() }
        })
    }

    /// What the engine has to report afterwards. All of the checkpoint is read, once.
    fn sums(&self, engine: &dyn Engine) -> Result<&Sums> {
        match self.sums.get() {
            Some(sums) => Ok(sums),
            None => {
                let sums = engine.sums(self.identity, self.checkpoint, self.checkpoint.dir())?;
                Ok(self.sums.get_or_init(|| sums))
            }
        }
    }
}
