//! The memory that weights lie in.

use driftless_transport::prepared::PreparedDelta;

use super::layout::Layout;
use crate::error::Result;

/// The memory that weights lie in, and what is prepared for them.
///
/// Both calls return the values that are not the delta's old ones. The engine generates during the first and
/// stands still during the second.
pub(super) trait Memory: Send {
    /// Readies a delta in place of the one before, and compares some of its old values with the weights: the first
    /// of each copy, and of those behind them a sample. Returns how many elements it changes, too.
    fn prepare(&mut self, layout: &Layout, delta: &PreparedDelta) -> Result<(u64, Found)>;

    /// Writes what is ready where the old values are, once, and asks whether it stays. If it does not, if a value is another one, or an
    /// error happens, all is taken back.
    fn write(&mut self, stays: &mut dyn FnMut(&Result<Found>) -> bool) -> Result<Found>;
}

/// Values that are not those that were expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// How many.
    pub(super) others: u64,
    /// The first tensor of the delta that has one.
    pub(super) tensor: usize,
}

impl Default for Found {
    fn default() -> Self {
        Self { others: 0, tensor: usize::MAX }
    }
}

impl Found {
    pub(super) fn of(others: u64, tensor: usize) -> Self {
        if others == 0 { Self::default() } else { Self { others, tensor } }
    }

    pub(super) fn and(self, more: Self) -> Self {
        Self { others: self.others + more.others, tensor: self.tensor.min(more.tensor) }
    }
}
