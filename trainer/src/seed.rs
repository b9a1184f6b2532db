//! Draws from numbers: the same bits on every machine.

pub use driftless_problems::seed::mix;

/// The first eight bytes of a digest or an identity; 0 of fewer.
#[must_use]
pub fn first_bits(bytes: &[u8]) -> u64 {
    bytes.first_chunk().copied().map_or(0, u64::from_le_bytes)
}
