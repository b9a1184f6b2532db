//! Encoding: scan for changes, choose a table per segment, code each block in its cheapest mode.

use std::ops::Range;

use crate::bits::BitWriter;
use crate::choose::Statistics;
use crate::coder::{SHIFT_BIAS, SHIFT_BITS, put_class};
use crate::digest::Changes;
use crate::payload::{Header, Kind, Token};
use crate::scan::Path;
use crate::table::Table;
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
    profile: Profile,
    changed: u64,
    digests: DigestTable,
    body: Body,
    statistics: Statistics,
    /// Changes of the segment in order: position in the block, and step.
    positions: Vec<u16>,
    steps: Vec<i32>,
    blocks: Vec<Option<ChangedBlock>>,
    masks: Vec<u64>,
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
            profile,
            changed: 0,
            digests,
            body: Body::default(),
            statistics: Statistics::new(element),
            positions: Vec::new(),
            steps: Vec::new(),
            blocks: Vec::new(),
            masks: Vec::new(),
            class_masks: Vec::new(),
            class_ranks: Vec::new(),
            class_steps: Vec::new(),
            coded: Vec::new(),
            alone: Vec::new(),
        }
    }

    fn segment(&mut self, first_block: usize, base: &[u8], new: &[u8], out: &mut Vec<u8>) {
        self.statistics.clear();
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
        let table = self.statistics.table(self.profile);
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
        let element = self.element;
        self.path.changed(element, base, new, &mut self.masks);
        let mut digest = Changes::new();
        for (group, &mask) in self.masks.iter().enumerate() {
            for bit in scan::ones(mask) {
                let at = group * 64 + bit as usize;
                let (old, new) = (element.load(base, at), element.load(new, at));
                let step = element.step(old, new);
                digest.push(element, (block * BLOCK_ELEMENTS + at) as u64, old, new);
                self.statistics.change(old, step);
                self.positions.push(at as u16);
                self.steps.push(step);
            }
        }
        let digest = digest.finish();
        if digest != Digest::default() {
            self.statistics.block(base);
            if let Some(carried) = self.digests.blocks_mut().get_mut(block) {
                *carried += digest;
            }
        }
    }

    /// Codes one block into `self.coded`.
    fn code(&mut self, table: &Table, base: &[u8], changes: Range<usize>) {
        self.coded.clear();
        let element = self.element;
        let members = (base.len() / element.size()) as u32;
        let (positions, steps) = (&self.positions[changes.clone()], &self.steps[changes]);
        let mut bits = BitWriter::new(&mut self.coded);
        if let [class] = table.classes.as_slice() {
            let shift = best_shift(
                f64::from(members) / 2_f64.powi(class.run as i32) * std::f64::consts::LN_2,
                steps.len(),
            );
            bits.put((shift + SHIFT_BIAS) as u32, SHIFT_BITS);
            self.class_ranks.clear();
            self.class_ranks.extend(positions.iter().map(|at| u32::from(*at)));
            put_class(&mut bits, element, class, shift, members, &self.class_ranks, steps);
        } else {
            self.path.classes(element, base, table, &mut self.class_masks);
            mark(positions, members, &mut self.masks);
            let groups = self.masks.len();
            let masks = || table.classes.iter().zip(self.class_masks.chunks_exact(groups));
            let expected = masks().filter(|(class, _)| !class.inverted).map(|(class, masks)| {
                let members: u32 = masks.iter().map(|mask| mask.count_ones()).sum();
                f64::from(members) / 2_f64.powi(class.run as i32) * std::f64::consts::LN_2
            });
            let shift = best_shift(expected.sum(), steps.len());
            bits.put((shift + SHIFT_BIAS) as u32, SHIFT_BITS);
            for (class, class_masks) in masks() {
                let members = rank_changes(
                    class_masks,
                    &self.masks,
                    steps,
                    &mut self.class_ranks,
                    &mut self.class_steps,
                );
                put_class(&mut bits, element, class, shift, members, &self.class_ranks, &self.class_steps);
            }
        }
        bits.finish();
    }
}

/// How much longer runs should be in a block with `found` changes than in one with `expected`: a power of two.
fn best_shift(expected: f64, found: usize) -> i32 {
    let ratio = (expected.max(1.0) / found.max(1) as f64).log2().round() as i32;
    ratio.clamp(-SHIFT_BIAS, (1 << SHIFT_BITS) - 1 - SHIFT_BIAS)
}

/// One bit per element, set at `positions`.
fn mark(positions: &[u16], elements: u32, masks: &mut Vec<u64>) {
    masks.clear();
    masks.resize(elements.div_ceil(64) as usize, 0);
    for at in positions {
        masks[usize::from(*at) / 64] |= 1 << (at % 64);
    }
}

/// Ranks within a class, and steps, of the changes of a block that belong to the class. Returns the number of members.
fn rank_changes(
    class_masks: &[u64],
    changed: &[u64],
    steps: &[i32],
    ranks: &mut Vec<u32>,
    class_steps: &mut Vec<i32>,
) -> u32 {
    ranks.clear();
    class_steps.clear();
    let (mut members, mut first_step) = (0, 0);
    for (&class, &changed) in class_masks.iter().zip(changed) {
        for bit in scan::ones(class & changed) {
            let below = (1 << bit) - 1;
            ranks.push(members + (class & below).count_ones());
            class_steps.push(steps[first_step + (changed & below).count_ones() as usize]);
        }
        members += class.count_ones();
        first_step += changed.count_ones() as usize;
    }
    members
}
