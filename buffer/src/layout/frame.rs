//! The 64-byte header in front of every record.
//!
//! It is written twice: at reservation (state `Reserved`: only the length is meaningful) and at commit or
//! release. It never crosses a disk sector, so after a crash it reads as one of the two, or as the zeros
//! before both.

use super::field::{self, put};
use super::{ALIGN, salted_crc};

/// Bytes of a frame header.
pub(crate) const FRAME_HEADER: usize = 64;
/// First bytes of every frame.
const MAGIC: [u8; 4] = *b"dlrF";

/// Where a frame stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameState {
    /// Space is taken; the body is being written.
    Reserved = 1,
    /// The body is complete and its CRC is in the header.
    Committed,
    /// The reservation was given up; the body means nothing.
    Void,
}

/// A decoded frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    /// Kind of record, see [`crate::Kind`].
    pub(crate) kind: u16,
    /// Where the frame stands.
    pub(crate) state: FrameState,
    /// Offset of this header in its segment.
    pub(crate) offset: u64,
    /// Bytes of header and body; a multiple of 64.
    pub(crate) bytes: u64,
    /// Number of the record in the log.
    pub(crate) sequence: u64,
    /// Every record before this number was on stable storage when the header was written.
    pub(crate) durable: u64,
    /// CRC32C of the body; 0 unless committed.
    pub(crate) body_crc: u32,
}

/// What 64 bytes turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peek {
    /// All zero: never written.
    Empty,
    /// A header of this place in this segment.
    Frame(FrameHeader),
    /// Something else.
    Invalid,
}

impl FrameHeader {
    pub(crate) fn encode(&self, salt: u64) -> [u8; FRAME_HEADER] {
        let mut block = [0; FRAME_HEADER];
        put(&mut block, 0, &MAGIC);
        put(&mut block, 4, &self.kind.to_le_bytes());
        put(&mut block, 6, &(self.state as u16).to_le_bytes());
        put(&mut block, 8, &self.offset.to_le_bytes());
        put(&mut block, 16, &self.bytes.to_le_bytes());
        put(&mut block, 24, &self.sequence.to_le_bytes());
        put(&mut block, 32, &self.durable.to_le_bytes());
        put(&mut block, 40, &self.body_crc.to_le_bytes());
        let crc = salted_crc(salt, &block[..60]);
        put(&mut block, 60, &crc.to_le_bytes());
        block
    }

    /// Reads the header at `offset` of a segment whose frames end at or before `limit`.
    pub(crate) fn peek(block: &[u8; FRAME_HEADER], salt: u64, offset: u64, limit: u64) -> Peek {
        if *block == [0; FRAME_HEADER] {
            return Peek::Empty;
        }
        if block[..4] != MAGIC || field::u32(block, 60) != salted_crc(salt, &block[..60]) {
            return Peek::Invalid;
        }
        let state = match field::u16(block, 6) {
            1 => FrameState::Reserved,
            2 => FrameState::Committed,
            3 => FrameState::Void,
            _ => return Peek::Invalid,
        };
        let header = Self {
            kind: field::u16(block, 4),
            state,
            offset: field::u64(block, 8),
            bytes: field::u64(block, 16),
            sequence: field::u64(block, 24),
            durable: field::u64(block, 32),
            body_crc: field::u32(block, 40),
        };
        let fits = header.offset == offset
            && header.bytes >= FRAME_HEADER as u64
            && header.bytes.is_multiple_of(ALIGN as u64)
            && offset.checked_add(header.bytes).is_some_and(|end| end <= limit);
        if fits { Peek::Frame(header) } else { Peek::Invalid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> FrameHeader {
        FrameHeader {
            kind: 1,
            state: FrameState::Committed,
            offset: 4096,
            bytes: 640,
            sequence: 7,
            durable: 5,
            body_crc: 0xdead_beef,
        }
    }

    #[test]
    fn round_trips_in_its_own_place_only() {
        let block = sample().encode(99);
        assert_eq!(FrameHeader::peek(&block, 99, 4096, 1 << 20), Peek::Frame(sample()));
        assert_eq!(FrameHeader::peek(&block, 98, 4096, 1 << 20), Peek::Invalid, "another segment's salt");
        assert_eq!(FrameHeader::peek(&block, 99, 8192, 1 << 20), Peek::Invalid, "another offset");
        assert_eq!(FrameHeader::peek(&block, 99, 4096, 4096 + 639), Peek::Invalid, "past the limit");
        assert_eq!(FrameHeader::peek(&[0; 64], 99, 4096, 1 << 20), Peek::Empty);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let block = sample().encode(99);
        for bit in (0..block.len() * 8).step_by(if cfg!(miri) { 31 } else { 1 }) {
            let mut bad = block;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(FrameHeader::peek(&bad, 99, 4096, 1 << 20), Peek::Invalid, "bit {bit}");
        }
    }
}
