//! What requests took of engines.

use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Tokens that engines drew and that stay, and for how long requests held places meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Decoded {
    /// For how long.
    pub time: Duration,
    /// How many.
    pub tokens: u64,
}

impl AddAssign for Decoded {
    fn add_assign(&mut self, other: Self) {
        self.time += other.time;
        self.tokens += other.tokens;
    }
}

/// Counts what requests had engines draw. Clones count together; two are equal if they do.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    time_us: AtomicU64,
    tokens: AtomicU64,
}

impl Meter {
    /// Adds what a request had drawn.
    pub fn add(&self, Decoded { time, tokens }: Decoded) {
        self.0.time_us.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Relaxed);
        self.0.tokens.fetch_add(tokens, Relaxed);
    }

    /// What was drawn so far.
    #[must_use]
    pub fn decoded(&self) -> Decoded {
        let Counts { time_us, tokens } = &*self.0;
        Decoded { time: Duration::from_micros(time_us.load(Relaxed)), tokens: tokens.load(Relaxed) }
    }
}

impl PartialEq for Meter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
