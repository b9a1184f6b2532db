//! What may go: pure decisions over a listing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeToInclusive;

use driftless_store::{Entry, Key};

use crate::ids::Version;
use crate::run::{MANIFEST, parse_version};

/// The last segment of the key of a manifest's signature.
const SIGNATURE: &str = "manifest.sig";

/// What lies in the place of one version.
#[derive(Debug, Default)]
pub(super) struct Listed {
    pub(super) manifest: Option<Entry>,
    others: Vec<Entry>,
}

impl Listed {
    /// What publishers put here and no manifest among the kept ones names; where the version is `collected`,
    /// the manifest's signature as well. Anything else is not ours to remove.
    pub(super) fn dead(&self, kept: &BTreeSet<Key>, collected: bool) -> Vec<&Entry> {
        let ours = |key: &Key| is_publishers(key) || (collected && key.name() == SIGNATURE);
        self.others.iter().filter(|entry| ours(&entry.key) && !kept.contains(&entry.key)).collect()
    }
}

/// A model's versions, as listed.
#[derive(Debug)]
pub(super) struct Places {
    versions: BTreeMap<Version, Listed>,
    /// Of all that is there but the manifests.
    sizes: BTreeMap<Key, u64>,
}

impl Places {
    /// Sorts the entries under a model's `root`.
    pub(super) fn of(entries: Vec<Entry>, root: &Key) -> Self {
        let (mut versions, mut sizes) = (BTreeMap::<Version, Listed>::new(), BTreeMap::new());
        for entry in entries {
            let parts = entry.key.under(root).and_then(|rest| rest.split_once('/'));
            let Some((version, name)) =
                parts.and_then(|(version, name)| Some((parse_version(version)?, name)))
            else {
                continue;
            };
            let place = versions.entry(version).or_default();
            if name == MANIFEST {
                place.manifest = Some(entry);
            } else {
                sizes.insert(entry.key.clone(), entry.size);
                place.others.push(entry);
            }
        }
        Self { versions, sizes }
    }

    pub(super) fn range(
        &self,
        versions: RangeToInclusive<Version>,
    ) -> impl Iterator<Item = (&Version, &Listed)> {
        self.versions.range(versions)
    }

    /// The size of an object, if it is there.
    pub(super) fn size(&self, key: &Key) -> Option<u64> {
        self.sizes.get(key).copied()
    }
}

/// The oldest version to keep: the lowest of the newest anchor, what the live leases need, and the last of
/// the `keep` newest. Without an anchor it is version 0.
pub(super) fn floor(
    newest: Version,
    anchor: Option<Version>,
    keep: u64,
    needed: impl Iterator<Item = Version>,
) -> Version {
    let kept = Version((newest.0 + 1).saturating_sub(keep));
    needed.fold(kept.min(anchor.unwrap_or_default()), Version::min)
}

/// Whether a key in a version's place is what publishers put there: an object `<16 hex>-<index>`, or a rank's
/// part.
pub(crate) fn is_publishers(key: &Key) -> bool {
    let name = key.name();
    name.starts_with("part-")
        || name.split_once('-').is_some_and(|(attempt, index)| {
            attempt.len() == 16
                && attempt.bytes().all(|byte| byte.is_ascii_hexdigit())
                && index.bytes().all(|byte| byte.is_ascii_digit())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_lowest_of_all_needs() {
        let floor = |anchor: Option<u64>, keep, needs: &[u64]| {
            floor(Version(20), anchor.map(Version), keep, needs.iter().map(|needs| Version(*needs))).0
        };
        assert_eq!(floor(Some(15), 1, &[]), 15);
        assert_eq!(floor(Some(20), 1, &[]), 20);
        assert_eq!(floor(Some(20), 3, &[]), 18);
        assert_eq!(floor(Some(15), 3, &[17, 12]), 12);
        assert_eq!(floor(Some(15), 100, &[]), 0);
        assert_eq!(floor(None, 1, &[19]), 0, "without an anchor every version is needed");
    }

    #[test]
    fn only_what_publishers_put_into_a_versions_place_is_theirs() {
        let entry = |key: &str| Entry::new(Key::new(key).unwrap(), 7, None);
        let root = Key::new("r/policy").unwrap();
        let places = Places::of(
            vec![
                entry("r/policy/head"),
                entry("r/policy/v0000000001/0123456789abcdef-00000"),
                entry("r/policy/v0000000001/0123456789abcdef-00001"),
                entry("r/policy/v0000000001/manifest"),
                entry("r/policy/v0000000001/manifest.sig"),
                entry("r/policy/v1/0123456789abcdef-00000"),
                entry("r/policy/v0000000001/notes-1"),
            ],
            &root,
        );
        let kept = BTreeSet::from([Key::new("r/policy/v0000000001/0123456789abcdef-00001").unwrap()]);
        let [(version, place)] = places.range(..=Version(9)).collect::<Vec<_>>()[..] else { panic!() };
        assert_eq!((*version, place.manifest.as_ref().unwrap().key.name()), (Version(1), MANIFEST));
        let dead =
            |collected| place.dead(&kept, collected).iter().map(|entry| entry.key.name()).collect::<Vec<_>>();
        assert_eq!(dead(false), ["0123456789abcdef-00000"]);
        assert_eq!(dead(true), ["0123456789abcdef-00000", "manifest.sig"]);
        assert_eq!(places.size(&Key::new("r/policy/v0000000001/manifest.sig").unwrap()), Some(7));
    }
}
