//! Version labels as engines carry them.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The version string given to engines: `<first 12 hex digits of run_id>:<version>`, for example
/// `3f0c9a12b7de:42`.
///
/// Labels of two runs are never comparable, so there is no `Ord`; see [`Label::at_least`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Label {
    run: String,
    version: u64,
}

impl Label {
    /// Number of hex digits of the run that a label carries.
    pub const RUN_DIGITS: usize = 12;

    /// The label of `version` in the run whose id, in hex, starts with the digits of `run`.
    ///
    /// # Errors
    /// [`Error::Label`] when `run` has fewer than 12 digits or others than lower-case hex.
    pub fn new(run: &str, version: u64) -> Result<Self> {
        match run.get(..Self::RUN_DIGITS) {
            Some(digits) if digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) => {
                Ok(Self { run: digits.into(), version })
            }
            _ => Err(Error::Label { found: run.into() }),
        }
    }

    /// The run's 12 hex digits.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// The version's number.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether this is the same run's `minimum` or a later version of it.
    pub fn at_least(&self, minimum: &Label) -> bool {
        self.run == minimum.run && self.version >= minimum.version
    }
}

/// A label without what was added to it.
pub(crate) fn plain(label: &str) -> &str {
    label.split_once('?').map_or(label, |(plain, _)| plain)
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.run, self.version)
    }
}

impl FromStr for Label {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = || Error::Label { found: text.chars().take(80).collect() };
        let (run, version) = text.split_once(':').ok_or_else(fail)?;
        let canonical = !version.starts_with('+') && (version == "0" || !version.starts_with('0'));
        if run.len() != Self::RUN_DIGITS || !canonical {
            return Err(fail());
        }
        // A run never comes to the largest number, which the rollout log does not take.
        let version = version.parse().ok().filter(|version| *version < u64::MAX).ok_or_else(fail)?;
        Self::new(run, version).map_err(|_| fail())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_reads_back() {
        let label = Label::new("3f0c9a12b7de00112233445566778899", 42).unwrap();
        assert_eq!(label.to_string(), "3f0c9a12b7de:42");
        assert_eq!("3f0c9a12b7de:42".parse::<Label>().unwrap(), label);
    }

    #[test]
    fn foreign_labels_are_refused() {
        for text in [
            "",
            "default",
            "3f0c9a12b7de",
            "3f0c9a12b7de:",
            "3f0c9a12b7d:1",
            "3F0C9A12B7DE:1",
            "3f0c9a12b7de:+1",
            "3f0c9a12b7de:01",
            "3f0c9a12b7de:18446744073709551615",
        ] {
            assert!(text.parse::<Label>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn only_versions_of_one_run_compare() {
        let label = |text: &str| text.parse::<Label>().unwrap();
        assert!(label("3f0c9a12b7de:5").at_least(&label("3f0c9a12b7de:5")));
        assert!(label("3f0c9a12b7de:10").at_least(&label("3f0c9a12b7de:9")));
        assert!(!label("3f0c9a12b7de:4").at_least(&label("3f0c9a12b7de:5")));
        assert!(!label("aaaaaaaaaaaa:9").at_least(&label("3f0c9a12b7de:5")));
    }
}
