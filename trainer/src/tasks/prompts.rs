//! Prompts that a user brings, in files.

use std::path::Path;

use async_trait::async_trait;

use super::DataSource;
use crate::data::{Dataset, Order, Tokenizer, vocabulary};
use crate::error::{Error, Result};
use crate::sample::Prompt;

/// Prompts from files.
#[derive(Debug)]
pub struct Prompts {
    data: Dataset,
    order: Order,
}

impl Prompts {
    /// Takes the prompts of `data` in an order of `seed`, epoch after epoch; as they are if `shuffle` is
    /// false.
    #[must_use]
    pub fn new(data: Dataset, shuffle: bool, seed: u64) -> Self {
        let order = Order { prompts: data.examples.len() as u64, shuffle, seed };
        Prompts { data, order }
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
impl DataSource for Prompts {
    /// The model has to have every id of the prompts. Tokenizer and template are the checkpoint's own.
    fn check(&self, checkpoint: &Path) -> Result<()> {
        let Some(size) = vocabulary(checkpoint)? else { return Ok(()) };
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

    async fn prompt(&self, number: u64) -> Result<Prompt> {
        let (index, _) = self.order.at(number);
        let none = || {
            let (files, first) = ("prompt_data".to_owned(), "there are no rows".to_owned());
            Error::NoPrompts { files, rows: 0, first }
        };
        let example = self.data.examples.get(index as usize).ok_or_else(none)?;
        Ok(example.clone().into())
    }

    fn digest(&self) -> Option<String> {
        let mut digest = blake3::Hasher::new();
        for example in &self.data.examples {
            let tokens: Vec<u8> = example.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let told =
                [&example.label, &example.metadata].map(|told| told.as_ref().map_or("", |raw| raw.get()));
            for part in [&tokens, told[0].as_bytes(), told[1].as_bytes()] {
                digest.update(&(part.len() as u64).to_le_bytes()).update(part);
            }
        }
        let order = if self.order.shuffle { Some(self.order.seed) } else { None };
        digest.update(format!("{order:?}").as_bytes());
        Some(digest.finalize().to_hex().to_string())
    }

    fn order(&self) -> Option<Order> {
        Some(self.order)
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.data.tokenizer
    }
}
