//! Decoding: checks the base, cuts the payload into spans of tokens, and has each turned into absolute
//! changes whose digest is the promised one.

use std::ops::Range;

use crate::bits::{BitReader, ByteReader};
use crate::classes::Classes;
use crate::coder::{SHIFT_BIAS, SHIFT_BITS, corrupt, get_class};
use crate::digest::{Changes, Digest, DigestTable};
use crate::element::{BLOCK_ELEMENTS, Element, with_constant};
use crate::entropy;
use crate::error::{Result, expect_length};
use crate::patch::{Part, Patch};
use crate::payload::{Header, Token, block_elements, expect_result};
use crate::pool::{Jobs, Pool, Serial};
use crate::scan::{self, GROUP, Path, Work};
use crate::source::Source;
use crate::table::Table;

const WHAT: &str = "delta payload";

/// Coded blocks after which a span ends: enough to be worth a job.
const SPAN_BLOCKS: u64 = 16;

/// [`Decoder::decode`] with memory of its own, on this thread.
///
/// # Errors
/// As [`Decoder::decode`].
pub fn decode(
    element: Element,
    base: &[u8],
    base_digests: &DigestTable,
    payload: &[u8],
    patch: &mut Patch,
) -> Result<()> {
    Decoder::new().decode(&Serial, Source { element, bytes: base, digests: base_digests }, payload, patch)
}

/// [`Decoder::decode_full`] with memory of its own, on this thread.
///
/// # Errors
/// As [`Decoder::decode_full`].
pub fn decode_full(element: Element, payload: &[u8], out: &mut [u8]) -> Result<DigestTable> {
    Decoder::new().decode_full(&Serial, element, payload, out)
}

/// Digest of the tensor that a payload of [`Encoder::encode_full`](crate::Encoder::encode_full) holds, as a
/// piece that begins at element `start` of its tensor. It proves that a payload is what it should be. One
/// block at a time is in memory.
///
/// # Errors
/// As [`Decoder::decode_full`], but for the length, which nothing is compared with.
pub fn full_digest(element: Element, start: u64, payload: &[u8]) -> Result<Digest> {
    let mut reader = ByteReader::new(payload, WHAT);
    let (elements, _) = Header::of_full(&mut reader, element)?;
    let elements = usize::try_from(elements).map_err(|_| reader.corrupt("more elements than fit"))?;
    let (mut digest, mut block, mut decoded) = (Digest::default(), 0, Vec::new());
    while block < elements.div_ceil(BLOCK_ELEMENTS) {
        let (run, bytes) = match Token::read(&mut reader)? {
            Token::Raw(run) => {
                let run =
                    usize::try_from(run).unwrap_or(usize::MAX).min(elements.div_ceil(BLOCK_ELEMENTS) - block);
                (run, reader.take(range_of(elements, block, run).len() * element.size())?)
            }
            Token::Entropy(bytes) => {
                decoded.resize(block_elements(elements, block) * element.size(), 0);
                entropy::decode(element, reader.take_long(bytes)?, &mut decoded)?;
                (1, decoded.as_slice())
            }
            _ => return Err(reader.corrupt("a full payload refers to a base")),
        };
        digest += Digest::of(element, start + (block * BLOCK_ELEMENTS) as u64, bytes);
        block += run;
    }
    reader.finish()?;
    Ok(digest)
}

/// Decodes payloads one after the other; once it has seen its largest, it allocates no more.
#[derive(Default)]
pub struct Decoder {
    spans: Vec<Span>,
    jobs: Jobs<Scratch, Part>,
}

/// Tokens of a payload that can be decoded on their own.
struct Span {
    first_block: usize,
    tokens: Range<usize>,
    /// The coder table in force at their beginning.
    table: Option<Range<usize>>,
}

impl Decoder {
    /// One that holds no memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Decodes one payload of [`Encoder::encode`](crate::Encoder::encode) into `patch`; `base` is read, never
    /// written.
    ///
    /// The base's digests are trusted: a rehash per step would cost more than the step. Digests are linear,
    /// so a base that differs from them shifts base and result alike, and is not noticed here. Compare with
    /// [`DigestTable::verify`] after an unclean stop, and as a scrub. The base's check is compared before
    /// anything is decoded, the result's before the patch is handed out. Memory is bounded by the size of the
    /// base, whatever the payload says.
    ///
    /// # Errors
    /// [`Error::BaseMismatch`](crate::Error::BaseMismatch) for another base.
    /// [`Error::ResultMismatch`](crate::Error::ResultMismatch) if the result is not the promised one.
    /// [`Error::Corrupt`](crate::Error::Corrupt) for bytes that no encoder writes.
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a later format,
    /// [`Error::UnsupportedMotion`](crate::Error::UnsupportedMotion) for a withdrawn one. Mismatches of element type,
    /// length or kind. The patch then does nothing.
    pub fn decode(
        &mut self,
        pool: &dyn Pool,
        base: Source<'_>,
        payload: &[u8],
        patch: &mut Patch,
    ) -> Result<()> {
        let elements = base.elements()?;
        patch.reset(base.element, elements, base.digests);
        let decoded = self.decode_into(pool, base, elements, payload, patch);
        if decoded.is_err() {
            patch.reset(base.element, elements, base.digests);
        }
        decoded
    }

    fn decode_into(
        &mut self,
        pool: &dyn Pool,
        base: Source<'_>,
        elements: usize,
        payload: &[u8],
        patch: &mut Patch,
    ) -> Result<()> {
        let mut reader = ByteReader::new(payload, WHAT);
        let Some(result) = Header::of_delta(&mut reader, base.element, base.digests.total())? else {
            return reader.finish();
        };
        self.cut(reader, base.element, elements)?;
        let Self { spans, jobs } = self;
        let decode = Decode { base, elements, payload };
        let work = |span: usize, scratch: &mut Scratch, part: &mut Part| {
            part.clear();
            decode.span(&spans[span], scratch, part)
        };
        jobs.run(pool, spans.len(), work, |part| patch.append(part))?;
        expect_result(result, patch.digests().total().check())
    }

    /// Decodes one payload of [`Encoder::encode_full`](crate::Encoder::encode_full) over all of `out`;
    /// returns the digests of the result.
    ///
    /// # Errors
    /// As [`Decoder::decode`], without a base. `out` may be partly overwritten then.
    pub fn decode_full(
        &mut self,
        pool: &dyn Pool,
        element: Element,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<DigestTable> {
        let elements = element.count("target", out.len())?;
        let mut reader = ByteReader::new(payload, WHAT);
        let (expected, result) = Header::of_full(&mut reader, element)?;
        expect_length("target", expected, elements)?;
        self.cut(reader, element, elements)?;
        let mut digests = DigestTable::default();
        digests.reset(elements);
        let Self { spans, jobs } = self;
        let work = |span: usize, _: &mut Scratch, part: &mut Part| {
            part.clear();
            full_span(element, elements, payload, &spans[span], part)
        };
        let (mut at, mut block) = (0, 0);
        jobs.run(pool, spans.len(), work, |part| {
            out[at..at + part.values.len()].copy_from_slice(&part.values);
            at += part.values.len();
            for digest in &part.digests {
                digests.blocks_mut()[block] = *digest;
                block += 1;
            }
        })?;
        expect_result(result, digests.total().check())?;
        Ok(digests)
    }

    /// Cuts what `reader` still holds, the body of a payload, into spans. After this, the tokens are known to
    /// cover the tensor's blocks, once each, and to lie within the payload.
    fn cut(&mut self, mut reader: ByteReader<'_>, element: Element, elements: usize) -> Result<()> {
        self.spans.clear();
        let blocks = elements.div_ceil(BLOCK_ELEMENTS);
        let (mut block, mut coded, mut table) = (0, 0, None);
        let mut span = Span { first_block: 0, tokens: reader.at()..reader.at(), table: None };
        while block < blocks {
            if coded >= SPAN_BLOCKS {
                let next =
                    Span { first_block: block, tokens: reader.at()..reader.at(), table: table.clone() };
                self.spans.push(std::mem::replace(&mut span, next));
                coded = 0;
            }
            let left = (blocks - block) as u64;
            match Token::read(&mut reader)? {
                Token::Same(run) | Token::Raw(run) if run > left => {
                    return Err(reader.corrupt("more blocks than the tensor has"));
                }
                Token::Same(run) => block += run as usize,
                Token::Raw(run) => {
                    reader.take(range_of(elements, block, run as usize).len() * element.size())?;
                    block += run as usize;
                    coded += run;
                }
                Token::Changes(bytes) | Token::Entropy(bytes) => {
                    reader.take_long(bytes)?;
                    block += 1;
                    coded += 1;
                }
                Token::Table(bytes) => {
                    let start = reader.at();
                    reader.take_long(bytes)?;
                    table = Some(start..reader.at());
                }
            }
            span.tokens.end = reader.at();
        }
        if !span.tokens.is_empty() {
            self.spans.push(span);
        }
        reader.finish()
    }
}

/// Elements of a run of blocks that a tensor of so many elements has.
fn range_of(elements: usize, block: usize, run: usize) -> Range<usize> {
    let start = block * BLOCK_ELEMENTS;
    start..elements.min(start + run * BLOCK_ELEMENTS)
}

/// Decodes a span of a full payload: the blocks' bytes and digests.
fn full_span(element: Element, elements: usize, payload: &[u8], span: &Span, part: &mut Part) -> Result<()> {
    let mut reader = ByteReader::starting(&payload[..span.tokens.end], span.tokens.start, WHAT);
    let mut block = span.first_block;
    while reader.at() < span.tokens.end {
        let start = part.values.len();
        let run = match Token::read(&mut reader)? {
            Token::Raw(run) => {
                let bytes = range_of(elements, block, run as usize).len() * element.size();
                part.values.extend_from_slice(reader.take(bytes)?);
                run as usize
            }
            Token::Entropy(bytes) => {
                part.values.resize(start + block_elements(elements, block) * element.size(), 0);
                entropy::decode(element, reader.take_long(bytes)?, &mut part.values[start..])?;
                1
            }
            _ => return Err(reader.corrupt("a full payload refers to a base")),
        };
        for (index, bytes) in part.values[start..].chunks(BLOCK_ELEMENTS * element.size()).enumerate() {
            part.digests.push(Digest::of(element, ((block + index) * BLOCK_ELEMENTS) as u64, bytes));
        }
        block += run;
    }
    Ok(())
}

/// Memory that decoding needs; it is kept for the next span.
#[derive(Default)]
struct Scratch {
    classes: Classes,
    ranks: Vec<u16>,
    steps: Vec<i32>,
    /// Changed elements of the block, one bit each; their positions; and their steps by position.
    changed: Vec<u64>,
    positions: Vec<u16>,
    step_at: Vec<i32>,
    values: Vec<u8>,
}

/// What all spans of a delta share.
struct Decode<'a> {
    base: Source<'a>,
    elements: usize,
    payload: &'a [u8],
}

impl<'a> Decode<'a> {
    fn span(&self, span: &Span, scratch: &mut Scratch, part: &mut Part) -> Result<()> {
        let element = self.base.element;
        let mut table = match span.table.clone() {
            Some(range) => Some(Table::read(element, &self.payload[range.clone()], range.start)?),
            None => None,
        };
        let mut reader = ByteReader::starting(&self.payload[..span.tokens.end], span.tokens.start, WHAT);
        let mut block = span.first_block;
        while reader.at() < span.tokens.end {
            match Token::read(&mut reader)? {
                Token::Same(run) => block += run as usize,
                Token::Raw(run) => {
                    for block in block..block + run as usize {
                        self.whole(reader.take(self.block(block).len())?, block, scratch, part);
                    }
                    block += run as usize;
                }
                Token::Changes(bytes) => {
                    let coded = reader.take_long(bytes)?;
                    let table = table.as_ref().ok_or(corrupt("no table before the first block"))?;
                    self.changes(coded, table, block, scratch, part)?;
                    block += 1;
                }
                Token::Entropy(bytes) => {
                    let mut values = std::mem::take(&mut scratch.values);
                    values.resize(self.block(block).len(), 0);
                    entropy::decode(element, reader.take_long(bytes)?, &mut values)?;
                    self.whole(&values, block, scratch, part);
                    scratch.values = values;
                    block += 1;
                }
                Token::Table(bytes) => {
                    let offset = reader.at();
                    table = Some(Table::read(element, reader.take_long(bytes)?, offset)?);
                }
            }
        }
        Ok(())
    }

    /// The base's bytes of a block.
    fn block(&self, block: usize) -> &'a [u8] {
        let range = range_of(self.elements, block, 1);
        let size = self.base.element.size();
        &self.base.bytes[range.start * size..range.end * size]
    }

    /// Delivers all elements of a block.
    fn whole(&self, bytes: &[u8], block: usize, scratch: &mut Scratch, part: &mut Part) {
        let element = self.base.element;
        scratch.changed.resize(block_elements(self.elements, block).div_ceil(GROUP), 0);
        Path::best().changed(element, self.block(block), bytes, &mut scratch.changed);
        let changed = scratch.changed.iter().map(|mask| mask.count_ones()).sum();
        let digest = Digest::of(element, (block * BLOCK_ELEMENTS) as u64, bytes);
        part.push_whole(block, bytes, changed, digest - self.base.digests.blocks()[block]);
    }

    fn changes(
        &self,
        coded: &[u8],
        table: &Table,
        block: usize,
        scratch: &mut Scratch,
        part: &mut Part,
    ) -> Result<()> {
        let mut bits = BitReader::new(coded);
        let base = self.block(block);
        let path = Path::best();
        let element = self.base.element;
        if !table.is_flat() {
            scratch.classes.fill(path, element, base, table);
        }
        path.run(Changed { element, base, block, table, bits: &mut bits, scratch, part })?;
        if bits.finish("change block")? == coded.len() {
            Ok(())
        } else {
            Err(corrupt("bytes follow the end"))
        }
    }
}

/// Decodes the changes of one block.
struct Changed<'a, 'b, 'c> {
    element: Element,
    base: &'a [u8],
    block: usize,
    table: &'a Table,
    bits: &'b mut BitReader<'c>,
    scratch: &'b mut Scratch,
    part: &'b mut Part,
}

impl Work for Changed<'_, '_, '_> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self) -> Result<()> {
        let Self { element, base, block, table, bits, scratch, part } = self;
        let elements = base.len() / element.size();
        let shift = bits.get(SHIFT_BITS) as i32 - SHIFT_BIAS;
        if let [class] = table.classes() {
            let Scratch { ranks, steps, .. } = scratch;
            get_class(bits, element, class, shift, elements as u32, ranks, steps)?;
            with_constant!(element, e => deliver(e, block, base, ranks, steps.iter().copied(), part));
        } else {
            classes(element, elements, table, shift, bits, scratch)?;
            let Scratch { changed, positions, step_at, .. } = scratch;
            positions.clear();
            scan::positions(0, changed, positions);
            let steps = positions.iter().map(|at| step_at[usize::from(*at)]);
            with_constant!(element, e => deliver(e, block, base, positions, steps, part));
        }
        Ok(())
    }
}

/// Decodes all classes of a block of `elements` into the scratch's `changed` and `step_at`.
#[inline(always)]
fn classes(
    element: Element,
    elements: usize,
    table: &Table,
    shift: i32,
    bits: &mut BitReader<'_>,
    scratch: &mut Scratch,
) -> Result<()> {
    let Scratch { classes, ranks, steps, changed, step_at, .. } = scratch;
    changed.clear();
    changed.resize(elements.div_ceil(GROUP), 0);
    if step_at.len() < elements {
        step_at.resize(elements, 0);
    }
    for (number, class) in (0..).zip(table.classes()) {
        get_class(bits, element, class, shift, classes.members(number), ranks, steps)?;
        for (rank, step) in ranks.iter().zip(steps.iter()) {
            let at = classes.position(number, u32::from(*rank)) as usize;
            changed[at / GROUP] |= 1 << (at % GROUP);
            step_at[at] = *step;
        }
    }
    Ok(())
}

/// Turns steps into values and adds them to the part.
#[inline(always)]
fn deliver(
    element: Element,
    block: usize,
    base: &[u8],
    positions: &[u16],
    steps: impl Iterator<Item = i32>,
    part: &mut Part,
) {
    let (first, size) = ((block * BLOCK_ELEMENTS) as u64, element.size());
    let mut digest = Changes::new();
    let values = part.push_changes(element, positions);
    // The base's values come before anything is done with them: these loads hardly ever hit a cache, and wait
    // side by side here.
    for (at, value) in positions.iter().zip(values.chunks_exact_mut(size)) {
        let at = usize::from(*at) * size;
        value.copy_from_slice(&base[at..at + size]);
    }
    let values = part.keep_old(positions.len() * size);
    for ((at, step), value) in positions.iter().zip(steps).zip(values.chunks_exact_mut(size)) {
        let old = element.load(value, 0);
        let new = element.stepped(old, step);
        digest.push(element, first + u64::from(*at), old, new);
        value.copy_from_slice(&new.to_le_bytes()[..size]);
    }
    part.end_block(block, positions.len() as u32, digest.finish());
}
