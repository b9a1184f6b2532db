//! From samples to padded tensors.
//!
//! Logits at position `t` predict token `t + 1`. All columns of a [`Batch`] are therefore `T = longest − 1` wide:
//! column `t` is about the prediction of token `t + 1`.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use crate::error::{Result, input};
use crate::torch::borrow;

/// One training sample, borrowed from wherever it lies: a record of the rollout log, or vectors.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// Prompt and response.
    pub tokens: &'a [i32],
    /// Tokens of the prompt, at least 1.
    pub prompt_len: usize,
    /// Per response token: 1 to train on it, 0 not to. Empty means all ones.
    pub loss_mask: &'a [u8],
    /// Per response token: log-probability when it was sampled. Empty where there is none (SFT).
    pub log_probs: &'a [f32],
    /// Samples of one rollout (an agent's turns) share a denominator.
    pub rollout_id: u64,
    /// Advantage of every response token.
    pub advantage: f32,
}

/// How token losses become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Mean over the tokens of each rollout, then over rollouts.
    PerRollout,
    /// Mean over all tokens.
    PerToken,
}

/// Padded tensors of some samples, all on one device.
#[derive(Debug)]
pub struct Batch {
    /// `[B, T]` i64: every token but the last; padding is 0.
    pub tokens: Tensor,
    /// `[B, T]` i64: the next token; padding is 0.
    pub labels: Tensor,
    /// `[B, T]` f32: share of the token in the loss, see [`token_weights`]; 0 for prompt, masked and padding.
    pub weights: Tensor,
    /// `[B, T]` f32: log-probs when sampled; 0 where there is none.
    pub old_log_probs: Tensor,
    /// `[B, T]` f32: log-probs under a reference policy, for KL terms.
    pub reference_log_probs: Option<Tensor>,
    /// `[B, 1]` f32.
    pub advantages: Tensor,
}

/// The weight of one trained token of each sample, such that the sum over all trained tokens of `samples` is the
/// mean that `reduction` names. Compute it over the whole batch before cutting micro-batches.
#[must_use]
pub fn token_weights(samples: &[Sample<'_>], reduction: Reduction) -> Vec<f32> {
    let trained = |sample: &Sample<'_>| match sample.loss_mask {
        [] => sample.tokens.len().saturating_sub(sample.prompt_len),
        mask => mask.iter().filter(|&&keep| keep != 0).count(),
    };
    let mut per_rollout: BTreeMap<u64, usize> = BTreeMap::new();
    for sample in samples {
        *per_rollout.entry(sample.rollout_id).or_default() += trained(sample);
    }
    let all: usize = per_rollout.values().sum();
    let weight = |sample: &Sample<'_>| match reduction {
        Reduction::PerToken => 1.0 / all.max(1) as f32,
        Reduction::PerRollout => {
            let tokens = per_rollout[&sample.rollout_id].max(1);
            1.0 / (per_rollout.len() * tokens) as f32
        }
    };
    samples.iter().map(weight).collect()
}

/// Cuts samples into micro-batches of at most `max_tokens` padded tokens each (a longer sample gets its own),
/// longest first so that little is padded. `lengths[i]` is sample i's; returns indices.
#[must_use]
pub fn micro_batches(lengths: &[usize], max_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(lengths[index]), index));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match batches.last_mut() {
            Some(batch) if (batch.len() + 1) * lengths[batch[0]] <= max_tokens => batch.push(index),
            _ => batches.push(vec![index]),
        }
    }
    batches
}

impl Batch {
    /// Pads samples into tensors. `weights[i]` is the weight of each trained token of sample i.
    ///
    /// Columns are read in place and widened by libtorch as it copies them into the padded rows.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a sample without prompt or response, with a column of another length, with an
    /// id outside `0..vocab_size`, or with a log-prob or advantage that is not finite.
    pub fn new(samples: &[Sample<'_>], weights: &[f32], vocab_size: i64, device: Device) -> Result<Batch> {
        for sample in samples {
            sample.check(vocab_size)?;
        }
        let longest = samples.iter().map(|sample| sample.tokens.len()).max();
        let width = longest.ok_or_else(|| input("batch", "samples", "none"))? as i64 - 1;
        let shape = [samples.len() as i64, width];
        let tokens = Tensor::f_zeros(shape, (Kind::Int64, Device::Cpu))?;
        let labels = tokens.f_zeros_like()?;
        let token_weights = Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?;
        let old_log_probs = token_weights.f_zeros_like()?;
        for (row, (sample, &weight)) in samples.iter().zip(weights).enumerate() {
            let place = |column: &Tensor, start: usize, length: usize| {
                column.f_get(row as i64)?.f_narrow(0, start as i64, length as i64)
            };
            let last = sample.tokens.len() - 1;
            place(&tokens, 0, last)?.f_copy_(&*borrow(&sample.tokens[..last])?)?;
            place(&labels, 0, last)?.f_copy_(&*borrow(&sample.tokens[1..])?)?;
            let (start, length) = (sample.prompt_len - 1, sample.response_len());
            let mut trained = place(&token_weights, start, length)?;
            match sample.loss_mask {
                [] => drop(trained.f_fill_(f64::from(weight))?),
                mask => trained.f_copy_(&borrow(mask)?.f_ne(0)?.f_mul_scalar(f64::from(weight))?)?,
            }
            if !sample.log_probs.is_empty() {
                place(&old_log_probs, start, length)?.f_copy_(&*borrow(sample.log_probs)?)?;
            }
        }
        let advantages: Vec<f32> = samples.iter().map(|sample| sample.advantage).collect();
        Ok(Batch {
            tokens: tokens.f_to_device(device)?,
            labels: labels.f_to_device(device)?,
            weights: token_weights.f_to_device(device)?,
            old_log_probs: old_log_probs.f_to_device(device)?,
            reference_log_probs: None,
            advantages: Tensor::f_from_slice(&advantages)?.f_unsqueeze(1)?.f_to_device(device)?,
        })
    }
}

impl<'a> Sample<'a> {
    /// A sample to be imitated: every token after the prompt is trained on.
    #[must_use]
    pub fn supervised(tokens: &'a [i32], prompt_len: usize, rollout_id: u64) -> Sample<'a> {
        Sample { tokens, prompt_len, loss_mask: &[], log_probs: &[], rollout_id, advantage: 0.0 }
    }

    fn response_len(&self) -> usize {
        self.tokens.len().saturating_sub(self.prompt_len)
    }

    fn check(&self, vocab_size: i64) -> Result<()> {
        if self.prompt_len == 0 || self.response_len() == 0 {
            let found = format!("prompt of {} in {} tokens", self.prompt_len, self.tokens.len());
            return Err(input("sample", "a prompt and a response", found));
        }
        let columns = [("loss mask", self.loss_mask.len()), ("log-probs", self.log_probs.len())];
        for (what, length) in columns {
            if length != 0 && length != self.response_len() {
                return Err(input(what, format!("{} values", self.response_len()), length));
            }
        }
        if let Some(id) = self.tokens.iter().find(|&&id| !(0..vocab_size).contains(&i64::from(id))) {
            return Err(input("token id", format!("0..{vocab_size}"), id));
        }
        match self.log_probs.iter().chain([&self.advantage]).find(|value| !value.is_finite()) {
            Some(value) => Err(input("log-prob or advantage", "a finite number", value)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    const A: Sample<'_> = Sample {
        tokens: &[5, 6, 7, 8],
        prompt_len: 2,
        loss_mask: &[],
        log_probs: &[-0.5, -0.25],
        rollout_id: 0,
        advantage: 1.5,
    };
    const B: Sample<'_> = Sample {
        tokens: &[9, 3, 4, 2, 1],
        prompt_len: 1,
        loss_mask: &[1, 0, 1, 1],
        log_probs: &[],
        rollout_id: 1,
        advantage: -1.0,
    };

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).unwrap()
    }

    #[test]
    fn columns_line_up_with_predictions() {
        let batch = Batch::new(&[A, B], &[0.5, 0.25], 10, Device::Cpu).unwrap();
        assert_eq!(batch.tokens.size(), [2, 4]);
        assert_eq!(values(&batch.tokens), [5., 6., 7., 0., 9., 3., 4., 2.]);
        assert_eq!(values(&batch.labels), [6., 7., 8., 0., 3., 4., 2., 1.]);
        assert_eq!(values(&batch.weights), [0., 0.5, 0.5, 0., 0.25, 0., 0.25, 0.25]);
        assert_eq!(values(&batch.old_log_probs), [0., -0.5, -0.25, 0., 0., 0., 0., 0.]);
        assert_eq!(values(&batch.advantages), [1.5, -1.0]);
    }

    #[test]
    fn weights_are_the_means_they_are_named_after() {
        let sibling = Sample { rollout_id: 1, ..A };
        assert_eq!(token_weights(&[A, B], Reduction::PerToken), [0.2, 0.2]);
        assert_eq!(token_weights(&[A, B], Reduction::PerRollout), [0.25, 1.0 / 6.0]);
        // A fan-out shares its rollout's weight: 3 + 2 tokens under one denominator.
        assert_eq!(token_weights(&[A, B, sibling], Reduction::PerRollout), [0.25, 0.1, 0.1]);
    }

    #[test]
    fn micro_batches_hold_every_sample_once_within_the_limit() {
        assert_eq!(micro_batches(&[3, 9, 4, 4, 2], 8), [vec![1], vec![2, 3], vec![0, 4]]);
        assert!(micro_batches(&[], 8).is_empty());
    }

    #[test]
    fn bad_samples_are_refused() {
        for sample in [
            Sample { prompt_len: 0, ..A },
            Sample { prompt_len: 4, ..A },
            Sample { loss_mask: &[1], ..A },
            Sample { log_probs: &[-1.0], ..A },
            Sample { log_probs: &[-1.0, f32::NAN], ..A },
            Sample { tokens: &[5, 6, 7, 10], ..A },
            Sample { tokens: &[5, -1, 7, 8], ..A },
            Sample { advantage: f32::INFINITY, ..A },
        ] {
            let result = Batch::new(&[sample], &[1.0], 10, Device::Cpu);
            assert!(matches!(result, Err(Error::Input { .. })), "{sample:?}");
        }
        assert!(matches!(Batch::new(&[], &[], 10, Device::Cpu), Err(Error::Input { .. })));
    }
}
