//! Encoding: cuts a tensor into segments, has them coded, and puts the payload together.

use crate::choose::Profile;
use crate::digest::DigestTable;
use crate::element::{BLOCK_ELEMENTS, Element};
use crate::error::{Result, expect_length};
use crate::payload::{Header, Kind, Token};
use crate::pool::{Jobs, Pool, Serial};
use crate::segment::{Input, SEGMENT_BLOCKS, Scratch, Segment};
use crate::source::Source;

/// What an encoder found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Elements whose bits changed (all of them in a full payload).
    pub changed: u64,
    /// Digests of the new tensor.
    pub digests: DigestTable,
    /// Whether one of these elements is NaN or infinite now.
    pub not_finite: bool,
}

/// [`Encoder::encode`] with memory of its own, on this thread.
///
/// # Errors
/// As [`Encoder::encode`].
pub fn encode(
    element: Element,
    base: &[u8],
    new: &[u8],
    base_digests: &DigestTable,
    profile: Profile,
    out: &mut Vec<u8>,
) -> Result<Encoded> {
    let mut encoder = Encoder::new();
    let base = Source { element, bytes: base, digests: base_digests };
    let changed = encoder.encode(&Serial, base, new, profile, out)?;
    Ok(encoder.into_encoded(changed))
}

/// [`Encoder::encode_checked`] with memory of its own, on this thread.
///
/// # Errors
/// As [`Encoder::encode_checked`].
pub fn encode_checked(
    element: Element,
    base: &[u8],
    new: &[u8],
    base_digests: &DigestTable,
    profile: Profile,
    out: &mut Vec<u8>,
) -> Result<Encoded> {
    let mut encoder = Encoder::new();
    let base = Source { element, bytes: base, digests: base_digests };
    let changed = encoder.encode_checked(&Serial, base, new, profile, out)?;
    Ok(encoder.into_encoded(changed))
}

/// [`Encoder::encode_full`] with memory of its own, on this thread.
///
/// # Errors
/// As [`Encoder::encode_full`].
pub fn encode_full(element: Element, new: &[u8], out: &mut Vec<u8>) -> Result<Encoded> {
    let mut encoder = Encoder::new();
    let changed = encoder.encode_full(&Serial, element, new, out)?;
    Ok(encoder.into_encoded(changed))
}

/// Encodes tensors one after the other; once it has seen its largest, it allocates no more.
#[derive(Default)]
pub struct Encoder {
    jobs: Jobs<Scratch, Segment>,
    digests: DigestTable,
    pub(crate) not_finite: bool,
}

impl Encoder {
    /// One that holds no memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn into_encoded(self, changed: u64) -> Encoded {
        Encoded { changed, digests: self.digests, not_finite: self.not_finite }
    }

    /// Digests of the tensor that was encoded last.
    pub fn digests(&self) -> &DigestTable {
        &self.digests
    }

    /// Appends to `out` one self-delimiting payload that turns `base` into `new`; returns how many elements
    /// changed.
    ///
    /// # Errors
    /// [`Error::OddLength`](crate::Error::OddLength) if `base` is not a whole number of elements,
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) if `new` is not as long or the digests are not one per
    /// block. `out` is unchanged then.
    pub fn encode(
        &mut self,
        pool: &dyn Pool,
        base: Source<'_>,
        new: &[u8],
        profile: Profile,
        out: &mut Vec<u8>,
    ) -> Result<u64> {
        self.encode_with(pool, base, false, new, profile, out)
    }

    /// As [`Encoder::encode`], and digests `new` itself, block by block, on the way.
    ///
    /// Digests are linear: the digest of `new` is the base's digest and the changes exactly where the base's
    /// bytes have that digest. So a bit that flipped in the bytes or in their digests is noticed, whether its
    /// element changes or not; and a payload that is made leads to `new` from every base with these digests.
    /// One of a digest's two sums is compared, which is twice as fast as both. A single bit is always
    /// noticed; other damage is missed with a chance of at most 2⁻³².
    ///
    /// # Errors
    /// As [`Encoder::encode`], and [`Error::BlockMismatch`](crate::Error::BlockMismatch) for the first block of
    /// `base` that has another digest. `out` is unchanged then.
    pub fn encode_checked(
        &mut self,
        pool: &dyn Pool,
        base: Source<'_>,
        new: &[u8],
        profile: Profile,
        out: &mut Vec<u8>,
    ) -> Result<u64> {
        self.encode_with(pool, base, true, new, profile, out)
    }

    fn encode_with(
        &mut self,
        pool: &dyn Pool,
        base: Source<'_>,
        check: bool,
        new: &[u8],
        profile: Profile,
        out: &mut Vec<u8>,
    ) -> Result<u64> {
        let Source { element, bytes, digests } = base;
        base.elements()?;
        expect_length("new tensor", bytes.len() as u64, new.len())?;
        self.digests.copy_from(digests);
        let mut header = Header { element, kind: Kind::Delta(digests.total().short_check()), result: 0 };
        let start = out.len();
        header.write(out);
        let segment_bytes = SEGMENT_BLOCKS * BLOCK_ELEMENTS * element.size();
        let work = |segment: usize, scratch: &mut Scratch, result: &mut Segment| {
            let range = segment * segment_bytes..bytes.len().min((segment + 1) * segment_bytes);
            let first_block = segment * SEGMENT_BLOCKS;
            let (base, new) = (&bytes[range.clone()], &new[range]);
            let digests = check.then(|| &digests.blocks()[first_block..]);
            scratch.delta(&Input { element, profile, first_block, base, new, digests }, result)
        };
        let assembled = self.assemble(pool, bytes.len().div_ceil(segment_bytes), work, out);
        let changed = assembled.inspect_err(|_| out.truncate(start))?;
        header.result = self.digests.total().check();
        if changed == 0 {
            header.kind = Kind::Unchanged;
            out.truncate(start);
            header.write(out);
        } else {
            header.write_over(&mut out[start..]);
        }
        Ok(changed)
    }

    /// Appends to `out` one self-delimiting payload that holds all of `new`, for anchors: no base is needed
    /// to decode it. Returns the number of elements.
    ///
    /// # Errors
    /// [`Error::OddLength`](crate::Error::OddLength) if `new` is not a whole number of elements. `out` is unchanged
    /// then.
    pub fn encode_full(
        &mut self,
        pool: &dyn Pool,
        element: Element,
        new: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<u64> {
        let elements = element.count("new tensor", new.len())?;
        self.digests.reset(elements);
        let mut header = Header { element, kind: Kind::Full(elements as u64), result: 0 };
        let start = out.len();
        header.write(out);
        let segment_bytes = SEGMENT_BLOCKS * BLOCK_ELEMENTS * element.size();
        let work = |segment: usize, scratch: &mut Scratch, result: &mut Segment| {
            let range = segment * segment_bytes..new.len().min((segment + 1) * segment_bytes);
            scratch.full(element, segment * SEGMENT_BLOCKS, &new[range], result);
            Ok(())
        };
        let changed = self.assemble(pool, new.len().div_ceil(segment_bytes), work, out)?;
        header.result = self.digests.total().check();
        header.write_over(&mut out[start..]);
        Ok(changed)
    }

    /// Has the segments coded and puts them one after the other; unchanged blocks of neighbours become one
    /// run. Returns how many elements changed.
    fn assemble(
        &mut self,
        pool: &dyn Pool,
        segments: usize,
        work: impl Fn(usize, &mut Scratch, &mut Segment) -> Result<()> + Sync,
        out: &mut Vec<u8>,
    ) -> Result<u64> {
        let Self { jobs, digests, not_finite } = self;
        *not_finite = false;
        let (mut changed, mut same, mut block) = (0, 0, 0);
        jobs.run(pool, segments, work, |segment| {
            for (digest, change) in digests.blocks_mut()[block..].iter_mut().zip(&segment.digests) {
                *digest += *change;
            }
            block += segment.digests.len();
            *not_finite |= segment.not_finite;
            changed += segment.changed;
            same += segment.before;
            if !segment.tokens.is_empty() {
                Token::run_of_same(&mut same, out);
                out.extend_from_slice(&segment.tokens);
            }
            same += segment.after;
        })?;
        Token::run_of_same(&mut same, out);
        Ok(changed)
    }
}
