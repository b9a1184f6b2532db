//! The memory that weights lie in.

use std::ops::Range;

use driftless_transport::prepared::PreparedDelta;
use driftless_transport::snapshot::TensorInfo;

use super::layout::Layout;
use crate::error::Result;

/// The memory that weights lie in, and what is prepared for them.
///
/// The calls return the values that are not those expected. The engine generates during the first and stands still
/// during the others.
pub(super) trait Memory: Send {
    /// Readies a delta in place of the one before, and compares some of its old values with the weights: the first
    /// of each copy, and of those behind them a sample. Returns how many elements it changes, too.
    fn prepare(&mut self, layout: &Layout, delta: &PreparedDelta) -> Result<(u64, Found)>;

    /// Writes what is ready where the old values are, once, and asks whether it stays. If it does not, if a value is another one, or an
    /// error happens, all is taken back.
    fn write(&mut self, stays: &mut dyn FnMut(&Result<Found>) -> bool) -> Result<Found>;

    /// Where the bytes of pieces go: room for those that are compared at a time.
    fn room(&mut self) -> Result<&mut [u8]>;

    /// Compares pieces of tensors, whose bytes are in the room, with all copies of their elements. What is ready stays so.
    fn compare(&mut self, layout: &Layout, pieces: &[Piece<'_>]) -> Result<Found>;
}

/// Elements of a tensor, as a checkpoint has them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    /// The tensor, in the form that the layout knows.
    pub(super) info: &'a TensorInfo,
    /// The first element.
    pub(super) first: u64,
    /// How many there are.
    pub(super) elements: u64,
    /// Where their bytes begin in the room: a multiple of 8.
    pub(super) at: usize,
}

impl Piece<'_> {
    /// The elements.
    pub(super) fn among(&self) -> Range<u64> {
        self.first..self.first + self.elements
    }
}

/// Values that are not those that were expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// How many.
    pub(super) others: u64,
    /// The first tensor of the delta, or the first piece, that has one.
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
