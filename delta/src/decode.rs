//! Decoding: checks the base, reads the tokens, and delivers absolute changes whose digest is the promised one.

use crate::bits::{BitReader, ByteReader};
use crate::coder::{SHIFT_BIAS, SHIFT_BITS, get_class};
use crate::digest::{Changes, short};
use crate::element::with_constant;
use crate::payload::{Header, Kind, Token, block_elements};
use crate::scan::{Path, Work};
use crate::table::Table;
use crate::{BLOCK_ELEMENTS, Digest, DigestTable, Element, Error, Patch, Result, entropy, scan};

const WHAT: &str = "delta payload";

/// Decodes one payload of [`encode`](crate::encode) into `patch`; `base` is read, never written.
///
/// `base_digests` must be the table of `base`: it is taken at its word, because a rehash per step would cost more than the step.
/// (Digests are linear, so a base that silently differs from its table shifts base and result alike and is not noticed here; compare
/// with [`DigestTable::of`] after an unclean stop and as a scrub.) The base's check is compared before anything is decoded, the result's check before
/// the patch is handed out. Memory is bounded by the size of the base, whatever the payload says.
///
/// # Errors
/// [`Error::BaseMismatch`] for another base, [`Error::ResultMismatch`] if the result is not the promised one, [`Error::Corrupt`] for bytes that no encoder
/// writes, [`Error::Unsupported`] for a later format, and mismatches of element type, length or kind. The patch then does nothing.
pub fn decode(
    element: Element,
    base: &[u8],
    base_digests: &DigestTable,
    payload: &[u8],
    patch: &mut Patch,
) -> Result<()> {
    let elements = element.count("base", base.len())?;
    base_digests.expect_elements(elements)?;
    patch.reset(element, elements, base_digests);
    let decoded = decode_into(element, base, base_digests, payload, patch);
    if decoded.is_err() {
        patch.reset(element, elements, base_digests);
    }
    decoded
}

fn decode_into(
    element: Element,
    base: &[u8],
    base_digests: &DigestTable,
    payload: &[u8],
    patch: &mut Patch,
) -> Result<()> {
    let mut reader = ByteReader::new(payload, WHAT);
    let header = Header::read(&mut reader)?;
    header.expect(element)?;
    let base_total = base_digests.total();
    let mismatch = |expected| Err(Error::BaseMismatch { expected, found: base_total.short_check() });
    match header.kind {
        Kind::Full(_) => return Err(Error::KindMismatch { expected: "a delta", found: "full" }),
        Kind::Unchanged if header.result != base_total.check() => {
            return mismatch(short(header.result));
        }
        Kind::Unchanged => return reader.finish(),
        Kind::Delta(check) if check != base_total.short_check() => return mismatch(check),
        Kind::Delta(_) => {}
    }
    Decoder::new(element, base).body(&mut reader, base_digests.blocks().len(), patch)?;
    reader.finish()?;
    expect_result(header.result, patch.digests())
}

fn expect_result(expected: u64, digests: &DigestTable) -> Result<()> {
    let found = digests.total().check();
    if expected == found { Ok(()) } else { Err(Error::ResultMismatch { expected, found }) }
}

/// Decodes one payload of [`encode_full`](crate::encode_full) over all of `out`; returns the digests of the result.
///
/// # Errors
/// As [`decode`], without a base. `out` may be partly overwritten then.
pub fn decode_full(element: Element, payload: &[u8], out: &mut [u8]) -> Result<DigestTable> {
    let elements = element.count("target", out.len())?;
    let mut reader = ByteReader::new(payload, WHAT);
    let header = Header::read(&mut reader)?;
    header.expect(element)?;
    match header.kind {
        Kind::Full(expected) if expected != elements as u64 => {
            return Err(Error::LengthMismatch { what: "target", expected, found: elements as u64 });
        }
        Kind::Full(_) => {}
        _ => return Err(Error::KindMismatch { expected: "full", found: "a delta" }),
    }
    let block_bytes = BLOCK_ELEMENTS * element.size();
    let mut rest = &mut *out;
    while !rest.is_empty() {
        match Token::read(&mut reader)? {
            Token::Raw(blocks) if blocks <= rest.len().div_ceil(block_bytes) as u64 => {
                let bytes = (blocks as usize).saturating_mul(block_bytes).min(rest.len());
                rest.split_off_mut(..bytes).unwrap_or_default().copy_from_slice(reader.take(bytes)?);
            }
            Token::Entropy(bytes) => {
                let block = rest.split_off_mut(..block_bytes.min(rest.len())).unwrap_or_default();
                entropy::decode(element, take(&mut reader, bytes)?, block)?;
            }
            _ => return Err(reader.corrupt("a full payload refers to a base or to more blocks than it has")),
        }
    }
    reader.finish()?;
    let digests = DigestTable::of(element, out)?;
    expect_result(header.result, &digests)?;
    Ok(digests)
}

/// State and scratch of one tensor.
struct Decoder<'a> {
    element: Element,
    path: Path,
    base: &'a [u8],
    table: Option<Table>,
    class_masks: Vec<u64>,
    ranks: Vec<u32>,
    steps: Vec<i32>,
    /// Changed elements of the block, one bit each, and their steps by position.
    changed: Vec<u64>,
    step_at: Vec<i32>,
}

impl<'a> Decoder<'a> {
    fn new(element: Element, base: &'a [u8]) -> Self {
        Self {
            element,
            path: Path::best(),
            base,
            table: None,
            class_masks: Vec::new(),
            ranks: Vec::new(),
            steps: Vec::new(),
            changed: Vec::new(),
            step_at: Vec::new(),
        }
    }

    fn body(&mut self, reader: &mut ByteReader<'_>, blocks: usize, patch: &mut Patch) -> Result<()> {
        let mut block = 0;
        while block < blocks {
            let left = (blocks - block) as u64;
            match Token::read(reader)? {
                Token::Same(run) | Token::Raw(run) if run > left => {
                    return Err(reader.corrupt("more blocks than the tensor has"));
                }
                Token::Same(run) => block += run as usize,
                Token::Raw(run) => {
                    for block in block..block + run as usize {
                        self.whole(reader.take(self.base_of(block).len())?, block, patch);
                    }
                    block += run as usize;
                }
                Token::Changes(bytes) => {
                    self.changes(take(reader, bytes)?, block, patch)?;
                    block += 1;
                }
                Token::Entropy(bytes) => {
                    let mut values = vec![0; self.base_of(block).len()];
                    entropy::decode(self.element, take(reader, bytes)?, &mut values)?;
                    self.whole(&values, block, patch);
                    block += 1;
                }
                Token::Table(bytes) => {
                    let offset = reader.at();
                    self.table = Some(Table::read(self.element, take(reader, bytes)?, offset)?);
                }
            }
        }
        Ok(())
    }

    fn base_of(&self, block: usize) -> &'a [u8] {
        let size = self.element.size();
        let inside = block_elements(self.base.len() / size, block);
        &self.base[block * BLOCK_ELEMENTS * size..][..inside * size]
    }

    /// Delivers all elements of a block.
    fn whole(&mut self, bytes: &[u8], block: usize, patch: &mut Patch) {
        self.path.changed(self.element, self.base_of(block), bytes, &mut self.changed);
        let changed = self.changed.iter().map(|mask| mask.count_ones()).sum();
        patch.push_block(block, bytes, changed);
        patch.set_digest(block, Digest::of(self.element, (block * BLOCK_ELEMENTS) as u64, bytes));
    }

    fn changes(&mut self, bytes: &[u8], block: usize, patch: &mut Patch) -> Result<()> {
        let corrupt = |why| Error::Corrupt { what: "change block", offset: 0, why };
        let table = self.table.take().ok_or(corrupt("no table before the first block"))?;
        let mut bits = BitReader::new(bytes);
        let shift = bits.get(SHIFT_BITS) as i32 - SHIFT_BIAS;
        let base = self.base_of(block);
        let elements = base.len() / self.element.size();
        if !table.is_flat() {
            self.path.classes(self.element, base, &table, &mut self.class_masks);
        }
        let path = self.path;
        let digest = path.run(Changed {
            decoder: self,
            bits: &mut bits,
            table: &table,
            shift,
            block,
            elements,
            patch,
        })?;
        patch.add_digest(block, digest);
        self.table = Some(table);
        if bits.finish("change block")? == bytes.len() {
            Ok(())
        } else {
            Err(corrupt("bytes follow the end"))
        }
    }

    /// Decodes all classes of a block of `elements` into `self.changed` and `self.step_at`.
    #[inline(always)]
    fn classes(
        &mut self,
        bits: &mut BitReader<'_>,
        table: &Table,
        shift: i32,
        elements: usize,
    ) -> Result<()> {
        self.changed.clear();
        self.changed.resize(elements.div_ceil(64), 0);
        self.step_at.resize(BLOCK_ELEMENTS, 0);
        let masks = self.class_masks.chunks_exact(scan::class_stride(elements));
        for (class, masks) in table.classes.iter().zip(masks) {
            let members = masks.iter().map(|mask| mask.count_ones()).sum();
            get_class(bits, self.element, class, shift, members, &mut self.ranks, &mut self.steps)?;
            let (mut group, mut before) = (0, 0);
            for (rank, step) in self.ranks.iter().zip(&self.steps) {
                let mut inside = masks[group].count_ones();
                while rank - before >= inside {
                    before += inside;
                    group += 1;
                    inside = masks[group].count_ones();
                }
                let bit = scan::select(masks[group], rank - before);
                self.changed[group] |= 1 << bit;
                self.step_at[group * 64 + bit as usize] = *step;
            }
        }
        Ok(())
    }
}

/// Decodes the changes of one block, and returns how they change its digest.
struct Changed<'a, 'b, 'c> {
    decoder: &'a mut Decoder<'b>,
    bits: &'a mut BitReader<'c>,
    table: &'a Table,
    shift: i32,
    block: usize,
    elements: usize,
    patch: &'a mut Patch,
}

impl Work for Changed<'_, '_, '_> {
    type Output = Result<Digest>;

    #[inline(always)]
    fn run(self) -> Result<Digest> {
        let Self { decoder, bits, table, shift, block, elements, patch } = self;
        let (element, base) = (decoder.element, decoder.base_of(block));
        if let [class] = table.classes.as_slice() {
            let Decoder { ranks, steps, .. } = decoder;
            get_class(bits, element, class, shift, elements as u32, ranks, steps)?;
            let changes = ranks.iter().zip(steps.iter()).map(|(at, step)| (*at, *step));
            Ok(with_constant!(element, e => deliver(e, block, base, changes, patch)))
        } else {
            decoder.classes(bits, table, shift, elements)?;
            let Decoder { changed, step_at, .. } = decoder;
            let groups = (0..).step_by(64).zip(changed.iter());
            let positions = groups.flat_map(|(first, mask)| scan::ones(*mask).map(move |bit| first + bit));
            let changes = positions.map(|at| (at, step_at[at as usize]));
            Ok(with_constant!(element, e => deliver(e, block, base, changes, patch)))
        }
    }
}

/// Turns steps into values, adds them to the patch, and returns how they change the block's digest.
#[inline(always)]
fn deliver(
    element: Element,
    block: usize,
    base: &[u8],
    changes: impl Iterator<Item = (u32, i32)>,
    patch: &mut Patch,
) -> Digest {
    let first = (block * BLOCK_ELEMENTS) as u64;
    let mut digest = Changes::new();
    let before = patch.changes();
    for (at, step) in changes {
        let old = element.load(base, at as usize);
        let new = element.stepped(old, step);
        digest.push(element, first + u64::from(at), old, new);
        patch.push_change(element, at as u16, new);
    }
    patch.end_block(block, before);
    digest.finish()
}

fn take<'a>(reader: &mut ByteReader<'a>, bytes: u64) -> Result<&'a [u8]> {
    reader.take(usize::try_from(bytes).unwrap_or(usize::MAX))
}
