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
use serde::Serialize;
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::hook::short;

/// An answer of the policy to a prompt, as rewards see it. Its JSON is what commands and services are sent.
#[derive(Debug, Clone, Serialize)]
pub struct Answer {
    /// Number of the sample.
    #[serde(rename = "index")]
    pub sample: u64,
    /// What the model read.
    pub prompt: String,
    /// What it wrote, without special tokens.
    pub response: String,
    /// What the data says that the answer is.
    pub label: Option<Box<RawValue>>,
    /// What else the data gives.
    pub metadata: Option<Box<RawValue>>,
    /// Whether it ended by itself, or was cut off at the token limit.
    pub truncated: bool,
    /// Tokens of the response.
    pub response_length: usize,
}

impl Answer {
    /// The label as text: what is in a JSON string, else the JSON.
    ///
    /// # Errors
    /// [`Error::Reward`] if there is none.
    pub fn label_text(&self) -> Result<String> {
        let label = self
            .label
            .as_deref()
            .ok_or_else(|| self.refused("a label", "none", "name its field with --label-key"))?;
        Ok(serde_json::from_str::<String>(label.get()).unwrap_or_else(|_| label.get().to_owned()))
    }

    /// An [`Error::Reward`] about this answer.
    pub(crate) fn refused(&self, expected: &str, found: impl fmt::Display, todo: &'static str) -> Error {
        Error::Reward { sample: self.sample, expected: expected.to_owned(), found: found.to_string(), todo }
    }

    /// `value` as a reward.
    pub(crate) fn number(&self, value: &serde_json::Value, todo: &'static str) -> Result<f32> {
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        number.ok_or_else(|| {
            self.refused("one finite number", format_args!("`{}`", short(&value.to_string())), todo)
        })
    }
}

/// Gives numbers to answers.
#[async_trait]
pub trait Reward: Send + Sync + fmt::Debug {
    /// One finite number for each answer, in order. All are of one group: what they say may be compared.
    ///
    /// # Errors
    /// [`Error::Reward`] for the first answer that gets none.
    async fn score(&self, answers: &[Answer]) -> Result<Vec<f32>>;

    /// Finds out whether it can be asked, before anything is generated.
    ///
    /// # Errors
    /// What keeps it from answering.
    async fn ready(&self) -> Result<()> {
        Ok(())
    }
}
