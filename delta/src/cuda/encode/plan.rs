//! The payload as the host plans it: what it writes itself, and where kernels put the code of blocks.

use std::ops::Range;

use super::{HEADER_BYTES, NOWHERE, Pair, Report, TABLE_BYTES};
use crate::cuda::Result;
use crate::cuda::machine::{HostRoom, Machine, numbers};
use crate::element::BLOCK_ELEMENTS;
use crate::entropy;
use crate::payload::{Token, block_elements};
use crate::segment::SEGMENT_BLOCKS;
use crate::table::{Class, Table};

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
pub(super) struct Fetch<'a> {
    pub(super) machine: &'a dyn Machine,
    pub(super) pair: &'a Pair<'a>,
    pub(super) elements: usize,
    pub(super) block: &'a mut HostRoom,
    pub(super) entropy: &'a mut entropy::Scratch,
    pub(super) coded: Vec<u8>,
}

impl Fetch<'_> {
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
pub(super) struct Plan {
    /// What the host writes, and where each piece of it goes.
    pub(super) text: Vec<u8>,
    pub(super) pieces: Vec<(usize, Range<usize>)>,
    /// Where the code of each block goes.
    pub(super) targets: Vec<u64>,
    /// Where bytes of the new tensor go as they are.
    pub(super) raw: Vec<(usize, Range<usize>)>,
    /// Blocks like the base's that no token covers yet.
    same: u64,
    pub(super) end: usize,
}

impl Plan {
    /// Starts over.
    pub(super) fn begin(&mut self, blocks: usize) {
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
    pub(super) fn bytes(&self) -> usize {
        8 * self.targets.len() + 24 * self.pieces.len() + self.text.len()
    }

    pub(super) fn put(&self, out: &mut [u8]) {
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
    pub(super) fn blocks(&mut self, report: &Report, read: &[u8], fetch: &mut Fetch<'_>) -> Result<()> {
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

    fn block(
        &mut self,
        block: usize,
        changed: u32,
        length: usize,
        raw: &mut Range<usize>,
        fetch: &mut Fetch<'_>,
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
