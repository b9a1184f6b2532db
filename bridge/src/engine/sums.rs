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
    match difference(expected, &engine.live_sums().await?) {
        None => Ok(LiveWeights::Equal),
        Some(Difference { count, tensor, expected, found }) => {
            Err(Error::LiveWeights { engine: engine.url().into(), count, tensor, expected, found })
        }
    }
}

/// How many entries differ, and the first of them.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    count: usize,
    tensor: String,
    expected: String,
    found: String,
}

fn difference(expected: &BTreeMap<String, String>, found: &BTreeMap<String, String>) -> Option<Difference> {
    let show = |sum: Option<&String>| sum.map_or_else(|| "none".to_owned(), Clone::clone);
    let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let mut differing = names.into_iter().filter(|name| expected.get(*name) != found.get(*name));
    let first = differing.next()?;
    Some(Difference {
        count: 1 + differing.count(),
        tensor: first.clone(),
        expected: show(expected.get(first)),
        found: show(found.get(first)),
    })
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
        let found = |other: &[(&str, &str)]| {
            difference(&base, &map(other)).map(|d| (d.count, d.tensor, d.expected, d.found))
        };
        assert_eq!(found(&[("a", "1"), ("b", "2")]), None);
        assert_eq!(found(&[("a", "1"), ("b", "3")]), Some((1, "b".into(), "2".into(), "3".into())));
        assert_eq!(found(&[("c", "3")]), Some((3, "a".into(), "1".into(), "none".into())));
    }
}
