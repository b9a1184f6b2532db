//! AVX2 and AVX-512 paths. A value of [`Avx2`] or [`Avx512`] exists only where the processor was found to
//! have the instructions: that is what every call into a `target_feature` function here rests on.
#![expect(
    unsafe_code,
    reason = "vector loads, and calls of functions compiled for instructions found at run time"
)]

use std::arch::x86_64::*;

use super::Work;
use super::vector::{Groups, store, vector_path, with_mantissa};
use crate::element::Element;
use crate::scan::PLANES;

vector_path! {
    /// Proof that AVX2, BMI and POPCNT are there.
    Avx2("avx2,bmi1,bmi2,lzcnt,popcnt", changed_avx2, planes_avx2):
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt")
}

vector_path! {
    /// Proof that AVX-512 F, BW, DQ, VL and VPOPCNTDQ are there, and all of [`Avx2`].
    Avx512("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,bmi1,bmi2,lzcnt,popcnt", changed_avx512, planes_avx512):
        Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vpopcntdq")
}

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
fn changed_avx2(size: usize, groups: Groups<'_>, masks: &mut [u64]) -> bool {
    let mut any = 0;
    for ((base, new), mask) in groups.zip(masks) {
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
        *mask = !equal;
        any |= !equal;
    }
    any != 0
}

#[target_feature(enable = "avx512f,avx512bw")]
fn changed_avx512(size: usize, groups: Groups<'_>, masks: &mut [u64]) -> bool {
    let mut any = 0;
    for ((base, new), mask) in groups.zip(masks) {
        *mask = match size {
            1 => _mm512_cmpneq_epi8_mask(load512(base, 0), load512(new, 0)),
            2 => (0..2).fold(0, |mask, i| {
                mask | u64::from(_mm512_cmpneq_epi16_mask(load512(base, i), load512(new, i))) << (32 * i)
            }),
            _ => (0..4).fold(0, |mask, i| {
                mask | u64::from(_mm512_cmpneq_epi32_mask(load512(base, i), load512(new, i))) << (16 * i)
            }),
        };
        any |= *mask;
    }
    any != 0
}

#[target_feature(enable = "avx2")]
fn planes_avx2(element: Element, base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    with_mantissa!(element, bytes_avx2, words_avx2, dwords_avx2, base, first, last, planes);
}

/// Bit planes of 64 bytes below 16.
#[inline]
#[target_feature(enable = "avx2")]
fn planes256(low: __m256i, high: __m256i) -> [u64; PLANES] {
    let join = |low, high| {
        let [low, high] = [low, high].map(|bytes| u64::from(_mm256_movemask_epi8(bytes) as u32));
        low | high << 32
    };
    [
        join(_mm256_slli_epi16::<7>(low), _mm256_slli_epi16::<7>(high)),
        join(_mm256_slli_epi16::<6>(low), _mm256_slli_epi16::<6>(high)),
        join(_mm256_slli_epi16::<5>(low), _mm256_slli_epi16::<5>(high)),
        join(_mm256_slli_epi16::<4>(low), _mm256_slli_epi16::<4>(high)),
    ]
}

#[target_feature(enable = "avx2")]
fn bytes_avx2<const MANTISSA: i32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (_mm256_set1_epi8(first as i8), _mm256_set1_epi8(last as i8));
    let exponents = _mm256_set1_epi8(0x7f >> MANTISSA);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(64).enumerate() {
        let class = |i| {
            let exponent = _mm256_and_si256(_mm256_srli_epi16::<MANTISSA>(load256(base, i)), exponents);
            _mm256_min_epu8(_mm256_subs_epu8(exponent, first), last)
        };
        store(planes, rows, row, planes256(class(0), class(1)));
    }
}

#[target_feature(enable = "avx2")]
fn words_avx2<const MANTISSA: i32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (_mm256_set1_epi16(first as i16), _mm256_set1_epi16(last as i16));
    let magnitude = _mm256_set1_epi16(0x7fff);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(128).enumerate() {
        let class = |i| {
            let exponent = _mm256_srli_epi16::<MANTISSA>(_mm256_and_si256(load256(base, i), magnitude));
            _mm256_min_epu16(_mm256_subs_epu16(exponent, first), last)
        };
        // Packing interleaves the 128-bit halves; the permutation puts them in order.
        let pack = |low, high| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high));
        store(planes, rows, row, planes256(pack(class(0), class(1)), pack(class(2), class(3))));
    }
}

#[target_feature(enable = "avx2")]
fn dwords_avx2<const MANTISSA: i32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (_mm256_set1_epi32(first as i32), _mm256_set1_epi32(last as i32));
    let magnitude = _mm256_set1_epi32(i32::MAX);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(256).enumerate() {
        let class = |i| {
            let exponent = _mm256_srli_epi32::<MANTISSA>(_mm256_and_si256(load256(base, i), magnitude));
            _mm256_min_epu32(_mm256_sub_epi32(_mm256_max_epu32(exponent, first), first), last)
        };
        // Packing twice leaves four bytes of each vector, first the low halves of all, then the high ones.
        let pack = |i| {
            let low = _mm256_packus_epi32(class(i), class(i + 1));
            let high = _mm256_packus_epi32(class(i + 2), class(i + 3));
            _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order)
        };
        store(planes, rows, row, planes256(pack(0), pack(4)));
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn planes_avx512(element: Element, base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    with_mantissa!(element, bytes_avx512, words_avx512, dwords_avx512, base, first, last, planes);
}

/// Bit planes of 64 bytes below 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn planes512(classes: __m512i) -> [u64; PLANES] {
    [1, 2, 4, 8].map(|bit| _mm512_test_epi8_mask(classes, _mm512_set1_epi8(bit)))
}

#[target_feature(enable = "avx512f,avx512bw")]
fn bytes_avx512<const MANTISSA: u32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (_mm512_set1_epi8(first as i8), _mm512_set1_epi8(last as i8));
    let exponents = _mm512_set1_epi8(0x7f >> MANTISSA);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(64).enumerate() {
        let exponent = _mm512_and_si512(_mm512_srli_epi16::<MANTISSA>(load512(base, 0)), exponents);
        store(planes, rows, row, planes512(_mm512_min_epu8(_mm512_subs_epu8(exponent, first), last)));
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn words_avx512<const MANTISSA: u32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (_mm512_set1_epi16(first as i16), _mm512_set1_epi16(last as i16));
    let magnitude = _mm512_set1_epi16(0x7fff);
    // Packing interleaves the 128-bit quarters; this puts them in order.
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(128).enumerate() {
        let class = |i| {
            let exponent = _mm512_srli_epi16::<MANTISSA>(_mm512_and_si512(load512(base, i), magnitude));
            _mm512_min_epu16(_mm512_subs_epu16(exponent, first), last)
        };
        store(
            planes,
            rows,
            row,
            planes512(_mm512_permutexvar_epi64(order, _mm512_packus_epi16(class(0), class(1)))),
        );
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn dwords_avx512<const MANTISSA: u32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (_mm512_set1_epi32(first as i32), _mm512_set1_epi32(last as i32));
    let magnitude = _mm512_set1_epi32(i32::MAX);
    // Packing twice leaves in each quarter four bytes of each vector.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(256).enumerate() {
        let class = |i| {
            let exponent = _mm512_srli_epi32::<MANTISSA>(_mm512_and_si512(load512(base, i), magnitude));
            _mm512_min_epu32(_mm512_sub_epi32(_mm512_max_epu32(exponent, first), first), last)
        };
        let low = _mm512_packus_epi32(class(0), class(1));
        let high = _mm512_packus_epi32(class(2), class(3));
        store(planes, rows, row, planes512(_mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high))));
    }
}
