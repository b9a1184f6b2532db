//! Rewards: numbers for answers.

mod built_in;
mod remote;

pub use built_in::BuiltIn;
pub use remote::Remote;

use std::fmt;

use async_trait::async_trait;

use crate::error::Result;
use crate::sample::Answer;

/// Gives numbers to answers.
#[async_trait]
pub trait Reward: Send + Sync + fmt::Debug {
    /// One finite number for each answer, in order. All are of one group: what they say may be compared.
    ///
    /// # Errors
    /// [`crate::Error::Reward`] for the first answer that gets none.
    async fn score(&self, answers: &[Answer]) -> Result<Vec<f32>>;

    /// Finds out whether it can be asked, before anything is generated.
    ///
    /// # Errors
    /// What keeps it from answering.
    async fn ready(&self) -> Result<()> {
        Ok(())
    }
}
