//! Identities: versions, runs, digests of content, and the names people choose.

use std::fmt;
use std::str::FromStr;

use driftless_store::{Error as StoreError, Key};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Number of a policy's weights; 0 is the start of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Version(pub u64);

impl Version {
    /// The version after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Version {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        text.parse().map(Self).map_err(|_| Error::BadText {
            what: "version",
            text: text.to_owned(),
            expected: "a decimal number",
        })
    }
}

/// Identity of one training run: 128 random bits, written as 32 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunId([u8; 16]);

impl RunId {
    /// A new identity from the operating system's randomness.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// The identity with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The text an engine is given for a version of this run: `<first 12 hex digits>:<version>`.
    #[must_use]
    pub fn label(&self, version: Version) -> String {
        format!("{}:{version}", hex::encode(&self.0[..6]))
    }
}

driftless_store::hex_text!(RunId, Error, "run id", "32 lower-case hex digits");

/// Checks a name that becomes one segment of a key: a run's, a model's or a follower's.
///
/// # Errors
/// [`Error::BadName`] with `what` and the rule broken.
pub(crate) fn check_name(what: &'static str, text: &str) -> Result<()> {
    let reason = match Key::new(text) {
        Err(StoreError::BadKey { reason, .. }) => reason,
        Ok(_) if text.contains('/') => "it has a slash",
        _ => return Ok(()),
    };
    Err(Error::BadName { what, text: text.to_owned(), reason })
}

/// The segment under a run's id that holds its followers; no model may have this name.
pub(crate) const FOLLOWERS: &str = "followers";

/// Checks a model's name: one segment of a key, and not the followers' place.
pub(crate) fn check_model(model: &str) -> Result<()> {
    check_name("model", model)?;
    if model == FOLLOWERS {
        let reason = "the followers of the run have this place";
        return Err(Error::BadName { what: "model", text: model.to_owned(), reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_round_trip_and_others_are_refused() {
        let id: RunId = "3f0c9a12b7de00112233445566778899".parse().unwrap();
        assert_eq!(id.to_string(), "3f0c9a12b7de00112233445566778899");
        assert_eq!(id.label(Version(42)), "3f0c9a12b7de:42");
        for bad in ["", "3f", "3F0c9a12b7de00112233445566778899", "zz0c9a12b7de00112233445566778899"] {
            assert!(matches!(bad.parse::<RunId>(), Err(Error::BadText { .. })), "{bad}");
        }
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"3f0c9a12b7de00112233445566778899\"");
        assert!("-1".parse::<Version>().is_err());
        assert_ne!(RunId::random(), RunId::random());
    }

    #[test]
    fn names_are_one_segment() {
        check_name("run", "my-run").unwrap();
        for bad in ["", "a/b", "..", "a b"] {
            assert!(matches!(check_name("run", bad), Err(Error::BadName { what: "run", .. })), "{bad}");
        }
    }
}
