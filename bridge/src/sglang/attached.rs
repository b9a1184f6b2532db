//! One engine whose identity was checked and accepted.

use std::collections::BTreeMap;

use super::identity;
use crate::{Capabilities, Client, Error, Expected, Identity, Result};

/// An engine that fits: the right model, in a set-up that can be updated.
#[derive(Debug, Clone)]
pub struct Engine {
    client: Client,
    identity: Identity,
    capabilities: Capabilities,
    load_format: Option<String>,
    saves_memory: bool,
}

/// What a look at an engine's live weights showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LiveWeights {
    /// Every tensor's checksum equals the checkpoint's.
    Equal,
    /// This engine's checksums cannot be computed here.
    Unchecked {
        /// Why: more than one rank, or not on the CPU.
        reason: String,
    },
}

impl Engine {
    /// Asks an engine who it is, and what it can do.
    ///
    /// # Errors
    /// [`Error::Refused`] for another model or an unsupported set-up, by the engine's own names; the errors of every call;
    /// [`Error::Config`] when the config under the engine's model path is readable here but not as one.
    pub async fn attach(client: Client, expected: &Expected) -> Result<Self> {
        let (model, server) = (client.model_info().await?, client.server_info().await?);
        let local = identity::local(&server)?;
        let identity = identity::compare(client.url(), expected, &model, &server, local.as_ref())?;
        let capabilities = Capabilities::probe(&client).await?;
        tracing::info!(engine = client.url(), ?identity, ?capabilities, "attached");
        let saves_memory = server.enable_memory_saver.unwrap_or(false);
        Ok(Self { client, identity, capabilities, load_format: server.load_format, saves_memory })
    }

    /// The same engine, called through another client of it.
    pub(crate) fn through(self, client: Client) -> Self {
        Self { client, ..self }
    }

    /// Its client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What it said about itself.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Whether it can give memory back and take it again.
    pub(crate) fn saves_memory(&self) -> bool {
        self.saves_memory
    }

    /// `load_format` for updates from disk: an engine started with `dummy` keeps that as its default, and cannot update with it.
    pub(crate) fn update_load_format(&self) -> Option<String> {
        (self.load_format.as_deref() == Some("dummy")).then(|| "auto".to_owned())
    }

    /// The label of the weights it serves.
    ///
    /// # Errors
    /// As every call of [`Client`].
    pub async fn serving(&self) -> Result<Option<String>> {
        Ok(self.client.model_info().await?.weight_version)
    }

    /// Compares the weights the engine holds with [`checksums`](crate::checksums()) of a checkpoint, where that is possible.
    ///
    /// # Errors
    /// [`Error::LiveWeights`] when they differ; as every call of [`Client`].
    pub async fn check_live(&self, expected: &BTreeMap<String, String>) -> Result<LiveWeights> {
        if !self.identity.checksums_comparable() {
            let (tp, device) =
                (self.identity.tp, self.identity.device.as_deref().unwrap_or("an unknown device"));
            return Ok(LiveWeights::Unchecked {
                reason: format!("checksums are known for one rank on the CPU, found {tp} on {device}"),
            });
        }
        let ranks = self.client.checksums().await?;
        let empty = BTreeMap::new();
        let found = ranks.first().map_or(&empty, |rank| &rank.checksums);
        match difference(expected, found) {
            None => Ok(LiveWeights::Equal),
            Some((count, tensor, expected, found)) => {
                Err(Error::LiveWeights { engine: self.client.url().into(), count, tensor, expected, found })
            }
        }
    }
}

/// How many entries differ, and the first of them: name, expected, found.
fn difference(
    expected: &BTreeMap<String, String>,
    found: &BTreeMap<String, String>,
) -> Option<(usize, String, String, String)> {
    let show = |sum: Option<&String>| sum.map_or_else(|| "none".to_owned(), Clone::clone);
    let names: std::collections::BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let mut differing = names.into_iter().filter(|name| expected.get(*name) != found.get(*name));
    let first = differing.next()?;
    Some((1 + differing.count(), first.clone(), show(expected.get(first)), show(found.get(first))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let map = |entries: &[(&str, &str)]| {
            entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
        };
        let base = map(&[("a", "1"), ("b", "2")]);
        assert_eq!(difference(&base, &base.clone()), None);
        let changed = difference(&base, &map(&[("a", "1"), ("b", "3")])).unwrap();
        assert_eq!(changed, (1, "b".into(), "2".into(), "3".into()));
        let missing = difference(&base, &map(&[("c", "3")])).unwrap();
        assert_eq!(missing, (3, "a".into(), "1".into(), "none".into()));
    }
}
