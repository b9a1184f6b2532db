//! Plain text, byte by byte: a token is a byte, and the task is to predict the next one.
//!
//! What a language model is trained on first, with whatever text is at hand. Nothing here is verifiable by a
//! reward; it is for models whose weights should move as those of real training do.

use std::path::Path;

use driftless_trainer::seed::mix;

use crate::config::Config;
use crate::error::{Result, input, io};
use crate::models::Family;

/// Tokens of one training sequence.
pub const WINDOW: usize = 128;
/// Ids that a model of text needs: one per byte.
pub const VOCABULARY: i64 = 256;

/// Shape of a model of 21 M parameters in 112 tensors: as many as make fixed costs per tensor visible, and no
/// more than two cores can train.
#[must_use]
pub fn config() -> Config {
    Config {
        family: Family::Qwen3,
        vocab_size: VOCABULARY,
        hidden_size: 384,
        intermediate_size: 1536,
        num_hidden_layers: 10,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position_embeddings: WINDOW as i64,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
    }
}

/// A text in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(Vec<u8>);

impl Text {
    /// Reads a file.
    ///
    /// # Errors
    /// [`crate::Error::Io`]; [`crate::Error::Input`] if it is shorter than one sequence.
    pub fn open(path: &Path) -> Result<Text> {
        Text::new(std::fs::read(path).map_err(io("read", path))?)
    }

    /// Takes bytes as they are; they need not be UTF-8.
    ///
    /// # Errors
    /// [`crate::Error::Input`] if there are fewer than [`WINDOW`].
    pub fn new(bytes: Vec<u8>) -> Result<Text> {
        if bytes.len() < WINDOW {
            return Err(input("text", format!("at least {WINDOW} bytes"), bytes.len()));
        }
        Ok(Text(bytes))
    }

    /// Token ids of sequence `number`, [`WINDOW`] of them from a random place: a function of text, number and
    /// seed alone.
    #[must_use]
    pub fn draw(&self, number: u64, seed: u64) -> Vec<i32> {
        let places = (self.0.len() - WINDOW + 1) as u64;
        let start = (mix(seed ^ mix(number)) % places) as usize;
        self.0[start..start + WINDOW].iter().map(|&byte| i32::from(byte)).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn sequences_lie_in_the_text_and_reach_both_ends() {
        let text = Text::new((0..=255).chain(0..=255).collect()).unwrap();
        let drawn: Vec<_> = (0..4000).map(|number| text.draw(number, 7)).collect();
        for tokens in &drawn {
            assert!(tokens.windows(2).all(|pair| pair[1] == (pair[0] + 1) % 256), "{tokens:?}");
            assert_eq!(tokens.len(), WINDOW);
        }
        let starts: std::collections::BTreeSet<_> = drawn.iter().map(|tokens| tokens[0]).collect();
        assert_eq!(starts.len(), 256);
        assert_eq!(text.draw(5, 7), drawn[5]);
        assert_ne!(text.draw(5, 8), drawn[5]);
    }

    #[test]
    fn a_text_without_a_whole_sequence_is_refused() {
        assert!(Text::new(vec![0; WINDOW - 1]).is_err());
        assert_eq!(Text::new(vec![9; WINDOW]).unwrap().draw(3, 3), vec![9; WINDOW]);
    }

    #[test]
    fn the_model_is_large_enough_to_be_measured_on() {
        let config = config();
        config.check().unwrap();
        assert!(config.elements() >= 20_000_000 && config.tensors().len() >= 100);
    }
}
