//! What stands in the place of a manifest whose version was collected.

use serde::{Deserialize, Serialize};

use crate::manifest::{FORMAT, Features};
use crate::{ContentDigest, Error, Result, RunId, Version};

/// Manifests longer than this are not looked at as tombstones.
const TOMBSTONE_BYTES_MAX: usize = 4096;
/// The required feature by which a reader that knows no tombstones refuses one.
const FEATURE: &str = "collected";

/// Replaces a manifest. The key stays taken, so that a publisher that slept can never commit the number again, and a
/// reader is told where to start.
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
    /// For the version whose manifest has these bytes.
    pub(super) fn new(
        run_id: RunId,
        model: &str,
        version: Version,
        manifest: &[u8],
        anchor: Version,
    ) -> Self {
        Self {
            format: FORMAT,
            run_id,
            model: model.to_owned(),
            version,
            features: Features { required: vec![FEATURE.to_owned()], optional: Vec::new() },
            collected: Fate { manifest_digest: ContentDigest::of(manifest), anchor },
        }
    }

    /// The tombstone that `bytes` are, or `None` if they are anything else.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let small = bytes.len() <= TOMBSTONE_BYTES_MAX;
        let tombstone: Self = small.then(|| serde_json::from_slice(bytes).ok())??;
        (tombstone.format == FORMAT && tombstone.features.required == [FEATURE]).then_some(tombstone)
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|source| Error::Parse { subject: "tombstone".to_owned(), source })
    }

    /// What a reader of the version is told.
    pub(crate) fn into_error(self) -> Error {
        let Fate { manifest_digest, anchor } = self.collected;
        Error::Collected {
            run_id: self.run_id,
            model: self.model,
            version: self.version,
            manifest_digest,
            anchor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_without_tombstones_refuse_one_and_others_see_nothing_else_in_it() {
        let tombstone = Tombstone::new(RunId::from_bytes([7; 16]), "policy", Version(3), b"{}", Version(9));
        let bytes = tombstone.to_bytes().unwrap();
        assert_eq!(Tombstone::parse(&bytes).unwrap(), tombstone);
        let error = crate::Manifest::parse(&bytes).unwrap_err();
        assert!(matches!(&error, Error::UnknownFeature { feature, .. } if feature == FEATURE), "{error:?}");
        for cut in 0..bytes.len() {
            assert!(Tombstone::parse(&bytes[..cut]).is_none());
        }
        let other = String::from_utf8(bytes).unwrap().replace("\"collected\"]", "\"collected\",\"more\"]");
        assert!(Tombstone::parse(other.as_bytes()).is_none(), "what else it requires is not known here");
    }
}
