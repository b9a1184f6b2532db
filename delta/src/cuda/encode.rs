//! Encoding on a machine: asks for the kernels, and where blocks are hardly related to their base puts the payload together as `encode.rs` and
//! `segment.rs` of the crate do.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::Result;
use super::machine::{Arguments, Grid, HostRoom, Kernel, Machine, Placed, Room, keys_on, numbers};
use crate::payload::{Header, Kind, Token, block_elements};
use crate::segment::SEGMENT_BLOCKS;
use crate::table::{Class, Table};
use crate::{BLOCK_ELEMENTS, Digest, DigestTable, Element, Profile, entropy};

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
}

// SAFETY: 25 numbers of 64 bits, in the order of the `struct`.
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
pub(super) struct State<M: Machine> {
    keys: Option<M::Memory>,
    segments: Room<M::Memory>,
    lists: Room<M::Memory>,
    spare: Room<M::Memory>,
    coded: Room<M::Memory>,
    blocks: Room<M::Memory>,
    placed: Room<M::Memory>,
    out: Room<M::Memory>,
    report: HostRoom<M::Pinned>,
    payload: HostRoom<M::Pinned>,
    block: HostRoom<M::Pinned>,
    places: HostRoom<M::Pinned>,
    checks: Room<M::Memory>,
    checked: HostRoom<M::Pinned>,
    entropy: entropy::Scratch,
    plan: Plan,
    digests: DigestTable,
}

impl<M: Machine> Default for State<M> {
    fn default() -> Self {
        Self {
            keys: None,
            segments: Room::default(),
            lists: Room::default(),
            spare: Room::default(),
            coded: Room::default(),
            blocks: Room::default(),
            placed: Room::default(),
            out: Room::default(),
            report: HostRoom::default(),
            payload: HostRoom::default(),
            block: HostRoom::default(),
            places: HostRoom::default(),
            checks: Room::default(),
            checked: HostRoom::default(),
            entropy: entropy::Scratch::default(),
            plan: Plan::default(),
            digests: DigestTable::default(),
        }
    }
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
}

impl Summary {
    const BYTES: usize = 32;

    fn read(bytes: &[u8]) -> Self {
        let mut fields = numbers(bytes).map(u64::from_le_bytes);
        let mut next = || fields.next().unwrap_or(0);
        Self { used: next(), end: next(), changed: next(), hard: next() != 0 }
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

impl<M: Machine> State<M> {
    /// The payload that was encoded last, of so many bytes.
    pub(super) fn payload(&self, bytes: usize) -> &[u8] {
        self.payload.filled(bytes)
    }

    /// Digests of the new tensor that was encoded last.
    pub(super) fn digests(&self) -> &DigestTable {
        &self.digests
    }

    pub(super) fn encode(&mut self, machine: &M, pair: Pair<'_>) -> Result<Outcome> {
        let outcome = self.queue(machine, pair);
        self.finished(machine, outcome)
    }

    /// As [`State::encode`], and digests the new tensor itself: as [`crate::Encoder::encode_checked`], but both sums.
    pub(super) fn encode_checked(&mut self, machine: &M, pair: Pair<'_>) -> Result<Outcome> {
        let outcome = self.encode(machine, pair)?;
        let checked = self.check(machine, pair);
        self.finished(machine, checked)?;
        Ok(outcome)
    }

    fn finished<T>(&self, machine: &M, outcome: Result<T>) -> Result<T> {
        // Whatever went wrong: nothing may still be reading or writing when the borrows end.
        let finished = machine.finish();
        let outcome = outcome?;
        finished?;
        Ok(outcome)
    }

    fn queue(&mut self, machine: &M, pair: Pair<'_>) -> Result<Outcome> {
        let elements = pair.element.count("base", pair.base.bytes)?;
        pair.digests.expect_elements(elements)?;
        if pair.base.bytes != pair.new.bytes {
            return Err(crate::Error::LengthMismatch {
                what: "new tensor",
                expected: pair.base.bytes as u64,
                found: pair.new.bytes as u64,
            }
            .into());
        }
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
        Ok(Outcome { changed: summary.changed, bytes: end })
    }

    /// Compares the digests that were carried over with those of the new tensor's bytes.
    fn check(&mut self, machine: &M, pair: Pair<'_>) -> Result<()> {
        let elements = pair.element.count("new tensor", pair.new.bytes)?;
        let blocks = self.digests.blocks().len();
        if blocks == 0 {
            return Ok(());
        }
        let arguments = Encode {
            fresh: pair.new.address,
            elements: elements as u64,
            keys: keys_on(machine, &mut self.keys)?,
            digests: self.checks.address(machine, 16 * blocks)?,
            ..Encode::default()
        };
        let read = &mut self.checked.bytes(machine, 16 * blocks)?[..16 * blocks];
        // SAFETY: the room was made for a digest a block, the tensor has as many blocks, and what is read is looked at after the wait.
        unsafe {
            machine.launch(pair.element, Kernel::Digest, Grid::of(blocks), &arguments)?;
            machine.download(arguments.digests, read)?;
        }
        machine.finish()?;
        let new = numbers::<16>(read).map(Digest::from_bytes);
        let carried = self.digests.blocks().iter().zip(pair.digests.blocks());
        for ((block, new), (carried, expected)) in (0..).zip(new).zip(carried) {
            if new != *carried {
                let (expected, found) = (*expected, *expected + (new - *carried));
                return Err(crate::Error::BlockMismatch { block, expected, found }.into());
            }
        }
        Ok(())
    }

    fn arguments(
        &mut self,
        machine: &M,
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
    fn find(&mut self, machine: &M, pair: &Pair<'_>, report: &Report, arguments: &Encode) -> Result<()> {
        // SAFETY: every address is that of a room made for this tensor, or of the tensor itself, and all of them outlive the wait in `code`.
        unsafe {
            machine.clear(arguments.statistics, report.segments * STATISTICS * 4)?;
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
        machine: &M,
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
            // SAFETY: as in `find`, and `out` has room for all code that fits and the tokens between; the report is looked at after the wait.
            unsafe {
                machine.clear(arguments.summary, Summary::BYTES)?;
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
        machine: &M,
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
        machine: &M,
        pair: &Pair<'_>,
        report: &Report,
        arguments: &Encode,
        end: usize,
    ) -> Result<()> {
        let Self { report: read, payload, plan, digests, .. } = self;
        let (head, body) = payload.bytes(machine, end)?.split_at_mut(HEADER_BYTES);
        // SAFETY: what targets and pieces say lies within `out`, one after the other; all memory lives until the wait.
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

    fn unchanged(&mut self, machine: &M, pair: &Pair<'_>) -> Result<Outcome> {
        let mut header = Vec::new();
        let result = pair.digests.total().check();
        Header { element: pair.element, kind: Kind::Unchanged, result }.write(&mut header);
        self.payload.bytes(machine, header.len())?.copy_from_slice(&header);
        self.digests.copy_from(pair.digests);
        Ok(Outcome { changed: 0, bytes: header.len() })
    }
}

/// Reads a table as kernels keep it.
fn table_of(bytes: &[u8]) -> Table {
    let mut fields = numbers::<4>(bytes).map(u32::from_le_bytes);
    let (first, count) = (fields.next().unwrap_or(0), fields.next().unwrap_or(0));
    let classes = fields.take(count as usize).map(|class| Class {
        inverted: class >> 24 == 1,
        run: class & 0xff,
        large_run: class >> 8 & 0xff,
        rice: class >> 16 & 0xff,
    });
    Table::new(first, classes)
}

/// Blocks that are hardly related to their base are coded here, on their own.
struct Fetch<'a, M: Machine> {
    machine: &'a M,
    pair: &'a Pair<'a>,
    elements: usize,
    block: &'a mut HostRoom<M::Pinned>,
    entropy: &'a mut entropy::Scratch,
    coded: Vec<u8>,
}

impl<M: Machine> Fetch<'_, M> {
    fn range(&self, block: usize) -> Range<usize> {
        let size = self.pair.element.size();
        let start = block * BLOCK_ELEMENTS * size;
        start..start + block_elements(self.elements, block) * size
    }

    /// The block in the entropy code, if that takes less than `limit` bytes.
    fn alone(&mut self, block: usize, limit: usize) -> Result<Option<&[u8]>> {
        let range = self.range(block);
        let bytes = self.block.bytes(self.machine, range.len())?;
        // SAFETY: the range lies in the new tensor; `bytes` is looked at after the wait.
        unsafe {
            self.machine.download(self.pair.new.address + range.start as u64, bytes)?;
        }
        self.machine.finish()?;
        let shorter = entropy::encode(self.pair.element, bytes, limit, self.entropy, &mut self.coded);
        Ok(shorter.then_some(&self.coded))
    }
}

/// A payload as far as the host knows it, behind the header.
#[derive(Default)]
struct Plan {
    /// What the host writes, and where each piece of it goes.
    text: Vec<u8>,
    pieces: Vec<(usize, Range<usize>)>,
    /// Where the code of each block goes.
    targets: Vec<u64>,
    /// Where bytes of the new tensor go as they are.
    raw: Vec<(usize, Range<usize>)>,
    /// Blocks like the base's that no token covers yet.
    same: u64,
    end: usize,
}

impl Plan {
    /// Starts over.
    fn begin(&mut self, blocks: usize) {
        (self.same, self.end) = (0, HEADER_BYTES);
        self.text.clear();
        self.pieces.clear();
        self.raw.clear();
        self.targets.clear();
        self.targets.resize(blocks, NOWHERE);
    }

    fn write(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.text.len();
        write(&mut self.text);
        let text = start..self.text.len();
        self.end += text.len();
        match self.pieces.last_mut() {
            Some((to, last)) if *to + last.len() == self.end - text.len() => last.end = text.end,
            _ => self.pieces.push((self.end - text.len(), text)),
        }
    }

    /// Bytes of targets, pieces and text, as kernels read them.
    fn bytes(&self) -> usize {
        8 * self.targets.len() + 24 * self.pieces.len() + self.text.len()
    }

    fn put(&self, out: &mut [u8]) {
        let (targets, out) = out.split_at_mut(8 * self.targets.len());
        let (pieces, text) = out.split_at_mut(24 * self.pieces.len());
        let numbered = self.targets.iter().zip(targets.as_chunks_mut().0);
        numbered.for_each(|(target, out)| *out = target.to_le_bytes());
        for ((target, from), out) in self.pieces.iter().zip(pieces.as_chunks_mut::<24>().0) {
            let fields = [*target, from.start, from.len()].into_iter().zip(out.as_chunks_mut().0);
            fields.for_each(|(field, out)| *out = (field as u64).to_le_bytes());
        }
        text.copy_from_slice(&self.text);
    }

    fn token(&mut self, token: Token) {
        let mut same = std::mem::take(&mut self.same);
        self.write(|text| {
            Token::run_of_same(&mut same, text);
            token.write(text);
        });
    }

    /// Ends a run of blocks that follow as they are.
    fn end_raw(&mut self, run: &mut Range<usize>, block_bytes: usize) {
        let run = std::mem::take(run);
        if !run.is_empty() {
            self.token(Token::Raw(run.len().div_ceil(block_bytes) as u64));
            let to = self.end;
            self.end += run.len();
            self.raw.push((to, run));
        }
    }

    /// Chooses the mode of each block, as [`crate::segment`] does.
    fn blocks<M: Machine>(&mut self, report: &Report, read: &[u8], fetch: &mut Fetch<'_, M>) -> Result<()> {
        let changed: Vec<u32> = numbers(&read[report.changed()]).map(u32::from_le_bytes).collect();
        let lengths: Vec<u32> = numbers(&read[report.bytes()]).map(u32::from_le_bytes).collect();
        let tables = read[report.tables()].chunks(TABLE_BYTES);
        for ((segment, own), table) in changed.chunks(SEGMENT_BLOCKS).enumerate().zip(tables) {
            if own.iter().all(|changed| *changed == 0) {
                self.same += own.len() as u64;
                continue;
            }
            let mut coded_table = Vec::new();
            table_of(table).write(&mut coded_table);
            self.token(Token::Table(coded_table.len() as u64));
            self.write(|text| text.extend_from_slice(&coded_table));
            let mut raw = 0..0;
            for (block, changed) in (segment * SEGMENT_BLOCKS..).zip(own) {
                self.block(block, *changed, lengths[block] as usize, &mut raw, fetch)?;
            }
            self.end_raw(&mut raw, BLOCK_ELEMENTS * fetch.pair.element.size());
        }
        let mut same = std::mem::take(&mut self.same);
        self.write(|text| Token::run_of_same(&mut same, text));
        Ok(())
    }

    fn block<M: Machine>(
        &mut self,
        block: usize,
        changed: u32,
        length: usize,
        raw: &mut Range<usize>,
        fetch: &mut Fetch<'_, M>,
    ) -> Result<()> {
        let block_bytes = BLOCK_ELEMENTS * fetch.pair.element.size();
        if changed == 0 {
            self.end_raw(raw, block_bytes);
            self.same += 1;
            return Ok(());
        }
        let range = fetch.range(block);
        let limit = length.min(range.len());
        if limit > range.len() / 2
            && let Some(alone) = fetch.alone(block, limit)?
        {
            self.end_raw(raw, block_bytes);
            self.token(Token::Entropy(alone.len() as u64));
            self.write(|text| text.extend_from_slice(alone));
        } else if length < range.len() {
            self.end_raw(raw, block_bytes);
            self.token(Token::Changes(length as u64));
            self.targets[block] = self.end as u64;
            self.end += length;
        } else {
            *raw = if raw.start == raw.end { range.start } else { raw.start }..range.end;
        }
        Ok(())
    }
}
