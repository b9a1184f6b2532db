//! Checksums of whole tensors, as slime names and spells them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Algorithm of the checksum that each changed tensor has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Checksum {
    /// XXH3, 128 bits, seed 0.
    #[default]
    #[serde(rename = "xxh3-128")]
    Xxh3,
    /// BLAKE3, 256 bits.
    #[serde(rename = "blake3")]
    Blake3,
    /// Adler-32: 32 bits, finds accidents of a single tensor and little else.
    #[serde(rename = "adler32")]
    Adler32,
}

impl Checksum {
    /// The name in an index.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Xxh3 => "xxh3-128",
            Self::Blake3 => "blake3",
            Self::Adler32 => "adler32",
        }
    }

    /// Number of hex digits.
    pub(crate) fn digits(self) -> usize {
        match self {
            Self::Xxh3 => 32,
            Self::Blake3 => 64,
            Self::Adler32 => 8,
        }
    }

    pub(crate) fn hasher(self) -> Hasher {
        match self {
            Self::Xxh3 => Hasher::Xxh3(Box::default()),
            Self::Blake3 => Hasher::Blake3(Box::default()),
            Self::Adler32 => Hasher::Adler32(adler2::Adler32::new()),
        }
    }

    /// The checksum of `bytes`.
    pub(crate) fn of(self, bytes: &[u8]) -> String {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish()
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A checksum being computed.
pub(crate) enum Hasher {
    Xxh3(Box<xxhash_rust::xxh3::Xxh3>),
    Blake3(Box<blake3::Hasher>),
    Adler32(adler2::Adler32),
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Xxh3(hasher) => hasher.update(bytes),
            Self::Blake3(hasher) => {
                hasher.update(bytes);
            }
            Self::Adler32(hasher) => hasher.write_slice(bytes),
        }
    }

    /// Lower-case hex, most significant digit first.
    pub(crate) fn finish(self) -> String {
        match self {
            Self::Xxh3(hasher) => format!("{:032x}", hasher.digest128()),
            Self::Blake3(hasher) => hasher.finalize().to_hex().to_string(),
            Self::Adler32(hasher) => format!("{:08x}", hasher.checksum()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the algorithms' own specifications and test vectors.
    #[test]
    fn known_values() {
        assert_eq!(Checksum::Xxh3.of(b""), "99aa06d3014798d86001c324468d497f");
        assert_eq!(Checksum::Adler32.of(b"Wikipedia"), "11e60398");
        assert_eq!(Checksum::Adler32.of(b""), "00000001");
        assert_eq!(
            Checksum::Blake3.of(b""),
            "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
        );
        for checksum in [Checksum::Xxh3, Checksum::Blake3, Checksum::Adler32] {
            let mut hasher = checksum.hasher();
            hasher.update(b"in two ");
            hasher.update(b"parts");
            assert_eq!(hasher.finish(), checksum.of(b"in two parts"));
            assert_eq!(checksum.of(b"x").len(), checksum.digits());
        }
    }
}
