//! Bringing committed records to stable storage: one thread flushes for all that wait.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::index::Checked;
use crate::layout::segment::{Entry, HEADER_PAGE};
use crate::locks::MutexGuard;
use crate::options::SyncPolicy;
use crate::position::Position;
use crate::segment::{self, Segment};
use crate::shared::{Shared, State};
use crate::spare::Spare;

/// How long the worker sleeps when there is nothing to do, unless it is woken.
const IDLE: Duration = Duration::from_secs(3600);

impl Shared {
    /// Returns when the record is durable.
    pub(crate) fn sync_through(&self, sequence: u64) -> Result<()> {
        let until = Instant::now() + self.options().wait_deadline;
        let mut state = self.lock();
        self.reclaim(&mut state);
        while !state.ledger.is_durable(sequence) {
            state = self.lead_or_wait(state, until)?;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<Position> {
        let until = Instant::now() + self.options().wait_deadline;
        let mut state = self.lock();
        self.check(&state)?;
        self.reclaim(&mut state);
        let target = state.ledger.next();
        while state.ledger.dirty_before(target) {
            state = self.lead_or_wait(state, until)?;
        }
        Ok(Position(state.ledger.visible()))
    }

    /// Flushes, or waits for the thread that does: its sync may cover what the caller waits for.
    fn lead_or_wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        until: Instant,
    ) -> Result<MutexGuard<'a, State>> {
        self.check(&state)?;
        if !state.syncing {
            return self.lead(state);
        }
        if Instant::now() >= until {
            let reason = "another thread's sync does not finish; the medium may hang";
            return Err(Error::Full { bytes: 0, waited: self.options().wait_deadline, reason });
        }
        Ok(self.wait(state, until))
    }

    /// Performs one sync for everything that is committed, without holding the lock while the medium works.
    pub(crate) fn lead<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>> {
        let Some(batch) = state.ledger.batch() else { return Ok(state) };
        let segment = |first: &u64| state.index.segment(*first).map(|loaded| Arc::clone(&loaded.segment));
        let work: Vec<(Arc<Segment>, Range<usize>)> =
            batch.ranges.iter().filter_map(|(first, range)| Some((segment(first)?, range.clone()))).collect();
        state.syncing = true;
        state.dirty_since = None;
        drop(state);
        let flush = |(segment, range): &(Arc<Segment>, Range<usize>)| {
            self.name(segment)?;
            segment.map.flush(range.clone()).map_err(Error::io("sync", self.storage.path(&segment.name)))
        };
        // Behind the flush: a process that takes the log after this look finds what was flushed.
        let flushed = work.iter().try_for_each(flush).and_then(|()| self.check_owner());
        let mut state = self.lock();
        let mut full = Vec::new();
        if flushed.is_ok() {
            state.ledger.finish(&batch);
            if state.ledger.dirty() == 0 {
                // What was given up during the sync needs none of its own. Were it noted on, the worker would
                // lead one sync of nothing after the other, and never let go of the lock.
                state.dirty_since = None;
            }
            state.publish();
            self.changed.notify_all();
            full = state.take_resolved();
        }
        drop(state);
        let sealed = flushed.and_then(|()| self.seal(full));
        let mut state = self.lock();
        state.syncing = false;
        self.changed.notify_all();
        match sealed {
            Ok(sealed) => {
                state.note_sealed(&sealed);
                Ok(state)
            }
            Err(error) => {
                self.poison(&mut state, &error);
                Err(error)
            }
        }
    }

    /// Seals segments, each given with its positions; answers with their first records and the times noted in
    /// them.
    fn seal(&self, full: Vec<(Arc<Segment>, Vec<Entry>)>) -> Result<Vec<(u64, u64)>> {
        let one = |(segment, entries): (Arc<Segment>, Vec<Entry>)| {
            let end = entries.last().map_or(HEADER_PAGE, |last| (last.offset + last.bytes) as usize);
            let next = segment.header.first + entries.len() as u64;
            self.name(&segment)?;
            let sealed_us = segment::seal(&segment.map, &segment.header, &entries, end, next)
                .map_err(Error::io("seal", self.storage.path(&segment.name)))?;
            self.storage.release(&segment.name, segment::unused(&segment.header, end, entries.len()));
            // It is complete; only its readers need its pages from here on.
            segment.map.complete();
            Ok((segment.header.first, sealed_us))
        };
        full.into_iter().map(one).collect()
    }

    pub(crate) fn close(&self) -> Result<()> {
        self.sync()?;
        let until = Instant::now() + self.options().wait_deadline;
        let mut state = self.lock();
        // No new reservation from here on; a sync still under way may be sealing.
        state.closing = true;
        self.changed.notify_all();
        self.work.notify_all();
        while state.syncing || matches!(state.spare, Spare::InTheMaking) {
            if Instant::now() >= until {
                let reason =
                    "another thread's sync, or its making of a segment, does not finish; the medium may hang";
                return Err(Error::Full { bytes: 0, waited: self.options().wait_deadline, reason });
            }
            state = self.wait(state, until);
        }
        state.spare = Spare::None;
        if let Some(active) = state.active.take() {
            state.retiring.push(active.segment.header.first);
        }
        let full = state.take_resolved();
        drop(state);
        self.check_owner()?;
        let sealed = self.seal(full)?;
        self.storage.discard_spare();
        let mut state = self.lock();
        state.note_sealed(&sealed);
        state.durable_end = None;
        state.lock = None;
        Ok(())
    }

    /// Body of the worker: syncs at the latest `bound` after a commit, and makes the next segment before it
    /// is needed.
    fn keep(&self, bound: Option<Duration>) {
        let mut state = self.lock();
        while !state.closing && !state.unattended && state.poison.is_none() {
            self.reclaim(&mut state);
            let due = bound.and_then(|bound| Some(state.dirty_since? + bound));
            let now = Instant::now();
            state = match due {
                // Another thread's sync is under way, and tells when it ends.
                Some(due) if due <= now && state.syncing => self.wait(state, now + IDLE),
                Some(due) if due <= now => match self.lead(state) {
                    Ok(after) => after,
                    // The log is poisoned now; every producer gets the error at its next call.
                    Err(_) => return,
                },
                _ if self.wants_spare(&state) => self.make_spare(state).unwrap_or_else(|error| {
                    tracing::warn!(%error, "no segment could be made ahead");
                    self.lock()
                }),
                due => {
                    let limit = due.map_or(IDLE, |due| due - now);
                    self.work.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl State {
    /// Shows readers what has become durable.
    pub(crate) fn publish(&mut self) {
        let published = self.ledger.publish();
        let news = !published.is_empty();
        for published in published {
            self.index.push(published.segment, published.entry, Checked::Good);
        }
        if let Some(durable_end) = self.durable_end.as_ref().filter(|_| news) {
            durable_end.set(self.ledger.visible());
        }
    }

    /// The full segments of which every position is visible, for sealing.
    fn take_resolved(&mut self) -> Vec<(Arc<Segment>, Vec<Entry>)> {
        let (open, full): (Vec<u64>, Vec<u64>) =
            self.retiring.drain(..).partition(|&first| self.ledger.holds(first));
        self.retiring = open;
        let loaded = |first| self.index.segment(first).map(|l| (Arc::clone(&l.segment), l.entries.clone()));
        full.into_iter().filter_map(loaded).collect()
    }

    fn note_sealed(&mut self, sealed: &[(u64, u64)]) {
        for &(first, sealed_us) in sealed {
            if let Some(loaded) = self.index.segment_mut(first) {
                loaded.sealed_us = Some(sealed_us);
            }
        }
    }
}

/// The thread that syncs and makes segments ahead of need. Dropping this ends it.
#[derive(Debug)]
pub(crate) struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Self> {
        let worker = Arc::clone(&shared);
        let bound = match shared.options().sync {
            SyncPolicy::Within(bound) => Some(bound),
            _ => None,
        };
        let thread = std::thread::Builder::new().name("rollout-log".into()).spawn(move || worker.keep(bound));
        let thread = thread.map_err(Error::io("start the thread of", &shared.root))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.lock().unattended = true;
        self.shared.changed.notify_all();
        self.shared.work.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it was already reported by the panic hook.
            let _ = thread.join();
        }
    }
}
