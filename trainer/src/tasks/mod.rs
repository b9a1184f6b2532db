//! What there is to learn: prompts, how answers to them are made, and what answers are worth.

mod generated;
mod prompts;
mod sourced;
pub mod tiny;

pub use driftless_problems as problems;
pub use generated::Generated;
pub use prompts::Prompts;
pub use sourced::Sourced;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;

use crate::data::{Order, Tokenizer};
use crate::error::Result;
use crate::hook::{Filters, Hook};
use crate::reward::Reward;
use crate::sample::{Prompt, Trajectory, Turn};

/// Something to learn, by its parts.
#[derive(Debug, Clone)]
pub struct Task {
    /// Where prompts are from.
    pub source: Arc<dyn DataSource>,
    /// Makes answers; each is a single turn, if `None`.
    pub generate: Option<Arc<Hook>>,
    /// What answers are worth.
    pub reward: Arc<dyn Reward>,
    /// Which answers are learned from.
    pub filters: Filters,
}

impl Task {
    /// Learns from all answers of a single turn.
    #[must_use]
    pub fn new(source: Arc<dyn DataSource>, reward: Arc<dyn Reward>) -> Self {
        Task { source, generate: None, reward, filters: Filters::default() }
    }

    /// Finds out whether it can be asked for prompts and rewards, before anything is generated.
    ///
    /// # Errors
    /// What keeps a part from answering.
    pub async fn ready(&self) -> Result<()> {
        self.source.ready().await?;
        self.reward.ready().await
    }

    /// Makes one answer. It may become several samples, which count as one in advantages and in the loss; rewards see
    /// the last.
    ///
    /// # Errors
    /// Whatever made it fail; the sample's group is then left out.
    pub async fn generate(&self, prompt: &Prompt, turn: &Turn<'_>) -> Result<Vec<Trajectory>> {
        match &self.generate {
            Some(hook) => hook.converse(self.source.tokenizer(), prompt, turn).await,
            None => Ok(vec![turn.single(prompt).await?]),
        }
    }
}

/// Where prompts are from. All of it may be asked for again after a crash, and has to answer the same.
#[async_trait]
pub trait DataSource: Send + Sync + fmt::Debug {
    /// Refuses a checkpoint whose tokens are not those of the prompts.
    ///
    /// # Errors
    /// Whatever is wrong with it, and what to do.
    fn check(&self, checkpoint: &Path) -> Result<()>;

    /// Finds out whether it can be asked, before anything is generated.
    ///
    /// # Errors
    /// What keeps it from answering.
    async fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Prompt `number` of a run: a function of the number alone.
    ///
    /// # Errors
    /// Whatever it is read from.
    async fn prompt(&self, number: u64) -> Result<Prompt>;

    /// Digest of the prompts, of what rewards are told of each and of their order, where these do not follow from
    /// the seed of the run alone. A run that goes on with another one says so.
    fn digest(&self) -> Option<String> {
        None
    }

    /// The order of its prompts, where they come again.
    fn order(&self) -> Option<Order> {
        None
    }

    /// What turns texts into tokens and back.
    fn tokenizer(&self) -> &Tokenizer;
}
