//! Parsers for times, sizes and choices of the command line, beside those of the learner's options.

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};

pub(crate) use driftless::trainer::options::bounds::{
    at_least_zero, count, ordinal, positive, reward, share,
};

/// Whole seconds, up to a year: more is a mistake, and what clocks can add to ends somewhere.
pub(crate) fn seconds() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(..=365 * 24 * 60 * 60)
}

/// Seconds that something may take, which is never none.
pub(crate) fn deadline() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=365 * 24 * 60 * 60)
}

/// Milliseconds between two looks at something, up to a day.
pub(crate) fn milliseconds() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=24 * 60 * 60 * 1000)
}

/// Bytes of a buffer in memory.
pub(crate) fn buffer() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=1 << 40)
}

/// One of `choices` by its name, for enums of libraries, which know no flags.
pub(crate) fn one_of<T: Copy + Send + Sync>(
    choices: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let names = PossibleValuesParser::new(choices.iter().map(|(name, _)| *name));
    names.try_map(|text| {
        let chosen = choices.iter().find(|(name, _)| *name == text);
        chosen.map(|(_, choice)| *choice).ok_or(text)
    })
}
