//! Bit and byte primitives of the format: bits go from the least significant of each byte upwards, numbers
//! are little-endian.

use crate::error::{Error, Result};

/// A Rice quotient of this many zeros is the escape: the value follows in full width.
pub(crate) const ESCAPE: u32 = 20;

/// Appends bits to a byte vector.
pub(crate) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    pending: u64,
    held: u32,
}

impl<'a> BitWriter<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, pending: 0, held: 0 }
    }

    /// The low `count` bits of `value`, at most 32; the bits above must be zero.
    #[inline(always)]
    pub(crate) fn put(&mut self, value: u32, count: u32) {
        debug_assert!(count == 32 || value >> count == 0);
        self.pending |= u64::from(value) << self.held;
        self.held += count;
        if self.held >= 32 {
            self.out.extend_from_slice(&(self.pending as u32).to_le_bytes());
            self.pending >>= 32;
            self.held -= 32;
        }
    }

    pub(crate) fn zeros(&mut self, mut count: u32) {
        while count > 0 {
            let now = count.min(32);
            self.put(0, now);
            count -= now;
        }
    }

    /// `zeros` zeros, a one, and the low `count` bits of `value`.
    #[inline(always)]
    pub(crate) fn unary(&mut self, zeros: u32, value: u32, count: u32) {
        if zeros + 1 + count <= 32 {
            self.put(((value << 1) | 1) << zeros, zeros + 1 + count);
        } else {
            self.zeros(zeros);
            self.put(1, 1);
            self.put(value, count);
        }
    }

    /// `value` in Rice code with parameter `rice`: quotient in zeros closed by a one, then `rice` bits. Long
    /// quotients become [`ESCAPE`] zeros and `width` bits.
    #[inline(always)]
    pub(crate) fn rice(&mut self, value: u32, rice: u32, width: u32) {
        let quotient = value >> rice;
        if quotient < ESCAPE {
            self.unary(quotient, value & ((1 << rice) - 1), rice);
        } else {
            self.put(0, ESCAPE);
            self.put(value, width);
        }
    }

    /// A signed number near zero: zigzag in unary.
    pub(crate) fn near(&mut self, value: i32) {
        self.zeros(((value << 1) ^ (value >> 31)) as u32);
        self.put(1, 1);
    }

    /// Pads with zero bits to a whole byte.
    pub(crate) fn finish(self) {
        let bytes = self.held.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.pending.to_le_bytes()[..bytes]);
    }
}

/// Reads what [`BitWriter`] wrote. Past the end it delivers zeros and remembers; [`BitReader::finish`] then
/// refuses.
pub(crate) struct BitReader<'a> {
    bytes: &'a [u8],
    /// Next bit.
    at: usize,
}

impl<'a> BitReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// At least 57 bits from the current one on.
    #[inline(always)]
    pub(crate) fn peek(&self) -> u64 {
        let byte = self.at / 8;
        let word = match self.bytes.get(byte..).and_then(|rest| rest.first_chunk::<8>()) {
            Some(chunk) => u64::from_le_bytes(*chunk),
            None => self.peek_end(byte),
        };
        word >> (self.at % 8)
    }

    #[cold]
    fn peek_end(&self, byte: usize) -> u64 {
        let rest = self.bytes.get(byte..).unwrap_or_default();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        u64::from_le_bytes(last)
    }

    /// Whether more bits were asked for than there are.
    #[inline(always)]
    pub(crate) fn overrun(&self) -> bool {
        self.at > self.bytes.len() * 8
    }

    /// Up to 32 bits.
    #[inline(always)]
    pub(crate) fn get(&mut self, count: u32) -> u32 {
        let value = (self.peek() & ((1 << count) - 1)) as u32;
        self.at += count as usize;
        value
    }

    /// Consumes bits that [`BitReader::peek`] showed.
    #[inline(always)]
    pub(crate) fn skip(&mut self, count: u32) {
        self.at += count as usize;
    }

    /// Zeros before the next one (which is consumed too), or `limit` if there are at least that many (then
    /// only those are consumed).
    #[inline(always)]
    pub(crate) fn unary(&mut self, limit: u32) -> u32 {
        let run = self.peek().trailing_zeros();
        if run < 56 && run < limit {
            self.at += run as usize + 1;
            return run;
        }
        self.long_unary(limit)
    }

    fn long_unary(&mut self, limit: u32) -> u32 {
        let mut zeros = 0;
        loop {
            let run = self.peek().trailing_zeros().min(56);
            if zeros + run >= limit {
                self.at += (limit - zeros) as usize;
                return limit;
            }
            zeros += run;
            if run < 56 {
                self.at += run as usize + 1;
                return zeros;
            }
            self.at += 56;
        }
    }

    /// The inverse of [`BitWriter::rice`].
    #[inline(always)]
    pub(crate) fn rice(&mut self, rice: u32, width: u32) -> u32 {
        match self.unary(ESCAPE) {
            ESCAPE => self.get(width),
            quotient => (quotient << rice) | self.get(rice),
        }
    }

    /// The inverse of [`BitWriter::near`]; numbers beyond ±64 are never written.
    pub(crate) fn near(&mut self) -> i32 {
        let zigzag = self.unary(128) as i32;
        (zigzag >> 1) ^ -(zigzag & 1)
    }

    /// Whole bytes consumed, if all bits were there and the padding is zero.
    pub(crate) fn finish(self, what: &'static str) -> Result<usize> {
        let corrupt = |why| Error::Corrupt { what, offset: self.at / 8, why };
        if self.overrun() {
            return Err(corrupt("bits end too early"));
        }
        if !self.at.is_multiple_of(8) && self.bytes[self.at / 8] >> (self.at % 8) != 0 {
            return Err(corrupt("padding is not zero"));
        }
        Ok(self.at.div_ceil(8))
    }
}

/// Appends `value` in LEB128: seven bits a byte, least significant first, the top bit set on all but the
/// last.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Bytes that [`put_varint`] writes.
pub(crate) fn varint_bytes(value: u64) -> usize {
    (64 - (value | 1).leading_zeros()).div_ceil(7) as usize
}

/// Reads bytes of a payload front to back; says what and where when they end.
pub(crate) struct ByteReader<'a> {
    bytes: &'a [u8],
    at: usize,
    what: &'static str,
}

impl<'a> ByteReader<'a> {
    pub(crate) fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, at: 0, what }
    }

    /// Reads the bytes from `at` on.
    pub(crate) fn starting(bytes: &'a [u8], at: usize, what: &'static str) -> Self {
        Self { bytes, at: at.min(bytes.len()), what }
    }

    pub(crate) fn corrupt(&self, why: &'static str) -> Error {
        Error::Corrupt { what: self.what, offset: self.at, why }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let taken = self.rest().get(..count).ok_or_else(|| self.corrupt("bytes end too early"))?;
        self.at += count;
        Ok(taken)
    }

    /// As [`ByteReader::take`], so many bytes as a payload says.
    pub(crate) fn take_long(&mut self, count: u64) -> Result<&'a [u8]> {
        self.take(usize::try_from(count).unwrap_or(usize::MAX))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let chunk = self.rest().first_chunk::<N>().ok_or_else(|| self.corrupt("bytes end too early"))?;
        self.at += N;
        Ok(*chunk)
    }

    pub(crate) fn byte(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(self.corrupt("number exceeds 64 bits"));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.corrupt("number exceeds 64 bits"))
    }

    pub(crate) fn finish(self) -> Result<()> {
        if self.rest().is_empty() { Ok(()) } else { Err(self.corrupt("bytes follow the end")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_round_trip() {
        let mut bytes = Vec::new();
        let mut writer = BitWriter::new(&mut bytes);
        for value in [0, 1, 2, 19, 20, 300, 65_535] {
            for rice in [0, 1, 5, 12] {
                writer.rice(value, rice, 16);
            }
            writer.near(value.min(60) as i32);
            writer.near(-(value.min(60) as i32));
        }
        writer.put(u32::MAX, 32);
        writer.finish();
        let mut reader = BitReader::new(&bytes);
        for value in [0, 1, 2, 19, 20, 300, 65_535] {
            for rice in [0, 1, 5, 12] {
                assert_eq!(reader.rice(rice, 16), value);
            }
            assert_eq!(reader.near(), value.min(60) as i32);
            assert_eq!(reader.near(), -(value.min(60) as i32));
        }
        assert_eq!(reader.get(32), u32::MAX);
        assert_eq!(reader.finish("test"), Ok(bytes.len()));
    }

    #[test]
    fn the_end_is_noticed() {
        let mut reader = BitReader::new(&[0xff]);
        assert_eq!(reader.get(9), 0xff);
        assert!(reader.finish("test").is_err());
        let mut reader = BitReader::new(&[0, 0, 0]);
        assert_eq!(reader.unary(1000), 1000);
        assert!(reader.overrun());
    }

    #[test]
    fn varints_round_trip() {
        for value in [0, 1, 127, 128, 1 << 32, u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            assert_eq!(ByteReader::new(&bytes, "test").varint(), Ok(value));
            assert_eq!(varint_bytes(value), bytes.len());
        }
        assert!(ByteReader::new(&[0xff; 10], "test").varint().is_err());
        assert!(ByteReader::new(&[0x80], "test").varint().is_err());
    }
}
