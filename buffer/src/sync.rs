//! Bringing committed records to stable storage: one thread flushes for all that wait.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::index::{Checked, Segment};
use crate::layout::segment::{Entry, HEADER_PAGE};
use crate::locks::MutexGuard;
use crate::recover;
use crate::shared::{Shared, State};
use crate::{Error, Position, Result};

/// How long the background thread sleeps when nothing is committed; any commit wakes it.
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
            segment.map.flush(range.clone()).map_err(Error::io("sync", self.storage.path(&segment.name)))
        };
        let flushed = work.iter().try_for_each(flush);
        let mut state = self.lock();
        let mut full = Vec::new();
        if flushed.is_ok() {
            state.ledger.finish(&batch);
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

    /// Seals segments, each given with its positions; answers with their first records and the times noted in them.
    fn seal(&self, full: Vec<(Arc<Segment>, Vec<Entry>)>) -> Result<Vec<(u64, u64)>> {
        let one = |(segment, entries): (Arc<Segment>, Vec<Entry>)| {
            let end = entries.last().map_or(HEADER_PAGE, |last| (last.offset + last.bytes) as usize);
            let next = segment.header.first + entries.len() as u64;
            let sealed_us = recover::seal(&segment.map, &segment.header, &entries, end, next)
                .map_err(Error::io("seal", self.storage.path(&segment.name)))?;
            self.storage.release(&segment.name, recover::unused(&segment.header, end, entries.len()));
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
        while state.syncing && Instant::now() < until {
            state = self.wait(state, until);
        }
        if let Some(active) = state.active.take() {
            state.retiring.push(active.segment.header.first);
        }
        let full = state.take_resolved();
        drop(state);
        let sealed = self.seal(full)?;
        let mut state = self.lock();
        state.note_sealed(&sealed);
        state.beacon = None;
        state.lock = None;
        Ok(())
    }

    /// Body of the background thread: syncs at the latest `bound` after a commit, until the log is closed.
    fn sync_within(&self, bound: Duration) {
        let mut state = self.lock();
        while !state.closing && state.poison.is_none() {
            self.reclaim(&mut state);
            let due = state.dirty_since.map(|since| since + bound);
            let now = Instant::now();
            match due {
                Some(due) if due <= now && !state.syncing => match self.lead(state) {
                    Ok(after) => state = after,
                    // The log is poisoned now; every producer is told at its next call.
                    Err(_) => return,
                },
                Some(due) if due > now => state = self.wait(state, due),
                _ => state = self.wait(state, now + IDLE),
            }
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
        if let Some(beacon) = self.beacon.as_ref().filter(|_| news) {
            beacon.set(self.ledger.visible());
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

/// The background thread of [`crate::SyncPolicy::Within`]; dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Flusher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Flusher {
    pub(crate) fn start(shared: Arc<Shared>, bound: Duration) -> Result<Self> {
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("rollout-log-sync".into())
            .spawn(move || worker.sync_within(bound));
        let thread = thread.map_err(Error::io("start the sync thread of", &shared.root))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it was already reported by the panic hook.
            let _ = thread.join();
        }
    }
}
