//! Makes an applied version durable behind the apply, while engines load it already. A version that was offered
//! to engines' plugins first is also written behind.
//!
//! A version is loadable once its journal is durable. Until the data is synced and the marker is moved, a
//! crash is followed by the journal again. The next apply waits, because its journal takes this one's place.
//!
//! A version may also be offered before its journal is durable, which is then made so first of all. A crash before
//! that leaves the version in front: no byte of it has changed.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use driftless_store::Error as StoreError;
use driftless_store::os::{crash_point, give_way, sync_dir, sync_file};
use driftless_store::wait::{Awaited, Doing, lock};

use super::journal::Sealed;
use super::prefault::{WriteMap, WriteMaps};
use super::redo::Redone;
use super::state::{Applied, Layout, Stamp, State};
use super::{Replica, quarantine, redo, withhold};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::ids::Version;

/// How long a call waits for a sync. The thread goes on behind it, and the next call waits again.
pub(super) const SYNC_DEADLINE: Duration = Duration::from_secs(600);

/// How long a version that engines have as a prepared delta keeps its files as they are, if nobody wants their
/// bytes. All processors would write them just when engines are paused for it.
const HOLD: Duration = Duration::from_secs(30);

/// A version that is in the page cache and in the journal, and not yet in its place on the disk.
#[derive(Debug)]
pub(super) struct PendingSync {
    pub(super) layout: Layout,
    pub(super) applied: Applied,
    /// The files that were overwritten.
    pub(super) overwritten: Vec<(PathBuf, WriteMap)>,
    /// The version before, to be unmapped.
    pub(super) before: Option<State>,
    /// All weight files, as the overwriting left them.
    pub(super) weights: Vec<Stamp>,
    /// The `manifest` file.
    pub(super) copy: Vec<u8>,
    /// The `digests` file.
    pub(super) digests: Vec<u8>,
}

impl PendingSync {
    /// Syncs the data, moves the marker, drops the journal, in this order. Returns what the sync of the data
    /// took.
    pub(super) fn sync(self) -> Result<Duration> {
        crash_point("follow.sync")?;
        let started = Instant::now();
        for (path, target) in &self.overwritten {
            if let Err(source) = sync_file(&target.file, path) {
                // The disk may hold pages of both versions: no engine starts from them until the journal is
                // carried out again.
                if let Err(error) = withhold::take(&self.layout) {
                    tracing::warn!(%error, "an engine that starts may load bytes of two versions");
                }
                return Err(Error::io("sync", path, source));
            }
        }
        let sync = started.elapsed();
        // The way back of the file that was withheld, before it is durable that it is not in the state
        // directory.
        sync_dir(&self.layout.dir)?;
        // Unmapping gigabytes that are not yet written back takes long, and no other thread of the process
        // can map or unmap anything meanwhile. Behind the sync it is quick.
        drop((self.before, self.overwritten));
        crash_point("follow.marker")?;
        redo::write_state(&self.layout, &self.applied, &self.weights, &self.copy, &self.digests)?;
        redo::drop_journal(&self.layout)?;
        quarantine::forget(&self.layout);
        let version = self.applied.version;
        tracing::info!(dir = %self.layout.root.display(), %version, sync_ms = sync.as_millis() as u64, "durable");
        Ok(sync)
    }
}

/// A version that another thread makes durable.
#[derive(Debug)]
pub(super) struct Syncing {
    what: String,
    /// Whether the journal is durable, where it was not when this began.
    kept: Option<Awaited>,
    outcome: Mutex<Receiver<Result<Synced>>>,
}

/// What a sync left.
#[derive(Debug, Default)]
struct Synced {
    /// How long the sync of the data took.
    sync: Duration,
    /// All weight files, where they were overwritten behind too.
    weights: Option<Vec<Stamp>>,
}

impl Syncing {
    /// Starts the thread, which holds the directory's lock as long as it writes there. It first makes the journal
    /// durable, if that is only sealed.
    fn start(
        replica: &Replica,
        version: Version,
        sealed: Option<Sealed>,
        work: impl FnOnce() -> Result<Synced> + Send + 'static,
    ) -> Result<Self> {
        let what = format!("making version {version} durable");
        let ((tell, outcome), keeping) = (sync_channel(1), Doing::default());
        let kept = sealed.is_some().then_some(keeping.awaited());
        let layout = replica.layout.clone();
        let (lock, downloads) = (replica.lock.clone(), replica.downloads.clone());
        let (buffers, root) = (replica.buffers.clone(), replica.layout.root.clone());
        let work = move || {
            let committed = sealed.map_or(Ok(()), |sealed| keep(sealed, &layout));
            if committed.is_ok() {
                keeping.end()
            } else {
                drop(keeping)
            }
            // Engines that decode need their processors at once, and all that works behind a version can wait.
            give_way();
            buffers.clear();
            let synced = committed.and_then(|()| work());
            // The journal has what was in it. Not sooner: removing files waits for the sync.
            downloads.resume();
            // Released before the outcome is sent: the receiver may open the directory.
            drop(lock);
            let _ = tell.send(synced);
        };
        thread::Builder::new()
            .name("driftless-sync".to_owned())
            .spawn(work)
            .map_err(|source| Error::io("start a thread for", root, source))?;
        Ok(Self { what, kept, outcome: Mutex::new(outcome) })
    }

    /// Whether the journal is durable by now.
    fn is_kept(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.outcome() == Some(true))
    }

    /// How it ended; `None` if it has not after `limit`.
    fn wait(&self, limit: Duration) -> Option<Result<Synced>> {
        match lock(&self.outcome).recv_timeout(limit) {
            Ok(outcome) => Some(outcome),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(Error::Internal { what: "making a version durable" }))
            }
        }
    }
}

impl Replica {
    /// Waits until the applied version is durable, and finishes what an earlier error left unfinished. It is
    /// never necessary: the next apply waits too, and so does a drop; [`Replica::open`] finishes what a crash
    /// interrupted. Returns what the sync of the data took, or zero if nothing was under way.
    ///
    /// # Errors
    ///
    /// The file system's, naming what could not be synced. The next call then carries the version out again,
    /// from its journal; [`Replica::checkpoint`] does not show it before. [`Error::Busy`] after ten minutes
    /// of waiting, or if there is something to finish while the checkpoint is shared.
    pub fn sync(&mut self) -> Result<Duration> {
        let sync = self.rest()?;
        if self.unfinished {
            self.check_unshared()?;
            self.recover()?;
        }
        Ok(sync)
    }

    /// Waits until no thread writes to the directory; returns what the sync took that was under way.
    pub(super) fn rest(&mut self) -> Result<Duration> {
        self.want();
        let sync = self.join(SYNC_DEADLINE)?;
        if let (None, Some(syncing)) = (sync, &self.syncing) {
            return Err(self.waited_for(syncing));
        }
        Ok(sync.unwrap_or_default())
    }

    fn waited_for(&self, syncing: &Syncing) -> Error {
        let with = format!("{}, for {} s by now", syncing.what, SYNC_DEADLINE.as_secs());
        Error::Busy { what: format!("`{}`", self.dir.display()), with }
    }

    /// Has bytes that nobody needed yet be written.
    fn want(&self) {
        self.state.iter().for_each(|state| state.checkpoint.want());
    }

    /// Takes note of a sync that has ended, without waiting for one.
    pub(crate) fn poll_sync(&mut self) -> Result<()> {
        self.join(Duration::ZERO).map(drop)
    }

    /// Has another thread make a version durable that can be read from here on.
    pub(super) fn sync_behind(&mut self, pending: PendingSync) -> Result<()> {
        let version = pending.applied.version;
        let work = move || Ok(Synced { sync: pending.sync()?, weights: None });
        self.syncing = Some(Syncing::start(self, version, None, work)?);
        Ok(())
    }

    /// Takes up the state that the sealed journal leads to, and has another thread carry it out and make it
    /// durable, as soon as the bytes are wanted. [`Checkpoint::wait`] waits for them. With `sealed` that thread keeps the
    /// journal, too.
    ///
    /// [`Checkpoint::wait`]: crate::Checkpoint::wait
    pub(super) fn carry_out_behind(
        &mut self,
        mut state: State,
        maps: WriteMaps,
        sealed: Option<Sealed>,
    ) -> Result<()> {
        self.unfinished = true;
        let (dir, layout, version) = (self.dir.clone(), self.layout.clone(), state.applied.version);
        let writing = Checkpoint::begin_writing(&mut state.checkpoint);
        let before = self.state.replace(state);
        let work = move || {
            writing.hold(HOLD);
            let redone =
                redo::redo(&dir, &layout, before.as_ref().map(|state| &*state.checkpoint), Some(maps), None)?;
            let Some(Redone { mut pending, overwrite, .. }) = redone else {
                return Err(Error::Cancelled { what: "carrying out a journal" });
            };
            writing.end();
            tracing::info!(dir = %dir.display(), %version, overwrite_ms = overwrite.as_millis() as u64, "overwritten");
            pending.before = before;
            let weights = Some(pending.weights.clone());
            Ok(Synced { sync: pending.sync()?, weights })
        };
        self.syncing = Some(Syncing::start(self, version, sealed, work)?);
        self.unfinished = false;
        Ok(())
    }

    /// Whether no crash takes the applied version back, as far as is known.
    pub(crate) fn is_kept(&self) -> bool {
        !self.unfinished && self.syncing.as_ref().is_none_or(Syncing::is_kept)
    }

    /// Waits until no crash takes the applied version back: one that was offered before its journal was durable is not
    /// kept sooner. True if it had to.
    ///
    /// # Errors
    ///
    /// As [`Replica::sync`]. What engines were offered is then not what the next call finds in the directory: that is the
    /// version before, unless the journal is there after all.
    pub fn keep(&mut self) -> Result<bool> {
        let Some(syncing) = &self.syncing else { return Ok(false) };
        let Some(kept) = &syncing.kept else { return Ok(false) };
        match kept.wait(SYNC_DEADLINE) {
            Some(true) => Ok(true),
            Some(false) => self.rest().map(|_| true),
            None => Err(self.waited_for(syncing)),
        }
    }

    /// Waits for the sync that is under way, if one is; returns what it took if it ended.
    fn join(&mut self, limit: Duration) -> Result<Option<Duration>> {
        let Some(outcome) = self.syncing.as_ref().and_then(|syncing| syncing.wait(limit)) else {
            return Ok(None);
        };
        self.syncing = None;
        let Synced { sync, weights } = outcome.map_err(|error| {
            // What the page cache holds after a failed sync is not known. Pages may count as clean that are
            // on no disk, or be the old ones again. The journal writes all of them once more.
            self.unfinished = true;
            tracing::error!(
                dir = %self.dir.display(), error = &error as &dyn std::error::Error, "not durable: it is carried out again, or fetched"
            );
            self.make_room(&error);
            self.classify(error)
        })?;
        if let (Some(state), Some(weights)) = (&mut self.state, weights) {
            state.weights = weights;
        }
        Ok(Some(sync))
    }

    /// Gives up what is not needed, if `error` says that the disk is full.
    pub(super) fn make_room(&self, error: &Error) {
        if matches!(error, Error::Store(StoreError::NoSpace { .. })) {
            quarantine::make_room(&self.layout);
            self.downloads.pause();
        }
    }

    /// Whether an error of a committed apply speaks against the directory itself.
    pub(super) fn classify(&self, source: Error) -> Error {
        match source {
            Error::Store(StoreError::Io { source: ref io, .. }) if io.kind() == ErrorKind::NotFound => {
                self.damaged(source)
            }
            Error::Store(
                StoreError::Io { .. } | StoreError::NoSpace { .. } | StoreError::PermissionDenied { .. },
            ) => source,
            Error::Internal { .. } => source,
            source => self.damaged(source),
        }
    }
}

/// Makes a sealed journal durable: from here on every crash ends in its version.
fn keep(sealed: Sealed, layout: &Layout) -> Result<()> {
    crash_point("follow.offered")?;
    sealed.keep()?;
    layout.sync()?;
    Ok(crash_point("follow.journal")?)
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.want();
        if let Err(error) = self.join(SYNC_DEADLINE) {
            tracing::warn!(dir = %self.dir.display(), %error, "opening the replica finishes its version");
        }
    }
}
