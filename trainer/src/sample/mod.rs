//! What a sample is: a prompt, what the policy answered token by token, and its number in the log.

mod trajectory;
mod turn;

pub(crate) use trajectory::Read;
pub use trajectory::Trajectory;
pub use turn::{Engines, Turn, Underway};

use std::fmt;

use serde::Serialize;
use serde_json::value::RawValue;

use driftless_buffer::Scalars;

use crate::error::{Error, Place, Result, input, short};

/// A prompt of a task.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// What the model reads; at least one id.
    pub tokens: Vec<i32>,
    /// The same as text.
    pub text: String,
    /// What rewards compare with, as JSON.
    pub label: Option<Box<RawValue>>,
    /// What else rewards are given, as a JSON object.
    pub metadata: Option<Box<RawValue>>,
    /// The conversation that it was rendered from, as a JSON list of messages; none where it is text alone.
    pub messages: Option<Box<RawValue>>,
    /// The tools of its row, as a JSON list.
    pub tools: Option<Box<RawValue>>,
    /// Where it is from.
    pub place: Place,
}

impl Prompt {
    /// One of token ids alone.
    #[must_use]
    pub fn of_tokens(tokens: Vec<i32>, place: Place) -> Self {
        let text = String::new();
        Prompt { tokens, text, label: None, metadata: None, messages: None, tools: None, place }
    }
}

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
    /// Its reward, where what made it gave one: no other is asked for.
    #[serde(skip)]
    pub given: Option<f32>,
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
            .ok_or_else(|| self.refused("a label", "none", "name its field as `label_key`"))?;
        Ok(label_text(label))
    }

    /// An [`Error::Reward`] about this answer.
    pub(crate) fn refused(&self, expected: &str, found: impl fmt::Display, todo: &'static str) -> Error {
        let (sample, expected, found) = (self.sample, expected.to_owned(), found.to_string());
        Error::Reward { sample, expected, found, todo, is_away: false }
    }

    /// An [`Error::Reward`] about this answer, of which nothing came that could be a reward.
    pub(crate) fn silent(&self, expected: &str, found: String, todo: &'static str) -> Error {
        let (sample, expected) = (self.sample, expected.to_owned());
        Error::Reward { sample, expected, found, todo, is_away: true }
    }

    /// `value` as a reward.
    pub(crate) fn number(&self, value: &serde_json::Value, todo: &'static str) -> Result<f32> {
        finite(value).ok_or_else(|| {
            self.refused("one finite number", format_args!("`{}`", short(&value.to_string())), todo)
        })
    }
}

/// A value as a number that a reward can be.
pub(crate) fn finite(value: &serde_json::Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
}

/// A label as text: what is in a JSON string, else the JSON.
#[must_use]
pub fn label_text(label: &RawValue) -> String {
    serde_json::from_str(label.get()).unwrap_or_else(|_| label.get().to_owned())
}

/// The answer that a sample is part of.
#[must_use]
pub fn answer_of(sample_id: u64) -> u64 {
    sample_id % Scalars::ANSWERS_MAX
}

/// Id of a part of an answer; that of the first is the answer's number.
pub(crate) fn sample_id(answer: u64, part: usize) -> u64 {
    answer | (part as u64 * Scalars::ANSWERS_MAX)
}

/// The answers of a group of `count`.
///
/// # Errors
/// [`Error::Input`] for numbers that an id has no room for.
pub(crate) fn answers_of(group: u64, count: u64) -> Result<std::ops::Range<u64>> {
    let end = group.checked_add(1).and_then(|next| next.checked_mul(count));
    let end = end.filter(|end| *end <= Scalars::ANSWERS_MAX);
    let end = end.ok_or_else(|| {
        let expected = format!("at most {} answers in a run", Scalars::ANSWERS_MAX);
        input("n_samples_per_prompt", expected, format_args!("{count} for each of {group} prompts"))
    })?;
    Ok(end - count..end)
}

/// Which part of its answer a sample is.
#[must_use]
pub fn part_of(sample_id: u64) -> usize {
    (sample_id / Scalars::ANSWERS_MAX) as usize
}
