//! Coding one segment: scan for changes, choose a table, code each block in its cheapest mode.

use std::ops::Range;

use crate::bits::BitWriter;
use crate::choose::{Profile, Statistics, floor_log2};
use crate::classes::Classes;
use crate::coder::{SHIFT_BIAS, SHIFT_BITS, put_class};
use crate::digest::{Changes, Digest};
use crate::element::{BLOCK_ELEMENTS, Element, with_constant};
use crate::entropy;
use crate::error::{Error, Result};
use crate::payload::Token;
use crate::scan::{self, GROUP, PLANES, Path, Work};
use crate::table::{CLASSES_MAX, Class, Table};

/// Blocks that share a coder table: what is coded without regard to the rest of the tensor.
pub(crate) const SEGMENT_BLOCKS: usize = 32;

/// Elements that are compared before those that changed are looked at again: few enough to stay in the
/// first-level cache.
const CHUNK_ELEMENTS: usize = 4096;

/// What a segment is made of.
pub(crate) struct Input<'a> {
    pub(crate) element: Element,
    pub(crate) profile: Profile,
    /// Number in the tensor of the segment's first block.
    pub(crate) first_block: usize,
    pub(crate) base: &'a [u8],
    pub(crate) new: &'a [u8],
    /// The base's digests from `first_block` on, if its bytes are to be checked against them.
    pub(crate) digests: Option<&'a [Digest]>,
}

/// A segment, coded: tokens, but for the unchanged blocks at both ends, which may be part of a longer run.
#[derive(Debug, Default)]
pub(crate) struct Segment {
    pub(crate) changed: u64,
    /// Blocks like the base's before `tokens`, and after them.
    pub(crate) before: u64,
    pub(crate) tokens: Vec<u8>,
    pub(crate) after: u64,
    /// What each block adds to the base's digests (in a full payload: the block's digest).
    pub(crate) digests: Vec<Digest>,
    /// Whether an element that changed is NaN or infinite.
    pub(crate) not_finite: bool,
}

impl Segment {
    fn clear(&mut self) {
        (self.changed, self.before, self.after) = (0, 0, 0);
        self.not_finite = false;
        self.tokens.clear();
        self.digests.clear();
    }

    fn token(&mut self, token: Token, bytes: &[u8]) {
        let same = std::mem::take(&mut self.after);
        if self.tokens.is_empty() {
            self.before = same;
        } else if same > 0 {
            Token::Same(same).write(&mut self.tokens);
        }
        token.write(&mut self.tokens);
        self.tokens.extend_from_slice(bytes);
    }

    /// Ends a run of blocks that follow as they are.
    fn raw(&mut self, run: &mut Range<usize>, bytes: &[u8], block_bytes: usize) {
        let run = std::mem::take(run);
        if !run.is_empty() {
            self.token(Token::Raw(run.len().div_ceil(block_bytes) as u64), &bytes[run]);
        }
    }
}

/// Memory that coding a segment needs; it is kept for the next one.
#[derive(Default)]
pub(crate) struct Scratch {
    statistics: Statistics,
    /// Changes of the segment in order: position in the block, and step.
    positions: Vec<u16>,
    steps: Vec<i32>,
    /// Whether one of them leads to NaN or infinity.
    not_finite: bool,
    /// Changes of each block.
    blocks: Vec<Range<usize>>,
    /// Classes of the blocks with changes, by exponent alone: the base is not read again once a table is
    /// chosen.
    planes: Vec<u64>,
    classes: Classes,
    sorted: Sorted,
    coded: Vec<u8>,
    alone: Vec<u8>,
    entropy: entropy::Scratch,
}

impl Scratch {
    /// Codes `input` against its base.
    pub(crate) fn delta(&mut self, input: &Input<'_>, out: &mut Segment) -> Result<()> {
        out.clear();
        self.compare(input, out)?;
        out.changed = self.positions.len() as u64;
        out.not_finite = self.not_finite;
        if self.positions.is_empty() {
            out.after = self.blocks.len() as u64;
            return Ok(());
        }
        let table = self.statistics.table();
        self.coded.clear();
        table.write(&mut self.coded);
        out.token(Token::Table(self.coded.len() as u64), &self.coded);
        self.code_blocks(input, &table, out);
        Ok(())
    }

    /// Gathers the changes of all blocks, and checks the base's digests.
    fn compare(&mut self, input: &Input<'_>, out: &mut Segment) -> Result<()> {
        self.statistics.begin(input.element, input.profile, input.base.len());
        self.positions.clear();
        self.steps.clear();
        self.blocks.clear();
        self.not_finite = false;
        let block_bytes = BLOCK_ELEMENTS * input.element.size();
        let pairs = input.base.chunks(block_bytes).zip(input.new.chunks(block_bytes));
        for (block, (base, new)) in (input.first_block..).zip(pairs) {
            let before = self.positions.len();
            let first = (block * BLOCK_ELEMENTS) as u64;
            let change = self.collect(input, first, base, new);
            out.digests.push(change);
            if let Some(expected) = input.digests.and_then(|all| all.get(block - input.first_block)) {
                // The block was read just now: it is still in the cache.
                if !(*expected + change).is_first_of(input.element, first, new) {
                    let (block, found) = (block as u64, Digest::of(input.element, first, base));
                    return Err(Error::BlockMismatch { block, expected: *expected, found });
                }
            }
            self.blocks.push(before..self.positions.len());
            if self.positions.len() > before {
                self.count(input, block - input.first_block, base);
            }
        }
        Ok(())
    }

    /// Codes each block in its cheapest mode.
    fn code_blocks(&mut self, input: &Input<'_>, table: &Table, out: &mut Segment) {
        let block_bytes = BLOCK_ELEMENTS * input.element.size();
        let pairs = input.base.chunks(block_bytes).zip(input.new.chunks(block_bytes));
        let mut raw = 0..0;
        for (block, (base, new)) in pairs.enumerate() {
            let changes = self.blocks[block].clone();
            if changes.is_empty() {
                out.raw(&mut raw, input.new, block_bytes);
                out.after += 1;
                continue;
            }
            let elements = base.len() / input.element.size();
            self.code(input.element, table, block, elements, changes);
            // A block that costs this much is hardly related to its base: it may be cheaper on its own.
            let limit = self.coded.len().min(new.len());
            if limit > new.len() / 2
                && entropy::encode(input.element, new, limit, &mut self.entropy, &mut self.alone)
            {
                out.raw(&mut raw, input.new, block_bytes);
                out.token(Token::Entropy(self.alone.len() as u64), &self.alone);
            } else if self.coded.len() < new.len() {
                out.raw(&mut raw, input.new, block_bytes);
                out.token(Token::Changes(self.coded.len() as u64), &self.coded);
            } else {
                let start = block * block_bytes;
                raw = if raw.is_empty() { start } else { raw.start }..start + new.len();
            }
        }
        out.raw(&mut raw, input.new, block_bytes);
    }

    /// Codes `new` without a base.
    pub(crate) fn full(&mut self, element: Element, first_block: usize, new: &[u8], out: &mut Segment) {
        out.clear();
        let block_bytes = BLOCK_ELEMENTS * element.size();
        let mut raw = 0..0;
        for (index, block) in new.chunks(block_bytes).enumerate() {
            let first = ((first_block + index) * BLOCK_ELEMENTS) as u64;
            out.digests.push(Digest::of(element, first, block));
            out.not_finite |= Path::best().run(NotFinite { element, bytes: block });
            if entropy::encode(element, block, block.len(), &mut self.entropy, &mut self.alone) {
                out.raw(&mut raw, new, block_bytes);
                out.token(Token::Entropy(self.alone.len() as u64), &self.alone);
            } else {
                let start = index * block_bytes;
                raw = if raw.is_empty() { start } else { raw.start }..start + block.len();
            }
        }
        out.raw(&mut raw, new, block_bytes);
        out.changed = (new.len() / element.size()) as u64;
    }

    /// Gathers the changes of one block and their statistics; returns how they change its digest.
    fn collect(&mut self, input: &Input<'_>, first: u64, base: &[u8], new: &[u8]) -> Digest {
        let (path, element) = (Path::best(), input.element);
        let chunk_bytes = CHUNK_ELEMENTS * element.size();
        let mut masks = [0; CHUNK_ELEMENTS / GROUP];
        let mut digest = Digest::default();
        for (start, (base, new)) in
            (0..).step_by(CHUNK_ELEMENTS).zip(base.chunks(chunk_bytes).zip(new.chunks(chunk_bytes)))
        {
            let masks = &mut masks[..(base.len() / element.size()).div_ceil(GROUP)];
            if path.changed(element, base, new, masks) {
                self.statistics.see(input.base);
                digest += path.run(Collect { scratch: self, element, first, start, masks, base, new });
            }
        }
        digest
    }

    /// Counts the elements of a block with changes, and keeps their classes.
    fn count(&mut self, input: &Input<'_>, block: usize, base: &[u8]) {
        let (path, elements) = (Path::best(), base.len() / input.element.size());
        let planes = planes_of(block, elements);
        if let Some(first) = self.statistics.first() {
            if self.planes.len() < planes.end {
                self.planes.resize(planes.end, 0);
            }
            path.planes(input.element, base, first, CLASSES_MAX as u32 - 1, &mut self.planes[planes.clone()]);
        }
        self.statistics.block(path, elements, self.planes.get(planes).unwrap_or_default());
    }

    /// Codes the changes of one block into `self.coded`.
    fn code(
        &mut self,
        element: Element,
        table: &Table,
        block: usize,
        elements: usize,
        changes: Range<usize>,
    ) {
        self.coded.clear();
        let path = Path::best();
        if let (false, Some(first)) = (table.is_flat(), self.statistics.first()) {
            let fine = &self.planes[planes_of(block, elements)];
            self.classes.fill_from(path, fine, first, elements, table);
        }
        path.run(Code { scratch: self, element, table, elements: elements as u32, changes });
    }
}

/// Where the planes of a block of a segment are.
fn planes_of(block: usize, elements: usize) -> Range<usize> {
    let start = block * BLOCK_ELEMENTS / GROUP * PLANES;
    start..start + elements.div_ceil(GROUP) * PLANES
}

/// Goes through the changes of a chunk.
struct Collect<'a> {
    scratch: &'a mut Scratch,
    element: Element,
    /// Element that the block begins with.
    first: u64,
    /// Position in the block that the chunk begins with.
    start: usize,
    masks: &'a [u64],
    base: &'a [u8],
    new: &'a [u8],
}

impl Work for Collect<'_> {
    type Output = Digest;

    #[inline(always)]
    fn run(self) -> Digest {
        with_constant!(self.element, e => self.run_as(e))
    }
}

impl Collect<'_> {
    #[inline(always)]
    fn run_as(self, element: Element) -> Digest {
        let Self {
            scratch: Scratch { statistics, positions, steps, not_finite, .. },
            first,
            start,
            masks,
            base,
            new,
            ..
        } = self;
        let before = positions.len();
        scan::positions(start, masks, positions);
        let mut digest = Changes::new();
        let (positions, known) = (&positions[before..], steps.len());
        steps.resize(known + positions.len(), 0);
        // No closure, which would not be compiled for the path.
        for (step, &at) in steps[known..].iter_mut().zip(positions) {
            let inside = usize::from(at) - start;
            let (old, new) = (element.load(base, inside), element.load(new, inside));
            *step = element.step(old, new);
            *not_finite |= !element.is_finite(new);
            digest.push(element, first + u64::from(at), old, new);
            statistics.change(old, *step);
        }
        digest.finish()
    }
}

/// Whether an element is NaN or infinite.
struct NotFinite<'a> {
    element: Element,
    bytes: &'a [u8],
}

impl Work for NotFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let Self { element, bytes } = self;
        // No way out of the loop, and no closure, which would not be compiled for the path: it is then done for
        // many elements at once.
        let mut found = false;
        with_constant!(element, e => {
            for bytes in bytes.chunks_exact(e.size()) {
                found |= !e.is_finite(e.load(bytes, 0));
            }
        });
        found
    }
}

/// The changes of a block, class after class.
#[derive(Default)]
struct Sorted {
    /// Class and rank of each change, by position.
    places: Vec<(u8, u16)>,
    ranks: Vec<u16>,
    steps: Vec<i32>,
}

impl Sorted {
    /// Sorts `steps` at `positions`; returns where the changes of each class begin.
    #[inline(always)]
    fn sort(&mut self, classes: &Classes, positions: &[u16], steps: &[i32]) -> [usize; CLASSES_MAX + 1] {
        let mut starts = [0; CLASSES_MAX + 1];
        self.places.resize(positions.len(), (0, 0));
        // No closure, which would not be compiled for the path.
        for (place, position) in self.places.iter_mut().zip(positions) {
            let (class, rank) = classes.rank(*position);
            starts[class + 1] += 1;
            *place = (class as u8, rank as u16);
        }
        for class in 0..CLASSES_MAX {
            starts[class + 1] += starts[class];
        }
        self.ranks.resize(positions.len(), 0);
        self.steps.resize(positions.len(), 0);
        let mut next = starts;
        for (&(class, rank), step) in self.places.iter().zip(steps) {
            let slot = &mut next[usize::from(class)];
            (self.ranks[*slot], self.steps[*slot]) = (rank, *step);
            *slot += 1;
        }
        starts
    }
}

/// Codes the changes of a block.
struct Code<'a> {
    scratch: &'a mut Scratch,
    element: Element,
    table: &'a Table,
    elements: u32,
    changes: Range<usize>,
}

impl Work for Code<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { scratch, element, table, elements, changes } = self;
        let (positions, steps) = (&scratch.positions[changes.clone()], &scratch.steps[changes]);
        let mut bits = BitWriter::new(&mut scratch.coded);
        if let [class] = table.classes() {
            let shift = best_shift(expected(class, elements), steps.len());
            bits.put((shift + SHIFT_BIAS) as u32, SHIFT_BITS);
            put_class(&mut bits, element, class, shift, elements, positions, steps);
        } else {
            let starts = scratch.sorted.sort(&scratch.classes, positions, steps);
            let classes = || (0..).zip(table.classes());
            let plain = classes().filter(|(_, class)| !class.inverted);
            let shift = best_shift(
                plain.map(|(number, class)| expected(class, scratch.classes.members(number))).sum(),
                steps.len(),
            );
            bits.put((shift + SHIFT_BIAS) as u32, SHIFT_BITS);
            for (number, class) in classes() {
                let own = starts[number]..starts[number + 1];
                let (ranks, steps) = (&scratch.sorted.ranks[own.clone()], &scratch.sorted.steps[own]);
                let members = scratch.classes.members(number);
                put_class(&mut bits, element, class, shift, members, ranks, steps);
            }
        }
        bits.finish();
    }
}

/// Changes that a class of so many members has if its run parameter is right: a run is then as long as half
/// of all gaps.
fn expected(class: &Class, members: u32) -> f64 {
    f64::from(members) * std::f64::consts::LN_2 / f64::from(1_u32 << class.run)
}

/// How much longer runs should be in a block with `found` changes than in one with `expected`: a power of
/// two.
fn best_shift(expected: f64, found: usize) -> i32 {
    let ratio = expected.max(1.0) / found.max(1) as f64;
    let whole = floor_log2(ratio);
    // Rounds the logarithm: half a power of two is a factor of the root of two.
    let rest = ratio / f64::from_bits(((whole + 1023) as u64) << 52);
    let shift = whole + i32::from(rest >= std::f64::consts::SQRT_2);
    shift.clamp(-SHIFT_BIAS, (1 << SHIFT_BITS) - 1 - SHIFT_BIAS)
}
