//! Rewards: numbers for answers.

mod built_in;
mod math;
mod number;
mod remote;

pub use built_in::BuiltIn;
pub(crate) use math::boxed;
pub(crate) use number::value;
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

/// No reward but those that answers are given by what makes them.
#[derive(Debug, Clone, Copy)]
pub struct Given;

#[async_trait]
impl Reward for Given {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<f32>> {
        let Some(first) = answers.first() else { return Ok(Vec::new()) };
        let todo =
            "give one in `turn.sample(reward=…)`, or name --custom-rm-command or another flag of rewards";
        Err(first.refused("a `reward` of the hook that made the answer", "none", todo))
    }
}
