//! Parsers for numbers and names of the command line. They refuse what no step or learning rate can be.

use clap::builder::RangedU64ValueParser;
use clap::{Args, Command};

/// Above every figure that is meant, and below what overflows once it is multiplied.
const LARGEST: f64 = 1e9;

/// Options as they are where no flag is given.
#[expect(clippy::expect_used, reason = "a default is no input; tests take that of each struct")]
pub(crate) fn defaults<T: Args>() -> T {
    let matches = T::augment_args(Command::new("defaults")).try_get_matches_from(["defaults"]);
    matches.and_then(|matches| T::from_arg_matches(&matches)).expect("every flag has a default")
}

/// How many of something, at least one, as far as memory can hold them.
pub fn count<T: TryFrom<u64> + Clone + Send + Sync + 'static>() -> RangedU64ValueParser<T> {
    RangedU64ValueParser::new().range(1..=1 << 31)
}

/// A number of a version, a step or a record: one can be added to it.
pub fn ordinal() -> RangedU64ValueParser {
    RangedU64ValueParser::new().range(..1 << 53)
}

/// A number above 0.
///
/// # Errors
/// What is expected.
pub fn positive(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0, "a number above 0 and up to 1e9")
}

/// A number above 1.
///
/// # Errors
/// What is expected.
pub fn above_one(text: &str) -> Result<f64, String> {
    number(text, |number| number > 1.0, "a number above 1 and up to 1e9")
}

/// A number that is not negative.
///
/// # Errors
/// What is expected.
pub fn at_least_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0, "a number from 0 to 1e9")
}

/// A number that may be negative, such as a reward.
///
/// # Errors
/// What is expected.
pub fn reward(text: &str) -> Result<f64, String> {
    number(text, |number| number.abs() <= LARGEST, "a number from -1e9 to 1e9")
}

/// A share that is not none: above 0, up to 1.
///
/// # Errors
/// What is expected.
pub fn share(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0 && number <= 1.0, "a number above 0 and up to 1")
}

/// A number from 0 to 1.
///
/// # Errors
/// What is expected.
pub fn up_to_one(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1.0).contains(&number), "a number from 0 to 1")
}

/// How much of something is kept: from 0 to 1, but not 1.
///
/// # Errors
/// What is expected.
pub fn decay(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..1.0).contains(&number), "a number from 0 to below 1")
}

/// One of the names of an option's values.
///
/// # Errors
/// The names.
pub fn named<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

fn number(text: &str, fits: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| *number <= LARGEST && fits(*number));
    number.ok_or_else(|| format!("expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        for text in ["nan", "-nan", "inf", "-inf", "-1", "1e308", "1e10", "", "one", "0x1"] {
            assert!(positive(text).is_err() && at_least_zero(text).is_err(), "{text}");
        }
        assert!(positive("0").is_err() && positive("-0").is_err() && positive("1e-9").is_ok());
        assert_eq!(at_least_zero("0"), Ok(0.0));
        assert!(decay("0.95").is_ok() && decay("1").is_err());
    }
}
