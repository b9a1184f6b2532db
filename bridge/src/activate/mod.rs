//! Activation from disk: an engine loads the checkpoint directory that a follower brought to a version.
//!
//! The order is the same for every release, and none dies of it: pause, flush, fence, update without flush, look, label, continue. Releases
//! before 0.5.22 end the whole server when an update that flushes meets a request; a flush of its own is merely refused. While the engine is
//! paused nothing can fill the cache again between the flush and the update.
//!
//! An update that fails leaves new weights, old ones or a mixture: what SGLang calls a rollback loads the new path once more. So the engine
//! carries a label that no request accepts from before the update until its weights were looked at, and stays paused until then.

pub(crate) mod pause;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftless_transport::{Activate, Activated, BoxError, Checkpoint, Target};
use tokio::runtime::Runtime;

use self::pause::{Pause, partial, relabel};
use crate::sglang::check_tensors;
use crate::{
    Client, ClientOptions, DiskUpdate, DiskUpdated, Engine, Error, Expected, Label, PauseMode, Result,
    checksums,
};

/// How often a flush or a continue is tried again, and how long apart. An engine answers a request slightly before it drops it, so the
/// first flush after an abort may come too early.
pub(crate) const TRIES: u32 = 20;
pub(crate) const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// Options of a [`DiskActivator`].
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// Keys and deadlines of the engine's client.
    pub client: ClientOptions,
    /// What happens to running requests. With [`PauseMode::InPlace`] they keep the KV cache of the old weights, and so does the prefix cache
    /// where any request was running.
    pub pause: PauseMode,
    /// The checkpoint directory as the engine sees it, where that differs from how the follower sees it.
    pub engine_checkpoint_dir: Option<PathBuf>,
    /// A checkpoint directory of the model that the engine was started with, for engines whose own model path cannot be read from here.
    pub base: Option<PathBuf>,
}

impl Default for DiskOptions {
    /// No keys, default deadlines, running requests go back to the queue, one path for both.
    fn default() -> Self {
        Self {
            client: ClientOptions::default(),
            pause: PauseMode::Retract,
            engine_checkpoint_dir: None,
            base: None,
        }
    }
}

/// Activates versions on one engine by `update_weights_from_disk`. Blocking, as followers want it: it owns a small runtime.
#[derive(Debug)]
pub struct DiskActivator {
    runtime: Runtime,
    client: Client,
    options: DiskOptions,
    engine: Option<Engine>,
    /// Label of the last successful activation: while the engine reports it, it is still the process that was attached.
    activated: Option<String>,
    pause: Pause,
}

/// Everything about an activation that is decided before the engine is paused.
struct Plan<'a> {
    label: &'a str,
    update: DiskUpdate,
    /// Checksums the engine must report afterwards, where they are comparable.
    sums: Option<BTreeMap<String, String>>,
}

impl DiskActivator {
    /// An activator of the engine at `host:port` or `http://host:port`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Address`] for any other form of address; [`Error::SetUp`] when the runtime cannot be made.
    pub fn new(address: &str, options: DiskOptions) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime
            .map_err(|error| Error::SetUp { what: "the engine client's runtime", source: error.into() })?;
        let client = Client::new(address, options.client.clone())?;
        Ok(Self { runtime, client, options, engine: None, activated: None, pause: Pause::default() })
    }

    /// Runs a future to its end on a thread of its own: the caller may be a runtime's thread, where blocking on another one panics.
    fn block_on<T: Send>(runtime: &Runtime, future: impl Future<Output = T> + Send) -> T {
        std::thread::scope(|scope| match scope.spawn(|| runtime.block_on(future)).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

impl Activate for DiskActivator {
    fn name(&self) -> String {
        self.client.url().to_owned()
    }

    fn serving(&mut self) -> Result<Option<String>, BoxError> {
        let (client, pause) = (self.client.limited(&pause::last_words()), &mut self.pause);
        let label = Self::block_on(&self.runtime, pause.look(&client))?;
        Ok(label.filter(|label| label.parse::<Label>().is_ok()))
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        let (client, options, pause) = (self.client.limited(target.limit), &self.options, &mut self.pause);
        let (engine, activated) = (self.engine.take(), self.activated.take());
        let (engine, paused_for) = Self::block_on(&self.runtime, async move {
            let serving = pause.look(&client).await?;
            let engine = attach(&client, options.base.as_deref(), target, engine, activated).await?;
            let plan = plan(&engine, options, target)?;
            transact(&engine, (pause, options.pause), serving, &plan)
                .await
                .map(|paused_for| (engine, paused_for))
        })?;
        self.engine = Some(engine);
        self.activated = Some(target.label.to_owned());
        Ok(Activated { pause: paused_for })
    }

    fn is_paused(&self) -> bool {
        self.pause.is_on()
    }
}

/// The engine as it was attached, or attached anew where it is no longer the process that served the last version.
pub(crate) async fn attach(
    client: &Client,
    base: Option<&Path>,
    target: &Target<'_>,
    known: Option<Engine>,
    activated: Option<String>,
) -> Result<Engine> {
    let serving = client.model_info().await?.weight_version;
    if let (Some(engine), true) = (known, activated.is_some() && serving == activated) {
        return Ok(engine.through(client.clone()));
    }
    let expected = Expected::from_snapshot(target.checkpoint, target.checkpoint.dir())?;
    let engine = Engine::attach(client.clone(), &expected).await?;
    if engine.identity().config_compared {
        return Ok(engine);
    }
    // Without the engine's own config nothing says which shapes it loaded, and other shapes would end it.
    match base.map(Expected::from_checkpoint).transpose()? {
        Some(base) if base.config == expected.config => Ok(engine),
        other => Err(Error::Refused {
            engine: client.url().into(),
            what: "config.json of the model it was started with".into(),
            expected: format!("{:?}", expected.config),
            found: other.map_or_else(
                || "not readable here, and no base checkpoint given".into(),
                |base| format!("{:?}", base.config),
            ),
        }),
    }
}

fn plan<'a>(engine: &Engine, options: &DiskOptions, target: &Target<'a>) -> Result<Plan<'a>> {
    let (checkpoint, place) = (target.checkpoint, target.checkpoint.dir());
    let expected = Expected::from_snapshot(checkpoint, place)?;
    check_tensors(checkpoint, place, &expected.config, engine.identity().dtype)?;
    let sums = engine.identity().checksums_comparable().then(|| checksums(checkpoint, place)).transpose()?;
    let update = DiskUpdate {
        model_path: engine_path(options, checkpoint)?,
        load_format: engine.update_load_format(),
        // The version's own label comes when its weights were looked at.
        weight_version: Some(partial(target.label)),
        flush_cache: false,
    };
    Ok(Plan { label: target.label, update, sums })
}

/// The directory as the engine sees it, absolute: a relative path would be taken for the name of a model on a hub.
fn engine_path(options: &DiskOptions, checkpoint: &Checkpoint) -> Result<PathBuf> {
    match &options.engine_checkpoint_dir {
        Some(path) => Ok(path.clone()),
        None => std::fs::canonicalize(checkpoint.dir())
            .map_err(|source| Error::Read { path: checkpoint.dir().into(), source }),
    }
}

/// Pause, load, look, continue. `serving` is the label of the weights that the engine has now, if they are known.
async fn transact(
    engine: &Engine,
    (pause, mode): (&mut Pause, PauseMode),
    serving: Option<String>,
    plan: &Plan<'_>,
) -> Result<Duration> {
    let client = engine.client();
    pause.begin(mode);
    let outcome = match make_ready(client, mode, plan.label).await {
        Ok(()) => {
            pause.touched();
            load(engine, mode, plan).await
        }
        failed => failed,
    };
    let client = &client.limited(&pause::last_words());
    let ended = pause.end(client, serving.as_deref(), outcome.as_ref().err()).await;
    let paused_for = pause.took();
    let (engine, failed) = (client.url(), outcome.is_err());
    tracing::info!(engine, label = plan.label, ?paused_for, failed, "activation");
    ended.and(outcome).map(|()| paused_for)
}

/// Brings an engine to where its weights may be changed: paused, without its cache, and fenced.
pub(crate) async fn make_ready(client: &Client, mode: PauseMode, label: &str) -> Result<()> {
    client.pause(mode).await?;
    // A follower that dies here leaves the engine paused, for the next one to find.
    fail::fail_point!("activate.paused");
    empty_cache(client, mode).await?;
    relabel(client, &partial(label)).await
}

async fn load(engine: &Engine, mode: PauseMode, plan: &Plan<'_>) -> Result<()> {
    if engine.client().update_weights_from_disk(&plan.update).await? == DiskUpdated::Unflushed {
        // Applied all the same: the flush is what is missing.
        empty_cache(engine.client(), mode).await?;
    }
    if let Some(sums) = &plan.sums {
        engine.check_live(sums).await?;
    }
    relabel(engine.client(), plan.label).await
}

/// Drops the KV cache of the old weights. Before 0.5.21 a flush is refused while retracted requests wait; those are then aborted, and
/// whoever sent them sends them again.
pub(crate) async fn empty_cache(client: &Client, mode: PauseMode) -> Result<()> {
    if client.flush_cache().await? || mode == PauseMode::InPlace {
        return Ok(());
    }
    client.pause(PauseMode::Abort).await?;
    for _ in 0..TRIES {
        if client.flush_cache().await? {
            return Ok(());
        }
        tokio::time::sleep(BETWEEN_TRIES).await;
    }
    let (expected, found) =
        ("accepted once every request is aborted".into(), format!("refused {TRIES} times"));
    Err(Error::Refused { engine: client.url().into(), what: "flush_cache".into(), expected, found })
}
