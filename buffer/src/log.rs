//! The writing side of a log.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::append;
use crate::cursor::{self, Cursor};
use crate::damage::Recovery;
use crate::durable_end::DurableEnd;
use crate::error::{Error, Result};
use crate::learned;
use crate::lock::LockFile;
use crate::options::{Options, SyncPolicy};
use crate::position::{Identity, Position};
use crate::producer::Producers;
use crate::reader::Reader;
use crate::recover::{self, SEGMENT_BYTES_MAX};
use crate::reservation::{Ack, Home, Pending, Reservation};
use crate::retain::{Retention, Retired};
use crate::sample::{Sample, Shape};
use crate::shared::Shared;
use crate::storage::{Directory, Storage};
use crate::sync::Worker;

/// Pages of a file.
const PAGE: u64 = 4096;

/// A log, open for writing. Clones are handles of the same log and may be used from any thread.
///
/// Dropping the last handle syncs nothing: what was acknowledged is safe, the rest is as after a crash.
/// [`Log::close`] syncs and seals, so that the next open has nothing to scan.
#[derive(Debug, Clone)]
pub struct Log {
    shared: Arc<Shared>,
    /// Ends its thread with the last handle.
    worker: Option<Arc<Worker>>,
}

impl Log {
    /// Opens the log in `dir`, creating the directory if it is absent, and recovers what an earlier process
    /// left. Incomplete records at the end are dropped. Damaged ones are skipped, and [`Log::recovery`] names
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] when another process writes it, or another handle of this one. [`Error::Identity`] when it belongs to another run,
    /// model or tokenizer. [`Error::Unsupported`] when a newer program wrote it. [`Error::Invalid`] for
    /// options that make no sense. [`Error::Io`].
    pub fn open(dir: impl AsRef<Path>, options: Options) -> Result<Self> {
        let root = dir.as_ref();
        fs::create_dir_all(root).map_err(Error::io("create", root))?;
        let lock = LockFile::take(root)?;
        let mut log = Self::open_on(Box::new(Directory::new(root)), root.to_owned(), options, Some(lock))?;
        {
            let mut state = log.shared.lock();
            state.durable_end = Some(DurableEnd::create(root, state.ledger.visible())?);
        }
        log.worker = Some(Arc::new(Worker::start(Arc::clone(&log.shared))?));
        Ok(log)
    }

    /// As [`Log::open`], on any storage, and without a thread of its own.
    pub(crate) fn open_on(
        storage: Box<dyn Storage>,
        root: PathBuf,
        mut options: Options,
        lock: Option<LockFile>,
    ) -> Result<Self> {
        options.segment_bytes = options.segment_bytes.next_multiple_of(PAGE);
        check_options(&options)?;
        let opened = recover::repair(&*storage, &options.identity, cursor::newest(&*storage)?)?;
        let shared = Arc::new(Shared::new(storage, root, options, opened, lock));
        Ok(Self { shared, worker: None })
    }

    /// Whether its thread would find nothing to sync.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_clean(&self) -> bool {
        let state = self.shared.lock();
        state.ledger.dirty() == 0 && state.dirty_since.is_none()
    }

    /// What its thread does, if there is no such thread.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn make_ahead(&self) -> Result<()> {
        let state = self.shared.lock();
        if self.shared.wants_spare(&state) {
            drop(self.shared.make_spare(state)?);
        }
        Ok(())
    }

    /// What opening found: damage, and how much had to be scanned.
    #[must_use]
    pub fn recovery(&self) -> &Recovery {
        self.shared.recovery()
    }

    /// What the log belongs to.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.shared.options().identity
    }

    /// Takes space for a record, to be written in place.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`]; [`Error::Invalid`] for an impossible shape. [`Error::Full`] when too much stays
    /// unsynced for longer than `wait_deadline`. [`Error::Io`] when a new segment cannot be made; the log
    /// stays usable, as a full disk may have room later. [`Error::Poisoned`].
    pub fn reserve(&self, shape: &Shape) -> Result<Reservation> {
        self.take(shape, false)
    }

    fn take(&self, shape: &Shape, copied: bool) -> Result<Reservation> {
        let plan = append::plan(shape)?;
        let (segment, sequence, body) = self.shared.reserve(shape.kind, plan.frame, copied)?;
        let home = Home::Here { shared: Arc::clone(&self.shared), segment };
        Ok(Reservation::new(home, sequence, body, plan, shape))
    }

    /// Copies a record into the log: `reserve`, write, `commit`.
    ///
    /// # Errors
    ///
    /// As [`Log::reserve`] and [`Reservation::commit`].
    pub fn append(&self, sample: &Sample<'_>) -> Result<Pending> {
        append::fill(self.take(&append::shape(sample)?, true)?, sample)
    }

    /// Appends several records and makes them durable together. The answer has one [`Ack`] per record, in
    /// order.
    ///
    /// # Errors
    ///
    /// As [`Log::append`]; the records before the one that failed are in the log, unacknowledged.
    pub fn append_all(&self, samples: &[Sample<'_>]) -> Result<Vec<Ack>> {
        append::all(samples, |sample| self.append(sample))
    }

    /// As [`Log::append_all`], and returns once readers see the records. One before them that another thread or process
    /// has taken space for, and still writes, hides them until then.
    ///
    /// # Errors
    ///
    /// As [`Log::append_all`]; [`Error::Full`] when it is still written after `wait_deadline`: the records are durable.
    pub fn append_seen(&self, samples: &[Sample<'_>]) -> Result<Vec<Ack>> {
        let acks = self.append_all(samples)?;
        let waited = self.shared.options().wait_deadline;
        let Some(last) = acks.last().map(Ack::position) else { return Ok(acks) };
        match self.reader().wait(last, waited)? {
            end if end > last => Ok(acks),
            _ => {
                Err(Error::Full { bytes: 0, waited, reason: "a record before these is still being written" })
            }
        }
    }

    /// Brings every record committed so far to stable storage. Returns the end of what readers see.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the medium fails; from then on every call that writes answers [`Error::Poisoned`],
    /// because it is unknown what a failed sync has left behind. [`Error::LockLost`], with the same effect, when
    /// the lock's file was removed or replaced: another process may own the log. [`Error::Full`] when another thread's sync
    /// does not finish in time.
    pub fn sync(&self) -> Result<Position> {
        self.shared.sync()
    }

    /// Lets other processes write to this log through [`crate::Producer`], until the answer is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when it does so already, [`Error::Io`].
    pub fn serve(&self) -> Result<Producers> {
        Producers::start(Arc::clone(&self.shared))
    }

    /// Reads what is on stable storage, including everything appended later.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::live(Arc::clone(&self.shared))
    }

    /// The durable position called `name`; 0 until it is first committed.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name that is not 1–64 of `A-Z a-z 0-9 . _ -`, [`Error::Damaged`],
    /// [`Error::Identity`] when the file belongs to another run, [`Error::Io`].
    pub fn cursor(&self, name: &str) -> Result<Cursor> {
        Cursor::open(Arc::clone(&self.shared), name)
    }

    /// Removes old segments, with what was learned from them. Records that readers hold stay valid.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a retention without limit or cursor, [`Error::Poisoned`], [`Error::Io`] (what
    /// was not removed is found again when the log is next opened).
    pub fn retain(&self, retention: &Retention) -> Result<Retired> {
        let retired = self.shared.retain(retention)?;
        learned::retain(&self.shared.root, retired.oldest)?;
        Ok(retired)
    }

    /// Syncs, seals the last segment, ends the log for all handles and lets another process own it. Readers
    /// keep working. Without it, the log stays locked until the last handle, reservation and reader are
    /// dropped.
    ///
    /// # Errors
    ///
    /// As [`Log::sync`].
    pub fn close(self) -> Result<()> {
        self.shared.close()
    }
}

fn check_options(options: &Options) -> Result<()> {
    let model = options.identity.model.len();
    if model > Identity::MODEL_BYTES_MAX {
        let expected = format!("at most {} bytes", Identity::MODEL_BYTES_MAX);
        return Err(Error::invalid("model name", expected, format!("{model} bytes")));
    }
    let sizes = 16 * PAGE..=SEGMENT_BYTES_MAX;
    if !sizes.contains(&options.segment_bytes) {
        let expected = format!("{} to {}", sizes.start(), sizes.end());
        return Err(Error::invalid("segment_bytes", expected, options.segment_bytes));
    }
    if options.sync == SyncPolicy::EveryRecords(0) {
        return Err(Error::invalid("sync policy", "at least 1 record", 0));
    }
    Ok(())
}
