//! One segment in memory: its name, and its end with the index table and the trailer.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::clock::clock_us;
use crate::layout::segment::{
    ENTRY, Entry, EntryState, HEADER_PAGE, SegmentHeader, TRAILER, Trailer, decode_table, encode_table,
    rollouts,
};
use crate::locks::Mutex;
use crate::map::Map;
use crate::scan::{self, Start};

/// Unit in which file systems give storage back.
const PAGE: usize = 4096;
const PREFIX: &str = "segment-";
const SUFFIX: &str = ".log";

/// A mapped segment.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) name: String,
    pub(crate) header: SegmentHeader,
    pub(crate) map: Arc<Map>,
    /// Its file has its name, and its header is on stable storage.
    pub(crate) named: Mutex<bool>,
}

impl Segment {
    /// One that was found under its name.
    pub(crate) fn found(name: String, header: SegmentHeader, map: Map) -> Arc<Self> {
        Arc::new(Self { name, header, map: Arc::new(map), named: Mutex::new(true) })
    }
}

/// File name of the segment that starts at `first`.
pub(crate) fn segment_name(first: u64) -> String {
    format!("{PREFIX}{first:020}{SUFFIX}")
}

/// First record of the segment with this file name.
pub(crate) fn segment_first(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    (digits.len() == 20).then(|| digits.parse().ok())?
}

/// What stands at the end of a segment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    Sealed(Trailer),
    Open,
    Damaged,
}

pub(crate) fn read_end(map: &Map, header: &SegmentHeader) -> End {
    let capacity = header.capacity as usize;
    if map.len() < capacity {
        return End::Open;
    }
    let mut block = [0; TRAILER];
    block.copy_from_slice(&map.copy(capacity - TRAILER..capacity));
    if block == [0; TRAILER] {
        return End::Open;
    }
    Trailer::decode(&block, header.salt, header.capacity).map_or(End::Damaged, End::Sealed)
}

/// The index table of a sealed segment; `None` when it is damaged.
pub(crate) fn table(segment: &Segment, trailer: &Trailer) -> Option<Vec<Entry>> {
    let table = trailer.table as usize..trailer.table as usize + trailer.count as usize * ENTRY;
    decode_table(&segment.map.copy(table), trailer, segment.header.format)
}

/// The positions of a sealed segment, from its table, or by walking it should that be damaged.
pub(crate) fn entries(segment: &Segment, trailer: &Trailer) -> Vec<Entry> {
    table(segment, trailer).unwrap_or_else(|| {
        tracing::warn!(segment = segment.name, "a damaged index table; scanning the segment instead");
        let (header, count) = (&segment.header, trailer.count as usize);
        let start = Start { offset: HEADER_PAGE, sequence: header.first };
        let mut entries = scan::unwritten(&segment.map, header, start, false).entries;
        // The trailer is whole, and tells how many there were.
        entries.truncate(count);
        entries.resize(count, Entry::empty(EntryState::Corrupt, trailer.table, 0));
        entries
    })
}

/// Writes index table and trailer behind the last frame and brings them to stable storage. Returns the time
/// it noted.
pub(crate) fn seal(
    map: &Map,
    header: &SegmentHeader,
    entries: &[Entry],
    end: usize,
    next: u64,
) -> io::Result<u64> {
    let (table, table_crc) = encode_table(entries, header.format);
    let sealed_us = clock_us();
    let (count, rollouts) = (entries.len() as u64, rollouts(entries));
    let trailer = Trailer { table: end as u64, count, table_crc, next, sealed_us, rollouts };
    map.put(end, &table);
    map.flush(end..map.len())?;
    map.put(map.len() - TRAILER, &trailer.encode(header.salt));
    map.flush(map.len() - TRAILER..map.len())?;
    Ok(sealed_us)
}

/// The whole pages between index table and trailer, which can be given back to the file system.
pub(crate) fn unused(header: &SegmentHeader, end: usize, entries: usize) -> Range<usize> {
    let table_end = end + entries * ENTRY;
    let trailer_page = (header.capacity as usize - TRAILER) / PAGE * PAGE;
    table_end.next_multiple_of(PAGE).min(trailer_page)..trailer_page
}
