//! Opens all segments of a log: sealed ones by their index table, the others by walking them.

use crate::damage::{Faults, Recovery, Severity};
use crate::error::{Error, Result};
use crate::index::{Checked, Index, Loaded};
use crate::layout::ALIGN;
use crate::layout::frame::{FRAME_HEADER, Peek};
use crate::layout::segment::{ENTRY, Entry, EntryState, HEADER_PAGE, HeaderFault, SegmentHeader, TRAILER};
use crate::map::Map;
use crate::position::Identity;
use crate::scan::{self, Fault, Scan, Start};
use crate::segment::{End, Segment, read_end, seal, segment_first, segment_name, unused};
use crate::storage::{SPARE, Storage};

/// Largest segment: keeps every size in a segment far from overflow.
pub(crate) const SEGMENT_BYTES_MAX: u64 = 1 << 37;

/// How a log is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Seal what a crash left open.
    Repair,
    /// Change nothing; no process writes.
    Unwritten,
    /// Change nothing; a process is writing, and tells that everything before this position is durable
    /// (`u64::MAX`: does not tell).
    Live { durable: u64 },
}

/// An opened log.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    pub(crate) index: Index,
    pub(crate) recovery: Recovery,
    /// Number of the next record.
    pub(crate) next: u64,
    /// No position before this one is given out again.
    noted: u64,
    /// The identity in the newest segment.
    pub(crate) identity: Option<Identity>,
    /// Bytes of storage that the segments' data takes.
    pub(crate) bytes: u64,
}

/// The last position that a record may follow. A log of a billion records a second comes to it in a century.
const POSITION_MAX: u64 = 1 << 62;

/// Opens every segment to read it.
pub(crate) fn read(storage: &dyn Storage, mode: Mode) -> Result<Opened> {
    open(storage, mode, None, 0)
}

/// Opens every segment and seals those that a crash left open. Refuses a log of another run, model or
/// tokenizer before anything is written. Positions before `noted` are never given out again, whatever became
/// of their records.
pub(crate) fn repair(storage: &dyn Storage, identity: &Identity, noted: u64) -> Result<Opened> {
    open(storage, Mode::Repair, Some(identity), noted)
}

fn open(storage: &dyn Storage, mode: Mode, identity: Option<&Identity>, noted: u64) -> Result<Opened> {
    let mut firsts = firsts(storage)?;
    let mut opened = Opened { next: 0, noted, ..Opened::default() };
    if let Some(identity) = identity {
        // The name of a file can say so, or a cursor.
        let last = firsts.last().copied().unwrap_or_default();
        if last.max(noted) > POSITION_MAX {
            let path = storage.path(&if last > POSITION_MAX { segment_name(last) } else { String::new() });
            return Err(Error::Damaged { path, offset: 0, what: "log: a position that no log comes to" });
        }
        for &first in &firsts {
            refuse_foreign(storage, first, identity)?;
        }
        if let Some(first) = adopt_spare(storage, identity, &firsts)? {
            firsts.push(first);
        }
    }
    for (index, &first) in firsts.iter().enumerate() {
        load(storage, mode, first, firsts.get(index + 1).copied(), &mut opened)?;
    }
    opened.next = opened.next.max(opened.index.end()).max(noted);
    let positions = |loaded: &Loaded| loaded.end() - loaded.segment.header.first;
    opened.recovery.positions = opened.index.segments().map(positions).sum();
    Ok(opened)
}

/// The first positions of all segments, ascending.
pub(crate) fn firsts(storage: &dyn Storage) -> Result<Vec<u64>> {
    let names = storage.names().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => Error::NoLog { path: storage.path("") },
        _ => Error::io("list the segments in", storage.path(""))(source),
    })?;
    let mut firsts: Vec<u64> = names.iter().filter_map(|name| segment_first(name)).collect();
    firsts.sort_unstable();
    Ok(firsts)
}

/// Makes a segment of a spare that records had gone into when its owner died, and removes any other. Answers
/// with its first position.
fn adopt_spare(storage: &dyn Storage, identity: &Identity, firsts: &[u64]) -> Result<Option<u64>> {
    let io = |source| Error::io("adopt", storage.path(SPARE))(source);
    let mut map = match storage.open(SPARE, Some(0)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(io)?,
    };
    let page = HEADER_PAGE.min(map.len()) / 8 * 8;
    let begun = SegmentHeader::decode(&map.copy(0..page)).ok().map(|(header, _)| header).filter(|header| {
        let used = map.len() >= HEADER_PAGE + FRAME_HEADER
            && matches!(map.header(HEADER_PAGE, header.salt, map.len()), Peek::Frame(_));
        let last = firsts.last().is_none_or(|&last| last < header.first);
        used && last && header.identity == *identity && header.capacity == map.len() as u64
    });
    let Some(header) = begun else {
        storage.discard_spare();
        return Ok(None);
    };
    // A failed flush of the dead process may have marked it clean.
    map.touch(0..HEADER_PAGE);
    map.flush(0..HEADER_PAGE).and_then(|()| storage.adopt(&segment_name(header.first))).map_err(io)?;
    Ok(Some(header.first))
}

fn refuse_foreign(storage: &dyn Storage, first: u64, identity: &Identity) -> Result<()> {
    let name = segment_name(first);
    let map = storage.open(&name, None).map_err(Error::io("map", storage.path(&name)))?;
    if let Some((header, _)) = read_header(storage, &name, &map)?
        && let Some((what, expected, found)) = identity.difference(&header.identity)
    {
        return Err(Error::Identity { path: storage.path(&name), what, expected, found });
    }
    Ok(())
}

/// The header of a segment; `None` when it is damaged.
fn read_header(storage: &dyn Storage, name: &str, map: &Map) -> Result<Option<(SegmentHeader, bool)>> {
    match SegmentHeader::decode(&map.copy(0..HEADER_PAGE.min(map.len()) / 8 * 8)) {
        Ok((header, whole)) => {
            // Its CRC is no proof of who wrote it, and words are read at the end of the capacity.
            let sane = header.capacity >= (HEADER_PAGE + TRAILER) as u64
                && header.capacity <= SEGMENT_BYTES_MAX
                && header.capacity.is_multiple_of(ALIGN as u64);
            Ok((sane && segment_first(name) == Some(header.first)).then_some((header, whole)))
        }
        Err(HeaderFault::Damaged) => Ok(None),
        Err(HeaderFault::Unsupported(what, found, known)) => {
            Err(Error::Unsupported { path: storage.path(name), what, found, known })
        }
    }
}

/// Opens one segment and adds it, with what is wrong with it, to `opened`. `after` is where the segment
/// behind it starts.
pub(crate) fn load(
    storage: &dyn Storage,
    mode: Mode,
    first: u64,
    after: Option<u64>,
    opened: &mut Opened,
) -> Result<()> {
    let name = segment_name(first);
    let mut faults = Faults::of(storage.path(&name));
    if opened.next > 0 && first > opened.next {
        let what = "log: the segment before this one is missing";
        faults.note(0, Some(opened.next), Severity::Corrupt, what);
    }
    let map = storage.open(&name, None).map_err(Error::io("map", &faults.path))?;
    let Some((header, whole)) = read_header(storage, &name, &map)? else {
        let what = "segment header: no copy is whole, its records cannot be read";
        faults.note(0, Some(first), Severity::Corrupt, what);
        // Its positions must not be used again. There cannot be more of them than the largest segment has
        // room for.
        let end = after.unwrap_or(first.saturating_add(SEGMENT_BYTES_MAX / ENTRY as u64));
        opened.next = opened.next.max(end);
        opened.recovery.damage.append(&mut faults.found);
        return Ok(());
    };
    if !whole {
        faults.note(0, None, Severity::Redundant, "segment header: one of two copies");
    }
    let capacity = header.capacity as usize;
    if map.len() < capacity {
        faults.note(map.len(), None, Severity::Corrupt, "segment: the file is cut short here");
    }
    opened.identity = Some(header.identity.clone());
    let mode = match read_end(&map, &header) {
        End::Sealed(trailer) => {
            opened.recovery.damage.append(&mut faults.found);
            opened.next = opened.next.max(trailer.next);
            opened.bytes += trailer.table;
            opened.index.add_sealed(Segment::found(name, header, map), trailer);
            return Ok(());
        }
        End::Damaged => {
            let what = "segment trailer; the segment was scanned instead";
            faults.note(capacity - TRAILER, None, Severity::Redundant, what);
            // No process writes to it: its end has been touched already.
            if mode == Mode::Repair { mode } else { Mode::Unwritten }
        }
        End::Open => mode,
    };
    scan_into(opened, storage, mode, after, Unscanned { name, header, map, faults })
}

/// A segment without a table.
struct Unscanned {
    name: String,
    header: SegmentHeader,
    map: Map,
    faults: Faults,
}

/// Scans a segment without a table, and adds it to `opened`.
fn scan_into(
    opened: &mut Opened,
    storage: &dyn Storage,
    mode: Mode,
    after: Option<u64>,
    segment: Unscanned,
) -> Result<()> {
    opened.recovery.scanned += 1;
    let Unscanned { name, header, map, mut faults } = segment;
    let first = header.first;
    let Some(part) = walk(storage, mode, after, opened, &name, &header, map)? else { return Ok(()) };
    for Fault { offset, sequence, state, what } in &part.faults {
        let severity = if *state == EntryState::Corrupt { Severity::Corrupt } else { Severity::Torn };
        faults.note(*offset, Some(*sequence), severity, what);
    }
    opened.recovery.damage.append(&mut faults.found);
    opened.next = opened.next.max(part.next);
    opened.bytes += part.end as u64;
    opened.index.add_segment(Segment::found(name, header, part.map));
    for entry in part.entries {
        opened.index.push(first, entry, Checked::Good);
    }
    if let Some(loaded) = opened.index.segment_mut(first) {
        loaded.sealed_us = part.sealed_us;
    }
    Ok(())
}

/// What a walk through a segment found.
struct Part {
    map: Map,
    entries: Vec<Entry>,
    faults: Vec<Fault>,
    end: usize,
    next: u64,
    sealed_us: Option<u64>,
}

/// Walks a segment without a table. When the mode is to repair, seals it, or removes it if it was never used.
///
/// The segments before it are opened; the one behind it starts at `after`, if there is one yet.
fn walk(
    storage: &dyn Storage,
    mode: Mode,
    after: Option<u64>,
    before: &Opened,
    name: &str,
    header: &SegmentHeader,
    mut map: Map,
) -> Result<Option<Part>> {
    let start = Start { offset: HEADER_PAGE, sequence: header.first };
    let (found, capacity) = (map.len(), header.capacity as usize);
    let known = before.next == header.first;
    if mode == Mode::Repair {
        map = storage.open(name, Some(capacity)).map_err(Error::io("map for repair", storage.path(name)))?;
    }
    let mut scan = match mode {
        Mode::Live { durable } => scan::live(&map, header, start, durable),
        Mode::Unwritten | Mode::Repair => scan::unwritten(&map, header, start, after.is_none()),
    };
    let mut next = after.unwrap_or(header.first + scan.entries.len() as u64);
    let mut sealed_us = None;
    if mode == Mode::Repair {
        if scan.entries.is_empty() && found == capacity && known {
            // The next segment will begin at the same position, and so have the same name.
            storage.remove(name).map_err(Error::io("remove the empty segment", storage.path(name)))?;
            return Ok(None);
        }
        if scan.entries.is_empty() {
            // Only this file still tells how far positions have come: it stays, with one position given up.
            scan.entries.push(Entry::empty(EntryState::Torn, HEADER_PAGE as u64, 0));
            next += 1;
        }
        if after.is_none() {
            // What was cut off may have held records: their positions stay theirs.
            next = next.max(before.noted) + ((capacity - found.min(capacity)) / ENTRY) as u64;
        }
        sealed_us =
            Some(finish(&mut map, header, &scan, next).map_err(Error::io("seal", storage.path(name)))?);
        storage.release(name, unused(header, scan.end, scan.entries.len()));
        map.complete();
    }
    let Scan { entries, faults, end } = scan;
    Ok(Some(Part { map, entries, faults, end, next, sealed_us }))
}

/// Makes a scanned segment durable as it was found, removes what lies behind its records, and seals it.
fn finish(map: &mut Map, header: &SegmentHeader, scan: &Scan, next: u64) -> std::io::Result<u64> {
    map.limit(scan.end);
    map.touch(0..scan.end);
    map.flush(0..scan.end)?;
    map.clear(scan.end);
    seal(map, header, &scan.entries, scan.end, next)
}
