//! The task that a user brings: prompts from files, and a reward.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;

use super::{Prompt, Task};
use crate::data::{Dataset, Order};
use crate::error::{Error, Result, io};
use crate::reward::{Answer, Reward};

/// Which groups are learned from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// All.
    None,
    /// Those whose rewards differ: others have no advantages. slime's `check_reward_nonzero_std`.
    NonzeroStd,
}

/// Prompts from files with a reward.
#[derive(Debug)]
pub struct Prompts {
    data: Dataset,
    order: Order,
    reward: Arc<dyn Reward>,
    filter: Filter,
}

impl Prompts {
    /// Takes the prompts of `data` in an order of `seed`, epoch after epoch; as they are if `shuffle` is
    /// false.
    #[must_use]
    pub fn new(data: Dataset, shuffle: bool, seed: u64, reward: Arc<dyn Reward>, filter: Filter) -> Self {
        let order = Order { prompts: data.examples.len() as u64, shuffle, seed };
        Prompts { data, order, reward, filter }
    }

    /// Prompts of an epoch.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.order.prompts
    }

    /// Whether there are none; a [`Dataset`] from files never is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.prompts == 0
    }
}

#[async_trait]
impl Task for Prompts {
    /// The model has to have every id of the prompts. Tokenizer and template are the checkpoint's own.
    fn check(&self, checkpoint: &Path) -> Result<()> {
        let path = checkpoint.join("config.json");
        let bytes = std::fs::read(&path).map_err(io("read", &path))?;
        let config: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.clone(), source })?;
        let Some(size) = config["vocab_size"].as_u64() else { return Ok(()) };
        let ids = |example: &crate::data::Example| example.tokens.iter().copied().max().unwrap_or_default();
        match self.data.examples.iter().find(|example| ids(example) as u64 >= size) {
            None => Ok(()),
            Some(example) => Err(Error::OtherTokenizer {
                path: checkpoint.to_owned(),
                expected: format!("ids below the model's vocab_size, {size}"),
                found: format!("{} in the prompt of {}", ids(example), example.place),
            }),
        }
    }

    fn prompt(&self, number: u64) -> Result<Prompt> {
        let (index, _) = self.order.at(number);
        let example = self.data.examples.get(index as usize).ok_or_else(|| Error::NoPrompts {
            files: "--prompt-data".into(),
            rows: 0,
            first: "there are no rows".into(),
        })?;
        Ok(Prompt {
            tokens: example.tokens.clone(),
            text: example.text.clone(),
            label: example.label.clone(),
            metadata: example.metadata.clone(),
            source: example.place.to_string(),
        })
    }

    fn decode(&self, response: &[i32]) -> Result<String> {
        self.data.tokenizer.decode(response)
    }

    async fn reward(&self, group: &[Answer]) -> Result<Vec<f32>> {
        self.reward.score(group).await
    }

    fn keep(&self, rewards: &[f32]) -> bool {
        match self.filter {
            Filter::None => true,
            Filter::NonzeroStd => rewards.windows(2).any(|pair| pair[0] != pair[1]),
        }
    }
}
