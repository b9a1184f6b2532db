//! The problems as a task of the loop.

use std::path::Path;

use async_trait::async_trait;
use driftless_store::os::regular;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{EOS, Problem, Split, VOCABULARY, tokenizer};
use crate::error::{Error, Result};
use crate::reward::{BuiltIn, Reward};
use crate::sample::{Answer, Prompt};
use crate::tasks::Task;

/// The problems of a split, rewarded for exactly the right answer.
#[derive(Debug, Clone)]
pub struct Arithmetic {
    seed: u64,
    /// The problems in their order, where they are all asked once.
    all: Option<Vec<Problem>>,
}

impl Arithmetic {
    /// Problems to practise, drawn by `seed`.
    #[must_use]
    pub fn practice(seed: u64) -> Self {
        Arithmetic { seed, all: None }
    }

    /// The problems that are only for measuring, each once.
    #[must_use]
    pub fn held_out() -> Self {
        Arithmetic { seed: 0, all: Some(Problem::all(Split::HeldOut)) }
    }

    /// Problems that are asked once; none if they do not end.
    #[must_use]
    pub fn problems(&self) -> Option<u64> {
        self.all.as_ref().map(|all| all.len() as u64)
    }

    /// Refuses a checkpoint directory that is not of this task's tokens.
    ///
    /// # Errors
    /// [`Error::OtherTokenizer`].
    pub fn check_checkpoint(checkpoint: &Path) -> Result<()> {
        let found = match regular::read(&checkpoint.join("tokenizer.json")) {
            Ok(bytes) => serde_json::from_slice::<Value>(&bytes).ok(),
            Err(_) => None,
        };
        if found.as_ref() == Some(&tokenizer()) {
            return Ok(());
        }
        Err(Error::OtherTokenizer {
            path: checkpoint.to_owned(),
            expected: "the 16 tokens of --task arithmetic".into(),
            found: found.map_or("no tokenizer.json that can be read", |_| "another tokenizer.json").into(),
        })
    }
}

#[async_trait]
impl Task for Arithmetic {
    fn check(&self, checkpoint: &Path) -> Result<()> {
        Self::check_checkpoint(checkpoint)
    }

    async fn prompt(&self, number: u64) -> Result<Prompt> {
        let problem = match &self.all {
            Some(all) if !all.is_empty() => all[(number % all.len() as u64) as usize],
            _ => Problem::draw(Split::Rl, number, self.seed),
        };
        let tokens = problem.prompt();
        let label = Value::from(text(&problem.answer())).to_string();
        Ok(Prompt {
            text: text(&tokens),
            tokens,
            label: RawValue::from_string(label).ok(),
            metadata: None,
            source: format!("arithmetic:{number}"),
        })
    }

    fn stop_token_ids(&self) -> Vec<i32> {
        vec![EOS]
    }

    /// With the special tokens: an answer has to end, and nothing may follow.
    fn decode(&self, response: &[i32]) -> Result<String> {
        Ok(text(response))
    }

    /// A character is a token.
    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let id = |letter: char| VOCABULARY.iter().position(|word| word.chars().eq([letter]));
        let known = |letter: char| {
            id(letter)
                .map(|id| id as i32)
                .ok_or_else(|| crate::error::input("text of --task arithmetic", VOCABULARY.join(" "), letter))
        };
        text.chars().map(known).collect()
    }

    async fn reward(&self, group: &[Answer]) -> Result<Vec<f32>> {
        BuiltIn::Exact.score(group).await
    }
}

fn text(tokens: &[i32]) -> String {
    let word = |id: &i32| usize::try_from(*id).ok().and_then(|id| VOCABULARY.get(id)).copied();
    tokens.iter().map(|id| word(id).unwrap_or("<unk>")).collect()
}
