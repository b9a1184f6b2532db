//! Finds the records of a segment that has no index table yet, by walking its frames.
//!
//! Frames follow each other without gaps, so normally the walk goes from header to header. Where a header is
//! not valid (a crash lost its page, or it was damaged), the walk tries every multiple of 64 bytes behind it.
//! A frame header carries its own offset and a CRC salted for its segment, so nothing else passes for one.

use crate::layout::ALIGN;
use crate::layout::body;
use crate::layout::frame::{FRAME_HEADER, FrameHeader, FrameState, Peek};
use crate::layout::segment::{ENTRY, Entry, EntryState, SegmentHeader, TRAILER};
use crate::map::Map;

/// A damaged place in one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) offset: usize,
    pub(crate) sequence: u64,
    pub(crate) state: EntryState,
    pub(crate) what: &'static str,
}

/// Where a walk starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) offset: usize,
    pub(crate) sequence: u64,
}

/// What a walk found.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// One per position from the start on.
    pub(crate) entries: Vec<Entry>,
    pub(crate) faults: Vec<Fault>,
    /// End of the last frame.
    pub(crate) end: usize,
}

/// Where the frames of a segment may end.
pub(crate) fn frames_end(map: &Map, header: &SegmentHeader) -> usize {
    let capacity = usize::try_from(header.capacity).unwrap_or(usize::MAX);
    capacity.saturating_sub(TRAILER).min(map.len() / ALIGN * ALIGN)
}

/// Walks a segment that no process writes to.
///
/// `is_last`: no segment follows, so a position lost behind the last record may still be accounted for.
pub(crate) fn unwritten(map: &Map, header: &SegmentHeader, start: Start, is_last: bool) -> Scan {
    let limit = frames_end(map, header);
    let (frames, rubbish) = walk(map, header, start, limit, u64::MAX);
    let attested = frames.iter().map(|frame| frame.durable).max().unwrap_or(0);
    let mut scan = classify(map, header, start, &frames, attested);
    if let Some(offset) = rubbish.filter(|&offset| offset >= scan.end) {
        // Whole frames may have been lost here. One position is given up, so that it is not used again.
        let sequence = start.sequence + scan.entries.len() as u64;
        if is_last && scan.end + (scan.entries.len() + 1) * ENTRY <= limit {
            scan.entries.push(Entry::empty(EntryState::Torn, scan.end as u64, 0));
        }
        let what = "bytes behind the last record";
        scan.faults.push(Fault { offset, sequence, state: EntryState::Torn, what });
    }
    scan
}

/// Walks a segment beside its writer: stops at the first frame that may still be in the making, and before
/// position `durable` (`u64::MAX` when the writer does not tell).
pub(crate) fn live(map: &Map, header: &SegmentHeader, start: Start, durable: u64) -> Scan {
    let limit = frames_end(map, header);
    let nothing_yet = start.sequence >= durable
        || start.offset + FRAME_HEADER > limit
        || map.header(start.offset, header.salt, limit) == Peek::Empty;
    if nothing_yet {
        return Scan { end: start.offset, ..Scan::default() };
    }
    let (frames, _) = walk(map, header, start, limit, durable);
    let attested = match durable {
        u64::MAX => frames.iter().map(|frame| frame.durable).max().unwrap_or(0),
        told => told,
    };
    let mut scan = classify(map, header, start, &frames, attested);
    if let Some(open) = scan.entries.iter().position(|entry| entry.state == EntryState::Torn) {
        scan.end = scan.entries[open].offset as usize;
        scan.entries.truncate(open);
        scan.faults.retain(|fault| fault.sequence < start.sequence + open as u64);
    }
    scan
}

/// All valid frame headers before position `until` in ascending order, and the first place behind the last of
/// them that is not zero.
fn walk(
    map: &Map,
    header: &SegmentHeader,
    start: Start,
    limit: usize,
    until: u64,
) -> (Vec<FrameHeader>, Option<usize>) {
    let mut frames: Vec<FrameHeader> = Vec::new();
    let mut rubbish = None;
    let (mut offset, mut sequence) = (start.offset, start.sequence);
    while offset + FRAME_HEADER <= limit && sequence < until {
        match map.header(offset, header.salt, limit) {
            Peek::Frame(frame) if plausible(&frame, sequence, header) => {
                offset += frame.bytes as usize;
                sequence = frame.sequence + 1;
                frames.push(frame);
                rubbish = None;
            }
            Peek::Empty => offset += ALIGN,
            _ => {
                rubbish.get_or_insert(offset);
                offset += ALIGN;
            }
        }
    }
    (frames, rubbish)
}

/// Numbers only rise, and no more frames can be missing than have room in the segment.
fn plausible(frame: &FrameHeader, expected: u64, header: &SegmentHeader) -> bool {
    frame.sequence >= expected && frame.sequence - header.first <= header.capacity / ALIGN as u64
}

/// Turns headers into entries, checking every body.
fn classify(map: &Map, header: &SegmentHeader, start: Start, frames: &[FrameHeader], attested: u64) -> Scan {
    let mut scan = Scan { end: start.offset, ..Scan::default() };
    let lost = |sequence: u64| if sequence < attested { EntryState::Corrupt } else { EntryState::Torn };
    for frame in frames {
        let mut sequence = start.sequence + scan.entries.len() as u64;
        while sequence < frame.sequence {
            let state = lost(sequence);
            scan.faults.push(Fault { offset: scan.end, sequence, state, what: "frame header" });
            scan.entries.push(Entry::empty(state, scan.end as u64, 0));
            sequence += 1;
        }
        let entry = match frame.state {
            FrameState::Void => Ok(Entry::empty(EntryState::Void, frame.offset, frame.bytes)),
            FrameState::Committed => entry_of(map, header.salt, frame).map_err(|what| (lost(sequence), what)),
            FrameState::Reserved => Err((EntryState::Torn, "record that was never committed")),
        };
        scan.entries.push(entry.unwrap_or_else(|(state, what)| {
            scan.faults.push(Fault { offset: frame.offset as usize, sequence, state, what });
            Entry::empty(state, frame.offset, frame.bytes)
        }));
        scan.end = (frame.offset + frame.bytes) as usize;
    }
    scan
}

/// Checks the body of a committed frame and describes it.
pub(crate) fn entry_of(map: &Map, salt: u64, frame: &FrameHeader) -> Result<Entry, &'static str> {
    let (_, body) = map.committed_body(frame.offset as usize, salt).ok_or("frame header")?;
    if crc32c::crc32c(body) != frame.body_crc {
        return Err("record body: its CRC does not match");
    }
    let (fixed, plan) = body::decode(body)?;
    Ok(describe(frame, &fixed, &plan))
}

/// The index entry of a record.
pub(crate) fn describe(frame: &FrameHeader, fixed: &body::Fixed, plan: &body::Plan) -> Entry {
    let tokens =
        plan.column(crate::sample::ColumnId::TOKENS).map_or(0, |column| column.bytes / column.element.size());
    let (oldest_version, newest_version) = fixed.versions.unwrap_or((u64::MAX, 0));
    Entry {
        state: EntryState::Record,
        kind: frame.kind,
        status: fixed.scalars.status,
        offset: frame.offset,
        bytes: frame.bytes,
        tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        response: u32::try_from(tokens).unwrap_or(u32::MAX).saturating_sub(fixed.prompt_len),
        reward: fixed.scalars.reward,
        parts: fixed.scalars.parts,
        flags: body::flags(&fixed.scalars),
        sample: fixed.scalars.sample_id,
        group: fixed.scalars.group_id,
        rollout: fixed.scalars.rollout_id,
        oldest_version,
        newest_version,
    }
}
