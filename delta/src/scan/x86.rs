//! AVX2 and AVX-512 paths. A value of [`Avx2`] or [`Avx512`] exists only where the processor was found to have the instructions:
//! that is what every call into a `target_feature` function here rests on.
#![expect(
    unsafe_code,
    reason = "vector loads, and calls of functions compiled for instructions found at run time"
)]

use std::arch::x86_64::*;

use super::Work;
use crate::Element;
use crate::table::Table;

/// Proof that AVX2, BMI and POPCNT are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

/// Proof that AVX-512 F, BW, DQ and VL are there, and all of [`Avx2`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        found.then_some(Self(()))
    }

    /// `base` and `new` are whole groups.
    pub(super) fn changed(self, size: usize, base: &[u8], new: &[u8], masks: &mut Vec<u64>) {
        let groups = base.chunks_exact(64 * size).zip(new.chunks_exact(64 * size));
        // SAFETY: `self` proves the features.
        unsafe { changed_avx2(size, groups, masks) }
    }

    /// `base` is whole groups; `masks` has `groups` zeroed words for each class.
    pub(super) fn classes(
        self,
        element: Element,
        base: &[u8],
        table: &Table,
        masks: &mut [u64],
        groups: usize,
    ) {
        // SAFETY: `self` proves the features.
        unsafe { classes_avx2(element, base, table, masks, groups) }
    }

    pub(super) fn run<W: Work>(self, work: W) -> W::Output {
        // SAFETY: `self` proves the features.
        unsafe { run_avx2(work) }
    }
}

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let found = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }

    /// As [`Avx2::changed`].
    pub(super) fn changed(self, size: usize, base: &[u8], new: &[u8], masks: &mut Vec<u64>) {
        let groups = base.chunks_exact(64 * size).zip(new.chunks_exact(64 * size));
        // SAFETY: `self` proves the features.
        unsafe { changed_avx512(size, groups, masks) }
    }

    /// As [`Avx2::classes`].
    pub(super) fn classes(
        self,
        element: Element,
        base: &[u8],
        table: &Table,
        masks: &mut [u64],
        groups: usize,
    ) {
        // SAFETY: `self` proves the features.
        unsafe { classes_avx512(element, base, table, masks, groups) }
    }

    /// What [`Avx512::detect`] found too.
    pub(super) fn avx2(self) -> Avx2 {
        Avx2(())
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn run_avx2<W: Work>(work: W) -> W::Output {
    work.run()
}

type Groups<'a> = std::iter::Zip<std::slice::ChunksExact<'a, u8>, std::slice::ChunksExact<'a, u8>>;

/// Vector `index` of `bytes`.
#[inline]
#[target_feature(enable = "avx2")]
fn load256(bytes: &[u8], index: usize) -> __m256i {
    let bytes = &bytes[index * 32..index * 32 + 32];
    // SAFETY: `bytes` is 32 bytes long, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Vector `index` of `bytes`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load512(bytes: &[u8], index: usize) -> __m512i {
    let bytes = &bytes[index * 64..index * 64 + 64];
    // SAFETY: `bytes` is 64 bytes long, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// One bit per 16-bit lane of two vectors, whose lanes are all ones or all zeros.
#[inline]
#[target_feature(enable = "avx2")]
fn bits_of_words(low: __m256i, high: __m256i) -> u64 {
    // Packing interleaves the 128-bit halves; the permutation puts them in order.
    let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(low, high));
    u64::from(_mm256_movemask_epi8(packed) as u32)
}

#[target_feature(enable = "avx2")]
fn changed_avx2(size: usize, groups: Groups<'_>, masks: &mut Vec<u64>) {
    masks.extend(groups.map(|(base, new)| {
        let equal: u64 = match size {
            1 => (0..2).fold(0, |mask, i| {
                let equal = _mm256_cmpeq_epi8(load256(base, i), load256(new, i));
                mask | u64::from(_mm256_movemask_epi8(equal) as u32) << (32 * i)
            }),
            2 => (0..2).fold(0, |mask, i| {
                let low = _mm256_cmpeq_epi16(load256(base, 2 * i), load256(new, 2 * i));
                let high = _mm256_cmpeq_epi16(load256(base, 2 * i + 1), load256(new, 2 * i + 1));
                mask | bits_of_words(low, high) << (32 * i)
            }),
            _ => (0..8).fold(0, |mask, i| {
                let equal = _mm256_cmpeq_epi32(load256(base, i), load256(new, i));
                mask | (_mm256_movemask_ps(_mm256_castsi256_ps(equal)) as u64) << (8 * i)
            }),
        };
        !equal
    }));
}

#[target_feature(enable = "avx512f,avx512bw")]
fn changed_avx512(size: usize, groups: Groups<'_>, masks: &mut Vec<u64>) {
    masks.extend(groups.map(|(base, new)| match size {
        1 => _mm512_cmpneq_epi8_mask(load512(base, 0), load512(new, 0)),
        2 => (0..2).fold(0, |mask, i| {
            mask | u64::from(_mm512_cmpneq_epi16_mask(load512(base, i), load512(new, i))) << (32 * i)
        }),
        _ => (0..4).fold(0, |mask, i| {
            mask | u64::from(_mm512_cmpneq_epi32_mask(load512(base, i), load512(new, i))) << (16 * i)
        }),
    }));
}

/// Turns masks of "beyond class i" for i = 0, 1, … into masks of the classes.
#[inline(always)]
fn split(masks: &mut [u64], group: usize, groups: usize, beyond: impl Fn(u32) -> u64) {
    let classes = masks.len() / groups;
    let mut rest = u64::MAX;
    for class in 0..classes - 1 {
        let next = beyond(class as u32);
        masks[class * groups + group] = rest & !next;
        rest = next;
    }
    masks[(classes - 1) * groups + group] = rest;
}

#[target_feature(enable = "avx2")]
fn classes_avx2(element: Element, base: &[u8], table: &Table, masks: &mut [u64], groups: usize) {
    // Magnitudes have no sign bit, so signed comparisons order them.
    let last_of = |class: u32| ((table.first + 1 + class) << element.mantissa_bits()) - 1;
    for (group, base) in base.chunks_exact(64 * element.size()).enumerate() {
        match element.size() {
            1 => {
                let magnitude = |i| _mm256_and_si256(load256(base, i), _mm256_set1_epi8(0x7f));
                let lanes = [magnitude(0), magnitude(1)];
                split(masks, group, groups, |class| {
                    let last = _mm256_set1_epi8(last_of(class) as i8);
                    let bits = |lane| u64::from(_mm256_movemask_epi8(_mm256_cmpgt_epi8(lane, last)) as u32);
                    bits(lanes[0]) | bits(lanes[1]) << 32
                });
            }
            2 => {
                let magnitude = |i| _mm256_and_si256(load256(base, i), _mm256_set1_epi16(0x7fff));
                let lanes = [magnitude(0), magnitude(1), magnitude(2), magnitude(3)];
                split(masks, group, groups, |class| {
                    let last = _mm256_set1_epi16(last_of(class) as i16);
                    let beyond = lanes.map(|lane| _mm256_cmpgt_epi16(lane, last));
                    bits_of_words(beyond[0], beyond[1]) | bits_of_words(beyond[2], beyond[3]) << 32
                });
            }
            _ => {
                let sign = _mm256_set1_epi32(i32::MAX);
                let lanes: [__m256i; 8] = std::array::from_fn(|i| _mm256_and_si256(load256(base, i), sign));
                split(masks, group, groups, |class| {
                    let last = _mm256_set1_epi32(last_of(class) as i32);
                    (0..8).fold(0, |mask, i| {
                        let beyond = _mm256_castsi256_ps(_mm256_cmpgt_epi32(lanes[i], last));
                        mask | (_mm256_movemask_ps(beyond) as u64) << (8 * i)
                    })
                });
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn classes_avx512(element: Element, base: &[u8], table: &Table, masks: &mut [u64], groups: usize) {
    let last_of = |class: u32| ((table.first + 1 + class) << element.mantissa_bits()) - 1;
    for (group, base) in base.chunks_exact(64 * element.size()).enumerate() {
        match element.size() {
            1 => {
                let lanes = _mm512_and_si512(load512(base, 0), _mm512_set1_epi8(0x7f));
                split(masks, group, groups, |class| {
                    _mm512_cmpgt_epi8_mask(lanes, _mm512_set1_epi8(last_of(class) as i8))
                });
            }
            2 => {
                let magnitude = |i| _mm512_and_si512(load512(base, i), _mm512_set1_epi16(0x7fff));
                let lanes = [magnitude(0), magnitude(1)];
                split(masks, group, groups, |class| {
                    let last = _mm512_set1_epi16(last_of(class) as i16);
                    let bits = |lane| u64::from(_mm512_cmpgt_epi16_mask(lane, last));
                    bits(lanes[0]) | bits(lanes[1]) << 32
                });
            }
            _ => {
                let sign = _mm512_set1_epi32(i32::MAX);
                let lanes: [__m512i; 4] = std::array::from_fn(|i| _mm512_and_si512(load512(base, i), sign));
                split(masks, group, groups, |class| {
                    let last = _mm512_set1_epi32(last_of(class) as i32);
                    (0..4).fold(0, |mask, i| {
                        mask | u64::from(_mm512_cmpgt_epi32_mask(lanes[i], last)) << (16 * i)
                    })
                });
            }
        }
    }
}
