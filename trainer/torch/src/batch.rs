//! From samples to packed tensors.
//!
//! Hidden states at position `t` predict token `t + 1`: the last token of a sample is only predicted, never
//! read.

use std::collections::{BTreeMap, BTreeSet};

use driftless_trainer::learner::Sample;
use driftless_trainer::options::LearnOptions;
use tch::{Device, Kind, Tensor};

use crate::error::{Result, input};
use crate::libtorch::borrow;

/// How token losses become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Mean over the tokens of each rollout, then over rollouts.
    PerRollout,
    /// Mean over all tokens.
    PerToken,
}

/// Some samples, packed: their tokens one after the other without padding, and a row for each token that is
/// trained on. N is the number of tokens, M of those trained on; all tensors are on one device.
#[derive(Debug)]
pub struct Batch {
    /// `[N]` i64: every token but the last of each sample.
    pub tokens: Tensor,
    /// How many of them are of each sample.
    pub lengths: Vec<i64>,
    /// `[M]` i64: the places in `tokens` that predict a trained token.
    pub trained: Tensor,
    /// `[M]` i64: the trained token.
    pub labels: Tensor,
    /// `[M]` i64: the sample that it is of, counted from 0.
    pub samples: Tensor,
    /// `[M]` f32: its share in the loss, see [`token_weights`].
    pub weights: Tensor,
    /// How many trained tokens are of each sample.
    pub counts: Vec<usize>,
    /// `[M]` f32: its log-prob when it was sampled; 0 where there is none.
    pub rollout_log_probs: Tensor,
    /// `[M]` f32: its log-prob under the trainer's old policy; the policy which is trained is that, if `None`.
    pub old_log_probs: Option<Tensor>,
    /// `[M]` f32.
    pub advantages: Tensor,
    /// `[M]` f32: what a critic expected before it.
    pub values: Option<Tensor>,
    /// `[M]` f32: what a critic learns to expect.
    pub returns: Option<Tensor>,
}

/// The weight of one trained token of each sample, such that the sum over all trained tokens of `samples` is
/// the mean that `reduction` names. Compute it over the whole batch before cutting micro-batches.
#[must_use]
pub fn token_weights(samples: &[Sample<'_>], reduction: Reduction) -> Vec<f32> {
    let mut per_answer: BTreeMap<u64, usize> = BTreeMap::new();
    for sample in samples {
        *per_answer.entry(sample.answer).or_default() += sample.trained();
    }
    let all: usize = per_answer.values().sum();
    let weight = |sample: &Sample<'_>| match reduction {
        Reduction::PerToken => 1.0 / all.max(1) as f32,
        Reduction::PerRollout => {
            let tokens = per_answer[&sample.answer].max(1);
            1.0 / (per_answer.len() * tokens) as f32
        }
    };
    samples.iter().map(weight).collect()
}

/// Cuts a rollout into the fewest optimiser steps of at most `global_batch_size` rollouts each, in their order and as equal
/// as can be: answers that failed are absent, and one that is left over is no step. `rollouts[i]` is the id of sample i's;
/// returns indices. Samples of one id stay together.
#[must_use]
pub fn steps(rollouts: &[u64], global_batch_size: usize) -> Vec<Vec<usize>> {
    let all = rollouts.iter().collect::<BTreeSet<_>>().len();
    let count = all.div_ceil(global_batch_size.max(1)).max(1);
    let mut places: BTreeMap<u64, usize> = BTreeMap::new();
    let mut steps: Vec<Vec<usize>> = Vec::new();
    for (index, &rollout) in rollouts.iter().enumerate() {
        let seen = places.len();
        let step = *places.entry(rollout).or_insert(seen) * count / all;
        if step == steps.len() {
            steps.push(Vec::new());
        }
        steps[step].push(index);
    }
    steps
}

/// Cuts samples into micro-batches of at most `max_tokens` tokens (a longer sample gets its own) and
/// `max_samples` samples each, longest first, so that samples of one length lie side by side. `lengths[i]` is
/// sample i's; returns indices.
#[must_use]
pub fn micro_batches(lengths: &[usize], max_tokens: usize, max_samples: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(lengths[index]), index));
    let mut batches: Vec<(usize, Vec<usize>)> = Vec::new();
    for index in order {
        let length = lengths[index];
        let fits = |(tokens, batch): &&mut (usize, Vec<usize>)| {
            tokens.saturating_add(length) <= max_tokens && batch.len() < max_samples
        };
        match batches.iter_mut().find(fits) {
            Some((tokens, batch)) => {
                *tokens += length;
                batch.push(index);
            }
            None => batches.push((length, vec![index])),
        }
    }
    batches.into_iter().map(|(_, batch)| batch).collect()
}

impl Batch {
    /// Runs a pass over it; if the device's memory does not suffice, the error says for how many tokens.
    pub(crate) fn pass<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        #[cfg(test)]
        let run = || if self.tokens.numel() > tests::MEMORY.get() { Err(tests::short()) } else { run() };
        run().map_err(|error| error.in_pass(self.tokens.numel()))
    }

    /// Whether any of its tokens is trained on.
    pub(crate) fn trains(&self) -> bool {
        self.labels.numel() > 0
    }

    /// Log-probs `[M]` of its trained tokens under the old policy, unless that is the one which is trained.
    pub(crate) fn old<'a>(&'a self, options: &LearnOptions) -> Option<&'a Tensor> {
        if options.use_rollout_logprobs { Some(&self.rollout_log_probs) } else { self.old_log_probs.as_ref() }
    }

    /// Packs samples. `weights[i]` is the weight of each trained token of sample i.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a sample without prompt or response, with a column of another length, with
    /// an id outside `0..vocab_size`, or with a log-prob or advantage that is not finite.
    pub fn new(samples: &[Sample<'_>], weights: &[f32], vocab_size: i64, device: Device) -> Result<Batch> {
        if samples.is_empty() {
            return Err(input("batch", "samples", "none"));
        }
        let mut rows = Rows::default();
        let (mut tokens, mut lengths, mut start) = (Vec::new(), Vec::new(), 0);
        for (index, (sample, &weight)) in samples.iter().zip(weights).enumerate() {
            check(sample, vocab_size)?;
            let read = &sample.tokens[..sample.tokens.len() - 1];
            rows.push(sample, index, start, weight);
            tokens.push(borrow(read)?);
            lengths.push(read.len() as i64);
            start += read.len();
        }
        let tokens: Vec<&Tensor> = tokens.iter().map(|tokens| &**tokens).collect();
        let integers = |values: &[i64]| Tensor::f_from_slice(values)?.f_to_device(device);
        let numbers = |values: &[f32]| Tensor::f_from_slice(values)?.f_to_device(device);
        Ok(Batch {
            tokens: Tensor::f_cat(&tokens, 0)?.f_to_device(device)?.f_to_kind(Kind::Int64)?,
            lengths,
            trained: integers(&rows.trained)?,
            labels: integers(&rows.labels)?,
            samples: integers(&rows.samples)?,
            weights: numbers(&rows.weights)?,
            counts: samples.iter().map(Sample::trained).collect(),
            rollout_log_probs: numbers(&rows.rollout_log_probs)?,
            old_log_probs: None,
            advantages: numbers(&rows.advantages)?,
            values: None,
            returns: None,
        })
    }
}

/// The columns of trained tokens, in the making.
#[derive(Default)]
struct Rows {
    trained: Vec<i64>,
    labels: Vec<i64>,
    samples: Vec<i64>,
    weights: Vec<f32>,
    rollout_log_probs: Vec<f32>,
    advantages: Vec<f32>,
}

impl Rows {
    /// Those of a sample whose first token lies at `start`.
    fn push(&mut self, sample: &Sample<'_>, index: usize, start: usize, weight: f32) {
        for place in 0..sample.response_len() {
            if !sample.is_trained(place) {
                continue;
            }
            let token = sample.prompt_len + place;
            self.trained.push((start + token - 1) as i64);
            self.labels.push(i64::from(sample.tokens[token]));
            self.samples.push(index as i64);
            self.weights.push(weight);
            self.rollout_log_probs.push(sample.log_probs.get(place).copied().unwrap_or(0.0));
            self.advantages.push(sample.advantage);
        }
    }
}

/// Refuses a sample that cannot be trained on.
fn check(sample: &Sample<'_>, vocab_size: i64) -> Result<()> {
    let response = sample.response_len();
    if sample.prompt_len == 0 || response == 0 {
        let found = format!("prompt of {} in {} tokens", sample.prompt_len, sample.tokens.len());
        return Err(input("sample", "a prompt and a response", found));
    }
    let columns = [("loss mask", sample.loss_mask.len()), ("log-probs", sample.log_probs.len())];
    for (what, length) in columns {
        if length != 0 && length != response {
            return Err(input(what, format!("{response} values"), length));
        }
    }
    if let Some(id) = sample.tokens.iter().find(|&&id| !(0..vocab_size).contains(&i64::from(id))) {
        return Err(input("token id", format!("0..{vocab_size}"), id));
    }
    match sample.log_probs.iter().chain([&sample.advantage]).find(|value| !value.is_finite()) {
        Some(value) => Err(input("log-prob or advantage", "a finite number", value)),
        None => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use driftless_buffer::Position;

    use super::*;
    use crate::error::Error;

    thread_local! {
        /// Tokens of the largest pass for which a device that lies has memory.
        pub(crate) static MEMORY: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// What libtorch says of a GPU whose memory is full.
    pub(crate) fn short() -> Error {
        let said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB";
        Error::Torch(tch::TchError::Torch(said.to_owned()))
    }

    const A: Sample<'_> = Sample {
        position: Position(0),
        tokens: &[5, 6, 7, 8],
        prompt_len: 2,
        loss_mask: &[],
        stale: 0,
        log_probs: &[-0.5, -0.25],
        teacher_log_probs: &[],
        answer: 0,
        advantage: 1.5,
    };
    const B: Sample<'_> = Sample {
        tokens: &[9, 3, 4, 2, 1],
        prompt_len: 1,
        loss_mask: &[1, 0, 1, 1],
        log_probs: &[],
        answer: 1,
        advantage: -1.0,
        ..A
    };

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).unwrap()
    }

    #[test]
    fn columns_line_up_with_predictions() {
        let batch = Batch::new(&[A, B], &[0.5, 0.25], 10, Device::Cpu).unwrap();
        assert_eq!(values(&batch.tokens), [5., 6., 7., 9., 3., 4., 2.]);
        assert_eq!(batch.lengths, [3, 4]);
        // Tokens 7 and 8 of A; 3, 2 and 1 of B.
        assert_eq!(values(&batch.trained), [1., 2., 3., 5., 6.]);
        assert_eq!(values(&batch.labels), [7., 8., 3., 2., 1.]);
        assert_eq!(values(&batch.samples), [0., 0., 1., 1., 1.]);
        assert_eq!(values(&batch.weights), [0.5, 0.5, 0.25, 0.25, 0.25]);
        assert_eq!(values(&batch.rollout_log_probs), [-0.5, -0.25, 0., 0., 0.]);
        assert_eq!(values(&batch.advantages), [1.5, 1.5, -1.0, -1.0, -1.0]);
    }

    #[test]
    fn tokens_that_are_too_old_have_no_part_in_the_loss() {
        let old = [Sample { stale: 1, ..A }, Sample { stale: 2, ..B }];
        let batch = Batch::new(&old, &[0.5, 0.25], 10, Device::Cpu).unwrap();
        assert_eq!(values(&batch.tokens), [5., 6., 7., 9., 3., 4., 2.], "the model still reads them");
        assert_eq!(values(&batch.labels), [8., 2., 1.]);
        assert_eq!(values(&batch.rollout_log_probs), [-0.25, 0., 0.]);
        assert_eq!(token_weights(&old, Reduction::PerToken), [1.0 / 3.0; 2]);
    }

    #[test]
    fn weights_are_the_means_they_are_named_after() {
        let sibling = Sample { answer: 1, ..A };
        assert_eq!(token_weights(&[A, B], Reduction::PerToken), [0.2, 0.2]);
        assert_eq!(token_weights(&[A, B], Reduction::PerRollout), [0.25, 1.0 / 6.0]);
        // A fan-out shares its rollout's weight: 3 + 2 tokens under one denominator.
        assert_eq!(token_weights(&[A, B, sibling], Reduction::PerRollout), [0.25, 0.1, 0.1]);
    }

    #[test]
    fn micro_batches_hold_every_sample_once_within_the_limit() {
        let all = usize::MAX;
        assert_eq!(micro_batches(&[3, 9, 4, 4, 2], 8, all), [vec![1], vec![2, 3], vec![0, 4]]);
        // A short one fills what is left of an earlier one.
        assert_eq!(micro_batches(&[5, 6, 2], 8, all), [vec![1, 2], vec![0]]);
        assert_eq!(micro_batches(&[1, 1, 1], 8, 2), [vec![0, 1], vec![2]]);
        assert!(micro_batches(&[], 8, all).is_empty());
    }

    #[test]
    fn steps_hold_whole_rollouts_in_their_order() {
        assert_eq!(steps(&[7, 3, 9, 5], 2), [vec![0, 1], vec![2, 3]]);
        // A rollout of several samples counts once, and a rest is a step too.
        assert_eq!(steps(&[7, 7, 3, 9, 3], 2), [vec![0, 1, 2, 4], vec![3]]);
        assert_eq!(steps(&[1, 2], usize::MAX), [vec![0, 1]]);
        // Of eight, three failed: no step has the one that would be left over.
        assert_eq!(steps(&[0, 1, 3, 5, 6], 4), [vec![0, 1, 2], vec![3, 4]]);
        assert!(steps(&[], 2).is_empty());
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
