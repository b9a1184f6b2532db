//! `fleet.json`: which engines were added to a run and removed from it while it ran. What is in it goes before the
//! run's options; of engines that it does not name, these decide.

use std::path::{Path, PathBuf};

use driftless_bridge::{ClientOptions, connect};
use serde::{Deserialize, Serialize};

use super::record::write_atomically;
use crate::error::{Error, Result, input};

/// An engine that a run is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Engine {
    /// Where it is, as it was given.
    pub(super) address: String,
    /// Whether it gets the run's keys.
    pub(super) keys: bool,
}

/// What the file holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Changes {
    added: Vec<Engine>,
    /// URLs.
    removed: Vec<String>,
}

impl Changes {
    fn path(save: &Path) -> PathBuf {
        save.join("fleet.json")
    }

    /// Reads them; none if there is no file.
    pub(super) fn read(save: &Path) -> Result<Self> {
        let path = Self::path(save);
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|source| Error::Json { path, source }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        }
    }

    pub(super) fn write(&self, save: &Path) -> Result<()> {
        let path = Self::path(save);
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|source| Error::Json { path: path.clone(), source })?;
        write_atomically(&path, &bytes)
    }

    /// An engine was added.
    pub(super) fn add(&mut self, engine: &Engine, url: &str) {
        self.forget(url);
        self.added.push(engine.clone());
    }

    /// An engine was removed.
    pub(super) fn remove(&mut self, url: &str) {
        self.forget(url);
        self.removed.push(url.to_owned());
    }

    /// Neither holds any more.
    pub(super) fn forget(&mut self, url: &str) {
        self.removed.retain(|removed| removed != url);
        self.added.retain(|engine| !url_of(&engine.address).is_ok_and(|added| added == url));
    }

    /// The engines of a run whose options name these.
    pub(super) fn applied_to(&self, named: &[Engine]) -> Result<Vec<Engine>> {
        let added = self.added.iter().map(|engine| Ok((url_of(&engine.address)?, engine)));
        let added = added.collect::<Result<Vec<_>>>()?;
        let mut engines = Vec::new();
        for engine in named {
            let url = url_of(&engine.address)?;
            if !self.removed.contains(&url) && !added.iter().any(|(other, _)| *other == url) {
                engines.push(engine.clone());
            }
        }
        engines.extend(added.into_iter().map(|(_, engine)| engine.clone()));
        if engines.is_empty() && !named.is_empty() {
            let expected = "an engine that was not removed from the run, as its fleet.json says";
            let named: Vec<_> = named.iter().map(|engine| engine.address.as_str()).collect();
            return Err(input("rollout_external_engine_addrs", expected, named.join(", ")));
        }
        Ok(engines)
    }
}

/// The URL of an address, by which engines are the same.
pub(super) fn url_of(address: &str) -> Result<String> {
    Ok(connect(address, ClientOptions::default())?.url().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(address: &str, keys: bool) -> Engine {
        Engine { address: address.to_owned(), keys }
    }

    fn named(addresses: &[&str]) -> Vec<Engine> {
        addresses.iter().map(|address| engine(address, true)).collect()
    }

    #[test]
    fn changes_go_before_the_options_for_what_they_name() {
        let mut changes = Changes::default();
        changes.add(&engine("vllm+http://c:1/", false), "http://c:1");
        changes.remove("http://b:1");
        let engines = changes.applied_to(&named(&["a:1", "http://b:1/"])).unwrap();
        assert_eq!(engines, [engine("a:1", true), engine("vllm+http://c:1/", false)]);
        // The list has become another one meanwhile.
        let engines = changes.applied_to(&named(&["d:1", "vllm+c:1", "b:1"])).unwrap();
        assert_eq!(engines, [engine("d:1", true), engine("vllm+http://c:1/", false)]);
        let refused = Changes { added: Vec::new(), ..changes.clone() }.applied_to(&named(&["b:1"]));
        assert!(matches!(refused, Err(Error::Input { .. })), "{refused:?}");
    }

    #[test]
    fn later_change_of_an_engine_counts() {
        let mut changes = Changes::default();
        changes.add(&engine("a:1", false), "http://a:1");
        changes.remove("http://a:1");
        assert_eq!(changes.applied_to(&named(&["b:1"])).unwrap(), [engine("b:1", true)]);
        changes.add(&engine("http://a:1", true), "http://a:1");
        changes.add(&engine("a:1", true), "http://a:1");
        assert_eq!(changes, Changes { added: vec![engine("a:1", true)], removed: Vec::new() });
    }

    #[test]
    fn written_changes_are_read_and_damaged_ones_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Changes::read(dir.path()).unwrap(), Changes::default());
        let mut changes = Changes::default();
        changes.add(&engine("a:1", true), "http://a:1");
        changes.remove("http://b:1");
        changes.write(dir.path()).unwrap();
        assert_eq!(Changes::read(dir.path()).unwrap(), changes);
        std::fs::write(dir.path().join("fleet.json"), "{").unwrap();
        assert!(matches!(Changes::read(dir.path()), Err(Error::Json { .. })));
    }
}
