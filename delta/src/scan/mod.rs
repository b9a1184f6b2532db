//! Passes over dense bytes: which elements changed, which class each belongs to. One bit per element, 64 to a
//! group.
//!
//! [`scalar`] is the reference; the other paths are chosen at run time and do the same on whole groups.

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod scalar;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::element::Element;

/// Elements of a group.
pub(crate) const GROUP: usize = 64;

/// Bits of a class.
pub(crate) const PLANES: usize = 4;

/// A way to do it that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon(neon::Neon),
}

impl Path {
    /// The widest path of this machine. The standard library remembers what it detected.
    pub(crate) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(path) = x86::Avx512::detect() {
                return Self::Avx512(path);
            }
            if let Some(path) = x86::Avx2::detect() {
                return Self::Avx2(path);
            }
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        if let Some(path) = neon::Neon::detect() {
            return Self::Neon(path);
        }
        Self::Scalar
    }

    /// Sets bit `i % 64` of `masks[i / 64]` where element `i` differs, clears all others, and says whether
    /// any is set. `base` and `new` have one length, of as many groups as there are masks.
    pub(crate) fn changed(self, element: Element, base: &[u8], new: &[u8], masks: &mut [u64]) -> bool {
        let group = GROUP * element.size();
        let (whole, tail) = base.split_at(base.len() / group * group);
        let (whole_new, tail_new) = new.split_at(whole.len());
        let (masks, last) = masks.split_at_mut(whole.len() / group);
        let any = match self {
            Self::Scalar => scalar::changed(element, whole, whole_new, masks),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(path) => path.changed(element.size(), whole, whole_new, masks),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(path) => path.changed(element.size(), whole, whole_new, masks),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon(path) => path.changed(element.size(), whole, whole_new, masks),
        };
        any | scalar::changed(element, tail, tail_new, last)
    }

    /// Bit planes of the class of each element, one plane after the other: its exponent less `first`, at
    /// least 0 and at most `last`, which is below 16. There are as many rows as `base` has groups.
    pub(crate) fn planes(self, element: Element, base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
        let group = GROUP * element.size();
        let (whole, tail) = base.split_at(base.len() / group * group);
        match self {
            Self::Scalar => scalar::planes(element, whole, first, last, planes, 0),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(path) => path.planes(element, whole, first, last, planes),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(path) => path.planes(element, whole, first, last, planes),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon(path) => path.planes(element, whole, first, last, planes),
        }
        scalar::planes(element, tail, first, last, planes, whole.len() / group);
    }

    /// Does `work`, compiled for the path's instructions.
    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            Self::Scalar => work.run(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(path) => path.run(work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(path) => path.run(work),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon(path) => path.run(work),
        }
    }
}

/// A loop worth compiling for more than the least of processors. A closure would not do: only what is marked
/// `#[inline(always)]` is sure to be compiled inside its caller, as `run` must be.
pub(crate) trait Work {
    type Output;
    fn run(self) -> Self::Output;
}

/// Positions of the set bits of `mask`, ascending.
#[inline(always)]
pub(crate) fn ones(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let at = mask.trailing_zeros();
        (mask != 0).then(|| {
            mask &= mask - 1;
            at
        })
    })
}

/// Appends the positions of the set bits of masks, which stand for the elements of a block from `start` on.
#[inline(always)]
pub(crate) fn positions(start: usize, masks: &[u64], out: &mut Vec<u16>) {
    // Four positions are written whether there are as many or not: how many there are cannot be guessed, and
    // a wrong guess costs more.
    const AT_ONCE: usize = 4;
    let count: u32 = masks.iter().map(|mask| mask.count_ones()).sum();
    let mut end = out.len();
    out.resize(end + count as usize + AT_ONCE, 0);
    for (group, &mask) in masks.iter().enumerate() {
        // Past the last bit the position need not be one of the block; it is written over or cut off.
        let position = |bit: u32| (start + group * GROUP + bit as usize) as u16;
        let mut rest = mask;
        for slot in &mut out[end..end + AT_ONCE] {
            *slot = position(rest.trailing_zeros());
            rest &= rest.wrapping_sub(1);
        }
        if rest != 0 {
            out[end + AT_ONCE..].iter_mut().zip(ones(rest)).for_each(|(slot, bit)| *slot = position(bit));
        }
        end += mask.count_ones() as usize;
    }
    out.truncate(end);
}

/// Position of the `rank`-th set bit of `mask`, which has more than `rank`: halves the search six times.
#[inline(always)]
pub(crate) fn select(mask: u64, mut rank: u32) -> u32 {
    let mut at = 0;
    for width in [32, 16, 8, 4, 2, 1] {
        let below = (mask >> at & ((1 << width) - 1)).count_ones();
        if rank >= below {
            rank -= below;
            at += width;
        }
    }
    at
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::element::tests::ALL;

    /// Whole groups, and a tail. Miri has no time for more.
    const MOST: usize = if cfg!(miri) { 127 } else { 4099 };
    /// Nor for every case: one in so many is looked at.
    const APART: usize = if cfg!(miri) { 3 } else { 1 };
    /// Rows of a block, or as many as Miri has time for.
    const ROWS: usize = if cfg!(miri) { 4 } else { 1024 };

    /// Every path of this machine.
    pub(crate) fn paths() -> Vec<Path> {
        let mut paths = vec![Path::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            paths.extend(x86::Avx2::detect().map(Path::Avx2));
            paths.extend(x86::Avx512::detect().map(Path::Avx512));
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        paths.extend(neon::Neon::detect().map(Path::Neon));
        paths
    }

    pub(crate) fn sample(length: usize, seed: u32) -> Vec<u8> {
        (0..length as u32).map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b1) >> 19) as u8).collect()
    }

    #[test]
    fn paths_see_the_same_changes() {
        for element in ALL {
            for count in [0, 1, 63, 64, 65, 128, MOST.min(1000), MOST] {
                let base = sample(count * element.size(), 1);
                let mut new = base.clone();
                (0..new.len()).filter(|at| at % 37 < at % 5).for_each(|at| new[at] ^= 1 << (at % 8));
                let mut expected = vec![7; count.div_ceil(GROUP)];
                let any = scalar::changed(element, &base, &new, &mut expected);
                assert_eq!(any, base != new);
                for path in paths() {
                    let mut masks = vec![9; expected.len()];
                    assert_eq!(path.changed(element, &base, &new, &mut masks), any);
                    assert_eq!(masks, expected, "{path:?} {element:?} {count}");
                    assert!(!path.changed(element, &base, &base, &mut masks));
                }
            }
        }
    }

    #[test]
    fn paths_see_the_same_classes() {
        for element in ALL {
            let exponents = element.exponent(element.mask()) + 1;
            let ranges = [(0, 1), (0, 15), (exponents / 2, 2), (exponents.saturating_sub(4), 3), (3, 15)];
            for (first, last) in ranges.into_iter().rev().step_by(APART) {
                for count in [63, 64, MOST].into_iter().rev().step_by(APART) {
                    let base = sample(count * element.size(), 2);
                    let mut expected = vec![7; 4 * count.div_ceil(GROUP)];
                    scalar::planes(element, &base, first, last, &mut expected, 0);
                    for path in paths() {
                        let mut planes = vec![9; expected.len()];
                        path.planes(element, &base, first, last, &mut planes);
                        assert_eq!(planes, expected, "{path:?} {element:?} {first} {last}");
                    }
                }
            }
        }
    }

    #[test]
    fn positions_are_those_of_the_bits() {
        let masks = [0, 1, 0b1011, u64::MAX, 0, 1 << 63, 0xf0f0, 0, 0b11111];
        let mut out = vec![9];
        positions(64, &masks, &mut out);
        let expected: Vec<u16> = (64..)
            .step_by(64)
            .zip(masks)
            .flat_map(|(at, mask)| ones(mask).map(move |bit| at + bit as u16))
            .collect();
        assert_eq!(out[1..], expected);
        let mut all = Vec::new();
        positions(0, &[u64::MAX; ROWS], &mut all);
        assert!(all.iter().copied().eq(0..=(ROWS * GROUP - 1) as u16));
        // Few bits in the last group of a whole block: no position past it is a number of 16 bits.
        let (mut sparse, mut last) = ([0; 1024], Vec::new());
        sparse[1023] = 1 << 63;
        positions(0, &sparse, &mut last);
        assert_eq!(last, [u16::MAX]);
    }

    #[test]
    fn select_finds_every_bit() {
        for mask in [1, u64::MAX, 1 << 63, 0x8000_0100_0001_0003, 0xdead_beef_cafe_f00d] {
            for (rank, bit) in (0..).zip(ones(mask)) {
                assert_eq!(select(mask, rank), bit);
            }
        }
    }
}
