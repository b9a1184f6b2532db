//! Numbers that follow from a seed.

/// splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), from this seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random(pub u64);

impl Random {
    /// 64 bits.
    #[allow(clippy::should_implement_trait, reason = "an endless sequence needs no `Option`")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Near a standard normal: enough for weights.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// So many bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        std::iter::repeat_with(|| self.next().to_le_bytes()).flatten().take(length).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn next_from_a_seed_is_the_published_sequence() {
        // The first numbers from seed 1234567 of the reference implementation (prng.di.unimi.it/splitmix64.c).
        let mut random = Random(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }
}
