//! NEON paths. A value of [`Neon`] exists only where the processor was found to have the instructions: that
//! is what every call into a `target_feature` function here rests on.
#![expect(
    unsafe_code,
    reason = "vector loads, and calls of functions compiled for instructions found at run time"
)]

use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

use super::Work;
use super::vector::{Groups, store, vector_path, with_mantissa};
use crate::element::Element;
use crate::scan::PLANES;

vector_path! {
    /// Proof that NEON is there.
    Neon("neon", changed, planes_as): is_aarch64_feature_detected!("neon")
}

/// Vector `index` of `bytes`.
#[inline]
#[target_feature(enable = "neon")]
fn load(bytes: &[u8], index: usize) -> uint8x16_t {
    let bytes = &bytes[index * 16..index * 16 + 16];
    // SAFETY: `bytes` is 16 bytes long, and the load needs no alignment.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_words(bytes: &[u8], index: usize) -> uint16x8_t {
    vreinterpretq_u16_u8(load(bytes, index))
}

#[inline]
#[target_feature(enable = "neon")]
fn load_dwords(bytes: &[u8], index: usize) -> uint32x4_t {
    vreinterpretq_u32_u8(load(bytes, index))
}

/// The low bytes of the lanes of two vectors.
#[inline]
#[target_feature(enable = "neon")]
fn narrow(low: uint16x8_t, high: uint16x8_t) -> uint8x16_t {
    vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))
}

/// The low bytes of the lanes of four vectors.
#[inline]
#[target_feature(enable = "neon")]
fn narrow_twice(lanes: [uint32x4_t; 4]) -> uint8x16_t {
    let [a, b, c, d] = lanes.map(|lanes| vreinterpretq_u16_u32(lanes));
    narrow(vuzp1q_u16(a, b), vuzp1q_u16(c, d))
}

/// One bit per byte of four vectors, whose bytes are all ones or all zeros.
#[inline]
#[target_feature(enable = "neon")]
fn bits(bytes: [uint8x16_t; 4]) -> u64 {
    // Each byte keeps the bit that is its place among eight; three times adding neighbours gathers eight
    // bytes in one.
    let places = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let [a, b, c, d] = bytes.map(|bytes| vandq_u8(bytes, places));
    let quarters = vpaddq_u8(vpaddq_u8(a, b), vpaddq_u8(c, d));
    vgetq_lane_u64::<0>(vreinterpretq_u64_u8(vpaddq_u8(quarters, quarters)))
}

#[target_feature(enable = "neon")]
fn changed(size: usize, groups: Groups<'_>, masks: &mut [u64]) -> bool {
    let mut any = 0;
    for ((base, new), mask) in groups.zip(masks) {
        let words = |i| vceqq_u16(load_words(base, i), load_words(new, i));
        let dwords = |i| vceqq_u32(load_dwords(base, i), load_dwords(new, i));
        *mask = !bits([0, 1, 2, 3].map(|i| match size {
            1 => vceqq_u8(load(base, i), load(new, i)),
            2 => narrow(words(2 * i), words(2 * i + 1)),
            _ => narrow_twice([0, 1, 2, 3].map(|quarter| dwords(4 * i + quarter))),
        }));
        any |= *mask;
    }
    any != 0
}

#[target_feature(enable = "neon")]
fn planes_as(element: Element, base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    with_mantissa!(element, bytes, words, dwords, base, first, last, planes);
}

/// Bit planes of 64 bytes below 16.
#[inline]
#[target_feature(enable = "neon")]
fn planes_of(classes: [uint8x16_t; 4]) -> [u64; PLANES] {
    [1, 2, 4, 8].map(|bit| bits(classes.map(|classes| vtstq_u8(classes, vdupq_n_u8(bit)))))
}

#[target_feature(enable = "neon")]
fn bytes<const MANTISSA: i32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (vdupq_n_u8(first as u8), vdupq_n_u8(last as u8));
    let magnitude = vdupq_n_u8(0x7f);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(64).enumerate() {
        let class = |i| {
            let exponent = vshrq_n_u8::<MANTISSA>(vandq_u8(load(base, i), magnitude));
            vminq_u8(vqsubq_u8(exponent, first), last)
        };
        store(planes, rows, row, planes_of([0, 1, 2, 3].map(class)));
    }
}

#[target_feature(enable = "neon")]
fn words<const MANTISSA: i32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (vdupq_n_u16(first as u16), vdupq_n_u16(last as u16));
    let magnitude = vdupq_n_u16(0x7fff);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(128).enumerate() {
        let class = |i| {
            let exponent = vshrq_n_u16::<MANTISSA>(vandq_u16(load_words(base, i), magnitude));
            vminq_u16(vqsubq_u16(exponent, first), last)
        };
        store(planes, rows, row, planes_of([0, 1, 2, 3].map(|i| narrow(class(2 * i), class(2 * i + 1)))));
    }
}

#[target_feature(enable = "neon")]
fn dwords<const MANTISSA: i32>(base: &[u8], first: u32, last: u32, planes: &mut [u64]) {
    let (first, last) = (vdupq_n_u32(first), vdupq_n_u32(last));
    let magnitude = vdupq_n_u32(0x7fff_ffff);
    let rows = planes.len() / PLANES;
    for (row, base) in base.chunks_exact(256).enumerate() {
        let class = |i| {
            let exponent = vshrq_n_u32::<MANTISSA>(vandq_u32(load_dwords(base, i), magnitude));
            vminq_u32(vqsubq_u32(exponent, first), last)
        };
        let pack = |i: usize| narrow_twice([0, 1, 2, 3].map(|quarter| class(4 * i + quarter)));
        store(planes, rows, row, planes_of([0, 1, 2, 3].map(pack)));
    }
}
