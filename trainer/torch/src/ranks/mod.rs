//! Ranks that train one model together: each goes through its share of a batch, and keeps its part of masters
//! and moments (ZeRO-1, Rajbhandari et al. 2020).

mod nccl;
mod others;
mod share;
mod star;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::Result;

pub(crate) use nccl::OverNccl;
pub use others::RankOptions;
pub(crate) use others::{Failed, Others};
pub(crate) use share::share;
pub(crate) use star::{Listening, Star};

/// Most ranks: a model's buffer can be cut into any number of equal parts up to this one.
pub(crate) const RANKS_MAX: usize = 8;

/// What ranks give each other in a step. All of them make the same calls in the same order.
pub(crate) trait Exchange: Send + Debug {
    /// Which this is, counted from 0, and how many there are.
    fn place(&self) -> (usize, usize);

    /// Makes this rank's part of `buffer` the sum over all ranks, and the rest of it worth nothing.
    ///
    /// # Errors
    /// [`crate::Error::Rank`] if another rank ended or took too long.
    fn reduce_scatter(&mut self, buffer: &Tensor) -> Result<()>;

    /// Makes each part of `buffer` that of the rank whose part it is.
    ///
    /// # Errors
    /// As for [`Exchange::reduce_scatter`].
    fn all_gather(&mut self, buffer: &Tensor) -> Result<()>;

    /// Makes each number the sum over all ranks.
    ///
    /// # Errors
    /// As for [`Exchange::reduce_scatter`].
    fn sum(&mut self, numbers: &mut [f64]) -> Result<()>;

    /// The largest of what the ranks have.
    ///
    /// # Errors
    /// As for [`Exchange::reduce_scatter`].
    fn largest(&mut self, number: f64) -> Result<f64> {
        let (rank, ranks) = self.place();
        let mut of_ranks = vec![0.0; ranks];
        of_ranks[rank] = number;
        self.sum(&mut of_ranks)?;
        Ok(of_ranks.into_iter().fold(f64::NEG_INFINITY, f64::max))
    }
}

/// A rank's part of a buffer of so many elements.
pub(crate) fn part(length: i64, rank: usize, ranks: usize) -> Range<i64> {
    let each = length / ranks as i64;
    each * rank as i64..each * (rank as i64 + 1)
}

/// The other ranks, for all that trains with them.
pub(crate) type Ranks = Arc<Mutex<dyn Exchange>>;

pub(crate) fn locked(ranks: &Ranks) -> MutexGuard<'_, dyn Exchange + 'static> {
    ranks.lock().unwrap_or_else(PoisonError::into_inner)
}
