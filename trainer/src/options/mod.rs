//! The words that the loop's settings are made of, and what a learner is told.

pub mod bounds;
mod learn;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use learn::{CriticOptions, LearnOptions};

impl fmt::Display for Estimator {
    /// As its flag names it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What a model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// bf16.
    Bfloat16,
    /// f32.
    Float32,
}

/// Which activations are computed again on the way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Whole layers: only what flows between them is kept.
    Full,
    /// Nothing.
    None,
}

/// What a probability ratio of trainer and engine is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Of each token.
    Token,
    /// Of the trained tokens of a sample: their product.
    Sequence,
    /// Of the trained tokens of a sample: their geometric mean.
    Geometric,
}

/// What becomes of an importance weight that is out of bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TisMode {
    /// It is moved to the nearest bound (truncated importance sampling).
    Clip,
    /// It is 0 (masked importance sampling; for tokens, IcePop).
    Mask,
}

/// Estimator of KL(policy ‖ reference) from one sample per token (Schulman 2020); `d = log p − log p_ref`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kl {
    /// `d`: unbiased, high variance, zero gradient in expectation as a loss.
    K1,
    /// `d² / 2`.
    K2,
    /// `exp(−d) + d − 1`: unbiased, never negative.
    K3,
    /// [`Kl::K3`], at most 10.
    LowVarKl,
}

/// Whether versions are published in full or as deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum UpdateWeightMode {
    /// Every version in full.
    Full,
    /// The difference to the version before.
    Delta,
}

/// Parts of the loop that are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Debug {
    /// None.
    Off,
    /// Generate and log, with the weights the engines serve; do not train or publish.
    RolloutOnly,
    /// Train on what the log holds; do not talk to engines or publish.
    TrainOnly,
}

/// Which half of the loop a process runs. Halves share the run's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Engines, schedule, hooks and log; [`rollout`](crate::rollout()) is told by it.
    Rollouts,
    /// Learner, publications and ledger; [`train`](crate::train()) is told by it.
    Trainer,
}

/// How rewards become advantages, and what the loss does with them (`--advantage-estimator`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// The reward against its group's; each token's ratio is clipped.
    Grpo,
    /// The same; the ratio of whole samples is clipped.
    Gspo,
    /// The same; the clipped ratio is a constant weight of the log-prob.
    Cispo,
    /// The reward itself, normalised over the trained tokens of the rollout.
    ReinforcePlusPlus,
    /// The reward minus its group's mean, normalised over the trained tokens of the rollout.
    ReinforcePlusPlusBaseline,
    /// The reward, and what a critic expects from each token on; each token's ratio is clipped.
    Ppo,
    /// 1 for the best sample of each group, the others are not learned from; the loss is cross-entropy.
    RejectionSampling,
}

impl Estimator {
    /// Whether advantages are normalised also where `--normalize-advantages` is not given.
    pub(crate) fn normalizes(self) -> bool {
        matches!(self, Estimator::ReinforcePlusPlus | Estimator::ReinforcePlusPlusBaseline)
    }
}

/// How generation and training overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Generate, train, publish, one after the other: every sample comes from the newest weights.
    Synchronous,
    /// The next batch is generated while a step trains: samples are at most one step old.
    OneStepOff,
    /// Groups are generated without regard to steps, and a step learns from the oldest that are finished. A token that
    /// older weights drew is not trained on.
    Bounded {
        /// How many optimiser steps the weights that draw a token may be behind those that learn from it; at least 1.
        max_staleness: u64,
    },
}

impl Mode {
    /// How many optimiser steps the weights that draw a token may be behind those that learn from it.
    #[must_use]
    pub fn max_staleness(self) -> u64 {
        match self {
            Mode::Synchronous => 0,
            Mode::OneStepOff => 1,
            Mode::Bounded { max_staleness } => max_staleness,
        }
    }
}
