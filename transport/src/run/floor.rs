//! The floor of a model: every version below it was collected, and nothing has to stay in its place to say
//! so.

use driftless_store::{Error as StoreError, Key, PutMode};

use super::{Committed, Run, parse_version};
use crate::error::{Error, Result};
use crate::ids::{RunId, Version};

/// The segment under a model that holds the floors.
const FLOORS: &str = "floor";

/// What the name of an empty object under `floor/` says: `v<floor>-v<anchor>`. Floors are created and never
/// changed, and the highest one counts, so that two collections at once cannot take one back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Floor {
    /// The oldest version that was not collected.
    pub(crate) version: Version,
    /// The newest anchor when that was decided.
    pub(crate) anchor: Version,
}

impl Floor {
    /// The floor that a key under the model's `root` names.
    pub(crate) fn parse(key: &Key, root: &Key) -> Option<Self> {
        let (version, anchor) = key.under(root)?.strip_prefix(FLOORS)?.strip_prefix('/')?.split_once('-')?;
        Some(Self { version: parse_version(version)?, anchor: parse_version(anchor)? })
    }

    fn key(self, root: &Key) -> Result<Key> {
        Ok(root.join(&format!("{FLOORS}/v{:010}-v{:010}", self.version.0, self.anchor.0))?)
    }

    /// The error for a reader of a version below it.
    fn collected(self, run_id: RunId, model: &str, version: Version) -> Error {
        Error::Collected { run_id, model: model.to_owned(), version, anchor: self.anchor }
    }
}

impl Run {
    /// The oldest version of a model that was not collected; 0 if none was.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub fn oldest(&self, model: &str) -> Result<Version> {
        Ok(self.floor(model)?.map_or(Version(0), |floor| floor.version))
    }

    pub(crate) fn floors(&self, model: &str) -> Result<Vec<Floor>> {
        let root = self.model_root(model)?;
        let listed = self.store().list(&root.join(FLOORS)?)?;
        let mut floors: Vec<Floor> =
            listed.iter().filter_map(|entry| Floor::parse(&entry.key, &root)).collect();
        floors.sort_unstable();
        Ok(floors)
    }

    pub(crate) fn floor(&self, model: &str) -> Result<Option<Floor>> {
        Ok(self.floors(model)?.pop())
    }

    /// What was read of a version, unless the version was collected; and the floor.
    ///
    /// The floor is read after the manifest. Below it numbers are free in the store, and a publisher that
    /// slept may have taken one. As the floor never falls, a number that is above it now had not been free
    /// before.
    pub(crate) fn unless_collected(
        &self,
        model: &str,
        version: Version,
        read: Result<Committed>,
    ) -> Result<(Committed, Version)> {
        match self.floor(model) {
            Ok(Some(floor)) if version < floor.version => Err(floor.collected(self.id(), model, version)),
            Ok(floor) => Ok((read?, floor.map_or(Version(0), |floor| floor.version))),
            // What went wrong first says more.
            Err(error) => read.and(Err(error)),
        }
    }

    /// Raises the floor, durably; of the ones that are there the highest stays, for a reader that lists them
    /// just now.
    pub(crate) fn raise_floor(&self, model: &str, floor: Floor) -> Result<()> {
        let root = self.model_root(model)?;
        let mut old = self.floors(model)?;
        old.pop();
        for old in old {
            self.store().delete(&old.key(&root)?)?;
        }
        match self.store().put(&floor.key(&root)?, b"", PutMode::Create) {
            // Another collection came to the same conclusion.
            Err(StoreError::AlreadyExists { .. }) => Ok(()),
            put => Ok(put?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_are_named_by_what_they_say() {
        let root = Key::new("r/policy").unwrap();
        let floor = Floor { version: Version(50), anchor: Version(52) };
        let key = floor.key(&root).unwrap();
        assert_eq!(key.as_str(), "r/policy/floor/v0000000050-v0000000052");
        assert_eq!(Floor::parse(&key, &root), Some(floor));
        for other in [
            "r/policy/floor/v50-v52",
            "r/policy/floor/v0000000050",
            "r/policy/v0000000050/manifest",
            "r/x/floor/v0000000050-v0000000052",
        ] {
            assert_eq!(Floor::parse(&Key::new(other).unwrap(), &root), None, "{other}");
        }
    }
    #[test]
    fn a_floor_never_falls_and_leaves_one_more_behind() {
        let store: std::sync::Arc<dyn driftless_store::Store> =
            std::sync::Arc::new(driftless_store::Memory::new());
        let run = Run::create(store.clone(), "run").unwrap();
        assert_eq!(run.oldest("policy").unwrap(), Version(0));
        for (raised, expected) in [(50, 50), (50, 50), (60, 60), (55, 60), (70, 70)] {
            let floor = Floor { version: Version(raised), anchor: Version(raised + 2) };
            // The second one was read by a collection that another one overtook.
            run.raise_floor("policy", floor).unwrap();
            assert_eq!(run.oldest("policy").unwrap(), Version(expected));
            assert!(run.floors("policy").unwrap().len() <= 2);
        }
        let got = run.get("policy", Version(69)).unwrap_err();
        assert!(matches!(got, Error::Collected { version: Version(69), anchor: Version(72), .. }), "{got:?}");
        let above = run.get("policy", Version(70)).unwrap_err();
        assert!(matches!(above, Error::NoSuchVersion { .. }), "{above:?}");
    }
}
