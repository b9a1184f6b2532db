//! Absolute changes of one tensor: what a decoded delta does, in a form that can be journaled and applied
//! twice.

use std::ops::Range;

use crate::bits::{ByteReader, put_varint};
use crate::digest::{Digest, DigestTable};
use crate::element::{BLOCK_ELEMENTS, Element, with_constant};
use crate::error::{Error, Result, expect_length};
use crate::payload::block_elements;

const MAGIC: [u8; 4] = *b"DFP1";

/// Changes of one block: either `changes` single elements, or the whole block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PatchBlock {
    block: usize,
    changed: u32,
    whole: bool,
}

/// Absolute changes of one tensor: (element, new value) pairs and whole blocks. Made by
/// [`decode`](crate::decode).
///
/// Applying it twice is applying it once, so it can be written to a journal first and replayed after a crash.
#[derive(Debug, Clone, Default)]
pub struct Patch {
    digests: DigestTable,
    changes: Changes<Vec<[u8; 2]>, Vec<u8>>,
    /// Values of the single changes in the base, in order; none in a patch that was read back.
    old: Vec<u8>,
}

/// Patches are equal that do the same, whatever they know of the base.
impl PartialEq for Patch {
    fn eq(&self, other: &Self) -> bool {
        (&self.digests, &self.changes) == (&other.digests, &other.changes)
    }
}

impl Eq for Patch {}

/// The journal form of a [`Patch`], checked, and applied from where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournaledPatch<'a> {
    digests: &'a [u8],
    changes: Changes<&'a [[u8; 2]], &'a [u8]>,
}

/// What a patch changes, in either form. All of it lies within the tensor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Changes<P, V> {
    element: Element,
    elements: usize,
    blocks: Vec<PatchBlock>,
    /// Positions in their block of the single changes, ascending, blocks one after the other; little-endian,
    /// as in the journal.
    positions: P,
    /// Values of the single changes and bytes of the whole blocks, in order.
    values: V,
}

/// What changes in one block of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockChanges<'a> {
    /// The first element of the block.
    pub first: usize,
    /// Which of its elements change, counted from `first`, ascending, little-endian; `None`: all of them.
    pub positions: Option<&'a [[u8; 2]]>,
    /// Their new values, one after the other.
    pub values: &'a [u8],
    /// Their values in the base, all of which differ, where the patch was decoded and knows them.
    pub old: Option<&'a [u8]>,
}

/// What changes in some blocks of a tensor, in ascending order.
#[derive(Debug, Default)]
pub(crate) struct Part {
    blocks: Vec<PatchBlock>,
    /// How the digest of each of `blocks` changes (in a full payload: the digest of each block).
    pub(crate) digests: Vec<Digest>,
    positions: Vec<[u8; 2]>,
    pub(crate) values: Vec<u8>,
    old: Vec<u8>,
}

impl Part {
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.digests.clear();
        self.positions.clear();
        self.values.clear();
        self.old.clear();
    }

    /// Adds single changes at ascending `positions` of the block that [`Part::end_block`] will name. Returns
    /// the place for their values.
    #[inline(always)]
    pub(crate) fn push_changes(&mut self, element: Element, positions: &[u16]) -> &mut [u8] {
        self.positions.extend(positions.iter().map(|at| at.to_le_bytes()));
        let start = self.values.len();
        self.values.resize(start + positions.len() * element.size(), 0);
        &mut self.values[start..]
    }

    /// The place that [`Part::push_changes`] returned last holds the values in the base, which are kept; returns it once
    /// more.
    #[inline(always)]
    pub(crate) fn keep_old(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.values.len() - bytes;
        let values = &mut self.values[start..];
        self.old.extend_from_slice(values);
        values
    }

    /// The last `changed` single changes belong to `block`, whose digest changes by `digest`.
    pub(crate) fn end_block(&mut self, block: usize, changed: u32, digest: Digest) {
        if changed > 0 {
            self.blocks.push(PatchBlock { block, changed, whole: false });
            self.digests.push(digest);
        }
    }

    /// Adds all bytes of `block`, of which `changed` elements differ from the base, and whose digest changes
    /// by `digest`.
    pub(crate) fn push_whole(&mut self, block: usize, bytes: &[u8], changed: u32, digest: Digest) {
        self.values.extend_from_slice(bytes);
        self.blocks.push(PatchBlock { block, changed, whole: true });
        self.digests.push(digest);
    }
}

impl Patch {
    /// An empty patch of an empty tensor; decoding into it again and again reuses its memory.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn reset(&mut self, element: Element, elements: usize, digests: &DigestTable) {
        self.digests.copy_from(digests);
        let changes = &mut self.changes;
        (changes.element, changes.elements) = (element, elements);
        changes.blocks.clear();
        changes.positions.clear();
        changes.values.clear();
        self.old.clear();
    }

    /// Adds what changes in blocks beyond those that the patch has.
    pub(crate) fn append(&mut self, part: &Part) {
        for (block, change) in part.blocks.iter().zip(&part.digests) {
            if let Some(digest) = self.digests.blocks_mut().get_mut(block.block) {
                *digest += *change;
            }
        }
        self.changes.blocks.extend_from_slice(&part.blocks);
        self.changes.positions.extend_from_slice(&part.positions);
        self.changes.values.extend_from_slice(&part.values);
        self.old.extend_from_slice(&part.old);
    }

    /// Number of elements that differ from the base.
    pub fn changed(&self) -> u64 {
        self.changes.blocks.iter().map(|block| u64::from(block.changed)).sum()
    }

    /// Length in bytes of the tensor that the patch is for.
    pub fn tensor_bytes(&self) -> u64 {
        self.changes.tensor_bytes()
    }

    /// Bytes of memory that the patch holds; it keeps them when another payload is decoded into it.
    pub fn memory(&self) -> usize {
        let Changes { blocks, positions, values, .. } = &self.changes;
        let lists = blocks.capacity() * size_of::<PatchBlock>() + positions.capacity() * 2;
        lists + values.capacity() + self.old.capacity()
    }

    /// Digests of the result.
    pub fn digests(&self) -> &DigestTable {
        &self.digests
    }

    /// Overwrites the changed elements of `tensor`, which may be the base or already (partly) patched.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] if `tensor` is not as long as the base was; nothing is written then.
    pub fn apply_to(&self, tensor: &mut [u8]) -> Result<()> {
        self.changes.apply_to(tensor)
    }

    /// What changes, block by block, ascending.
    pub fn blocks(&self) -> impl Iterator<Item = BlockChanges<'_>> {
        let mut old = self.old.as_slice();
        self.changes.blocks().map(move |block| {
            let known = block.positions.and_then(|_| old.split_off(..block.values.len()));
            BlockChanges { old: known, ..block }
        })
    }

    /// Runs of consecutive changed bytes: byte offset in the tensor and new bytes, ascending and disjoint.
    pub fn byte_runs(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.changes.byte_runs()
    }

    /// Ranges of bytes of the tensor in which all changes lie, ascending; changes with fewer than `gap` bytes
    /// between them are in one.
    pub fn byte_ranges(&self, gap: u64) -> Vec<Range<u64>> {
        self.changes.byte_ranges(gap)
    }

    /// The journal form: everything above, closed by a digest of all bytes before it. Replaces what `out`
    /// held; one that has held as much before is not allocated anew.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        let Changes { element, elements, blocks, positions, values } = &self.changes;
        out.clear();
        let head = 64 + 16 * self.digests.blocks().len() + 16 * blocks.len();
        out.reserve(head + positions.len() * 2 + values.len());
        out.extend(MAGIC);
        out.push(element.code());
        put_varint(out, *elements as u64);
        self.digests.blocks().iter().for_each(|digest| out.extend(digest.to_bytes()));
        put_varint(out, blocks.len() as u64);
        for block in blocks {
            put_varint(out, block.block as u64);
            put_varint(out, u64::from(block.changed) << 1 | u64::from(block.whole));
        }
        out.extend_from_slice(positions.as_flattened());
        out.extend_from_slice(values);
        let digest = Digest::of(Element::Bytes, 0, out);
        out.extend(digest.to_bytes());
    }

    /// [`Patch::write_to`] with memory of its own.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write_to(&mut out);
        out
    }

    /// The inverse of [`Patch::to_bytes`]. Allocates no more than a small multiple of `bytes`.
    ///
    /// # Errors
    /// As [`JournaledPatch::from_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let JournaledPatch { digests, changes } = JournaledPatch::from_bytes(bytes)?;
        let Changes { element, elements, blocks, positions, values } = changes;
        let (positions, values) = (positions.to_vec(), values.to_vec());
        let changes = Changes { element, elements, blocks, positions, values };
        Ok(Self { digests: DigestTable::from_bytes(digests)?, changes, old: Vec::new() })
    }
}

impl<'a> JournaledPatch<'a> {
    /// Checks what [`Patch::to_bytes`] wrote. Allocates a few bytes for each block that changes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if `bytes` are not what [`Patch::to_bytes`] wrote: their digest is checked first,
    /// then every bound.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self> {
        let what = "patch";
        let corrupt = |offset, why| Error::Corrupt { what, offset, why };
        let (body, digest) = bytes.split_last_chunk::<16>().ok_or(corrupt(0, "bytes end too early"))?;
        if Digest::of(Element::Bytes, 0, body).to_bytes() != *digest {
            return Err(corrupt(body.len(), "digest does not match"));
        }
        let mut reader = ByteReader::new(body, what);
        if reader.array()? != MAGIC {
            return Err(reader.corrupt("not a patch"));
        }
        let element = Element::from_code(reader.byte()?)?;
        let elements = reader.varint()?;
        let elements = usize::try_from(elements)
            .ok()
            .filter(|count| count.checked_mul(element.size()).is_some())
            .ok_or(reader.corrupt("tensor exceeds the address space"))?;
        let table = elements.div_ceil(BLOCK_ELEMENTS);
        let table = table.checked_mul(16).ok_or(reader.corrupt("tensor exceeds the address space"))?;
        let digests = reader.take(table)?;
        let (blocks, singles, value_bytes) = read_blocks(&mut reader, element, elements)?;
        let positions = reader.take(singles * 2)?.as_chunks::<2>().0;
        let values = reader.take(value_bytes)?;
        let changes = Changes { element, elements, blocks, positions, values };
        if !changes.positions_fit() {
            return Err(reader.corrupt("positions do not ascend within their block"));
        }
        reader.finish()?;
        Ok(Self { digests, changes })
    }

    /// As [`Patch::tensor_bytes`].
    pub fn tensor_bytes(&self) -> u64 {
        self.changes.tensor_bytes()
    }

    /// As [`Patch::apply_to`].
    ///
    /// # Errors
    /// As [`Patch::apply_to`].
    pub fn apply_to(&self, tensor: &mut [u8]) -> Result<()> {
        self.changes.apply_to(tensor)
    }
}

impl<P: AsRef<[[u8; 2]]>, V: AsRef<[u8]>> Changes<P, V> {
    fn tensor_bytes(&self) -> u64 {
        (self.elements * self.element.size()) as u64
    }

    fn apply_to(&self, tensor: &mut [u8]) -> Result<()> {
        expect_length("tensor", self.tensor_bytes(), tensor.len())?;
        with_constant!(self.element, e => self.apply_as(e, tensor));
        Ok(())
    }

    fn blocks(&self) -> impl Iterator<Item = BlockChanges<'_>> {
        let (mut positions, mut values) = (self.positions.as_ref(), self.values.as_ref());
        self.blocks.iter().map(move |block| {
            let own = if block.whole { None } else { positions.split_off(..block.changed as usize) };
            let elements = own.map_or_else(|| block_elements(self.elements, block.block), <[_]>::len);
            let values = values.split_off(..elements * self.element.size()).unwrap_or_default();
            BlockChanges { first: block.block * BLOCK_ELEMENTS, positions: own, values, old: None }
        })
    }

    /// As if for each of [`Changes::byte_runs`], but single changes cost less on their own than to be found
    /// in runs.
    #[inline(always)]
    fn apply_as(&self, element: Element, tensor: &mut [u8]) {
        let size = element.size();
        for block in self.blocks() {
            let start = block.first * size;
            let end = tensor.len().min(start + BLOCK_ELEMENTS * size);
            let target = &mut tensor[start..end];
            let Some(positions) = block.positions else {
                target.copy_from_slice(block.values);
                continue;
            };
            // Stores that miss the caches go one after the other, loads side by side.
            std::hint::black_box(positions.iter().fold(0, |seen, at| seen | target[position(*at) * size]));
            for (at, new) in positions.iter().zip(block.values.chunks_exact(size)) {
                let at = position(*at) * size;
                target[at..at + size].copy_from_slice(new);
            }
        }
    }

    fn byte_runs(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let size = self.element.size();
        let mut blocks = self.blocks.iter();
        let (mut positions, mut values) = (self.positions.as_ref(), self.values.as_ref());
        let (mut block, mut left) = (0, 0_usize);
        std::iter::from_fn(move || {
            if left == 0 {
                let next = blocks.next()?;
                block = next.block;
                if next.whole {
                    let bytes = values.split_off(..block_elements(self.elements, block) * size)?;
                    return Some(((block * BLOCK_ELEMENTS * size) as u64, bytes));
                }
                left = next.changed as usize;
            }
            let first = position(*positions.first()?);
            let run = (1..left)
                .find(|&i| positions.get(i).is_none_or(|at| position(*at) != first + i))
                .unwrap_or(left);
            left -= run;
            positions = positions.get(run..)?;
            let bytes = values.split_off(..run * size)?;
            Some((((block * BLOCK_ELEMENTS + first) * size) as u64, bytes))
        })
    }

    fn byte_ranges(&self, gap: u64) -> Vec<Range<u64>> {
        let size = self.element.size() as u64;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut last = 0..0;
        let mut add = |next: Range<u64>| {
            if next.start - last.end >= gap || last.is_empty() {
                ranges.push(std::mem::replace(&mut last, next));
            } else {
                last.end = next.end;
            }
        };
        for block in self.blocks() {
            let start = block.first as u64 * size;
            let Some(positions) = block.positions else {
                add(start..start + block.values.len() as u64);
                continue;
            };
            for at in positions {
                let at = start + position(*at) as u64 * size;
                add(at..at + size);
            }
        }
        ranges.push(last);
        ranges.retain(|range| !range.is_empty());
        ranges
    }

    fn positions_fit(&self) -> bool {
        let mut positions = self.positions.as_ref();
        self.blocks.iter().filter(|block| !block.whole).all(|block| {
            let Some(own) = positions.split_off(..block.changed as usize) else { return false };
            own.is_sorted_by(|a, b| position(*a) < position(*b))
                && own.last().is_some_and(|last| position(*last) < block_elements(self.elements, block.block))
        })
    }
}

fn position(bytes: [u8; 2]) -> usize {
    usize::from(u16::from_le_bytes(bytes))
}

/// Reads the list of blocks; also the number of single changes, and of value bytes.
fn read_blocks(
    reader: &mut ByteReader<'_>,
    element: Element,
    elements: usize,
) -> Result<(Vec<PatchBlock>, usize, usize)> {
    let mut blocks: Vec<PatchBlock> = Vec::new();
    let (mut singles, mut values) = (0, 0);
    for _ in 0..reader.varint()? {
        let block = reader.varint()?;
        let changed = reader.varint()?;
        let next = blocks.last().map_or(0, |block| block.block as u64 + 1);
        if block < next || block >= elements.div_ceil(BLOCK_ELEMENTS) as u64 {
            return Err(reader.corrupt("blocks do not ascend within the tensor"));
        }
        let (block, whole, changed) = (block as usize, changed & 1 == 1, changed >> 1);
        let inside = block_elements(elements, block);
        if changed > inside as u64 || (changed == 0 && !whole) {
            return Err(reader.corrupt("a block has more changes than elements, or none"));
        }
        singles += if whole { 0 } else { changed as usize };
        values += element.size() * if whole { inside } else { changed as usize };
        blocks.push(PatchBlock { block, changed: changed as u32, whole });
    }
    Ok((blocks, singles, values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "a table of a hundred thousand digests")]
    fn offsets_beyond_4_gib() {
        let elements = 3 << 31;
        let blocks = elements / BLOCK_ELEMENTS;
        let digests = DigestTable::from_bytes(&vec![1; blocks * 16]).unwrap();
        let mut patch = Patch::new();
        patch.reset(Element::Bf16, elements, &digests);
        let mut part = Part::default();
        part.push_changes(Element::Bf16, &[3, 4, 65_535]).fill(0xcd);
        part.end_block(blocks - 2, 3, Digest::default());
        part.push_whole(blocks - 1, &vec![7; BLOCK_ELEMENTS * 2], 5, Digest::default());
        patch.append(&part);
        assert_eq!(patch.changed(), 8);
        let patch = Patch::from_bytes(&patch.to_bytes()).unwrap();
        let block = (BLOCK_ELEMENTS * 2) as u64;
        let start = patch.tensor_bytes() - 2 * block;
        let runs: Vec<_> = patch.byte_runs().map(|(offset, bytes)| (offset, bytes.len())).collect();
        assert_eq!(runs, [(start + 6, 4), (start + 131_070, 2), (start + block, 131_072)]);
        assert!(start > 1 << 33);
        let blocks: Vec<_> =
            patch.blocks().map(|block| (block.first, block.positions.map(<[_]>::len))).collect();
        assert_eq!(blocks, [(elements - 2 * BLOCK_ELEMENTS, Some(3)), (elements - BLOCK_ELEMENTS, None)]);
        let values: Vec<_> =
            patch.blocks().map(|block| (block.values.len(), block.values[0], block.old)).collect();
        assert_eq!(values, [(6, 0xcd, None), (BLOCK_ELEMENTS * 2, 7, None)]);
    }
}
