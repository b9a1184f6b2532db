//! What the steps so far have moved, and which way: a context that both sides of the next step have.
//!
//! An element that has just crossed a border of rounding lies next to it, so it is more likely than others to cross it again; and which way
//! it went says which way it goes.

use crate::bits::{ByteReader, put_varint};
use crate::scan::GROUP;
use crate::{BLOCK_ELEMENTS, Digest, Element, Error, Result, Source};

const MAGIC: [u8; 4] = *b"DFM1";

/// Rows of 64 elements in a block.
const ROWS: usize = BLOCK_ELEMENTS / GROUP;

/// Which elements of a tensor have moved since some version, and which way each one went last: two bits an element.
///
/// It begins empty at a version that is published in full ([`Motion::start`]) and goes along with every step
/// ([`Motion::advance`]). Both sides of a delta have it, so positions and directions are coded in its light. Its digest says which
/// steps it has seen.
///
/// ```
/// use driftless_delta::{Decoder, DigestTable, Element, Encoder, Motion, Patch, Profile, Serial, Source};
///
/// let versions: Vec<Vec<u8>> = [0, 1, 0].map(|step| vec![64 + step; 5000]).into();
/// let mut digests = DigestTable::of(Element::Bf16, &versions[0])?;
/// let start = Motion::start(Source { element: Element::Bf16, bytes: &versions[0], digests: &digests })?;
/// let (mut sent, mut seen) = (start.clone(), start);
/// let (mut encoder, mut decoder, mut patch) = (Encoder::new(), Decoder::new(), Patch::new());
/// for step in versions.windows(2) {
///     let base = Source { element: Element::Bf16, bytes: &step[0], digests: &digests };
///     let mut payload = Vec::new();
///     encoder.encode_after(&Serial, base, &sent, &step[1], Profile::Wire, &mut payload)?;
///     sent.advance(encoder.moves())?;
///     decoder.decode_after(&Serial, base, &seen, &payload, &mut patch)?;
///     seen.advance(decoder.moves())?;
///     assert_eq!(sent, seen);
///     digests = patch.digests().clone();
/// }
/// # Ok::<(), driftless_delta::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Motion {
    element: Element,
    elements: usize,
    /// Digest of the tensor as it is now.
    at: Digest,
    /// Digest of the digests of all versions since the first, the last one included.
    digest: Digest,
    /// One bit each, 64 elements to a word: whether an element has moved, and whether it went down the last time.
    moved: Vec<u64>,
    down: Vec<u64>,
}

/// What one step moves: how a [`Motion`] gets from a version to the next. [`Encoder::moves`](crate::Encoder::moves) and
/// [`Decoder::moves`](crate::Decoder::moves) have it of the last step that they were told the motion for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moves {
    from: Digest,
    to: Digest,
    /// Changed elements, ascending, and whether each went down.
    positions: Vec<u64>,
    down: Vec<bool>,
}

/// Motion of the elements of some blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) moved: &'a [u64],
    pub(crate) down: &'a [u64],
}

impl View<'_> {
    /// Whether the element has moved.
    #[inline(always)]
    pub(crate) fn has_moved(&self, at: usize) -> bool {
        self.moved[at / GROUP] >> (at % GROUP) & 1 == 1
    }

    /// Whether the element went down the last time it moved.
    #[inline(always)]
    pub(crate) fn went_down(&self, at: usize) -> bool {
        self.down[at / GROUP] >> (at % GROUP) & 1 == 1
    }

    /// `step` of an element that has moved, or back: counted positive if it goes the way the element went last.
    #[inline(always)]
    pub(crate) fn relative(&self, at: usize, step: i32) -> i32 {
        if self.went_down(at) { step.wrapping_neg() } else { step }
    }

    /// The part that belongs to a block, by its number among these.
    pub(crate) fn block(self, block: usize) -> Self {
        self.blocks(block, 1)
    }

    /// The part that belongs to so many blocks, as far as there are any.
    pub(crate) fn blocks(self, first: usize, count: usize) -> Self {
        let rows = first * ROWS..self.moved.len().min((first + count) * ROWS);
        Self { moved: &self.moved[rows.clone()], down: &self.down[rows] }
    }
}

impl Motion {
    /// Nothing has moved since this version.
    ///
    /// # Errors
    /// [`Error::OddLength`] or [`Error::LengthMismatch`] if bytes or digests are not those of whole elements.
    pub fn start(version: Source<'_>) -> Result<Self> {
        let elements = version.elements()?;
        let at = version.digests.total();
        let rows = elements.div_ceil(GROUP);
        let digest = chained(Digest::default(), at);
        Ok(Self { element: version.element, elements, at, digest, moved: vec![0; rows], down: vec![0; rows] })
    }

    /// Goes along with the step that moved these. A step that changes nothing leaves the motion as it is.
    ///
    /// # Errors
    /// [`Error::MotionElsewhere`] if the step does not start from where the motion is; nothing is changed then.
    pub fn advance(&mut self, moves: &Moves) -> Result<()> {
        self.expect_at(moves.from)?;
        if moves.positions.last().is_some_and(|last| *last >= self.elements as u64) {
            let (expected, found) = (self.elements as u64, moves.positions.len() as u64);
            return Err(Error::LengthMismatch { what: "motion", expected, found });
        }
        if moves.positions.is_empty() {
            return Ok(());
        }
        for (at, down) in moves.positions.iter().zip(&moves.down) {
            let (row, bit) = (*at as usize / GROUP, *at as usize % GROUP);
            self.moved[row] |= 1 << bit;
            self.down[row] = self.down[row] & !(1 << bit) | u64::from(*down) << bit;
        }
        self.at = moves.to;
        self.digest = chained(self.digest, moves.to);
        Ok(())
    }

    /// Which versions the motion has gone along with: the same on both sides of a delta.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The digest of the tensor that the motion has come to.
    pub fn at(&self) -> Digest {
        self.at
    }

    /// Elements that have moved.
    pub fn moved(&self) -> u64 {
        self.moved.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// All of it, if it is that of `base`.
    pub(crate) fn view(&self, base: Source<'_>) -> Result<View<'_>> {
        let elements = base.elements()?;
        if base.element != self.element {
            return Err(Error::ElementMismatch { expected: base.element, found: self.element });
        }
        if elements != self.elements {
            let (expected, found) = (elements as u64, self.elements as u64);
            return Err(Error::LengthMismatch { what: "motion", expected, found });
        }
        self.expect_at(base.digests.total())?;
        Ok(View { moved: &self.moved, down: &self.down })
    }

    fn expect_at(&self, expected: Digest) -> Result<()> {
        if self.at == expected { Ok(()) } else { Err(Error::MotionElsewhere { expected, found: self.at }) }
    }

    /// A form to keep it in, closed by a digest of all bytes before it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(self.element.code());
        put_varint(&mut out, self.elements as u64);
        out.extend(self.at.to_bytes());
        out.extend(self.digest.to_bytes());
        out.extend(self.moved.iter().chain(&self.down).flat_map(|word| word.to_le_bytes()));
        let digest = Digest::of(Element::Bytes, 0, &out);
        out.extend(digest.to_bytes());
        out
    }

    /// Reads it back. Memory is bounded by the length of `bytes`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if `bytes` are not what [`Motion::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = |offset, why| Error::Corrupt { what: "motion", offset, why };
        let (body, digest) = bytes.split_last_chunk::<16>().ok_or(corrupt(0, "bytes end too early"))?;
        if Digest::of(Element::Bytes, 0, body).to_bytes() != *digest {
            return Err(corrupt(body.len(), "digest does not match"));
        }
        let mut reader = ByteReader::new(body, "motion");
        if reader.array()? != MAGIC {
            return Err(reader.corrupt("not a motion"));
        }
        let element = Element::from_code(reader.byte()?)?;
        let elements = usize::try_from(reader.varint()?).unwrap_or(usize::MAX);
        let [at, digest] = [reader.array()?, reader.array()?].map(Digest::from_bytes);
        let rows = elements.div_ceil(GROUP);
        let mut words = || -> Result<Vec<u64>> {
            let bytes = reader.take(rows.saturating_mul(8))?;
            let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            Ok(words.collect())
        };
        let (moved, down) = (words()?, words()?);
        let beyond = !elements.is_multiple_of(GROUP)
            && moved.last().is_some_and(|word| word >> (elements % GROUP) != 0);
        if beyond || down.iter().zip(&moved).any(|(down, moved)| down & !moved != 0) {
            return Err(reader.corrupt("directions of elements that have not moved"));
        }
        reader.finish()?;
        Ok(Self { element, elements, at, digest, moved, down })
    }
}

/// The digest of a motion with digest `before` that goes on to the version `to`.
fn chained(before: Digest, to: Digest) -> Digest {
    let mut both = [0; 32];
    both[..16].copy_from_slice(&before.to_bytes());
    both[16..].copy_from_slice(&to.to_bytes());
    Digest::of(Element::Bytes, 0, &both)
}

impl Moves {
    pub(crate) fn clear(&mut self) {
        (self.from, self.to) = Default::default();
        self.positions.clear();
        self.down.clear();
    }

    /// The step leads from one version to another.
    pub(crate) fn between(&mut self, from: Digest, to: Digest) {
        (self.from, self.to) = (from, to);
    }

    /// Adds changes of a block.
    pub(crate) fn extend(&mut self, block: usize, positions: &[u16], down: impl Iterator<Item = bool>) {
        let first = (block * BLOCK_ELEMENTS) as u64;
        self.positions.extend(positions.iter().map(|at| first + u64::from(*at)));
        self.down.extend(down);
    }

    /// Adds what others add behind these.
    pub(crate) fn append(&mut self, other: &Self) {
        self.positions.extend_from_slice(&other.positions);
        self.down.extend_from_slice(&other.down);
    }
}
