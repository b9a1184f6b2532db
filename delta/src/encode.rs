//! Encoding: scan for changes, choose a table per segment, code each block in its cheapest mode.

use std::ops::Range;

use crate::bits::BitWriter;
use crate::choose::Statistics;
use crate::coder::{SHIFT_BIAS, SHIFT_BITS, put_class};
use crate::digest::Changes;
use crate::element::with_constant;
use crate::payload::{Header, Kind, Token};
use crate::scan::{Path, Work};
use crate::table::{Class, Table};
use crate::{BLOCK_ELEMENTS, Digest, DigestTable, Element, Error, Result, entropy, scan};

/// Blocks that share a coder table; also bounds what the encoder remembers of a tensor.
const SEGMENT_BLOCKS: usize = 32;

/// What a delta is optimised for. A decoder needs no such choice: it does what the payload says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// Smallest. Decoding reads the whole base, for the classes its exponents define.
    #[default]
    Wire,
    /// Decoding reads the base only where it changes.
    Fast,
}

/// What an encoder found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Elements whose bits changed (all of them in a full payload).
    pub changed: u64,
    /// Digests of the new tensor.
    pub digests: DigestTable,
}

/// Appends to `out` one self-delimiting payload that turns `base` into `new`.
///
/// `base_digests` must be the table of `base`: it is carried over to the result, not computed again.
///
/// # Errors
/// [`Error::OddLength`] if `base` is not a whole number of elements, [`Error::LengthMismatch`] if `new` is not as long or `base_digests` has not one digest per block. `out` is unchanged then.
pub fn encode(
    element: Element,
    base: &[u8],
    new: &[u8],
    base_digests: &DigestTable,
    profile: Profile,
    out: &mut Vec<u8>,
) -> Result<Encoded> {
    let elements = element.count("base", base.len())?;
    if base.len() != new.len() {
        return Err(Error::LengthMismatch {
            what: "new tensor",
            expected: base.len() as u64,
            found: new.len() as u64,
        });
    }
    base_digests.expect_elements(elements)?;
    let header = Header { element, kind: Kind::Delta(base_digests.total().short_check()), result: 0 };
    let start = out.len();
    header.write(out);
    let mut encoder = Encoder::new(element, profile, base_digests.clone());
    let segment_bytes = SEGMENT_BLOCKS * BLOCK_ELEMENTS * element.size();
    for (index, (base, new)) in base.chunks(segment_bytes).zip(new.chunks(segment_bytes)).enumerate() {
        encoder.segment(index * SEGMENT_BLOCKS, base, new, out);
    }
    let Encoder { changed, digests, body, .. } = encoder;
    body.finish(out);
    let kind = if changed == 0 { Kind::Unchanged } else { header.kind };
    let header = Header { kind, result: digests.total().check(), ..header };
    let mut front = Vec::with_capacity(32);
    header.write(&mut front);
    if changed == 0 {
        out.truncate(start);
        out.extend(front);
    } else {
        out[start..start + front.len()].copy_from_slice(&front);
    }
    Ok(Encoded { changed, digests })
}

/// Appends to `out` one self-delimiting payload that holds all of `new`, for anchors: no base is needed to decode it.
///
/// # Errors
/// [`Error::OddLength`] if `new` is not a whole number of elements.
pub fn encode_full(element: Element, new: &[u8], out: &mut Vec<u8>) -> Result<Encoded> {
    let elements = element.count("new tensor", new.len())?;
    let digests = DigestTable::of(element, new)?;
    Header { element, kind: Kind::Full(elements as u64), result: digests.total().check() }.write(out);
    let (mut body, mut coded) = (Body::default(), Vec::new());
    for block in new.chunks(BLOCK_ELEMENTS * element.size()) {
        if entropy::encode(element, block, block.len(), &mut coded) {
            body.token(Token::Entropy, &coded, out);
        } else {
            body.raw(block, out);
        }
    }
    body.finish(out);
    Ok(Encoded { changed: elements as u64, digests })
}

/// The body of a payload under construction: runs of equal modes become one token.
#[derive(Default)]
struct Body {
    same: u64,
    raw: u64,
    raw_bytes: Vec<u8>,
}

impl Body {
    fn same(&mut self, out: &mut Vec<u8>) {
        self.end_raw(out);
        self.same += 1;
    }

    fn raw(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        self.end_same(out);
        self.raw += 1;
        self.raw_bytes.extend_from_slice(bytes);
    }

    fn token(&mut self, token: fn(u64) -> Token, bytes: &[u8], out: &mut Vec<u8>) {
        self.finish_runs(out);
        token(bytes.len() as u64).write(out);
        out.extend_from_slice(bytes);
    }

    fn end_same(&mut self, out: &mut Vec<u8>) {
        if self.same > 0 {
            Token::Same(std::mem::take(&mut self.same)).write(out);
        }
    }

    fn end_raw(&mut self, out: &mut Vec<u8>) {
        if self.raw > 0 {
            Token::Raw(std::mem::take(&mut self.raw)).write(out);
            out.append(&mut self.raw_bytes);
        }
    }

    fn finish_runs(&mut self, out: &mut Vec<u8>) {
        self.end_same(out);
        self.end_raw(out);
    }

    fn finish(mut self, out: &mut Vec<u8>) {
        self.finish_runs(out);
    }
}

/// A block of the current segment that has changes; `changes` indexes [`Encoder::positions`] and [`Encoder::steps`].
struct ChangedBlock {
    bytes: Range<usize>,
    changes: Range<usize>,
}

/// State and scratch of one tensor.
struct Encoder {
    element: Element,
    path: Path,
    changed: u64,
    digests: DigestTable,
    body: Body,
    statistics: Statistics,
    /// Changes of the segment in order: position in the block, and step.
    positions: Vec<u16>,
    steps: Vec<i32>,
    blocks: Vec<Option<ChangedBlock>>,
    masks: Vec<u64>,
    steps_before: Vec<u32>,
    class_masks: Vec<u64>,
    class_ranks: Vec<u32>,
    class_steps: Vec<i32>,
    coded: Vec<u8>,
    alone: Vec<u8>,
}

impl Encoder {
    fn new(element: Element, profile: Profile, digests: DigestTable) -> Self {
        Self {
            element,
            path: Path::best(),
            changed: 0,
            digests,
            body: Body::default(),
            statistics: Statistics::new(element, profile),
            positions: Vec::new(),
            steps: Vec::new(),
            blocks: Vec::new(),
            masks: Vec::new(),
            steps_before: Vec::new(),
            class_masks: Vec::new(),
            class_ranks: Vec::new(),
            class_steps: Vec::new(),
            coded: Vec::new(),
            alone: Vec::new(),
        }
    }

    fn segment(&mut self, first_block: usize, base: &[u8], new: &[u8], out: &mut Vec<u8>) {
        self.statistics.begin(base.len());
        self.positions.clear();
        self.steps.clear();
        self.blocks.clear();
        let block_bytes = BLOCK_ELEMENTS * self.element.size();
        for start in (0..base.len()).step_by(block_bytes) {
            let bytes = start..base.len().min(start + block_bytes);
            self.collect(first_block + start / block_bytes, &base[bytes.clone()], &new[bytes.clone()]);
            let changes = self.changes_before_collect()..self.positions.len();
            self.blocks.push((!changes.is_empty()).then_some(ChangedBlock { bytes, changes }));
        }
        self.changed += self.positions.len() as u64;
        if self.positions.is_empty() {
            (0..self.blocks.len()).for_each(|_| self.body.same(out));
            return;
        }
        let table = self.statistics.table();
        self.coded.clear();
        table.write(&mut self.coded);
        self.body.token(Token::Table, &self.coded, out);
        for block in std::mem::take(&mut self.blocks) {
            let Some(block) = block else {
                self.body.same(out);
                continue;
            };
            self.code(&table, &base[block.bytes.clone()], block.changes);
            // A block that costs this much is hardly related to its base: it may be cheaper on its own.
            let new = &new[block.bytes];
            let limit = self.coded.len().min(new.len());
            if limit > new.len() / 2 && entropy::encode(self.element, new, limit, &mut self.alone) {
                self.body.token(Token::Entropy, &self.alone, out);
            } else if self.coded.len() < new.len() {
                self.body.token(Token::Changes, &self.coded, out);
            } else {
                self.body.raw(new, out);
            }
        }
    }

    fn changes_before_collect(&self) -> usize {
        self.blocks.iter().flatten().last().map_or(0, |block| block.changes.end)
    }

    /// Gathers the changes of one block, its statistics and its digest.
    fn collect(&mut self, block: usize, base: &[u8], new: &[u8]) {
        self.path.changed(self.element, base, new, &mut self.masks);
        let before = self.positions.len();
        let first = (block * BLOCK_ELEMENTS) as u64;
        let digest = self.path.run(Collect { encoder: self, first, base, new });
        if self.positions.len() > before {
            self.statistics.block(base);
            if let Some(carried) = self.digests.blocks_mut().get_mut(block) {
                *carried += digest;
            }
        }
    }

    /// Goes through the changes in `self.masks`.
    #[inline(always)]
    fn collect_as(&mut self, element: Element, first: u64, base: &[u8], new: &[u8]) -> Digest {
        let before = self.positions.len();
        scan::positions(&self.masks, &mut self.positions);
        let positions = &self.positions[before..];
        let mut digest = Changes::new();
        self.steps.reserve(positions.len());
        for &at in positions {
            let at = usize::from(at);
            let (old, new) = (element.load(base, at), element.load(new, at));
            let step = element.step(old, new);
            digest.push(element, first + at as u64, old, new);
            self.statistics.change(element.exponent(old), step);
            self.steps.push(step);
        }
        digest.finish()
    }

    /// Codes one block into `self.coded`.
    fn code(&mut self, table: &Table, base: &[u8], changes: Range<usize>) {
        self.coded.clear();
        if !table.is_flat() {
            self.path.classes(self.element, base, table, &mut self.class_masks);
        }
        let elements = base.len() / self.element.size();
        self.path.run(Code { encoder: self, table, elements, changes });
    }

    #[inline(always)]
    fn code_flat(&mut self, class: &Class, members: u32, changes: Range<usize>) {
        let steps = &self.steps[changes.clone()];
        let shift = best_shift(expected(class, members), steps.len());
        let mut bits = BitWriter::new(&mut self.coded);
        bits.put((shift + SHIFT_BIAS) as u32, SHIFT_BITS);
        self.class_ranks.clear();
        self.class_ranks.extend(self.positions[changes].iter().map(|at| u32::from(*at)));
        put_class(&mut bits, self.element, class, shift, members, &self.class_ranks, steps);
        bits.finish();
    }

    #[inline(always)]
    fn code_classes(&mut self, table: &Table, elements: usize, changes: Range<usize>) {
        let (positions, steps) = (&self.positions[changes.clone()], &self.steps[changes]);
        mark(positions, elements, &mut self.masks, &mut self.steps_before);
        let masks = || table.classes.iter().zip(self.class_masks.chunks_exact(scan::class_stride(elements)));
        let expected = masks()
            .filter(|(class, _)| !class.inverted)
            .map(|(class, masks)| expected(class, masks.iter().map(|mask| mask.count_ones()).sum()));
        let shift = best_shift(expected.sum(), steps.len());
        let mut bits = BitWriter::new(&mut self.coded);
        bits.put((shift + SHIFT_BIAS) as u32, SHIFT_BITS);
        for (class, class_masks) in masks() {
            self.class_ranks.clear();
            self.class_steps.clear();
            let mut members = 0;
            for ((&mask, &changed), &before) in class_masks.iter().zip(&self.masks).zip(&self.steps_before) {
                for bit in scan::ones(mask & changed) {
                    let below = (1 << bit) - 1;
                    self.class_ranks.push(members + (mask & below).count_ones());
                    self.class_steps.push(steps[before as usize + (changed & below).count_ones() as usize]);
                }
                members += mask.count_ones();
            }
            put_class(&mut bits, self.element, class, shift, members, &self.class_ranks, &self.class_steps);
        }
        bits.finish();
    }
}

/// Goes through the changes of a block.
struct Collect<'a> {
    encoder: &'a mut Encoder,
    /// Element that the block begins with.
    first: u64,
    base: &'a [u8],
    new: &'a [u8],
}

impl Work for Collect<'_> {
    type Output = Digest;

    #[inline(always)]
    fn run(self) -> Digest {
        let Self { encoder, first, base, new } = self;
        with_constant!(encoder.element, e => encoder.collect_as(e, first, base, new))
    }
}

/// Codes the changes of a block.
struct Code<'a> {
    encoder: &'a mut Encoder,
    table: &'a Table,
    elements: usize,
    changes: Range<usize>,
}

impl Work for Code<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.table.classes.as_slice() {
            [class] => self.encoder.code_flat(class, self.elements as u32, self.changes),
            _ => self.encoder.code_classes(self.table, self.elements, self.changes),
        }
    }
}

/// Changes that a class of so many members has if its run parameter is right: a run is then as long as half of all gaps.
fn expected(class: &Class, members: u32) -> f64 {
    f64::from(members) * std::f64::consts::LN_2 / f64::from(1_u32 << class.run)
}

/// How much longer runs should be in a block with `found` changes than in one with `expected`: a power of two.
fn best_shift(expected: f64, found: usize) -> i32 {
    let ratio = (expected.max(1.0) / found.max(1) as f64).log2().round() as i32;
    ratio.clamp(-SHIFT_BIAS, (1 << SHIFT_BITS) - 1 - SHIFT_BIAS)
}

/// One bit per element, set at `positions`, and the number of positions before each group of 64.
fn mark(positions: &[u16], elements: usize, masks: &mut Vec<u64>, before: &mut Vec<u32>) {
    masks.clear();
    masks.resize(elements.div_ceil(64), 0);
    for at in positions {
        masks[usize::from(*at) / 64] |= 1 << (at % 64);
    }
    before.clear();
    before.extend(masks.iter().scan(0, |sum, mask| {
        let before = *sum;
        *sum += mask.count_ones();
        Some(before)
    }));
}
