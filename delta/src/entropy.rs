//! The block coder for elements without a base: the byte that holds the exponent in a Huffman code, the rest
//! as it is.
//!
//! An element is rotated left by one bit, so that sign and mantissa lie below and the exponent on top. The
//! top byte is the symbol. For one-byte elements that is all of it; of bf16 and f32 it is exactly the
//! exponent. Symbols go to [`STREAMS`] bit streams in quarters of the block, which a decoder can read side by
//! side.

use std::ops::Range;

use crate::bits::{BitReader, BitWriter, ByteReader};
use crate::element::{Element, with_constant};
use crate::error::{Error, Result};
use crate::scan::{Path, Work};

/// Longest code. 2⁻¹¹ is rarer than any exponent worth its own length.
const LENGTH_MAX: usize = 11;
const STREAMS: usize = 4;

/// Code lengths of all symbols; 0 where a symbol does not occur, or is the only one.
type Lengths = [u8; 256];

#[inline(always)]
fn rotated(element: Element, bits: u32) -> u32 {
    let width = element.bits();
    ((bits << 1) | (bits >> (width - 1))) & element.mask()
}

#[inline(always)]
fn unrotated(element: Element, bits: u32) -> u32 {
    let width = element.bits();
    ((bits >> 1) | (bits << (width - 1))) & element.mask()
}

/// Lengths of a Huffman code for these counts, none above [`LENGTH_MAX`]: counts are flattened until it
/// holds.
fn lengths(counts: &[u32; 256]) -> Lengths {
    let mut weights = counts.map(u64::from);
    loop {
        let lengths = unlimited_lengths(&weights);
        if lengths.iter().all(|length| usize::from(*length) <= LENGTH_MAX) {
            return lengths;
        }
        weights.iter_mut().filter(|weight| **weight > 0).for_each(|weight| *weight = *weight / 2 + 1);
    }
}

/// Huffman's algorithm with two queues: leaves by weight, and inner nodes, which come in ascending order by
/// themselves.
fn unlimited_lengths(weights: &[u64; 256]) -> Lengths {
    let mut leaves = [(0, 0); 256];
    let mut n = 0;
    for (symbol, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0) {
        leaves[n] = (weight, symbol);
        n += 1;
    }
    let leaves = &mut leaves[..n];
    leaves.sort_unstable();
    let mut result = [0; 256];
    // Nodes 0..n are the leaves in order, the others follow; each knows its parent.
    let nodes = (2 * n).saturating_sub(1);
    let (mut weight, mut parent, mut depth) = ([0; 511], [0; 511], [0_u8; 511]);
    weight.iter_mut().zip(&*leaves).for_each(|(weight, leaf)| *weight = leaf.0);
    let (mut leaf, mut inner) = (0, n);
    for node in n..nodes {
        for _ in 0..2 {
            let take_leaf = leaf < n && (inner >= node || weight[leaf] <= weight[inner]);
            let child = if take_leaf { &mut leaf } else { &mut inner };
            weight[node] += weight[*child];
            parent[*child] = node;
            *child += 1;
        }
    }
    for node in (0..nodes.saturating_sub(1)).rev() {
        depth[node] = depth[parent[node]] + 1;
    }
    for ((_, symbol), depth) in leaves.iter().zip(depth) {
        result[*symbol] = depth;
    }
    result
}

/// Canonical codes: by length, then by symbol; bit-reversed, because bits are read from the least significant
/// up.
fn codes(lengths: &Lengths) -> [u16; 256] {
    let mut codes = [0; 256];
    let mut next = 0_u16;
    for length in 1..=LENGTH_MAX as u8 {
        for symbol in (0..256).filter(|symbol| lengths[*symbol] == length) {
            codes[symbol] = next.reverse_bits() >> (16 - length);
            next += 1;
        }
        next <<= 1;
    }
    codes
}

/// The four parts of a block of `count` elements.
fn quarters(count: usize) -> [Range<usize>; STREAMS] {
    let quarter = count.div_ceil(STREAMS);
    std::array::from_fn(|stream| (stream * quarter).min(count)..((stream + 1) * quarter).min(count))
}

/// Parts each element into its symbol and the low bytes.
#[inline(always)]
fn part(element: Element, bytes: &[u8], symbols: &mut [u8], low: &mut [u8]) {
    let size = element.size();
    for (at, symbol) in symbols.iter_mut().enumerate() {
        let whole = rotated(element, element.load(bytes, at)).to_le_bytes();
        *symbol = whole[size - 1];
        low[at * (size - 1)..(at + 1) * (size - 1)].copy_from_slice(&whole[..size - 1]);
    }
}

/// Memory that [`encode`] needs; it is kept for the next block.
#[derive(Default)]
pub(crate) struct Scratch {
    symbols: Vec<u8>,
    low: Vec<u8>,
}

/// Codes one block into `out`, unless that takes `limit` bytes or more.
pub(crate) fn encode(
    element: Element,
    bytes: &[u8],
    limit: usize,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> bool {
    out.clear();
    let size = element.size();
    let count = bytes.len() / size;
    let Scratch { symbols, low } = scratch;
    symbols.resize(count, 0);
    low.resize(count * (size - 1), 0);
    with_constant!(element, e => part(e, bytes, symbols, low));
    let mut counts = [0_u32; 256];
    symbols.iter().for_each(|symbol| counts[usize::from(*symbol)] += 1);
    let (Some(first), Some(last)) = (counts.iter().position(|c| *c > 0), counts.iter().rposition(|c| *c > 0))
    else {
        return false;
    };
    let lengths = lengths(&counts);
    let coded: usize =
        counts.iter().zip(&lengths).map(|(count, length)| *count as usize * usize::from(*length)).sum();
    if coded / 8 + low.len() >= limit {
        return false;
    }
    out.extend([first as u8, last as u8]);
    if first < last {
        let mut bits = BitWriter::new(out);
        lengths[first..=last].iter().for_each(|length| bits.put(u32::from(*length), 4));
        bits.finish();
    }
    out.extend_from_slice(low);
    let quarters = quarters(count).map(|range| &symbols[range]);
    for quarter in &quarters[..STREAMS - 1] {
        let bits: usize = quarter.iter().map(|symbol| usize::from(lengths[usize::from(*symbol)])).sum();
        out.extend((bits.div_ceil(8) as u32).to_le_bytes());
    }
    let codes = codes(&lengths);
    for quarter in quarters {
        let mut bits = BitWriter::new(out);
        for symbol in quarter.iter().map(|symbol| usize::from(*symbol)) {
            bits.put(codes[symbol].into(), lengths[symbol].into());
        }
        bits.finish();
    }
    out.len() < limit
}

/// One entry per next [`LENGTH_MAX`] bits: the symbol, and how many bits it takes.
type Lookup = [(u8, u8); 1 << LENGTH_MAX];

fn corrupt(why: &'static str) -> Error {
    Error::Corrupt { what: "entropy block", offset: 0, why }
}

fn read_lookup(reader: &mut ByteReader<'_>) -> Result<Lookup> {
    let [first, last] = reader.array()?;
    if first >= last {
        // One symbol, which takes no bits.
        return if first == last { Ok([(first, 0); _]) } else { Err(corrupt("symbols do not ascend")) };
    }
    let mut lengths = [0; 256];
    let symbols = usize::from(first)..usize::from(last) + 1;
    let mut bits = BitReader::new(reader.take(symbols.len().div_ceil(2))?);
    lengths[symbols].iter_mut().for_each(|length| *length = bits.get(4) as u8);
    bits.finish("entropy block")?;
    let used = || lengths.iter().filter(|length| **length > 0);
    if used().any(|length| usize::from(*length) > LENGTH_MAX)
        || used().map(|length| 1 << (LENGTH_MAX - usize::from(*length))).sum::<usize>() != 1 << LENGTH_MAX
    {
        return Err(corrupt("code lengths do not form a complete prefix code"));
    }
    let mut lookup = [(0, 0); _];
    let codes = codes(&lengths);
    for (symbol, (&length, &code)) in
        lengths.iter().zip(&codes).enumerate().filter(|(_, (length, _))| **length > 0)
    {
        for entry in lookup[usize::from(code)..].iter_mut().step_by(1 << length) {
            *entry = (symbol as u8, length);
        }
    }
    Ok(lookup)
}

/// Decodes what [`encode`] wrote over all of `out`, one block.
pub(crate) fn decode(element: Element, coded: &[u8], out: &mut [u8]) -> Result<()> {
    let mut reader = ByteReader::new(coded, "entropy block");
    let size = element.size();
    let lookup = read_lookup(&mut reader)?;
    let count = out.len() / size;
    let low = reader.take(count * (size - 1))?;
    let mut sizes = [0; STREAMS];
    for size in &mut sizes[..STREAMS - 1] {
        *size = u32::from_le_bytes(reader.array()?) as usize;
    }
    let known = sizes.iter().try_fold(0_usize, |sum, size| sum.checked_add(*size));
    sizes[STREAMS - 1] = known
        .and_then(|known| reader.rest().len().checked_sub(known))
        .ok_or(reader.corrupt("bytes end too early"))?;
    let mut streams = [&[][..]; STREAMS];
    for (stream, size) in streams.iter_mut().zip(sizes) {
        *stream = reader.take(size)?;
    }
    Path::best().run(Join { element, lookup: &lookup, streams, low, out })
}

/// Decodes the four streams side by side and joins symbols and low bytes to elements.
struct Join<'a> {
    element: Element,
    lookup: &'a Lookup,
    streams: [&'a [u8]; STREAMS],
    low: &'a [u8],
    out: &'a mut [u8],
}

impl Work for Join<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self) -> Result<()> {
        with_constant!(self.element, e => self.run_as(e))
    }
}

impl Join<'_> {
    #[inline(always)]
    fn run_as(self, element: Element) -> Result<()> {
        let Self { lookup, streams, low, out, .. } = self;
        let ranges = quarters(out.len() / element.size());
        let mut readers = streams.map(BitReader::new);
        let mut put = |at: usize, symbol: u8| {
            let size = element.size();
            let mut whole = [0; 4];
            whole[..size - 1].copy_from_slice(&low[at * (size - 1)..(at + 1) * (size - 1)]);
            whole[size - 1] = symbol;
            let element = unrotated(element, u32::from_le_bytes(whole)).to_le_bytes();
            out[at * size..(at + 1) * size].copy_from_slice(&element[..size]);
        };
        // Five codes fit into what one look into a stream shows; four divide evenly.
        let together = ranges[STREAMS - 1].len() / 4 * 4;
        for step in (0..together).step_by(4) {
            for (bits, range) in readers.iter_mut().zip(&ranges) {
                let mut ahead = bits.peek();
                let mut taken = 0;
                for at in 0..4 {
                    let (symbol, length) = lookup[ahead as usize % lookup.len()];
                    ahead >>= length;
                    taken += u32::from(length);
                    put(range.start + step + at, symbol);
                }
                bits.skip(taken);
            }
        }
        for ((mut bits, range), stream) in readers.into_iter().zip(ranges).zip(streams) {
            for at in range.start + together..range.end {
                let (symbol, length) = lookup[bits.peek() as usize % lookup.len()];
                bits.skip(length.into());
                put(at, symbol);
            }
            if bits.finish("entropy block")? != stream.len() {
                return Err(corrupt("bytes follow the end of a stream"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::ALL;

    /// Miri has no time for whole blocks, nor for every case: one in so many is looked at.
    const MOST: usize = if cfg!(miri) { 60 } else { 65_536 };
    const TYPES_APART: usize = if cfg!(miri) { 2 } else { 1 };
    const CASES_APART: usize = if cfg!(miri) { 3 } else { 1 };

    fn sample(element: Element, count: usize, spread: f32) -> Vec<u8> {
        (0..count)
            .flat_map(|i| {
                let value = ((i as f32 * 0.7).sin() * spread).exp() * 0.01;
                (value.to_bits() >> (32 - element.bits())).to_le_bytes().into_iter().take(element.size())
            })
            .collect()
    }

    #[test]
    fn blocks_round_trip() {
        let cases = [(1, 1.0), (2, 9.0), (5, 2.0), (MOST, 1.0), (MOST, 30.0), (MOST / 2 + 7, 0.0)];
        for element in ALL.into_iter().rev().step_by(TYPES_APART) {
            for (count, spread) in cases.into_iter().step_by(CASES_APART) {
                let bytes = sample(element, count, spread);
                let (mut coded, mut scratch) = (Vec::new(), Scratch::default());
                assert!(encode(element, &bytes, usize::MAX, &mut scratch, &mut coded));
                let mut out = vec![0xaa; bytes.len()];
                decode(element, &coded, &mut out).unwrap();
                assert!(out == bytes, "{element:?} {count} {spread}");
                assert!(decode(element, &coded[..coded.len() - 1], &mut out).is_err());
                let limit = coded.len();
                assert!(!encode(element, &bytes, limit, &mut scratch, &mut coded));
            }
        }
    }

    #[test]
    fn lengths_are_limited_and_complete() {
        let mut counts = [0; 256];
        let (mut a, mut b) = (1_u32, 1_u32);
        for count in &mut counts[..40] {
            *count = a;
            (a, b) = (b, a.saturating_add(b));
        }
        let lengths = lengths(&counts);
        let sum: usize =
            lengths.iter().filter(|l| **l > 0).map(|length| 1 << (LENGTH_MAX - usize::from(*length))).sum();
        assert_eq!(sum, 1 << LENGTH_MAX);
    }

    #[test]
    fn incomplete_codes_are_refused() {
        for lengths in [&[0x01, 0x02, 0x21][..], &[0x01, 0x02, 0x11, 0x01], &[9, 3, 0], &[0, 1, 0xcc]] {
            assert!(decode(Element::Bytes, lengths, &mut [0; 4]).is_err());
        }
    }
}
