//! The reading side of a log.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::damage::Recovery;
use crate::error::{Error, Result};
use crate::files::Files;
use crate::index::{Checked, Index, Place};
use crate::layout::segment::EntryState;
use crate::position::{Identity, Position};
use crate::record::Record;
use crate::shared::Shared;

/// Reads a log in place. Clones share everything.
///
/// It sees exactly the records that are on stable storage. A reader of [`crate::Log::reader`] sees them as
/// they become so. One of [`Reader::open`], possibly beside a writing process, sees them as of the last
/// [`Reader::refresh`] or [`Reader::wait`].
#[derive(Debug, Clone)]
pub struct Reader {
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    Live(Arc<Shared>),
    Files(Arc<Files>),
}

impl Reader {
    pub(crate) fn live(shared: Arc<Shared>) -> Self {
        Self { source: Source::Live(shared) }
    }

    /// Opens the log in `dir` for reading only. Safe beside a process that writes it.
    ///
    /// # Errors
    ///
    /// [`Error::NoLog`] when there is no such directory, [`Error::Unsupported`] when a newer program wrote it,
    /// [`Error::Io`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Ok(Self { source: Source::Files(Arc::new(Files::open(dir.as_ref())?)) })
    }

    /// What the log belongs to; `None` for a directory without segments.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        match &self.source {
            Source::Live(shared) => Some(&shared.options().identity),
            Source::Files(files) => files.identity(),
        }
    }

    /// What opening found: damage, and how much had to be scanned. A segment of which nothing can be read is
    /// named here only.
    #[must_use]
    pub fn recovery(&self) -> &Recovery {
        match &self.source {
            Source::Live(shared) => shared.recovery(),
            Source::Files(files) => files.recovery(),
        }
    }

    /// Looks for records that another process has appended; what is known already is not read again. Nothing
    /// to do for a reader of [`crate::Log::reader`].
    ///
    /// # Errors
    ///
    /// As [`Reader::open`].
    pub fn refresh(&self) -> Result<()> {
        match &self.source {
            Source::Live(_) => Ok(()),
            Source::Files(files) => files.refresh(),
        }
    }

    pub(crate) fn with<T>(&self, query: impl FnOnce(&mut Index) -> T) -> T {
        match &self.source {
            Source::Live(shared) => {
                let mut state = shared.lock();
                // A producer that died may be all that hides the records behind its reservation.
                shared.reclaim(&mut state);
                query(&mut state.index)
            }
            Source::Files(files) => files.with(query),
        }
    }

    /// One past the last position that can be read.
    #[must_use]
    pub fn end(&self) -> Position {
        Position(self.with(|index| index.end()))
    }

    /// The first position that retention has kept.
    #[must_use]
    pub fn oldest(&self) -> Position {
        Position(self.with(|index| index.oldest()))
    }

    /// The record at `position`; `None` where there is none (not written yet, given up, or lost to a crash
    /// before it was acknowledged).
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] when its bytes have changed, [`Error::Retired`] when retention removed it.
    pub fn get(&self, position: Position) -> Result<Option<Record>> {
        let (oldest, found) = self.with(|index| (index.oldest(), index.at_or_after(position.0)));
        if position.0 < oldest {
            return Err(Error::Retired { position, oldest: Position(oldest) });
        }
        match found {
            Some((sequence, place)) if sequence == position.0 => self.read(sequence, &place),
            _ => Ok(None),
        }
    }

    /// The record at a place, with the score of its answer if that is another record and there already.
    fn read(&self, sequence: u64, place: &Place) -> Result<Option<Record>> {
        let found = self.read_alone(sequence, place)?;
        Ok(found.map(|record| match record.scalars().score_follows {
            // A damaged score is as one that is not there.
            true => {
                let score = self.score_of(&record).and_then(|position| self.get(position).ok().flatten());
                record.with_score(score)
            }
            false => record,
        }))
    }

    /// The record at a place, checked once per process.
    fn read_alone(&self, sequence: u64, place: &Place) -> Result<Option<Record>> {
        let damaged =
            |what| Error::Damaged { path: self.path(&place.segment.name), offset: place.entry.offset, what };
        match place.entry.state {
            EntryState::Void | EntryState::Torn => return Ok(None),
            EntryState::Corrupt => return Err(damaged("record")),
            EntryState::Record => {}
        }
        let segment = &place.segment;
        let (header, body) = usize::try_from(place.entry.offset)
            .ok()
            .and_then(|offset| segment.map.committed(offset, segment.header.salt))
            .filter(|(header, _)| header.sequence == sequence)
            .ok_or_else(|| damaged("record header"))?;
        let good = match place.checked {
            Checked::Good => true,
            Checked::Bad => false,
            Checked::NotYet => {
                let good = crc32c::crc32c(&body) == header.body_crc;
                self.with(|index| {
                    index.set_checked(sequence, if good { Checked::Good } else { Checked::Bad })
                });
                good
            }
        };
        if !good {
            return Err(damaged("record body: its CRC does not match"));
        }
        Record::new(&header, body).map(Some).map_err(damaged)
    }

    /// Whether the log's own handles still own it.
    pub(crate) fn check_owner(&self) -> Result<()> {
        match &self.source {
            Source::Live(shared) => shared.check_owner(),
            Source::Files(_) => Ok(()),
        }
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        match &self.source {
            Source::Live(shared) => shared.storage.path(name),
            Source::Files(files) => files.path(name),
        }
    }

    /// The records from `position` on, in order, up to the end as it is when each is asked for.
    #[must_use]
    pub fn iter(&self, position: Position) -> Records {
        Records { reader: self.clone(), next: position }
    }

    /// Waits until something can be read at or after `position`, at most for `deadline`. Returns the end,
    /// which is at or before `position` when the deadline passed. The writer, in this process or another,
    /// wakes it: it does not poll.
    ///
    /// # Errors
    ///
    /// As [`Reader::refresh`].
    pub fn wait(&self, position: Position, deadline: Duration) -> Result<Position> {
        let until = Instant::now() + deadline;
        match &self.source {
            Source::Live(shared) => {
                let mut state = shared.lock();
                shared.reclaim(&mut state);
                while state.index.end() <= position.0 && Instant::now() < until {
                    let wake = state.deadlines.front().map_or(until, |&(_, deadline)| until.min(deadline));
                    state = shared.wait(state, wake);
                    shared.reclaim(&mut state);
                }
                Ok(Position(state.index.end()))
            }
            Source::Files(files) => files.wait(position, until),
        }
    }
}

/// Iterator over records, from [`Reader::iter`].
///
/// A damaged record is one `Err` item; the iteration goes on behind it. After `None` it may be asked again:
/// new records continue where it ended.
#[derive(Debug)]
pub struct Records {
    reader: Reader,
    next: Position,
}

impl Records {
    /// The position that comes next: store it to continue from here.
    #[must_use]
    pub fn position(&self) -> Position {
        self.next
    }
}

impl Iterator for Records {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (oldest, found) = self.reader.with(|index| (index.oldest(), index.at_or_after(self.next.0)));
            let (sequence, place) = found?;
            if self.next.0 < oldest && self.next.0 > 0 {
                let position = std::mem::replace(&mut self.next, Position(oldest));
                return Some(Err(Error::Retired { position, oldest: self.next }));
            }
            self.next = Position(sequence).next();
            if let Some(item) = self.reader.read(sequence, &place).transpose() {
                return Some(item);
            }
        }
    }
}
