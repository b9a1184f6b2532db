//! A log's directory, read from outside: what a reader knows of it, and how it learns more.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::damage::Recovery;
use crate::durable_end::DurableEnd;
use crate::error::{Error, Result};
use crate::index::{Checked, Index, Loaded};
use crate::layout::segment::HEADER_PAGE;
use crate::lock::LockFile;
use crate::position::{Identity, Position};
use crate::recover::{self, Mode, Opened};
use crate::scan::{self, Start};
use crate::segment::{self, End};
use crate::storage::{Directory, Storage};

/// How often a waiting reader looks whether a writer has come or gone; new records wake it.
const LOOK: Duration = Duration::from_secs(1);
/// The same where no process has written yet that could wake it.
const LOOK_FOR_WRITER: Duration = Duration::from_millis(50);

/// A directory of segments and what is known of it.
pub(crate) struct Files {
    root: PathBuf,
    storage: Directory,
    identity: OnceLock<Identity>,
    recovery: Recovery,
    known: Mutex<Known>,
    durable_end: OnceLock<DurableEnd>,
}

struct Known {
    index: Index,
    mode: Mode,
    /// First positions of the segments it was made from.
    firsts: Vec<u64>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files").field("root", &self.root).finish_non_exhaustive()
    }
}

/// Unwritten when no process writes: then what a crash left is told apart from what is being written.
pub(crate) fn read_mode(root: &Path) -> Result<Mode> {
    if !LockFile::is_taken(root)? {
        return Ok(Mode::Unwritten);
    }
    Ok(Mode::Live { durable: DurableEnd::open(root).map_or(u64::MAX, |durable_end| durable_end.get().1) })
}

impl Files {
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let storage = Directory::new(root);
        let mode = read_mode(root)?;
        let firsts = recover::firsts(&storage)?;
        let opened = recover::read(&storage, mode)?;
        let identity = opened.identity.map_or_else(OnceLock::new, OnceLock::from);
        let known = Mutex::new(Known { index: opened.index, mode, firsts });
        let (root, recovery) = (root.to_owned(), opened.recovery);
        Ok(Self { root, storage, identity, recovery, known, durable_end: OnceLock::new() })
    }

    /// What opening found.
    pub(crate) fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.get()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.storage.path(name)
    }

    pub(crate) fn with<T>(&self, query: impl FnOnce(&mut Index) -> T) -> T {
        query(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner).index)
    }

    /// Learns what has been appended, sealed and removed.
    pub(crate) fn refresh(&self) -> Result<()> {
        let mode = read_mode(&self.root)?;
        let firsts = recover::firsts(&self.storage)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match (known.mode, mode) {
            (Mode::Unwritten, Mode::Unwritten) if known.firsts == firsts => return Ok(()),
            (Mode::Live { .. }, Mode::Live { durable }) => self.extend(&mut known.index, &firsts, durable)?,
            // A writer has come or gone, and has sealed what was open.
            _ => known.index = recover::read(&self.storage, mode)?.index,
        }
        (known.mode, known.firsts) = (mode, firsts);
        if let Some(loaded) = known.index.segments().next_back() {
            // Once it is set, it stays.
            let _ = self.identity.set(loaded.segment.header.identity.clone());
        }
        Ok(())
    }

    /// Adds what is new to the index. The segments that were sealed before are not read again.
    fn extend(&self, index: &mut Index, firsts: &[u64], durable: u64) -> Result<()> {
        // An empty segment may have been removed and made again under the same name.
        let stale = |loaded: &&Loaded| {
            let empty = loaded.end() == loaded.segment.header.first && loaded.sealed_us.is_none();
            empty || firsts.binary_search(&loaded.segment.header.first).is_err()
        };
        let stale: Vec<u64> =
            index.segments().filter(stale).map(|loaded| loaded.segment.header.first).collect();
        for first in stale {
            index.remove_segment(first);
        }
        for (at, &first) in firsts.iter().enumerate() {
            match index.segment(first) {
                Some(loaded) if loaded.sealed_us.is_some() => {}
                Some(_) => walk_on(index, first, durable),
                None => {
                    let mut opened = Opened::default();
                    opened.next = index.end();
                    opened.index = std::mem::take(index);
                    let after = firsts.get(at + 1).copied();
                    let loaded =
                        recover::load(&self.storage, Mode::Live { durable }, first, after, &mut opened);
                    *index = opened.index;
                    match loaded {
                        // Retention was faster.
                        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                        loaded => loaded?,
                    }
                }
            }
        }
        Ok(())
    }

    /// As [`crate::Reader::wait`].
    pub(crate) fn wait(&self, position: Position, until: Instant) -> Result<Position> {
        loop {
            if self.durable_end.get().is_none()
                && let Some(durable_end) = DurableEnd::open(&self.root)
            {
                // As good as the one that another thread may have put there.
                let _ = self.durable_end.set(durable_end);
            }
            // Before looking, so that no news can fall between.
            let seen = self.durable_end.get().map(|durable_end| durable_end.get().0);
            self.refresh()?;
            let end = Position(self.with(|index| index.end()));
            let left = until.saturating_duration_since(Instant::now());
            if end > position || left.is_zero() {
                return Ok(end);
            }
            match self.durable_end.get().zip(seen) {
                Some((durable_end, seen)) => durable_end.sleep(seen, left.min(LOOK)),
                None => std::thread::sleep(left.min(LOOK_FOR_WRITER)),
            }
        }
    }
}

/// Walks an unsealed segment on from its last known record.
fn walk_on(index: &mut Index, first: u64, durable: u64) {
    let Some(loaded) = index.segment(first) else { return };
    let segment = loaded.segment.clone();
    let end = |loaded: &Loaded| {
        let offset = loaded.entries.last().map(|last| (last.offset + last.bytes) as usize);
        Start { offset: offset.unwrap_or(HEADER_PAGE), sequence: first + loaded.entries.len() as u64 }
    };
    let scan = scan::live(&segment.map, &segment.header, end(loaded), durable);
    for entry in scan.entries {
        index.push(first, entry, Checked::Good);
    }
    // It may have been sealed since, and that names every position.
    if let End::Sealed(trailer) = segment::read_end(&segment.map, &segment.header)
        && let Some(known) = index.segment(first).map(|loaded| loaded.entries.len())
    {
        if known < trailer.count as usize {
            for entry in segment::entries(&segment, &trailer).into_iter().skip(known) {
                index.push(first, entry, Checked::NotYet);
            }
        }
        if let Some(loaded) = index.segment_mut(first) {
            loaded.sealed_us = Some(trailer.sealed_us);
        }
    }
}
