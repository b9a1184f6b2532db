//! Rewards: numbers for answers.

mod built_in;
mod remote;

pub use built_in::BuiltIn;
pub use remote::Remote;

use std::collections::BTreeMap;
use std::fmt;

use async_trait::async_trait;

use crate::error::Result;
use crate::sample::Answer;

/// What a reward gives an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Given {
    /// A finite number.
    pub reward: f32,
    /// What it is made of, by name: for the log and the figures.
    pub components: BTreeMap<String, f32>,
}

impl From<f32> for Given {
    fn from(reward: f32) -> Self {
        Given { reward, ..Given::default() }
    }
}

/// Gives numbers to answers.
#[async_trait]
pub trait Reward: Send + Sync + fmt::Debug {
    /// What each answer gets, in order. All are of one group: what they say may be compared. A group goes on without an
    /// answer that gets an error here, as long as enough are left.
    ///
    /// # Errors
    /// [`crate::Error::Reward`] where the answers cannot be told apart: of all of them, and asked again if it is away.
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>>;

    /// Finds out whether it can be asked, before anything is generated.
    ///
    /// # Errors
    /// What keeps it from answering.
    async fn ready(&self) -> Result<()> {
        Ok(())
    }
}
