//! What requests took of engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Counts for how long requests held places of a fleet's engines while tokens were drawn that stay. Clones count together;
/// two are equal if they do.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<AtomicU64>);

impl Meter {
    /// Adds such a time.
    pub fn add(&self, decoded: Duration) {
        self.0.fetch_add(u64::try_from(decoded.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    /// The time so far.
    #[must_use]
    pub fn decoded(&self) -> Duration {
        Duration::from_micros(self.0.load(Relaxed))
    }
}

impl PartialEq for Meter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
