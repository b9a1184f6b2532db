//! Draws from numbers: the same bits on every machine.

/// The first eight bytes of a digest or an identity.
pub(crate) fn first_bits(bytes: &[u8]) -> u64 {
    bytes.first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// Mixes 64 bits: SplitMix64's finaliser (Steele, Lea and Flood 2014).
#[must_use]
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
