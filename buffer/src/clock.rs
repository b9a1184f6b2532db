//! The wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Unix time in microseconds, for information only: nothing is ever ordered by it.
pub(crate) fn clock_us() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
}
