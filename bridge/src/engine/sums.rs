//! Checksums of weights: those that an engine has to report, those that it reports, and the first difference.

use std::collections::{BTreeMap, BTreeSet};

use super::Engine;
use crate::error::{Error, Result};

/// What an engine has to report of the weights that it should hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sums {
    /// A checksum for each of its tensors, by the engine's own name and in its own form.
    Known(BTreeMap<String, String>),
    /// The checksums of this engine cannot be computed here.
    Unknown {
        /// Why: more than one rank, or not on the CPU.
        reason: String,
    },
}

/// What a look at an engine's live weights showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LiveWeights {
    /// Every tensor's checksum equals the expected one.
    Equal,
    /// Nothing was compared: see [`Sums::Unknown`].
    Unchecked {
        /// Why not.
        reason: String,
    },
}

/// Compares the weights that an engine holds with what it has to report. Nothing is asked where that is unknown.
///
/// # Errors
/// [`Error::LiveWeights`] when they differ; the call's own failures.
pub(crate) async fn check(engine: &dyn Engine, expected: &Sums) -> Result<LiveWeights> {
    let expected = match expected {
        Sums::Known(expected) => expected,
        Sums::Unknown { reason } => return Ok(LiveWeights::Unchecked { reason: reason.clone() }),
    };
    compare(engine.url(), expected, &engine.live_sums().await?).map(|()| LiveWeights::Equal)
}

/// Counts the entries that differ, and names the first of them.
fn compare(
    engine: &str,
    expected: &BTreeMap<String, String>,
    found: &BTreeMap<String, String>,
) -> Result<()> {
    let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let mut differing = names.into_iter().filter(|name| expected.get(*name) != found.get(*name));
    let Some(first) = differing.next() else { return Ok(()) };
    let (engine, count, tensor) = (engine.into(), 1 + differing.count(), first.clone());
    let [expected, found] =
        [expected, found].map(|sums| sums.get(first).map_or("none", String::as_str).to_owned());
    Err(Error::LiveWeights { engine, count, tensor, expected, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_names_the_first_and_counts_all() {
        let map = |entries: &[(&str, &str)]| {
            entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
        };
        let base = map(&[("a", "1"), ("b", "2")]);
        let found = |other: &[(&str, &str)]| match compare("an engine", &base, &map(other)) {
            Err(Error::LiveWeights { count, tensor, expected, found, .. }) => {
                Some((count, tensor, expected, found))
            }
            other => other.map(|()| None).unwrap(),
        };
        assert_eq!(found(&[("a", "1"), ("b", "2")]), None);
        assert_eq!(found(&[("a", "1"), ("b", "3")]), Some((1, "b".into(), "2".into(), "3".into())));
        assert_eq!(found(&[("c", "3")]), Some((3, "a".into(), "1".into(), "none".into())));
    }
}
