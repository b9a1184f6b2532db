//! Names of objects in a store.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Longest key in bytes; every store this crate knows takes at least this much.
const KEY_BYTES_MAX: usize = 1024;
/// Longest segment in bytes: the limit of common file systems.
const SEGMENT_BYTES_MAX: usize = 255;

/// The name of an object: segments of `A-Z a-z 0-9 . _ - @ = +`, joined by `/`.
///
/// No segment is empty or starts with a dot. So a key can neither leave its store (`..`, an absolute path)
/// nor meet a store's private files. No key may be a directory-like prefix of another (`a` and `a/b`): a file
/// system cannot hold both.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(String);

impl Key {
    /// Checks a text and makes it a key.
    ///
    /// # Errors
    /// [`Error::BadKey`] names the rule that the text breaks.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        match broken_rule(&text) {
            None => Ok(Self(text)),
            Some(reason) => Err(Error::BadKey { text, reason }),
        }
    }

    /// This key with further segments behind it.
    ///
    /// # Errors
    /// [`Error::BadKey`] if the result is not a key.
    pub fn join(&self, rest: &str) -> Result<Self> {
        Self::new(format!("{}/{rest}", self.0))
    }

    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The last segment.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// The segments, first to last.
    pub fn segments(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }

    /// What follows `prefix/`, or `None` if the key does not lie under `prefix`.
    #[must_use]
    pub fn under(&self, prefix: &Self) -> Option<&str> {
        self.0.strip_prefix(prefix.as_str())?.strip_prefix('/')
    }
}

fn broken_rule(text: &str) -> Option<&'static str> {
    match text {
        "" => Some("it is empty"),
        _ if text.len() > KEY_BYTES_MAX => Some("it is longer than 1024 bytes"),
        _ if text.starts_with('/') => Some("it is absolute"),
        _ => text.split('/').find_map(broken_rule_of_segment),
    }
}

fn broken_rule_of_segment(segment: &str) -> Option<&'static str> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@=+".contains(&byte);
    match segment {
        "" => Some("it has an empty segment"),
        _ if segment.starts_with('.') => Some("a segment starts with a dot"),
        _ if segment.len() > SEGMENT_BYTES_MAX => Some("a segment is longer than 255 bytes"),
        _ if segment.bytes().all(is_allowed) => None,
        _ => Some("a segment has a character other than A-Z a-z 0-9 . _ - @ = +"),
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Key {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl TryFrom<String> for Key {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        Self::new(text)
    }
}

impl From<Key> for String {
    fn from(key: Key) -> Self {
        key.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_cannot_leave_their_store() {
        for bad in
            ["", "/a", "a//b", "a/", "..", "a/../b", ".", "a/.hidden", "a b", "a\\b", "a\0", "é", "a\n"]
        {
            assert!(matches!(Key::new(bad), Err(Error::BadKey { .. })), "{bad:?} was accepted");
        }
        assert!(Key::new("a".repeat(256)).is_err());
        assert!(Key::new(vec!["a"; 600].join("/")).is_err());
        for good in ["a", "runs/my-run_2", "0f/policy@fp8/v0000000042/manifest.sig", "a=b+c"] {
            assert_eq!(Key::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn a_prefix_ends_at_a_segment() {
        let key = Key::new("runs/demo/x").unwrap();
        assert_eq!(key.under(&Key::new("runs").unwrap()), Some("demo/x"));
        assert_eq!(key.under(&Key::new("run").unwrap()), None);
        assert_eq!(key.under(&key), None);
        assert_eq!(key.name(), "x");
        assert_eq!(key.segments().count(), 3);
    }
}
