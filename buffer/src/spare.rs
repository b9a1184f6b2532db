//! Where frames come from: the segment that takes reservations, and the spare that follows it.
//!
//! A spare is a zeroed file with storage behind every byte. When the active segment is full, the spare gets a
//! header in memory and takes over, without a call to the medium under the log's lock. Its header reaches
//! stable storage, and the file gets its name, with the first sync of its records or before. Nothing in it is
//! acknowledged, visible or open to other processes until then. The next owner makes a spare that is left
//! over a segment if records had gone into it, and else removes it.

use std::sync::Arc;
use std::time::Instant;

use crate::clock::clock_us;
use crate::error::{Error, Result};
use crate::layout::segment::{ENTRY, FORMAT, HEADER_PAGE, SegmentHeader, TRAILER};
use crate::locks::{Mutex, MutexGuard};
use crate::map::{Exclusive, Map};
use crate::segment::{Segment, segment_name};
use crate::shared::{Shared, State};

/// The segment that takes reservations.
pub(crate) struct Active {
    pub(crate) segment: Arc<Segment>,
    /// Frames in it.
    count: usize,
}

/// The segment that will take them next.
#[derive(Debug, Default)]
pub(crate) enum Spare {
    /// There is none. One is made when it is needed, or ahead of that.
    #[default]
    None,
    /// A thread makes it.
    InTheMaking,
    /// The file of zeros.
    Ready(Map),
    /// It could not be made; the producer that needs it tries again, and gets the error if it fails.
    Failed,
}

impl Spare {
    fn take(&mut self) -> Option<Map> {
        match std::mem::take(self) {
            Self::Ready(map) => Some(map),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl Shared {
    /// Where the first frame of a segment must end.
    pub(crate) fn frame_limit(&self) -> usize {
        // Room for the table with one spare entry, which recovery may need for a position lost at the end.
        self.options().segment_bytes as usize - TRAILER - 2 * ENTRY
    }

    /// Takes `bytes` of the active segment, or of the spare, which becomes active; `None` when there is no
    /// spare.
    pub(crate) fn allot(&self, state: &mut State, bytes: usize) -> Option<(Arc<Segment>, Exclusive)> {
        let limit = self.frame_limit();
        if let Some(active) = &mut state.active
            && let Some(end) = limit.checked_sub(active.count * ENTRY)
            && let Some(body) = active.segment.map.allot(bytes, end)
        {
            active.count += 1;
            let segment = Arc::clone(&active.segment);
            if self.wants_spare(state) {
                self.work.notify_all();
            }
            return Some((segment, body));
        }
        let map = state.spare.take()?;
        let segment = self.begin_segment(map, state.ledger.next());
        // It is empty, and no frame is longer than this: see `reserve`.
        let body = segment.map.allot(bytes, limit)?;
        state.index.add_segment(Arc::clone(&segment));
        if let Some(full) = state.active.replace(Active { segment: Arc::clone(&segment), count: 1 }) {
            state.retiring.push(full.segment.header.first);
        }
        Some((segment, body))
    }

    fn begin_segment(&self, map: Map, first: u64) -> Arc<Segment> {
        use std::hash::{BuildHasher, Hasher};
        // std's hasher keys are random per process and differ from one to the next: no other source is needed
        // for a salt.
        let salt = std::hash::RandomState::new().build_hasher().finish();
        let header = SegmentHeader {
            format: FORMAT,
            identity: self.options().identity.clone(),
            capacity: self.options().segment_bytes,
            first,
            salt,
            created_us: clock_us(),
        };
        map.put_head(&header.encode());
        let (name, named) = (segment_name(first), Mutex::new(false));
        Arc::new(Segment { name, header, map: Arc::new(map), named })
    }

    /// Waits for a spare, making it if no other thread does. The lock is not held meanwhile.
    pub(crate) fn await_spare<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        until: Instant,
    ) -> Result<MutexGuard<'a, State>> {
        while matches!(state.spare, Spare::InTheMaking) {
            if Instant::now() >= until {
                let reason = "another thread does not finish making a segment; the medium may hang";
                return Err(Error::Full { bytes: 0, waited: self.options().wait_deadline, reason });
            }
            state = self.wait(state, until);
        }
        self.check(&state)?;
        if matches!(state.spare, Spare::Ready(_)) {
            return Ok(state);
        }
        self.make_spare(state)
    }

    /// Makes the spare, without holding the lock meanwhile. No other thread may be making it.
    pub(crate) fn make_spare<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Result<MutexGuard<'a, State>> {
        state.spare = Spare::InTheMaking;
        let active = state.active.as_ref().map(|active| Arc::clone(&active.segment));
        drop(state);
        // The active segment may still be the spare by name.
        let named = active.map_or(Ok(()), |active| self.name(&active));
        let made = named.and_then(|()| self.check_owner()).and_then(|()| {
            let made = self.storage.prepare(self.options().segment_bytes as usize);
            made.map_err(Error::io("create a segment in", &self.root))
        });
        let mut state = self.lock();
        self.changed.notify_all();
        match made {
            Ok(map) => {
                state.spare = Spare::Ready(map);
                Ok(state)
            }
            Err(error) => {
                state.spare = Spare::Failed;
                if matches!(error, Error::LockLost { .. }) {
                    self.poison(&mut state, &error);
                }
                Err(error)
            }
        }
    }

    /// Is it time to make a spare?
    pub(crate) fn wants_spare(&self, state: &State) -> bool {
        let half = self.frame_limit() / 2;
        let half_full = |active: &Active| active.segment.map.tail() > half;
        matches!(state.spare, Spare::None) && state.active.as_ref().is_some_and(half_full)
    }

    /// Brings the header of a segment to stable storage and gives it its name. Every record in it is
    /// acknowledged, and every other process told of it, after that only.
    pub(crate) fn name(&self, segment: &Segment) -> Result<()> {
        let mut named = segment.named.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *named {
            return Ok(());
        }
        self.check_owner()?;
        let stored = segment.map.flush(0..HEADER_PAGE).and_then(|()| self.storage.adopt(&segment.name));
        stored.map_err(Error::io("create the segment", self.storage.path(&segment.name)))?;
        *named = true;
        Ok(())
    }
}
