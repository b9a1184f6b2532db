//! The additive digest: position-keyed, linear in the words, so that a change updates it without reading
//! anything else.
//!
//! The bytes of a tensor are little-endian 32-bit words `w[j]`, the last one padded with zeros. With `s = j /
//! 1024` and `p = j % 1024`, both sums modulo 2⁶⁴:
//!
//! ```text
//! first  = Σ_j  w[j]               · A[p] · M[s]
//! second = Σ_j  rotate16(w[j])     · B[p] · N[s]
//! ```
//!
//! `A`, `B`, `M`, `N` are odd 64-bit numbers that `splitmix64` draws from fixed seeds. A word is a sum of its
//! bytes, so an element smaller than a word contributes on its own, and digests of disjoint pieces of a
//! tensor add up.
//!
//! The format's description says what it detects, and why. Over the choice of keys, two different tensors
//! have the same digest with a chance of at most 2⁻⁶⁶. They have the same check (both sums in 64 bits) with
//! one of at most 2⁻⁴¹, or 2⁻⁵⁶ where the lowest bits of an element differ. The keys are public: the digest
//! stands against accidents, not against forgery, for which objects and manifests carry cryptographic
//! digests. Length is not covered: both sides know it.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

use crate::element::{BLOCK_ELEMENTS, Element};
use crate::error::{Error, Result, expect_length};
use crate::scan::{Path, Work};

const STRIPE_WORDS: usize = 1024;
const STRIPE_BYTES: usize = STRIPE_WORDS * 4;

const SEED_A: u64 = 0x6472_6966_746c_6541;
const SEED_B: u64 = 0x6472_6966_746c_6542;
const SEED_M: u64 = 0x6472_6966_746c_654d;
const SEED_N: u64 = 0x6472_6966_746c_654e;

/// The `index`-th output of splitmix64 (Steele, Lea, Flood 2014) from `seed`, made odd.
const fn key(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) | 1
}

const fn keys(seed: u64) -> [u64; STRIPE_WORDS] {
    let mut keys = [0; STRIPE_WORDS];
    let mut p = 0;
    while p < STRIPE_WORDS {
        keys[p] = key(seed, p as u64);
        p += 1;
    }
    keys
}

/// The lower halves of [`A`], two in a word, and the upper ones: multiplied apart, they take half the time.
static A_LOW: [u64; STRIPE_WORDS / 2] = {
    let (all, mut low, mut p) = (keys(SEED_A), [0; STRIPE_WORDS / 2], 0);
    while p < STRIPE_WORDS / 2 {
        low[p] = (all[2 * p] & LOW) | all[2 * p + 1] << 32;
        p += 1;
    }
    low
};
static A_HIGH: [u32; STRIPE_WORDS] = {
    let (all, mut high, mut p) = (keys(SEED_A), [0; STRIPE_WORDS], 0);
    while p < STRIPE_WORDS {
        high[p] = (all[p] >> 32) as u32;
        p += 1;
    }
    high
};
const LOW: u64 = 0xffff_ffff;

static A: [u64; STRIPE_WORDS] = keys(SEED_A);
static B: [u64; STRIPE_WORDS] = keys(SEED_B);

/// 128-bit additive digest of (part of) a tensor. Not cryptographic; the crate's documentation of the format
/// states what it detects.
///
/// Digests of disjoint pieces add up to the digest of the whole. `Digest::default()` is the digest of nothing
/// (and of zeros).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digest {
    sums: [u64; 2],
}

impl Digest {
    /// Digest of `bytes`, which begin at element `start` of their tensor.
    pub fn of(element: Element, start: u64, bytes: &[u8]) -> Self {
        Path::best().run(Sum { at: start * element.size() as u64, bytes })
    }

    /// Whether this digest's first sum is that of `bytes`, which begin at element `start`, the first of a
    /// stripe.
    pub(crate) fn is_first_of(self, element: Element, start: u64, bytes: &[u8]) -> bool {
        let stripe = start * element.size() as u64 / STRIPE_BYTES as u64;
        Path::best().run(First { stripe, bytes }) == self.sums[0]
    }

    fn of_word(word: u64, value: u32) -> Self {
        let p = (word % STRIPE_WORDS as u64) as usize;
        let sums = [u64::from(value).wrapping_mul(A[p]), u64::from(value.rotate_left(16)).wrapping_mul(B[p])];
        Self { sums }.scaled(word / STRIPE_WORDS as u64)
    }

    fn scaled(self, stripe: u64) -> Self {
        Self {
            sums: [
                self.sums[0].wrapping_mul(key(SEED_M, stripe)),
                self.sums[1].wrapping_mul(key(SEED_N, stripe)),
            ],
        }
    }

    /// The 16 bytes that stand for the digest in files: both sums, little-endian.
    pub fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.sums[0]) | (u128::from(self.sums[1]) << 64)).to_le_bytes()
    }

    /// The inverse of [`Digest::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self { sums: [both as u64, (both >> 64) as u64] }
    }

    /// Both sums in 64 bits.
    pub(crate) fn check(self) -> u64 {
        self.sums[0].wrapping_add(self.sums[1])
    }

    /// The top of [`Digest::check`]: enough to name a wrong base, never to accept a result.
    pub(crate) fn short_check(self) -> u16 {
        short(self.check())
    }
}

/// Digest of `bytes`, which begin at byte `at` of their tensor.
struct Sum<'a> {
    at: u64,
    bytes: &'a [u8],
}

impl Work for Sum<'_> {
    type Output = Digest;

    #[inline(always)]
    fn run(self) -> Digest {
        let Self { mut at, bytes: mut rest } = self;
        let mut digest = Digest::default();
        while !at.is_multiple_of(4)
            && let Some((&byte, tail)) = rest.split_first()
        {
            digest += Digest::of_word(at / 4, u32::from(byte) << (8 * (at % 4)));
            (at, rest) = (at + 1, tail);
        }
        while !rest.is_empty() {
            let inside = (at % STRIPE_BYTES as u64) as usize;
            let (stripe, tail) = rest.split_at(rest.len().min(STRIPE_BYTES - inside));
            digest += stripe_sums(stripe, inside / 4).scaled(at / STRIPE_BYTES as u64);
            (at, rest) = (at + stripe.len() as u64, tail);
        }
        digest
    }
}

/// The first sum of `bytes`, which begin with a stripe.
struct First<'a> {
    stripe: u64,
    bytes: &'a [u8],
}

impl Work for First<'_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let (mut sum, mut stripe) = (0_u64, self.stripe);
        // No closure, which would not be compiled for the path.
        for bytes in self.bytes.chunks(STRIPE_BYTES) {
            let own =
                if bytes.len() == STRIPE_BYTES { first_sum(bytes) } else { stripe_sums(bytes, 0).sums[0] };
            sum = sum.wrapping_add(own.wrapping_mul(key(SEED_M, stripe)));
            stripe = stripe.wrapping_add(1);
        }
        sum
    }
}

/// The first sum of a whole stripe, before its own key. Of the products' upper halves only the lowest 32 bits
/// count.
#[inline(always)]
fn first_sum(stripe: &[u8]) -> u64 {
    let (mut low, mut high) = (0_u64, 0_u32);
    for (pair, key) in stripe.as_chunks::<8>().0.iter().zip(&A_LOW) {
        let pair = u64::from_le_bytes(*pair);
        low = low.wrapping_add((pair & LOW) * (key & LOW)).wrapping_add((pair >> 32) * (key >> 32));
    }
    for (word, key) in stripe.as_chunks::<4>().0.iter().zip(&A_HIGH) {
        high = high.wrapping_add(u32::from_le_bytes(*word).wrapping_mul(*key));
    }
    low.wrapping_add(u64::from(high) << 32)
}

/// What is left of a check where two bytes have to do.
pub(crate) fn short(check: u64) -> u16 {
    (check >> 48) as u16
}

/// Sums of one stripe, or the part of it that begins at word `first`, before the stripe's own key.
#[inline(always)]
fn stripe_sums(bytes: &[u8], first: usize) -> Digest {
    let words = bytes.chunks_exact(4);
    let mut last = [0; 4];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    let mut sums = [0_u64; 2];
    let tail = first + words.len();
    for ((word, a), b) in words.zip(&A[first..]).zip(&B[first..]) {
        let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        sums[0] = sums[0].wrapping_add(u64::from(word).wrapping_mul(*a));
        sums[1] = sums[1].wrapping_add(u64::from(word.rotate_left(16)).wrapping_mul(*b));
    }
    if last != [0; 4] {
        let word = u32::from_le_bytes(last);
        sums[0] = sums[0].wrapping_add(u64::from(word).wrapping_mul(A[tail]));
        sums[1] = sums[1].wrapping_add(u64::from(word.rotate_left(16)).wrapping_mul(B[tail]));
    }
    Digest { sums }
}

/// Carries a digest over a run of element changes in ascending order; the stripe's key is applied once per
/// stripe, not per change.
pub(crate) struct Changes {
    total: Digest,
    stripe: u64,
    sums: Digest,
}

impl Changes {
    pub(crate) fn new() -> Self {
        Self { total: Digest::default(), stripe: 0, sums: Digest::default() }
    }

    /// Element `index` of the tensor went from `old` to `new`.
    #[inline(always)]
    pub(crate) fn push(&mut self, element: Element, index: u64, old: u32, new: u32) {
        let at = index * element.size() as u64;
        let stripe = at / STRIPE_BYTES as u64;
        if stripe != self.stripe {
            self.flush(stripe);
        }
        let p = (at as usize % STRIPE_BYTES) / 4;
        let shift = 8 * (at % 4) as u32;
        let (old, new) = (old << shift, new << shift);
        let difference = |old: u32, new: u32| u64::from(new).wrapping_sub(u64::from(old));
        let [first, second] = &mut self.sums.sums;
        *first = first.wrapping_add(difference(old, new).wrapping_mul(A[p]));
        *second =
            second.wrapping_add(difference(old.rotate_left(16), new.rotate_left(16)).wrapping_mul(B[p]));
    }

    fn flush(&mut self, next: u64) {
        self.total += std::mem::take(&mut self.sums).scaled(self.stripe);
        self.stripe = next;
    }

    /// What to add to the digest of the old elements.
    pub(crate) fn finish(mut self) -> Digest {
        self.flush(0);
        self.total
    }
}

impl Add for Digest {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { sums: [self.sums[0].wrapping_add(other.sums[0]), self.sums[1].wrapping_add(other.sums[1])] }
    }
}

impl Sub for Digest {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self { sums: [self.sums[0].wrapping_sub(other.sums[0]), self.sums[1].wrapping_sub(other.sums[1])] }
    }
}

impl AddAssign for Digest {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Digest {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One write: manifests spell thousands of them.
        let number = u128::from_be_bytes(self.to_bytes());
        write!(f, "{number:032x}")
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let not = || Error::NotADigest { found: text.chars().take(64).collect() };
        if text.len() != 32 || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(not());
        }
        let number = u128::from_str_radix(text, 16).map_err(|_| not())?;
        Ok(Self::from_bytes(number.to_be_bytes()))
    }
}

/// One [`Digest`] per block of [`BLOCK_ELEMENTS`] elements of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DigestTable {
    blocks: Vec<Digest>,
}

impl DigestTable {
    /// Digests of all blocks of a tensor: reads every byte.
    ///
    /// # Errors
    /// [`Error::OddLength`] if `bytes` is not a whole number of elements.
    pub fn of(element: Element, bytes: &[u8]) -> Result<Self> {
        element.count("tensor", bytes.len())?;
        let blocks = bytes
            .chunks(BLOCK_ELEMENTS * element.size())
            .enumerate()
            .map(|(block, bytes)| Digest::of(element, (block * BLOCK_ELEMENTS) as u64, bytes))
            .collect();
        Ok(Self { blocks })
    }

    /// Compares all of `bytes` with the table: reads every byte, as [`DigestTable::of`] does. This is the
    /// check that a delta leaves out.
    ///
    /// # Errors
    /// [`Error::BlockMismatch`] for the first block that has another digest, [`Error::OddLength`] and
    /// [`Error::LengthMismatch`] if the table cannot be that of `bytes`.
    pub fn verify(&self, element: Element, bytes: &[u8]) -> Result<()> {
        self.expect_elements(element.count("tensor", bytes.len())?)?;
        for ((block, bytes), expected) in
            bytes.chunks(BLOCK_ELEMENTS * element.size()).enumerate().zip(&self.blocks)
        {
            let found = Digest::of(element, (block * BLOCK_ELEMENTS) as u64, bytes);
            if found != *expected {
                return Err(Error::BlockMismatch { block: block as u64, expected: *expected, found });
            }
        }
        Ok(())
    }

    /// Digest of the whole tensor: the sum over its blocks.
    pub fn total(&self) -> Digest {
        self.blocks.iter().fold(Digest::default(), |sum, block| sum + *block)
    }

    /// One digest per block, in order.
    pub fn blocks(&self) -> &[Digest] {
        &self.blocks
    }

    /// `A`, then `B`.
    #[cfg(feature = "cuda")]
    pub(crate) fn stripe_keys() -> [u64; 2 * STRIPE_WORDS] {
        std::array::from_fn(|p| if p < STRIPE_WORDS { A[p] } else { B[p - STRIPE_WORDS] })
    }

    /// Digests of nothing, for a tensor of so many elements.
    pub(crate) fn reset(&mut self, elements: usize) {
        self.blocks.clear();
        self.blocks.resize(elements.div_ceil(BLOCK_ELEMENTS), Digest::default());
    }

    /// Becomes a copy of `other` in the memory it has, which the derived `clone_from` would give up.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.blocks.clone_from(&other.blocks);
    }

    pub(crate) fn blocks_mut(&mut self) -> &mut Vec<Digest> {
        &mut self.blocks
    }

    /// Refuses a table that is not one digest per block of `elements` elements.
    pub(crate) fn expect_elements(&self, elements: usize) -> Result<()> {
        expect_length("digest table", elements.div_ceil(BLOCK_ELEMENTS) as u64, self.blocks.len())
    }

    /// 16 bytes per block, in order.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.blocks.iter().flat_map(|digest| digest.to_bytes()).collect()
    }

    /// The inverse of [`DigestTable::to_bytes`].
    ///
    /// # Errors
    /// [`Error::OddLength`] if `bytes` is not a multiple of 16 long.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (digests, rest) = bytes.as_chunks::<16>();
        if !rest.is_empty() {
            return Err(Error::OddLength { what: "digest table", bytes: bytes.len(), size: 16 });
        }
        Ok(Self { blocks: digests.iter().map(|digest| Digest::from_bytes(*digest)).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Miri has no time for more.
    const STRIPES: usize = if cfg!(miri) { 2 } else { 5 };
    const BLOCKS_BYTES: usize = if cfg!(miri) { 1000 } else { 200_000 };
    /// One cut or bit in so many is looked at.
    const CUTS_APART: usize = if cfg!(miri) { 3 } else { 1 };
    const BITS_APART: usize = if cfg!(miri) { 32_771 } else { 1 };

    /// Bytes that begin again after a prime number of them.
    fn sample(length: usize) -> Vec<u8> {
        let period: Vec<u8> = (0..257).map(|i| key(7, i).to_le_bytes()[2]).collect();
        let mut bytes = period.repeat(length.div_ceil(period.len()));
        bytes.truncate(length);
        bytes
    }

    #[test]
    fn pieces_cut_anywhere_add_up() {
        let bytes = sample(STRIPES * STRIPE_BYTES + 7);
        let whole = Digest::of(Element::Bytes, 0, &bytes);
        let cuts = [0, 1, 2, 3, 4095, 4096, 4097, 5, 8197, bytes.len()];
        for cut in cuts.into_iter().step_by(CUTS_APART) {
            let (left, right) = bytes.split_at(cut);
            assert_eq!(
                Digest::of(Element::Bytes, 0, left) + Digest::of(Element::Bytes, cut as u64, right),
                whole,
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn first_sums_are_those_of_digests() {
        let bytes = sample(STRIPES * STRIPE_BYTES + 7);
        for (start, length) in [(0, bytes.len()), (3, 2 * STRIPE_BYTES), (1 << 40, STRIPE_BYTES + 2), (7, 0)]
        {
            let (start, bytes) = (start * (STRIPE_BYTES / 2) as u64, &bytes[..length]);
            let digest = Digest::of(Element::Bf16, start, bytes);
            assert!(digest.is_first_of(Element::Bf16, start, bytes), "{length} bytes from {start}");
            for bit in (0..length * 8).step_by(if cfg!(miri) { 32_771 } else { 97 }) {
                let mut flipped = bytes.to_vec();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(!digest.is_first_of(Element::Bf16, start, &flipped), "bit {bit}");
            }
        }
    }

    #[test]
    fn changes_carry_the_digest() {
        for element in [Element::Bytes, Element::Bf16, Element::F32] {
            let old = sample(STRIPES * STRIPE_BYTES);
            let mut new = old.clone();
            let mut changes = Changes::new();
            let elements = old.len() / element.size();
            for index in [0, 1, 2, 3, 700, 1023, 1024, 2047, 4000].into_iter().filter(|i| *i < elements) {
                new[index * element.size()] ^= 0x5a;
                changes.push(element, index as u64, element.load(&old, index), element.load(&new, index));
            }
            assert_eq!(Digest::of(element, 0, &old) + changes.finish(), Digest::of(element, 0, &new));
            // The same far beyond 4 GiB.
            let far = (7 << 32) + 1;
            let (at, size) = (far + 1000, element.size());
            let mut changes = Changes::new();
            for inside in [1023, 1024] {
                let (old, new) = (element.load(&old, inside), element.load(&new, inside));
                changes.push(element, at - 1000 + inside as u64, old, new);
            }
            let piece = 1000 * size..1025 * size;
            let [old, new] = [&old, &new].map(|bytes| Digest::of(element, at, &bytes[piece.clone()]));
            assert_eq!(old + changes.finish(), new);
        }
    }

    #[test]
    fn position_matters_and_every_single_bit_shows() {
        let mut bytes = sample(2 * STRIPE_BYTES);
        let digest = Digest::of(Element::Bytes, 0, &bytes);
        assert_ne!(digest, Digest::of(Element::Bytes, 4, &bytes));
        for bit in (0..bytes.len() * 8).step_by(BITS_APART) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let flipped = Digest::of(Element::Bytes, 0, &bytes);
            assert!(flipped != digest && flipped.check() != digest.check(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for (i, j) in [(0, 1), (5, 1024), (100, 2000)] {
            let mut swapped = bytes.clone();
            for byte in 0..4 {
                swapped.swap(4 * i + byte, 4 * j + byte);
            }
            assert_ne!(Digest::of(Element::Bytes, 0, &swapped), digest);
        }
    }

    #[test]
    fn text_and_bytes_round_trip() {
        let digest = Digest::of(Element::Bytes, 0, &sample(100));
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert_eq!(Digest::from_bytes(digest.to_bytes()), digest);
        for text in ["", "12", "zz112233445566778899aabbccddeeff", "+0112233445566778899aabbccddeef0"] {
            assert!(text.parse::<Digest>().is_err());
        }
        let bytes = sample(BLOCKS_BYTES);
        let table = DigestTable::of(Element::Bytes, &bytes).unwrap();
        assert_eq!(table.blocks().len(), bytes.len().div_ceil(BLOCK_ELEMENTS));
        assert_eq!(table.total(), Digest::of(Element::Bytes, 0, &bytes));
        assert_eq!(DigestTable::from_bytes(&table.to_bytes()), Ok(table.clone()));
        assert!(DigestTable::from_bytes(&table.to_bytes()[1..]).is_err());
    }
}
