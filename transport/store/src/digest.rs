//! Digests that name content.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// BLAKE3-256 of some bytes, written as 64 hex digits: names manifests, objects and files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentDigest([u8; 32]);

impl ContentDigest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The digest with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Refuses bytes that this digest does not name; `subject` says what they are.
    ///
    /// # Errors
    /// [`Error::DigestMismatch`] with both digests.
    pub fn check(&self, bytes: &[u8], subject: impl fmt::Display) -> Result<()> {
        let found = Self::of(bytes);
        if found == *self {
            return Ok(());
        }
        Err(Error::DigestMismatch { subject: subject.to_string(), expected: *self, found })
    }
}

/// Text, hex and serde of a byte-array identity; for the crates above, which have identities of their own.
#[doc(hidden)]
#[macro_export]
macro_rules! hex_text {
    ($type:ident, $error:ident, $what:literal, $expected:literal) => {
        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(&hex::encode(self.0))
            }
        }

        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                write!(f, "{}({self})", stringify!($type))
            }
        }

        impl ::std::str::FromStr for $type {
            type Err = $error;
            fn from_str(text: &str) -> ::std::result::Result<Self, $error> {
                let bad = || $error::BadText { what: $what, text: text.to_owned(), expected: $expected };
                // Only one spelling: a digest that compares equal must also read equal.
                if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
                    return Err(bad());
                }
                let mut bytes = [0; _];
                hex::decode_to_slice(text, &mut bytes).map_err(|_| bad())?;
                Ok(Self(bytes))
            }
        }

        impl TryFrom<String> for $type {
            type Error = $error;
            fn try_from(text: String) -> ::std::result::Result<Self, $error> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(id: $type) -> Self {
                id.to_string()
            }
        }
    };
}

hex_text!(ContentDigest, Error, "BLAKE3-256 digest", "64 lower-case hex digits");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_names_both_sides_when_it_refuses() {
        let digest = ContentDigest::of(b"abc");
        digest.check(b"abc", "x").unwrap();
        let Err(Error::DigestMismatch { subject, expected, found }) = digest.check(b"abd", "x") else {
            panic!()
        };
        assert_eq!((subject.as_str(), expected, found), ("x", digest, ContentDigest::of(b"abd")));
    }
}
