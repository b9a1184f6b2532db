//! Keeps a host's checkpoint, and the engines that load it, at a run's newest version.
//!
//! | File | Does |
//! |---|---|
//! | `options`, `status`, `metrics` | what a follower is given, and what it reports |
//! | `run` | a run of ours as a source of versions |
//! | `watch` | the loop of a follower that acts alone |
//! | `engines` | which engines are asked when, and what becomes of their answers |
//! | `worker` | one thread per engine, so that a slow engine delays only itself |
//! | `lease` | renews the lease, which carries the acknowledgement |
//! | `scrub` | reads the checkpoint in the background, and repairs it |

mod engines;
mod lease;
mod metrics;
mod options;
mod run;
mod scrub;
mod status;
mod watch;
mod worker;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant, SystemTime};

use driftless_store::wait::{Stop, lock};
use driftless_store::wrap::Count;
use driftless_store::{Store, chain_text};

use crate::activate::Activate;
use crate::error::{Error, Result};
use crate::gc::{Ack, EngineStatus, PHASES_MAX, Phases};
use crate::ids::{Version, check_name};
use crate::replica::{Advanced, Replica, refuse_foreign_place};
use crate::source::{Asked, Source};
use engines::Slot;
use metrics::Counters;
use run::RunSource;

pub use options::{ACTIVATE_DEADLINE, FollowerOptions, LEAVE_DEADLINE, default_id};
pub use status::{PrepareReply, Status};

/// A version that lies ready on the host: engines may load it, and a crash does not take it away.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prepared {
    /// The version.
    pub version: Version,
    /// The label that engines are given for it.
    pub label: String,
    /// What it took; `versions` is 0 if the version was there already.
    pub advanced: Advanced,
}

/// Keeps one host on the newest version of a model: the checkpoint directory first ([`Follower::prepare`]),
/// then the engines that load it ([`Follower::activate`]). A handle; clones share the follower.
///
/// The replica's directory pins the run: once it holds a version of a run, versions of any other are refused.
#[derive(Clone)]
pub struct Follower {
    shared: Arc<Shared>,
}

/// Hears what a round came to.
type Observer = Box<dyn Fn(&Status) + Send + Sync>;

struct Shared {
    store: Arc<Count>,
    options: FollowerOptions,
    /// Held for the length of a prepare or an activate.
    core: Mutex<Core>,
    /// Held for moments only, so that status answers during both.
    status: Mutex<Status>,
    /// Engines that are inside an activation, or were paused at the last poll. Likewise.
    maybe_paused: Mutex<Vec<String>>,
    /// What the loop waits on, while there is one.
    watching: Mutex<Option<Stop>>,
    /// Likewise.
    counters: Mutex<Counters>,
    /// Hears of each round.
    observer: OnceLock<Observer>,
}

struct Core {
    replica: Replica,
    source: Box<dyn Source>,
    engines: Vec<Slot>,
    /// The version that [`Follower::activate`] was last called for.
    released: Option<Version>,
    /// The version on disk is new: engines that are brought to it now end its phases.
    is_new: bool,
    /// What was acknowledged last.
    acknowledged: Option<Ack>,
}

impl Follower {
    /// Opens the replica, finishing an interrupted apply, and takes over the engines. The run need not exist
    /// yet.
    ///
    /// # Errors
    ///
    /// [`Locked`](driftless_store::Error::Locked) if another follower has the directory.
    /// [`Error::DamagedReplica`] for one that is damaged and has foreign weights in it; otherwise the next
    /// prepare builds it anew. [`Error::BadName`] for an `id` that cannot be a key. [`Error::ForeignModel`]
    /// if the directory holds another model.
    pub fn open(
        store: Arc<dyn Store>,
        options: FollowerOptions,
        engines: Vec<Box<dyn Activate>>,
    ) -> Result<Self> {
        let store = Arc::new(Count::new(store));
        let source = Box::new(RunSource::new(store.clone(), &options));
        Self::open_source(source, store, options, engines)
    }

    /// [`Follower::open`] for versions that come from `source`; the metrics tell the calls that pass `store`.
    ///
    /// # Errors
    ///
    /// As [`Follower::open`].
    pub fn open_source(
        source: Box<dyn Source>,
        store: Arc<Count>,
        options: FollowerOptions,
        engines: Vec<Box<dyn Activate>>,
    ) -> Result<Self> {
        check_name("follower", &options.id)?;
        check_name("run", &options.run)?;
        check_name("model", &options.model)?;
        refuse_foreign_place(&options.checkpoint_dir, options.hf_checkpoint.as_deref())?;
        let mut replica = Replica::open_or_quarantine(&options.checkpoint_dir)?;
        replica.set_download_options(options.download);
        if let Some(dir) = &options.plugin_dir {
            replica.set_plugin_dir(dir.clone());
        }
        if engines.iter().any(|engine| engine.waits()) {
            replica.offer_first(options.offer);
        }
        let engines = engines.into_iter().map(Slot::new).collect::<Result<Vec<_>>>()?;
        let mut status = Status {
            id: options.id.clone(),
            run: options.run.clone(),
            run_id: replica.applied().map(|applied| applied.run_id),
            model: options.model.clone(),
            newest: None,
            applied: None,
            error: None,
        };
        record_applied(&mut status, &replica, &engines, Duration::ZERO, 0);
        let core = Core { replica, source, engines, released: None, is_new: false, acknowledged: None };
        let shared = Shared {
            store,
            options,
            core: Mutex::new(core),
            status: Mutex::new(status),
            maybe_paused: Mutex::default(),
            watching: Mutex::default(),
            counters: Mutex::default(),
            observer: OnceLock::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The options it was opened with.
    #[must_use]
    pub fn options(&self) -> &FollowerOptions {
        &self.shared.options
    }

    /// What the follower has and what hinders it. Never waits for a prepare or an activate.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status_mut().clone()
    }

    /// The engines that may be paused: those inside an activation, and those that were paused at the last
    /// poll. Never waits for a prepare or an activate.
    #[must_use]
    pub fn maybe_paused(&self) -> Vec<String> {
        self.maybe_paused_mut().clone()
    }

    /// What the follower has done since it was opened, as the text that Prometheus reads. Never waits for a
    /// prepare or an activate.
    #[must_use]
    pub fn metrics(&self) -> String {
        let (status, counters) = (self.status(), self.counters_mut().clone());
        metrics::page(&status, &counters, &self.shared.store.counts(), Instant::now())
    }

    /// Brings the checkpoint directory to `target`, or to the newest version up to
    /// [`FollowerOptions::until`]. Engines go on with what they serve. The data become durable behind it
    /// ([`Follower::sync`]); the journal that can repeat them is. For engines with a plugin the files are also
    /// written behind it ([`Follower::wait_written`]).
    ///
    /// # Errors
    ///
    /// The file system's, if the version before turned out not to become durable: the next call carries it
    /// out again first. [`Error::NoSuchRun`] or [`Error::NoSuchVersion`] before the first publication;
    /// [`Error::Busy`] during another prepare or activate, and while an engine still loads; those of
    /// [`Replica::advance`]. The version before stays in place.
    pub fn prepare(&self, target: Option<Version>) -> Result<Prepared> {
        let core = &mut *self.core()?;
        let prepared = self.prepare_noted(core, target.map_or(Asked::Newest, Asked::Version))?;
        // Nobody is told of a version that a crash could take back.
        self.keep_in(core)?;
        Ok(prepared)
    }

    /// One poll of the loop: to the newest version, or to the next one if the poll before found nothing new. True if
    /// there was one.
    fn poll(&self) -> Result<bool> {
        let prepared = self.prepare_noted(&mut *self.core()?, Asked::Poll)?;
        Ok(prepared.advanced.versions > 0)
    }

    /// Waits until the version on disk is kept, which engines may have had sooner, and acknowledges it. True if there was
    /// such a one. If it was not kept, the status tells what the directory holds instead.
    fn keep(&self) -> Result<bool> {
        self.keep_in(&mut *self.core()?)
    }

    fn keep_in(&self, core: &mut Core) -> Result<bool> {
        let kept = self.note(core.replica.keep());
        if kept.is_err() && core.replica.sync().is_ok() {
            record_applied(&mut self.status_mut(), &core.replica, &core.engines, Duration::ZERO, 0);
        }
        if matches!(kept, Ok(true)) {
            self.acknowledge(core);
        }
        kept
    }

    /// Prepares, and has the status and the counters tell of it.
    fn prepare_noted(&self, core: &mut Core, asked: Asked) -> Result<Prepared> {
        let prepared = self.prepare_in(core, asked);
        let status = {
            let mut status = self.status_mut();
            status.error = prepared.as_ref().err().map(|error| chain_text(error));
            status.clone()
        };
        let mut counters = self.counters_mut();
        counters.prepared(prepared.as_ref().map(|prepared| &prepared.advanced), Instant::now());
        counters.compared(&status, Instant::now());
        prepared
    }

    /// Waits until the directory's files have the prepared version, which engines with a plugin may serve
    /// sooner.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::wait`](crate::Checkpoint::wait); [`Error::NothingApplied`]; [`Error::Busy`] also during
    /// another request.
    pub fn wait_written(&self, limit: Duration) -> Result<()> {
        self.core()?.replica.checkpoint()?.wait(limit)
    }

    /// Waits until the prepared version is durable in its place.
    ///
    /// # Errors
    ///
    /// As [`Replica::sync`]; [`Error::Busy`] also during another request.
    pub fn sync(&self) -> Result<()> {
        self.note(self.core()?.replica.sync().map(drop))
    }

    /// Has the status tell of a version that could not be made durable, and begins with it again.
    fn check_durable(&self) -> Result<()> {
        let mut core = self.core()?;
        self.note(quarantine_on_damage(&mut core.replica, Replica::poll_sync))?;
        let unfinished = core.replica.applied().is_some() && core.replica.checkpoint().is_err();
        if !unfinished {
            return Ok(());
        }
        self.note(quarantine_on_damage(&mut core.replica, |replica| replica.sync().map(drop)))
    }

    /// Shows an error of the replica, if there is one, in the status and among the failures.
    fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|error| {
            self.status_mut().error = Some(chain_text(error));
            self.counters_mut().prepared(Err(error), Instant::now());
        })
    }

    /// Makes every engine serve the prepared version; those that do already are left alone. All are tried,
    /// each within its deadline.
    ///
    /// # Errors
    ///
    /// [`Error::NothingApplied`] before the first prepare; [`Error::Busy`]; else the first engine's failure,
    /// with all of them in [`Follower::status`].
    pub fn activate(&self) -> Result<Status> {
        let mut core = self.core()?;
        core.released = core.replica.applied().map(|applied| applied.version);
        self.activate_and_acknowledge(&mut core, None)?;
        Ok(self.status())
    }

    /// [`Follower::activate`] for the engines whose time to be asked again has come. Where a coordinator
    /// decides and has not yet, they are only polled, which ends a pause that an earlier process left.
    fn activate_due(&self) -> Result<()> {
        self.activate_and_acknowledge(&mut *self.core()?, Some(Instant::now()))
    }

    /// Has `observer` hear what is on disk and on the engines, after each round in which these were asked or
    /// loaded a version, from the thread of that round. The first one is kept.
    pub fn on_round(&self, observer: impl Fn(&Status) + Send + Sync + 'static) {
        let _ = self.shared.observer.set(Box::new(observer));
    }

    fn activate_and_acknowledge(&self, core: &mut Core, due: Option<Instant>) -> Result<()> {
        let activated = self.activate_in(core, due);
        self.acknowledge(core);
        if let Some(observer) = self.shared.observer.get() {
            observer(&self.status());
        }
        activated
    }

    fn core(&self) -> Result<MutexGuard<'_, Core>> {
        match self.shared.core.try_lock() {
            Ok(core) => Ok(core),
            // Every step of a replica is guarded by its journal, so a panic in one leaves nothing that the
            // next cannot handle.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Error::Busy {
                what: format!("follower `{}`", self.shared.options.id),
                with: "another request".into(),
            }),
        }
    }

    fn status_mut(&self) -> MutexGuard<'_, Status> {
        lock(&self.shared.status)
    }

    fn maybe_paused_mut(&self) -> MutexGuard<'_, Vec<String>> {
        lock(&self.shared.maybe_paused)
    }

    fn counters_mut(&self) -> MutexGuard<'_, Counters> {
        lock(&self.shared.counters)
    }

    fn prepare_in(&self, core: &mut Core, asked: Asked) -> Result<Prepared> {
        let options = &self.shared.options;
        if let Some(slot) = core.engines.iter_mut().find_map(|slot| slot.worker.is_busy().then_some(slot)) {
            return Err(Error::Busy {
                what: format!("`{}`", options.checkpoint_dir.display()),
                with: format!("engine `{}`, which still loads it", slot.worker.name()),
            });
        }
        quarantine_on_damage(&mut core.replica, Replica::poll_sync)?;
        let (started, before) = (Instant::now(), core.replica.identity());
        let mut moved = self.advance(core, asked);
        match moved {
            Err(damage @ Error::DamagedReplica { .. }) => {
                core.replica.quarantine(damage)?;
                moved = self.advance(core, asked);
            }
            // More was published and collected than one advance takes time for: the newest is another one
            // now.
            Err(Error::Collected { .. }) if !matches!(asked, Asked::Version(_)) => {
                moved = self.advance(core, asked);
            }
            _ => {}
        }
        let Core { replica, engines, is_new, .. } = core;
        let (took, bytes) = (started.elapsed(), moved.as_ref().map_or(0, |advanced| advanced.bytes));
        // Also after an error: versions applied before it stay applied. What an engine refused is another version now.
        if moved.as_ref().map_or_else(|_| replica.identity() != before, |advanced| advanced.versions > 0) {
            engines.iter_mut().for_each(|slot| slot.load_at = Instant::now());
            record_applied(&mut self.status_mut(), replica, engines, took, bytes);
        }
        let advanced = moved?;
        if advanced.versions > 0 {
            *is_new = true;
            self.keep_phases(&advanced, took);
        }
        let (applied, _) = replica.held()?;
        let prepared = Prepared { version: applied.version, label: applied.label(), advanced };
        self.acknowledge(core);
        Ok(prepared)
    }

    /// Keeps the phases of the version that was just brought here; a prepare took so long.
    fn keep_phases(&self, advanced: &Advanced, took: Duration) {
        let mut status = self.status_mut();
        let Some(ack) = &mut status.applied else { return };
        let phases = phases(ack.version, advanced, took);
        self.counters_mut().phased(phases.of_host().into_iter());
        ack.phases.push(phases);
        let over = ack.phases.len().saturating_sub(PHASES_MAX);
        ack.phases.drain(..over);
    }

    /// Moves the replica to the version asked for, or to the newest.
    fn advance(&self, core: &mut Core, asked: Asked) -> Result<Advanced> {
        let options = &self.shared.options;
        let Core { source, replica, .. } = core;
        let newest = source.newest(replica, asked);
        if newest.as_ref().is_ok_and(|newest| newest.is_reached) {
            return Ok(Advanced::default());
        }
        let run_id = |replica: &Replica| replica.applied().map(|applied| applied.run_id);
        let known = source.run_id();
        {
            let mut status = self.status_mut();
            status.newest = newest.as_ref().map_or(status.newest, |newest| newest.version);
            status.run_id = known.or(run_id(replica));
        }
        let last = options.last(newest?.version);
        let to = match (asked, last, known) {
            (Asked::Version(to), ..) | (_, Some(to), _) => to,
            (_, None, Some(run_id)) => {
                let model = options.model.clone();
                return Err(Error::NoSuchVersion { run_id, model, version: Version(0) });
            }
            (_, None, None) => {
                let store = self.shared.store.to_string();
                return Err(Error::NoSuchRun { name: options.run.clone(), store });
            }
        };
        let moved = source.advance(replica, to);
        self.status_mut().run_id = known.or(run_id(replica));
        moved
    }

    /// Tells the store what is here, if that changed or the lease has to be renewed. Of a version that a crash could take
    /// back it tells nothing: what leads to it is still needed.
    fn acknowledge(&self, core: &mut Core) {
        let Some(ack) = self.status().applied else { return };
        let known = core.acknowledged.as_ref().map(|acknowledged| acknowledged.version);
        if core.replica.is_kept() || known == Some(ack.version) {
            core.acknowledged = Some(ack);
        }
        if let Some(ack) = core.acknowledged.clone() {
            core.source.acknowledge(ack);
        }
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

/// Does something that may find the directory damaged, and then sets it aside.
fn quarantine_on_damage(replica: &mut Replica, look: impl FnOnce(&mut Replica) -> Result<()>) -> Result<()> {
    match look(replica) {
        Err(damage @ Error::DamagedReplica { .. }) => replica.quarantine(damage),
        looked => looked,
    }
}

/// Notes the version on disk; what the engines serve is known again after the next activate.
fn record_applied(status: &mut Status, replica: &Replica, engines: &[Slot], prepare: Duration, bytes: u64) {
    let Some(applied) = replica.applied() else {
        status.applied = None;
        return;
    };
    let (before, phases) = status.applied.take().map(|ack| (ack.engines, ack.phases)).unzip();
    let unknown =
        |slot: &Slot| EngineStatus { url: slot.worker.name().to_owned(), ..EngineStatus::default() };
    status.applied = Some(Ack {
        version: applied.version,
        label: applied.label(),
        manifest_digest: applied.manifest_digest,
        prepare_ms: millis(prepare),
        bytes,
        engines: before.unwrap_or_else(|| engines.iter().map(unknown).collect()),
        phases: phases.unwrap_or_default(),
    });
}

/// The host's phases of a prepare that took so long and ends now.
fn phases(version: Version, advanced: &Advanced, took: Duration) -> Phases {
    let Advanced { journal, fetch, decode, offer, sync, .. } = *advanced;
    let began_at = SystemTime::now().checked_sub(took).unwrap_or(SystemTime::UNIX_EPOCH);
    let since_1970 = began_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Phases {
        version,
        began_at_ms: u64::try_from(since_1970.as_millis()).unwrap_or_default(),
        see_ms: millis(took.saturating_sub(sync + journal + offer)),
        sync_ms: millis(sync),
        fetch_ms: millis(fetch),
        decode_ms: millis(decode),
        journal_ms: millis(journal.saturating_sub(fetch + decode)),
        offer_ms: millis(offer),
        ..Phases::default()
    }
}

/// Milliseconds, to the microsecond: so few digits survive JSON exactly.
fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}
