//! What all handles, reservations and readers of an open log share: taking space, committing it, giving it
//! up.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use fail::fail_point;

use crate::damage::Recovery;
use crate::durable_end::DurableEnd;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::layout::body::{Fixed, Plan};
use crate::layout::frame::{FrameHeader, FrameState};
use crate::layout::segment::{Entry, EntryState, HEADER_PAGE};
use crate::ledger::Ledger;
use crate::lock::{LockFile, LockName};
use crate::locks::{Condvar, Mutex, MutexGuard};
use crate::map::Exclusive;
use crate::options::{Options, SyncPolicy};
use crate::position::Position;
use crate::recover::Opened;
use crate::sample::Kind;
use crate::scan;
use crate::segment::Segment;
use crate::spare::{Active, Spare};
use crate::storage::Storage;

/// An open log.
pub(crate) struct Shared {
    pub(crate) storage: Box<dyn Storage>,
    pub(crate) root: PathBuf,
    options: Options,
    recovery: Recovery,
    /// None on the simulated medium of the tests.
    lock_name: Option<LockName>,
    state: Mutex<State>,
    /// Told whenever records become durable, a reservation ends, or the log is poisoned.
    pub(crate) changed: Condvar,
    /// Told when the worker has something to do.
    pub(crate) work: Condvar,
    /// Held while old segments are removed.
    pub(crate) retaining: Mutex<()>,
}

pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) index: Index,
    pub(crate) active: Option<Active>,
    pub(crate) spare: Spare,
    /// Full segments that wait for their last records to become visible, to be sealed then.
    pub(crate) retiring: Vec<u64>,
    /// Open reservations, oldest first, with the moment each may be reclaimed.
    pub(crate) deadlines: VecDeque<(u64, Instant)>,
    /// A thread is flushing.
    pub(crate) syncing: bool,
    /// Moment of the first commit that no sync has covered.
    pub(crate) dirty_since: Option<Instant>,
    pub(crate) poison: Option<String>,
    pub(crate) closing: bool,
    /// The last handle is gone; reservations and readers may be left. The worker ends.
    pub(crate) unattended: bool,
    /// Held until the log is closed or its last handle, reservation and reader are gone.
    pub(crate) lock: Option<LockFile>,
    /// Shows readers of other processes what is durable.
    pub(crate) durable_end: Option<DurableEnd>,
    /// Producers of other processes are served.
    pub(crate) serving: bool,
}

/// A record that is complete, and not committed yet.
pub(crate) struct Complete {
    pub(crate) kind: Kind,
    pub(crate) sequence: u64,
    pub(crate) body: Exclusive,
    pub(crate) crc: u32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(
        storage: Box<dyn Storage>,
        root: PathBuf,
        options: Options,
        opened: Opened,
        lock: Option<LockFile>,
    ) -> Self {
        let lock_name = lock.as_ref().map(|lock| lock.name().clone());
        let state = State {
            ledger: Ledger::new(opened.next),
            index: opened.index,
            active: None,
            spare: Spare::None,
            retiring: Vec::new(),
            deadlines: VecDeque::new(),
            syncing: false,
            dirty_since: None,
            poison: None,
            closing: false,
            unattended: false,
            lock,
            durable_end: None,
            serving: false,
        };
        let (recovery, state) = (opened.recovery, Mutex::new(state));
        let (changed, work, retaining) = (Condvar::new(), Condvar::new(), Mutex::new(()));
        Self { storage, root, options, recovery, lock_name, state, changed, work, retaining }
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panics under this lock leaves the bookkeeping consistent: every change is a single
        // call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check(&self, state: &State) -> Result<()> {
        let closed = state.closing.then_some("the log was closed");
        match state.poison.as_deref().or(closed) {
            Some(cause) => Err(Error::Poisoned { path: self.root.clone(), cause: cause.to_owned() }),
            None => Ok(()),
        }
    }

    /// Refuses to go on where another process can own the log, because the lock's file was removed.
    pub(crate) fn check_owner(&self) -> Result<()> {
        self.lock_name.as_ref().map_or(Ok(()), LockName::check)
    }

    pub(crate) fn poison(&self, state: &mut State, cause: &Error) {
        let mut text = cause.to_string();
        if let Some(source) = std::error::Error::source(cause) {
            text = format!("{text}: {source}");
        }
        tracing::error!(path = %self.root.display(), cause = text, "the rollout log stops taking records");
        state.poison = Some(text);
        // The file may be another owner's by now.
        state.durable_end = None;
        self.changed.notify_all();
        self.work.notify_all();
    }

    /// Waits for any change, at most until `until`.
    pub(crate) fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let left = until.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes a frame of so many bytes. `copied`: it will be filled in one piece, not in place.
    pub(crate) fn reserve(
        &self,
        kind: Kind,
        frame: usize,
        copied: bool,
    ) -> Result<(Arc<Segment>, u64, Exclusive)> {
        // Before it is counted with anything else: a number from outside may be any.
        let max = self.frame_limit() - HEADER_PAGE;
        if frame > max {
            return Err(Error::TooLarge { bytes: frame as u64, max: max as u64 });
        }
        let until = Instant::now() + self.options.wait_deadline;
        let (mut state, segment, body) = loop {
            let mut state = self.room(frame)?;
            match self.allot(&mut state, frame) {
                Some((segment, body)) => break (state, segment, body.copied(copied)),
                None => drop(self.await_spare(state, until)?),
            }
        };
        let offset = body.offset();
        let range = offset..offset + frame;
        let given_up = Entry::empty(EntryState::Void, offset as u64, frame as u64);
        let sequence = state.ledger.reserve(segment.header.first, range, given_up);
        let header = FrameHeader {
            kind: kind.code(),
            state: FrameState::Reserved,
            offset: offset as u64,
            bytes: frame as u64,
            sequence,
            durable: state.ledger.visible(),
            body_crc: 0,
        };
        set_header(&segment, &header, body.goes_through_file());
        state.deadlines.push_back((sequence, Instant::now() + self.options.reservation_deadline));
        drop(state);
        // The next header lies right behind this frame. Its page fault is taken here, and not under the lock.
        if !body.goes_through_file() {
            segment.map.prefault(offset + frame);
        }
        Ok((segment, sequence, body))
    }

    /// Waits until `bytes` more may be outstanding.
    fn room(&self, bytes: usize) -> Result<MutexGuard<'_, State>> {
        let started = Instant::now();
        let until = started + self.options.wait_deadline;
        let mut state = self.lock();
        loop {
            self.check(&state)?;
            self.reclaim(&mut state);
            let outstanding = state.ledger.bytes();
            // A single record above the bound is let through when it is alone: it would never fit otherwise.
            if outstanding == 0 || (outstanding + bytes) as u64 <= self.options.unsynced_bytes_max {
                return Ok(state);
            }
            if state.ledger.dirty() > 0 && !state.syncing {
                state = self.lead(state)?;
            } else if Instant::now() >= until {
                let reason =
                    "open reservations or a slow sync hold it; commit them, or raise `unsynced_bytes_max`";
                return Err(Error::Full { bytes: bytes as u64, waited: started.elapsed(), reason });
            } else {
                let wake = state.deadlines.front().map_or(until, |&(_, deadline)| until.min(deadline));
                state = self.wait(state, wake);
            }
        }
    }

    /// Gives up the reservations that were held too long.
    pub(crate) fn reclaim(&self, state: &mut State) {
        let now = Instant::now();
        while let Some(&(sequence, deadline)) = state.deadlines.front() {
            if state.ledger.is_reserved(sequence) {
                if deadline > now {
                    return;
                }
                tracing::warn!(sequence, "reclaiming a reservation that was never committed");
                self.void(state, sequence);
            }
            state.deadlines.pop_front();
        }
    }

    fn void(&self, state: &mut State, sequence: u64) {
        let durable = state.ledger.visible();
        if let Some((first, range)) = state.ledger.void(sequence)
            && let Some(loaded) = state.index.segment(first)
        {
            let header = FrameHeader {
                kind: 0,
                state: FrameState::Void,
                offset: range.start as u64,
                bytes: range.len() as u64,
                sequence,
                durable,
                body_crc: 0,
            };
            loaded.segment.map.set_header(range.start, &header.encode(loaded.segment.header.salt));
            if state.ledger.dirty() > 0 {
                self.note_dirty(state);
            }
            state.publish();
            self.changed.notify_all();
        }
    }

    /// Commits a complete body. From here on its bytes may be handed to readers.
    pub(crate) fn commit_body(
        &self,
        segment: &Segment,
        Complete { kind, sequence, body, crc }: Complete,
        fixed: &Fixed,
        plan: &Plan,
    ) -> Result<()> {
        let mut header = FrameHeader {
            kind: kind.code(),
            state: FrameState::Committed,
            offset: body.offset() as u64,
            bytes: plan.frame as u64,
            sequence,
            durable: 0,
            body_crc: crc,
        };
        let through_file = body.goes_through_file();
        drop(body);
        let entry = scan::describe(&header, fixed, plan);
        let mut state = self.lock();
        self.check(&state)?;
        if !state.ledger.commit(sequence, entry) {
            let (position, held) = (Position(sequence), self.options.reservation_deadline);
            return Err(Error::Expired { position, held });
        }
        header.durable = state.ledger.visible();
        set_header(segment, &header, through_file);
        self.note_dirty(&mut state);
        let dirty = state.ledger.dirty();
        drop(state);
        fail_point!("log.commit");
        match self.options.sync {
            SyncPolicy::EachRecord => self.sync_through(sequence),
            SyncPolicy::EveryRecords(n) if dirty >= n => self.sync_through(sequence),
            _ => Ok(()),
        }
    }

    /// Something waits for a sync from now on.
    fn note_dirty(&self, state: &mut State) {
        if state.dirty_since.is_none() {
            state.dirty_since = Some(Instant::now());
            if matches!(self.options.sync, SyncPolicy::Within(_)) {
                self.work.notify_all();
            }
        }
    }

    pub(crate) fn give_up(&self, sequence: u64) {
        let mut state = self.lock();
        // A closed log may have another writer already; what is open in it reads as never committed.
        if !state.closing {
            self.void(&mut state, sequence);
        }
    }
}

fn set_header(segment: &Segment, header: &FrameHeader, through_file: bool) {
    let (offset, block) = (header.offset as usize, header.encode(segment.header.salt));
    if through_file {
        segment.map.write_header(offset, &block);
    } else {
        segment.map.set_header(offset, &block);
    }
}
