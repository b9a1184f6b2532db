//! Which versions of a run are measured, and whether the store still has what they are built from.

use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;

use driftless_transport::{self as transport, Replica, Run, Version};

use driftless_trainer::learner::MODEL;
use driftless_trainer::{Error, Result};

use crate::input;

/// How a list is written.
const FORM: &str = "a list such as `latest`, `0,10,20`, `10..`, `0..40` or `0..40/10`";

/// A list of versions: `latest`, `0,10,20`, `10..` (up to the newest), `0..40` (both included), `0..40/10` (each tenth).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted(Vec<Item>);

/// A part of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item {
    /// The newest version, if `None`.
    first: Option<u64>,
    /// Likewise.
    last: Option<u64>,
    step: u64,
}

impl Default for Wanted {
    /// The newest version.
    fn default() -> Self {
        Wanted(vec![Item { first: None, last: None, step: 1 }])
    }
}

impl FromStr for Wanted {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let items = text.split(',').map(|part| Item::parse(part.trim()));
        let items = items.collect::<Option<_>>().map(Wanted);
        items.ok_or_else(|| input("versions", FORM, text.chars().take(80).collect::<String>()))
    }
}

impl Item {
    fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.parse::<u64>().ok();
        let Some((first, rest)) = text.split_once("..") else {
            let only = if text == "latest" { None } else { Some(number(text)?) };
            return Some(Item { first: only, last: only, step: 1 });
        };
        let (last, step) = match rest.split_once('/') {
            Some((last, step)) => (last, number(step).filter(|step| *step > 0)?),
            None => (rest, 1),
        };
        let first = number(first)?;
        let last = if last.is_empty() { None } else { Some(number(last).filter(|last| *last >= first)?) };
        Some(Item { first: Some(first), last, step })
    }
}

impl Wanted {
    /// The versions of a run that has them up to `newest`; or the first that it does not have.
    fn up_to(&self, newest: u64) -> Result<BTreeSet<u64>, u64> {
        let mut versions = BTreeSet::new();
        for Item { first, last, step } in &self.0 {
            let (first, last) = (first.unwrap_or(newest), last.unwrap_or(newest));
            if let Some(ahead) = [first, last].into_iter().find(|version| *version > newest) {
                return Err(ahead);
            }
            versions.extend((first..=last).step_by(usize::try_from(*step).unwrap_or(usize::MAX)));
        }
        Ok(versions)
    }

    /// The versions of `run`, oldest first, that a checkpoint directory can be brought to one after the other.
    ///
    /// # Errors
    /// [`Error::Input`] for a version that was not published, or that was collected.
    pub(super) fn of(&self, run: &Run, dir: &Path) -> Result<Vec<Version>> {
        let of_run = format!("versions of run `{}`", run.name());
        let Some(Version(newest)) = run.newest_version(MODEL)? else {
            return Err(input("versions", of_run, "none: nothing is published yet"));
        };
        let wanted = self.up_to(newest);
        let wanted = wanted.map_err(|ahead| {
            input("versions", format!("{of_run}, the newest of which is {newest}"), ahead)
        })?;
        let first = wanted.first().copied().unwrap_or(newest);
        let Err(error) = Replica::plan(dir, run, MODEL, Version(first)) else {
            return Ok(wanted.into_iter().map(Version).collect());
        };
        let transport::Error::Collected { .. } = &error else { return Err(error.into()) };
        let oldest = oldest(run, newest)?;
        let gone: Vec<_> = wanted.range(..oldest).map(u64::to_string).collect();
        if gone.is_empty() {
            return Err(error.into());
        }
        let expected = format!("{of_run} from {oldest} on, the oldest that can still be built");
        let were = if gone.len() == 1 { "which was" } else { "which were" };
        Err(input("versions", expected, format!("{}, {were} collected", gone.join(", "))))
    }
}

/// The oldest version that can be built without those that were collected.
fn oldest(run: &Run, newest: u64) -> Result<u64> {
    for version in run.oldest(MODEL)?.0..newest {
        if run.get(MODEL, Version(version))?.manifest.is_anchor() {
            return Ok(version);
        }
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn of(text: &str, newest: u64) -> Result<Vec<u64>, u64> {
        text.parse::<Wanted>().unwrap().up_to(newest).map(|versions| versions.into_iter().collect())
    }

    #[test]
    fn list_is_sorted_and_each_version_once() {
        assert_eq!(of("20, 0,10,10", 40), Ok(vec![0, 10, 20]));
        assert_eq!(of("latest", 7), Ok(vec![7]));
        assert_eq!(of("5..", 7), Ok(vec![5, 6, 7]));
        assert_eq!(of("0..40/10,latest", 45), Ok(vec![0, 10, 20, 30, 40, 45]));
        assert_eq!(of("1../3", 9), Ok(vec![1, 4, 7]));
        assert_eq!("latest".parse::<Wanted>().unwrap(), Wanted::default());
    }

    #[test]
    fn version_that_is_not_published_is_named() {
        assert_eq!(of("0,8", 7), Err(8));
        assert_eq!(of("0..18446744073709551615", 7), Err(u64::MAX));
        assert_eq!(of("9..", 7), Err(9));
    }

    #[test]
    fn list_of_another_form_is_refused() {
        for text in ["", "newest", "-1", "4..2", "0..4/0", "..4", "1,,2", "0..4/", "1/2"] {
            let refused = text.parse::<Wanted>();
            assert!(matches!(&refused, Err(Error::Input { what, .. }) if what == "versions"), "{refused:?}");
        }
    }
}
