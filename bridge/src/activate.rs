//! Activation from disk: an engine loads the checkpoint directory that a follower brought to a version.
//!
//! The order is the same for every release, and none dies of it: pause, flush, update without flush, look, continue. Releases before
//! 0.5.22 end the whole server when an update that flushes meets a request; a flush of its own is merely refused. While the engine is
//! paused nothing can fill the cache again between the flush and the update.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use driftless_transport::{Activate, Activated, BoxError, Checkpoint, Target};
use tokio::runtime::Runtime;

use crate::checksums::check_tensors;
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
    /// Whether the engine may be paused because of us. True at first: an earlier process may have died between pause and continue.
    resume_owed: bool,
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
        Ok(Self { runtime, client, options, engine: None, activated: None, resume_owed: true })
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
        let (client, owed) = (&self.client, self.resume_owed);
        let label = Self::block_on(&self.runtime, async {
            if owed {
                client.resume().await?;
            }
            client.model_info().await.map(|info| info.weight_version)
        })?;
        self.resume_owed = false;
        Ok(label.filter(|label| label.parse::<Label>().is_ok()))
    }

    fn activate(&mut self, target: &Target<'_>) -> Result<Activated, BoxError> {
        let outcome = {
            let (client, options, owed) = (&self.client, &self.options, self.resume_owed);
            let (engine, activated) = (self.engine.take(), self.activated.take());
            Self::block_on(&self.runtime, async move {
                if owed {
                    client.resume().await?;
                }
                let engine = attach(client, options.base.as_deref(), target, engine, activated).await?;
                let plan = plan(&engine, options, target)?;
                let (outcome, resumed) = transact(&engine, options.pause, &plan).await;
                Ok::<_, Error>((engine, outcome, resumed))
            })
        };
        let (engine, outcome, resumed) = outcome?;
        self.resume_owed = resumed.is_err();
        if let Err(source) = resumed {
            let first = outcome.err().map(|error| error.to_string());
            return Err(Box::new(Error::LeftPaused {
                engine: self.client.url().into(),
                first,
                source: Box::new(source),
            }));
        }
        let pause = outcome?;
        self.engine = Some(engine);
        self.activated = Some(target.label.to_owned());
        Ok(Activated { pause })
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
        return Ok(engine);
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
        weight_version: Some(target.label.to_owned()),
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

/// Pause, load, look, continue; the second result is that of continuing, which is tried whatever happened before.
async fn transact(engine: &Engine, mode: PauseMode, plan: &Plan<'_>) -> (Result<Duration>, Result<()>) {
    let begin = Instant::now();
    let outcome = load(engine, mode, plan).await;
    let resumed = resume(engine.client()).await;
    let pause = begin.elapsed();
    tracing::info!(
        engine = engine.client().url(),
        label = plan.label,
        ?pause,
        failed = outcome.is_err(),
        "activation"
    );
    (outcome.map(|()| pause), resumed)
}

async fn load(engine: &Engine, mode: PauseMode, plan: &Plan<'_>) -> Result<()> {
    let client = engine.client();
    client.pause(mode).await?;
    // A follower that dies here leaves the engine paused, for the next one to find.
    fail::fail_point!("activate.paused");
    empty_cache(client, mode).await?;
    if client.update_weights_from_disk(&plan.update).await? == DiskUpdated::Unflushed {
        // Applied all the same: the label and the flush are what is missing.
        empty_cache(client, mode).await?;
        client.set_weight_version(plan.label).await?;
    }
    look(engine, plan.label, plan.sums.as_ref()).await
}

/// Checks what is live, before anybody is served from it.
pub(crate) async fn look(
    engine: &Engine,
    label: &str,
    sums: Option<&BTreeMap<String, String>>,
) -> Result<()> {
    let found = engine.serving().await?;
    if found.as_deref() != Some(label) {
        let found = found.unwrap_or_else(|| "none".into());
        return Err(Error::LabelMismatch {
            engine: engine.client().url().into(),
            expected: label.into(),
            found,
        });
    }
    let Some(sums) = sums else { return Ok(()) };
    let checked = engine.check_live(sums).await;
    if matches!(checked, Err(Error::LiveWeights { .. })) {
        // Nobody may take what these weights generate for this version.
        engine.client().set_weight_version(&format!("{label}?unverified")).await?;
    }
    checked.map(drop)
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

pub(crate) async fn resume(client: &Client) -> Result<()> {
    let mut outcome = client.resume().await;
    for _ in 1..3 {
        if outcome.is_ok() {
            break;
        }
        tokio::time::sleep(BETWEEN_TRIES).await;
        outcome = client.resume().await;
    }
    outcome
}
