//! Encoding on a machine: launches the kernels, and for blocks hardly related to their base puts the payload
//! together as `encode.rs` and `segment.rs` of the crate do.

mod plan;
#[cfg(test)]
mod tests;

use std::ops::Range;

use plan::{Fetch, Plan};

use super::machine::{
    Arguments, Grid, HostRoom, Kernel, Machine, Memory, Placed, Room, finished, keys_on, numbers,
};
use super::{Error, Result};
use crate::choose::Profile;
use crate::digest::{Digest, DigestTable};
use crate::element::{BLOCK_ELEMENTS, Element};
use crate::entropy;
use crate::error::expect_length;
use crate::payload::{Header, Kind};
use crate::segment::SEGMENT_BLOCKS;

/// `struct Encode` of `kernels/encode.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Encode {
    base: u64,
    fresh: u64,
    elements: u64,
    blocks: u64,
    classes: u64,
    keys: u64,
    firsts: u64,
    statistics: u64,
    changed: u64,
    listed: u64,
    digests: u64,
    tables: u64,
    lists: u64,
    spare: u64,
    coded: u64,
    capacity: u64,
    summary: u64,
    places: u64,
    bytes: u64,
    targets: u64,
    header: u64,
    pieces: u64,
    piece_count: u64,
    text: u64,
    out: u64,
    first: u64,
}

// SAFETY: 26 numbers of 64 bits, in the order of the `struct`.
unsafe impl Arguments for Encode {}

/// Numbers of a segment's statistics: `STATISTICS` of `kernels/encode.cu`.
const STATISTICS: usize = 20 + 16 * 33;
/// Bytes of `struct Table`.
pub(super) const TABLE_BYTES: usize = 4 * 18;
/// Shared memory of a block's classes: `CLASSES_BYTES`.
pub(super) const CLASSES_BYTES: usize = 4 * BLOCK_ELEMENTS / 8 + 16 * (BLOCK_ELEMENTS / 128) * 2 + 16 * 4;
/// Bytes of a block's list of changes: `NEAR` entries. A block with more is looked through once more.
const LIST_BYTES: usize = 4 * 4096;
/// Blocks that a thread block of `emit_flat` codes: `WARPS`.
const WARPS: usize = 8;
/// Code of a block at first, in bytes on average; if it turns out to be more, the blocks are coded once more.
const FIRST_CODE: usize = 4096;
/// Most bytes of tokens before a block, and of a table with its tokens before a segment.
const TOKEN_BYTES: usize = 16;
const TABLE_ROOM: usize = 256;
/// Bytes of a delta's header.
const HEADER_BYTES: usize = 11;
/// The one thread block of `frame`: `FRAMERS` warps.
const FRAME: Grid = Grid { blocks: 1, threads: 1024, shared: 0 };
/// Where there is no target.
const NOWHERE: u64 = u64::MAX;

/// Memory of an encoder; it grows to what the largest tensor needs.
#[derive(Default)]
pub(super) struct State {
    keys: Option<Memory>,
    segments: Room,
    lists: Room,
    spare: Room,
    coded: Room,
    blocks: Room,
    placed: Room,
    out: Room,
    report: HostRoom,
    payload: HostRoom,
    block: HostRoom,
    places: HostRoom,
    checks: Room,
    checked: HostRoom,
    entropy: entropy::Scratch,
    plan: Plan,
    digests: DigestTable,
}

/// What to encode: two tensors of one length, and the digests of the first.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) element: Element,
    pub(super) base: Placed,
    pub(super) new: Placed,
    pub(super) digests: &'a DigestTable,
    pub(super) profile: Profile,
}

/// What was encoded; payload and digests wait in the state.
pub(super) struct Outcome {
    pub(super) changed: u64,
    pub(super) bytes: usize,
    pub(super) not_finite: bool,
}

/// Where the kernels' results lie: one area, which is read back at once.
struct Report {
    blocks: usize,
    segments: usize,
}

/// `struct Summary` of `kernels/encode.cu`.
struct Summary {
    used: u64,
    end: u64,
    changed: u64,
    hard: bool,
    not_finite: bool,
}

impl Summary {
    const BYTES: usize = 40;
    /// Those that coding the blocks once more begins again.
    const CODED_BYTES: usize = 32;

    fn read(bytes: &[u8]) -> Self {
        let mut fields = numbers(bytes).map(u64::from_le_bytes);
        let mut next = || fields.next().unwrap_or(0);
        Self { used: next(), end: next(), changed: next(), hard: next() != 0, not_finite: next() != 0 }
    }
}

impl Report {
    fn digests(&self) -> Range<usize> {
        Summary::BYTES..Summary::BYTES + 16 * self.blocks
    }
    /// What the host reads first.
    fn first(&self) -> Range<usize> {
        0..self.digests().end
    }
    fn changed(&self) -> Range<usize> {
        let start = self.digests().end;
        start..start + 4 * self.blocks
    }
    fn bytes(&self) -> Range<usize> {
        let start = self.changed().end;
        start..start + 4 * self.blocks
    }
    fn tables(&self) -> Range<usize> {
        let start = self.bytes().end;
        start..start + TABLE_BYTES * self.segments
    }
    fn len(&self) -> usize {
        self.tables().end
    }
}

impl State {
    /// The payload that was encoded last, of so many bytes.
    pub(super) fn payload(&self, bytes: usize) -> &[u8] {
        self.payload.filled(bytes)
    }

    /// Digests of the new tensor that was encoded last.
    pub(super) fn digests(&self) -> &DigestTable {
        &self.digests
    }

    pub(super) fn encode(&mut self, machine: &dyn Machine, pair: Pair<'_>) -> Result<Outcome> {
        let outcome = self.queue(machine, pair);
        finished(machine, outcome)
    }

    /// As [`State::encode`], and digests the new tensor itself: as [`crate::Encoder::encode_checked`], but
    /// both sums.
    pub(super) fn encode_checked(&mut self, machine: &dyn Machine, pair: Pair<'_>) -> Result<Outcome> {
        let outcome = self.encode(machine, pair)?;
        self.check(machine, pair)?;
        Ok(outcome)
    }

    fn queue(&mut self, machine: &dyn Machine, pair: Pair<'_>) -> Result<Outcome> {
        let elements = pair.element.count("base", pair.base.bytes)?;
        pair.digests.expect_elements(elements)?;
        expect_length("new tensor", pair.base.bytes as u64, pair.new.bytes)?;
        let report = Report {
            blocks: elements.div_ceil(BLOCK_ELEMENTS),
            segments: elements.div_ceil(BLOCK_ELEMENTS * SEGMENT_BLOCKS),
        };
        if report.blocks == 0 {
            return self.unchanged(machine, &pair);
        }
        let mut arguments = self.arguments(machine, &pair, elements, &report)?;
        self.find(machine, &pair, &report, &arguments)?;
        let summary = self.code(machine, &pair, &report, &mut arguments)?;
        if summary.changed == 0 {
            return self.unchanged(machine, &pair);
        }
        let end = if summary.hard {
            self.assemble(machine, &pair, &report, &mut arguments, elements)?
        } else {
            self.plan.raw.clear();
            summary.end as usize
        };
        self.fetch(machine, &pair, &report, &arguments, end)?;
        Ok(Outcome { changed: summary.changed, bytes: end, not_finite: summary.not_finite })
    }

    /// Compares the digests that were carried over with those of the new tensor's bytes.
    fn check(&mut self, machine: &dyn Machine, pair: Pair<'_>) -> Result<()> {
        let new = self.digest(machine, pair.element, 0, pair.new)?;
        let carried = self.digests.blocks().iter().zip(pair.digests.blocks());
        for ((block, new), (carried, expected)) in (0..).zip(new.blocks()).zip(carried) {
            if new != carried {
                let (expected, found) = (*expected, *expected + (*new - *carried));
                return Err(crate::error::Error::BlockMismatch { block, expected, found }.into());
            }
        }
        Ok(())
    }

    /// Digests of the blocks of a tensor, or of a slice that begins at element `first` of one.
    pub(super) fn digest(
        &mut self,
        machine: &dyn Machine,
        element: Element,
        first: u64,
        tensor: Placed,
    ) -> Result<DigestTable> {
        let elements = element.count("tensor", tensor.bytes)?;
        let first_byte = first * element.size() as u64;
        if !first_byte.is_multiple_of(4) {
            return Err(Error::OddSlice { first_byte });
        }
        let blocks = elements.div_ceil(BLOCK_ELEMENTS);
        if blocks == 0 {
            return Ok(DigestTable::default());
        }
        let arguments = Encode {
            fresh: tensor.address,
            elements: elements as u64,
            keys: keys_on(machine, &mut self.keys)?,
            digests: self.checks.address(machine, 16 * blocks)?,
            first: first_byte / 4,
            ..Encode::default()
        };
        let read = self.checked.bytes(machine, 16 * blocks)?;
        // SAFETY: the room was made for a digest a block, the tensor has as many blocks, and what is read is
        // looked at after the wait.
        let queued = unsafe {
            machine
                .launch(element, Kernel::Digest, Grid::of(blocks), &arguments)
                .and_then(|()| machine.download(arguments.digests, read))
        };
        finished(machine, queued)?;
        Ok(DigestTable::from_bytes(self.checked.filled(16 * blocks))?)
    }

    fn arguments(
        &mut self,
        machine: &dyn Machine,
        pair: &Pair<'_>,
        elements: usize,
        report: &Report,
    ) -> Result<Encode> {
        let (blocks, segments) = (report.blocks, report.segments);
        let keys = keys_on(machine, &mut self.keys)?;
        let wide = if pair.element.size() == 4 { 8 } else { 4 };
        let area = self.blocks.address(machine, report.len().next_multiple_of(16) + (8 + 8 + 4) * blocks)?;
        let places = area + report.len().next_multiple_of(16) as u64;
        let statistics = self.segments.address(machine, segments * (STATISTICS + 1) * 4)?;
        let first_code = blocks * FIRST_CODE + BLOCK_ELEMENTS * pair.element.size();
        let coded = self.coded.address(machine, first_code)?;
        Ok(Encode {
            base: pair.base.address,
            fresh: pair.new.address,
            elements: elements as u64,
            blocks: blocks as u64,
            classes: (pair.profile == Profile::Wire && pair.element != Element::Bytes).into(),
            keys,
            firsts: statistics + (segments * STATISTICS * 4) as u64,
            statistics,
            changed: area + report.changed().start as u64,
            listed: places + 16 * blocks as u64,
            digests: area + report.digests().start as u64,
            tables: area + report.tables().start as u64,
            lists: self.lists.address(machine, blocks * LIST_BYTES)?,
            spare: self.spare.address(machine, machine.emitters().min(blocks) * BLOCK_ELEMENTS * wide)?,
            coded,
            capacity: (self.coded.bytes() / 4) as u64,
            summary: area,
            places,
            bytes: area + report.bytes().start as u64,
            targets: places + 8 * blocks as u64,
            header: HEADER_BYTES as u64,
            ..Encode::default()
        })
    }

    /// Asks for what changed, and for the tables.
    fn find(
        &mut self,
        machine: &dyn Machine,
        pair: &Pair<'_>,
        report: &Report,
        arguments: &Encode,
    ) -> Result<()> {
        // SAFETY: every address is that of a room made for this tensor, or of the tensor itself, and all of
        // them outlive the wait in `code`.
        unsafe {
            machine.clear(arguments.statistics, report.segments * STATISTICS * 4)?;
            machine.clear(arguments.summary, Summary::BYTES)?;
            if arguments.classes == 1 {
                machine.launch(pair.element, Kernel::Sample, Grid::of(report.segments), arguments)?;
            }
            machine.launch(pair.element, Kernel::Scan, Grid::of(report.blocks), arguments)?;
            let choose = Grid { threads: 64, ..Grid::of(report.segments) };
            machine.launch(pair.element, Kernel::Choose, choose, arguments)
        }
    }

    /// Asks for the code of each block and its place in the payload, and waits for the summary.
    fn code(
        &mut self,
        machine: &dyn Machine,
        pair: &Pair<'_>,
        report: &Report,
        arguments: &mut Encode,
    ) -> Result<Summary> {
        let shared = LIST_BYTES + if arguments.classes == 1 { CLASSES_BYTES } else { 0 };
        let emit = Grid { shared, ..Grid::of(machine.emitters().min(report.blocks)) };
        let tokens = TOKEN_BYTES * (report.blocks + 1) + TABLE_ROOM * report.segments + HEADER_BYTES;
        loop {
            arguments.out = self.out.address(machine, self.coded.bytes() + tokens)?;
            let read = &mut self.report.bytes(machine, report.len())?[report.first()];
            // SAFETY: as in `find`, and `out` has room for all code that fits and the tokens between; the
            // report is looked at after the wait.
            unsafe {
                machine.clear(arguments.summary, Summary::CODED_BYTES)?;
                let flat = Grid::of(report.blocks.div_ceil(WARPS));
                machine.launch(pair.element, Kernel::EmitFlat, flat, arguments)?;
                machine.launch(pair.element, Kernel::Emit, emit, arguments)?;
                machine.launch(pair.element, Kernel::Frame, FRAME, arguments)?;
                machine.download(arguments.summary, read)?;
            }
            machine.finish()?;
            let summary = Summary::read(read);
            if summary.used <= arguments.capacity {
                return Ok(summary);
            }
            arguments.coded = self.coded.address(machine, summary.used as usize * 4)?;
            arguments.capacity = (self.coded.bytes() / 4) as u64;
        }
    }

    /// Puts a payload together here, because a block may be better off without its base. Returns its length.
    fn assemble(
        &mut self,
        machine: &dyn Machine,
        pair: &Pair<'_>,
        report: &Report,
        arguments: &mut Encode,
        elements: usize,
    ) -> Result<usize> {
        let Self { report: read, placed, out, block, entropy, plan, places, .. } = self;
        let rest = report.first().end..report.len();
        let read = read.bytes(machine, report.len())?;
        // SAFETY: the report lies there, and is looked at after the wait.
        unsafe { machine.download(arguments.summary + rest.start as u64, &mut read[rest]) }?;
        machine.finish()?;
        plan.begin(report.blocks);
        let mut fetch = Fetch { machine, pair, elements, block, entropy, coded: Vec::new() };
        plan.blocks(report, read, &mut fetch)?;
        let places = places.bytes(machine, plan.bytes())?;
        plan.put(places);
        arguments.targets = placed.address(machine, places.len())?;
        arguments.pieces = arguments.targets + 8 * plan.targets.len() as u64;
        arguments.piece_count = plan.pieces.len() as u64;
        arguments.text = arguments.pieces + 24 * arguments.piece_count;
        arguments.out = out.address(machine, plan.end)?;
        // SAFETY: the room was made for them; they live until the wait in `encode`.
        unsafe { machine.upload(arguments.targets, places) }?;
        Ok(plan.end)
    }

    /// Has the payload of `end` bytes copied to the host, which writes the header meanwhile.
    fn fetch(
        &mut self,
        machine: &dyn Machine,
        pair: &Pair<'_>,
        report: &Report,
        arguments: &Encode,
        end: usize,
    ) -> Result<()> {
        let Self { report: read, payload, plan, digests, .. } = self;
        let (head, body) = payload.bytes(machine, end)?.split_at_mut(HEADER_BYTES);
        // SAFETY: what targets and pieces say lies within `out`, one after the other; all memory lives until
        // the wait.
        unsafe {
            machine.launch(pair.element, Kernel::Pack, Grid::of(report.blocks), arguments)?;
            machine.download(arguments.out + HEADER_BYTES as u64, body)?;
            for (to, from) in &plan.raw {
                let to = to - HEADER_BYTES;
                machine.download(pair.new.address + from.start as u64, &mut body[to..to + from.len()])?;
            }
        }
        digests.copy_from(pair.digests);
        let changes = numbers::<16>(&read.filled(report.len())[report.digests()]).map(Digest::from_bytes);
        digests.blocks_mut().iter_mut().zip(changes).for_each(|(digest, change)| *digest += change);
        let kind = Kind::Delta(pair.digests.total().short_check());
        let mut header = Vec::with_capacity(HEADER_BYTES);
        Header { element: pair.element, kind, result: digests.total().check() }.write(&mut header);
        head.copy_from_slice(&header);
        machine.finish()
    }

    fn unchanged(&mut self, machine: &dyn Machine, pair: &Pair<'_>) -> Result<Outcome> {
        let mut header = Vec::new();
        let result = pair.digests.total().check();
        Header { element: pair.element, kind: Kind::Unchanged, result }.write(&mut header);
        self.payload.bytes(machine, header.len())?.copy_from_slice(&header);
        self.digests.copy_from(pair.digests);
        Ok(Outcome { changed: 0, bytes: header.len(), not_finite: false })
    }
}
