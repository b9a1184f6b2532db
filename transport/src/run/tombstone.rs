//! What earlier releases left in the place of a manifest whose version was collected. The next collection
//! removes it.

use driftless_store::ContentDigest;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::ids::{RunId, Version};
use crate::manifest::{FORMAT, Features};

/// Manifests longer than this are no tombstones.
const TOMBSTONE_BYTES_MAX: usize = 4096;
/// The required feature by which a reader that knows no tombstones refuses one.
const FEATURE: &str = "collected";

/// Stands in a manifest's place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    format: u32,
    pub(crate) run_id: RunId,
    pub(crate) model: String,
    pub(crate) version: Version,
    features: Features,
    collected: Fate,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Fate {
    manifest_digest: ContentDigest,
    anchor: Version,
}

impl Tombstone {
    /// The tombstone that `bytes` are, or `None` if they are anything else.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let small = bytes.len() <= TOMBSTONE_BYTES_MAX;
        let tombstone: Self = small.then(|| serde_json::from_slice(bytes).ok())??;
        (tombstone.format == FORMAT && tombstone.features.required == [FEATURE]).then_some(tombstone)
    }

    /// The error for a reader of the version.
    pub(crate) fn into_error(self) -> Error {
        let Self { run_id, model, version, collected: Fate { anchor, .. }, .. } = self;
        Error::Collected { run_id, model, version, anchor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tombstone_is_refused_by_readers_that_do_not_know_it() {
        let digest = ContentDigest::of(b"{}");
        let bytes = format!(
            r#"{{"format":1,"run_id":"{}","model":"policy","version":3,"features":{{"required":["collected"],"optional":[]}},"collected":{{"manifest_digest":"{digest}","anchor":9}}}}"#,
            RunId::from_bytes([7; 16])
        )
        .into_bytes();
        let error = Tombstone::parse(&bytes).unwrap().into_error();
        let expected = matches!(error, Error::Collected { version: Version(3), anchor: Version(9), .. });
        assert!(expected, "{error:?}");
        let error = crate::manifest::Manifest::parse(&bytes).unwrap_err();
        assert!(matches!(&error, Error::UnknownFeature { feature, .. } if feature == FEATURE), "{error:?}");
        for cut in 0..bytes.len() {
            assert!(Tombstone::parse(&bytes[..cut]).is_none());
        }
        let other = String::from_utf8(bytes).unwrap().replace("\"collected\"]", "\"collected\",\"more\"]");
        assert!(Tombstone::parse(other.as_bytes()).is_none(), "what else it requires is not known here");
    }
}
