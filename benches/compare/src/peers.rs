//! Other stacks' delta encodings of one tensor of 16-bit elements, restated. Sizes and work are theirs, container bytes left out in their favour.

#![allow(clippy::expect_used, reason = "a bench ends where its own data cannot be compressed")]

/// slime, miles, stitch: dense byte xor, zstd level 1; xxh3-128 of the result.
pub mod xor_zstd {
    use xxhash_rust::xxh3::xxh3_128;

    /// The xor of both states, compressed.
    pub fn encode(base: &[u8], new: &[u8]) -> (Vec<u8>, u128) {
        let xor: Vec<u8> = base.iter().zip(new).map(|(a, b)| a ^ b).collect();
        (zstd::bulk::compress(&xor, 1).expect("zstd compresses any bytes"), xxh3_128(new))
    }

    /// Decompresses, xors into `tensor` in place, and hashes the result, as their receiver does.
    pub fn apply(tensor: &mut [u8], payload: &(Vec<u8>, u128)) -> bool {
        let Ok(xor) = zstd::bulk::decompress(&payload.0, tensor.len()) else { return false };
        tensor.iter_mut().zip(&xor).for_each(|(a, b)| *a ^= b);
        xxh3_128(tensor) == payload.1
    }
}

/// NeMo-RL: gaps between changed elements in 16 bits, xor values, each compressed with zstd level 1.
pub mod gaps_zstd {
    /// Gap streams hold the distance to the next change; a gap that does not fit makes the stream 32 bits wide.
    pub fn encode(base: &[u8], new: &[u8]) -> (Vec<u8>, Vec<u8>, bool) {
        let (mut gaps, mut values, mut last) = (Vec::<u32>::new(), Vec::new(), 0);
        for (at, (a, b)) in base.chunks_exact(2).zip(new.chunks_exact(2)).enumerate() {
            if a != b {
                gaps.push((at - last) as u32);
                values.extend([a[0] ^ b[0], a[1] ^ b[1]]);
                last = at;
            }
        }
        let wide = gaps.iter().any(|gap| *gap > 0xffff);
        let width = if wide { 4 } else { 2 };
        let gaps: Vec<u8> = gaps.iter().flat_map(|gap| gap.to_le_bytes().into_iter().take(width)).collect();
        let compress = |bytes: &[u8]| zstd::bulk::compress(bytes, 1).expect("zstd compresses any bytes");
        (compress(&gaps), compress(&values), wide)
    }

    /// Xors the values into `tensor` in place.
    pub fn apply(tensor: &mut [u8], (gaps, values, wide): &(Vec<u8>, Vec<u8>, bool)) -> bool {
        let most = tensor.len() * 2;
        let (Ok(gaps), Ok(values)) =
            (zstd::bulk::decompress(gaps, most), zstd::bulk::decompress(values, most))
        else {
            return false;
        };
        let mut at = 0;
        for (gap, value) in gaps.chunks_exact(if *wide { 4 } else { 2 }).zip(values.chunks_exact(2)) {
            at += gap.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
            tensor[at * 2] ^= value[0];
            tensor[at * 2 + 1] ^= value[1];
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Pair, Shape, synthetic};

    #[test]
    fn peers_round_trip() {
        for density in [0.00001, 0.01, 0.3] {
            for Pair { base, new, .. } in synthetic(Shape { tensors: 2, elements: 150_000 }, density, 1) {
                let mut tensor = base.clone();
                assert!(xor_zstd::apply(&mut tensor, &xor_zstd::encode(&base, &new)) && tensor == new);
                let mut tensor = base.clone();
                assert!(gaps_zstd::apply(&mut tensor, &gaps_zstd::encode(&base, &new)) && tensor == new);
            }
        }
    }
}
