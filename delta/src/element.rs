//! The numbers a tensor is made of, and the order in which a change is counted.

use crate::error::{Error, Result};

/// Elements of a block, whatever their type. Blocks do not depend on each other.
pub const BLOCK_ELEMENTS: usize = 65_536;

/// Type of one element. It decides the size of a step, never whether bytes survive: every bit pattern
/// round-trips.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Element {
    /// Opaque bytes (packed formats, integers): one element is one byte, and a step is the difference of two
    /// bytes.
    #[default]
    Bytes,
    /// 8-bit float, 4 exponent bits, 3 mantissa bits.
    F8E4M3,
    /// 8-bit float, 5 exponent bits, 2 mantissa bits.
    F8E5M2,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an `f32`.
    Bf16,
    /// IEEE 754 single precision.
    F32,
}

impl Element {
    /// The element type for a safetensors dtype name (`BF16`, `F8_E4M3`, …). What is no float of up to 32
    /// bits is [`Element::Bytes`].
    pub fn of_dtype(dtype: &str) -> Self {
        match dtype {
            "F8_E4M3" => Self::F8E4M3,
            "F8_E5M2" => Self::F8E5M2,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F32" => Self::F32,
            _ => Self::Bytes,
        }
    }

    /// Bytes of one element.
    #[inline(always)]
    pub const fn size(self) -> usize {
        match self {
            Self::Bytes | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Bits of one element.
    #[inline(always)]
    pub(crate) const fn bits(self) -> u32 {
        self.size() as u32 * 8
    }

    /// All of them, in the order of the numbers that name them in the format.
    const ALL: [Self; 6] = [Self::Bytes, Self::F8E4M3, Self::F8E5M2, Self::F16, Self::Bf16, Self::F32];

    /// Number that names the type in the format.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Result<Self> {
        let unsupported = Error::Unsupported { what: "element type", found: code.into() };
        Self::ALL.get(usize::from(code)).copied().ok_or(unsupported)
    }

    /// Bits below the exponent field; opaque bytes have no exponent, their class is always 0.
    #[inline(always)]
    pub(crate) const fn mantissa_bits(self) -> u32 {
        match self {
            Self::Bytes => 8,
            Self::F8E4M3 => 3,
            Self::F8E5M2 => 2,
            Self::F16 => 10,
            Self::Bf16 => 7,
            Self::F32 => 23,
        }
    }

    /// All bits of an element set.
    #[inline(always)]
    pub(crate) const fn mask(self) -> u32 {
        u32::MAX >> (32 - self.bits())
    }

    #[inline(always)]
    const fn sign_bit(self) -> u32 {
        1 << (self.bits() - 1)
    }

    /// The bits without the sign: what classes are cut from.
    #[inline(always)]
    pub(crate) const fn magnitude(self, bits: u32) -> u32 {
        bits & (self.mask() >> 1)
    }

    /// Exponent field, 0 for opaque bytes.
    #[inline(always)]
    pub(crate) const fn exponent(self, bits: u32) -> u32 {
        self.magnitude(bits) >> self.mantissa_bits()
    }

    /// Whether a bit pattern is neither NaN nor an infinity; opaque bytes are no numbers, and always are.
    #[inline(always)]
    pub(crate) const fn is_finite(self, bits: u32) -> bool {
        match self {
            Self::Bytes => true,
            // Without infinities: its highest exponent has numbers, and one NaN.
            Self::F8E4M3 => self.magnitude(bits) != self.mask() >> 1,
            _ => self.exponent(bits) != self.exponent(self.mask()),
        }
    }

    /// Position of a bit pattern in the monotone order of the float: neighbours differ by one ulp, −0 lies
    /// just below +0, NaNs lie beyond the infinities. A bijection on all patterns.
    #[inline(always)]
    pub(crate) const fn ordered(self, bits: u32) -> u32 {
        // No branch: signs are as good as random, and a wrong guess would wait for the memory that holds
        // them.
        let negative = (bits >> (self.bits() - 1)).wrapping_neg();
        match self {
            Self::Bytes => bits,
            _ => bits ^ (negative & self.mask() | self.sign_bit()),
        }
    }

    #[inline(always)]
    const fn unordered(self, rank: u32) -> u32 {
        let negative = (rank >> (self.bits() - 1)).wrapping_sub(1);
        match self {
            Self::Bytes => rank,
            _ => rank ^ (negative & self.mask() | self.sign_bit()),
        }
    }

    /// Signed distance from `base` to `new` in ulps, modulo the number of patterns.
    #[inline(always)]
    pub(crate) const fn step(self, base: u32, new: u32) -> i32 {
        let unused = 32 - self.bits();
        ((self.ordered(new).wrapping_sub(self.ordered(base)) << unused) as i32) >> unused
    }

    /// The pattern `step` ulps away from `base`: the inverse of [`Element::step`].
    #[inline(always)]
    pub(crate) const fn stepped(self, base: u32, step: i32) -> u32 {
        self.unordered(self.ordered(base).wrapping_add(step as u32) & self.mask())
    }

    /// Number of elements in `bytes`.
    pub(crate) fn count(self, what: &'static str, bytes: usize) -> Result<usize> {
        let size = self.size();
        if bytes.is_multiple_of(size) {
            Ok(bytes / size)
        } else {
            Err(Error::OddLength { what, bytes, size })
        }
    }

    /// Bits of element `index`; the caller keeps `index` in range.
    #[inline(always)]
    pub(crate) fn load(self, bytes: &[u8], index: usize) -> u32 {
        match self.size() {
            1 => bytes[index].into(),
            2 => u16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).into(),
            _ => {
                let at = index * 4;
                u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
            }
        }
    }
}

/// Evaluates `$work` with `$name` bound to `$element` as a constant, so that loops inside carry no dispatch.
macro_rules! with_constant {
    ($element:expr, $name:ident => $work:expr) => {
        with_constant!($element, $name => $work, [Bytes, F8E4M3, F8E5M2, F16, Bf16, F32])
    };
    ($element:expr, $name:ident => $work:expr, [$($type:ident),*]) => {
        match $element {
            $(Element::$type => {
                let $name = Element::$type;
                $work
            })*
        }
    };
}
pub(crate) use with_constant;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Miri has no time for all patterns.
    const BITS: u32 = if cfg!(miri) { 8 } else { 16 };
    const APART: usize = if cfg!(miri) { 251 } else { 1 };

    pub(crate) const ALL: [Element; 6] = Element::ALL;

    #[test]
    fn codes_name_their_type() {
        for element in ALL {
            assert_eq!(Element::from_code(element.code()), Ok(element));
        }
        assert!(Element::from_code(6).is_err());
    }

    #[test]
    fn order_is_a_bijection_and_neighbours_are_one_ulp_apart() {
        let narrow = |element: &Element| element.bits() <= BITS;
        for element in ALL.into_iter().filter(narrow) {
            let mut seen = vec![false; 1 << element.bits()];
            for bits in 0..=element.mask() {
                let rank = element.ordered(bits);
                assert!(!std::mem::replace(&mut seen[rank as usize], true));
                assert_eq!(element.unordered(rank), bits);
            }
        }
        assert_eq!(Element::Bf16.step(0x3f80, 0x3f81), 1);
        assert_eq!(Element::Bf16.step(0xbf80, 0xbf81), -1);
        assert_eq!(Element::Bf16.step(0x8000, 0x0000), 1, "from -0 to +0");
        assert_eq!(Element::F32.step(f32::MAX.to_bits(), f32::INFINITY.to_bits()), 1);
    }

    #[test]
    fn every_bf16_pattern_reaches_every_tested_target() {
        for base in (0..=0xffff_u32).step_by(APART) {
            for new in
                [0, 1, 0x7f80, 0x7fff, 0x8000, 0xff80, 0xffff, base ^ 0x8000, base.wrapping_add(1) & 0xffff]
            {
                assert_eq!(Element::Bf16.stepped(base, Element::Bf16.step(base, new)), new);
            }
        }
    }
}
