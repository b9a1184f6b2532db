//! Makes an applied version durable behind the apply, while engines load it already.
//!
//! A version is loadable once its journal is durable. Until the data is synced and the marker is moved, a
//! crash is followed by the journal again. The next apply waits, because its journal takes this one's place.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use driftless_store::Error as StoreError;
use driftless_store::os::{Lock, crash_point, sync_dir, sync_file};

use super::buffers::Buffers;
use super::prefault::WriteMap;
use super::state::{Applied, Layout, Stamp, State};
use super::{Replica, quarantine, redo, withhold};
use crate::download::DownloadCache;
use crate::error::{Error, Result};

/// How long a call waits for a sync. The thread goes on behind it, and the next call waits again.
const SYNC_DEADLINE: Duration = Duration::from_secs(600);

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
    outcome: Mutex<Receiver<Result<Duration>>>,
}

impl Syncing {
    /// Starts the thread, which holds the directory's lock as long as it writes there.
    fn start(
        pending: PendingSync,
        lock: Arc<Lock>,
        downloads: Arc<DownloadCache>,
        buffers: Arc<Buffers>,
    ) -> Result<Self> {
        let what = format!("making version {} durable", pending.applied.version);
        let root = pending.layout.root.clone();
        let (tell, outcome) = sync_channel(1);
        let work = move || {
            buffers.clear();
            let synced = pending.sync();
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
        Ok(Self { what, outcome: Mutex::new(outcome) })
    }

    /// How it ended; `None` if it has not after `limit`.
    fn wait(&self, limit: Duration) -> Option<Result<Duration>> {
        match self.outcome.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(limit) {
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
        let sync = self.join(SYNC_DEADLINE)?;
        if let (None, Some(syncing)) = (sync, &self.syncing) {
            let with = format!("{}, for {} s by now", syncing.what, SYNC_DEADLINE.as_secs());
            return Err(Error::Busy { what: format!("`{}`", self.dir.display()), with });
        }
        Ok(sync.unwrap_or_default())
    }

    /// Takes note of a sync that has ended, without waiting for one.
    pub(crate) fn poll_sync(&mut self) -> Result<()> {
        self.join(Duration::ZERO).map(drop)
    }

    /// Has another thread make a version durable that can be read from here on.
    pub(super) fn sync_behind(&mut self, pending: PendingSync) -> Result<()> {
        self.syncing =
            Some(Syncing::start(pending, self.lock.clone(), self.downloads.clone(), self.buffers.clone())?);
        Ok(())
    }

    /// Waits for the sync that is under way, if one is; returns what it took if it ended.
    fn join(&mut self, limit: Duration) -> Result<Option<Duration>> {
        let Some(outcome) = self.syncing.as_ref().and_then(|syncing| syncing.wait(limit)) else {
            return Ok(None);
        };
        self.syncing = None;
        let sync = outcome.map_err(|error| {
            // What the page cache holds after a failed sync is not known. Pages may count as clean that are
            // on no disk, or be the old ones again. The journal writes all of them once more.
            self.unfinished = true;
            tracing::error!(
                dir = %self.dir.display(), error = &error as &dyn std::error::Error, "not durable: its journal is carried out again"
            );
            self.make_room(&error);
            self.classify(error)
        })?;
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

impl Drop for Replica {
    fn drop(&mut self) {
        if let Err(error) = self.join(SYNC_DEADLINE) {
            tracing::warn!(dir = %self.dir.display(), %error, "opening the replica finishes its version");
        }
    }
}
