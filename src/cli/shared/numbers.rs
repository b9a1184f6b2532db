//! Parsers for times and sizes of the command line, beside those of the learner's options.

use clap::builder::RangedU64ValueParser;

pub(crate) use driftless::trainer::options::bounds::{at_least_zero, count, ordinal, positive, share};

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
