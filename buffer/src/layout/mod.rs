//! The bytes of a segment: pure encoding and checking over slices. See `docs/format/log.md`.
//!
//! Nothing here touches a file or a mapping, so all of it runs under Miri.

pub(crate) mod body;
pub(crate) mod frame;
pub(crate) mod segment;

/// Every frame and every column starts at a multiple of this: a cache line, and what libtorch asks of a
/// tensor's memory.
pub(crate) const ALIGN: usize = 64;

/// Rounds up to [`ALIGN`]; `None` on overflow.
pub(crate) fn align(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN)
}

/// Little-endian fields of a fixed-size block. Offsets are constants of the format, so a bad one is a bug,
/// not bad input.
pub(crate) mod field {
    pub(crate) fn u16(block: &[u8], at: usize) -> u16 {
        u16::from_le_bytes(array(block, at))
    }
    pub(crate) fn u32(block: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(array(block, at))
    }
    pub(crate) fn u64(block: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(array(block, at))
    }
    pub(crate) fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
        block[at..at + bytes.len()].copy_from_slice(bytes);
    }
    pub(crate) fn array<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&block[at..at + N]);
        out
    }
}

/// CRC32C of `bytes`, started from the segment's salt, so that bytes of another place never pass for a frame
/// of this one.
pub(crate) fn salted_crc(salt: u64, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&salt.to_le_bytes()), bytes)
}
