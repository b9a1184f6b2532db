//! Other stacks' delta encodings of one tensor of 16-bit elements, restated. Sizes and work are theirs,
//! container bytes left out in their favour.

#![allow(clippy::expect_used, reason = "a bench ends where its own data cannot be compressed")]

/// slime, miles, stitch: dense byte xor, zstd level 1; xxh3-128 of the result.
pub mod xor_zstd {
    use std::io::Read;

    use xxhash_rust::xxh3::{Xxh3, xxh3_128};

    /// Bytes that the receiver of today decompresses, xors and hashes at a time.
    const STREAM_BYTES: usize = 2 << 20;

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

    /// The same in blocks that stay in the processor's cache, as their receiver does over a mapped file.
    pub fn apply_streamed(tensor: &mut [u8], frame: &[u8], digest: u128) -> bool {
        let Ok(mut stream) = zstd::stream::read::Decoder::with_buffer(frame) else { return false };
        let (mut xor, mut hash) = (vec![0; STREAM_BYTES.min(tensor.len())], Xxh3::new());
        for block in tensor.chunks_mut(STREAM_BYTES) {
            let xor = &mut xor[..block.len()];
            if stream.read_exact(xor).is_err() {
                return false;
            }
            block.iter_mut().zip(&*xor).for_each(|(a, b)| *a ^= b);
            hash.update(block);
        }
        hash.digest128() == digest
    }
}

/// slime's other form: positions of changed bytes in 32 bits, then the new bytes, zstd level 1; xxh3-128 of
/// the result.
pub mod overwrite_zstd {
    use xxhash_rust::xxh3::xxh3_128;

    /// Number of changed bytes, their positions, their new values, compressed together. A tensor is less than
    /// 4 GiB.
    pub fn encode(base: &[u8], new: &[u8]) -> (Vec<u8>, u128) {
        let changed = || (0_u32..).zip(base.iter().zip(new)).filter(|(_, (a, b))| a != b);
        let mut content = (changed().count() as u32).to_le_bytes().to_vec();
        content.extend(changed().flat_map(|(at, _)| at.to_le_bytes()));
        content.extend(changed().map(|(_, (_, new))| new));
        (zstd::bulk::compress(&content, 1).expect("zstd compresses any bytes"), xxh3_128(new))
    }

    /// Decompresses, writes into `tensor`, and hashes the result.
    pub fn apply(tensor: &mut [u8], payload: &(Vec<u8>, u128)) -> bool {
        let Ok(content) = zstd::bulk::decompress(&payload.0, 4 + 5 * tensor.len()) else { return false };
        let Some((count, rest)) = content.split_first_chunk::<4>() else { return false };
        let Some((positions, values)) = rest.split_at_checked(4 * u32::from_le_bytes(*count) as usize) else {
            return false;
        };
        for (at, value) in positions.as_chunks::<4>().0.iter().zip(values) {
            let Some(slot) = tensor.get_mut(u32::from_le_bytes(*at) as usize) else { return false };
            *slot = *value;
        }
        xxh3_128(tensor) == payload.1
    }
}

/// NeMo-RL: gaps between changed elements in 16 bits, xor values, each compressed with zstd level 1.
pub mod gaps_zstd {
    /// Gap streams hold the distance to the next change; a gap that does not fit makes the stream 32 bits
    /// wide.
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
    pub fn apply(tensor: &mut [u8], packed: &(Vec<u8>, Vec<u8>, bool)) -> bool {
        let (gaps, values, wide) = packed;
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
                let payload = xor_zstd::encode(&base, &new);
                assert!(xor_zstd::apply(&mut tensor, &payload) && tensor == new);
                let mut tensor = base.clone();
                assert!(xor_zstd::apply_streamed(&mut tensor, &payload.0, payload.1) && tensor == new);
                assert!(!xor_zstd::apply_streamed(&mut base.clone(), &payload.0, payload.1 ^ 1));
                let mut tensor = base.clone();
                assert!(
                    overwrite_zstd::apply(&mut tensor, &overwrite_zstd::encode(&base, &new)) && tensor == new
                );
                let mut tensor = base.clone();
                assert!(gaps_zstd::apply(&mut tensor, &gaps_zstd::encode(&base, &new)) && tensor == new);
            }
        }
    }
}
