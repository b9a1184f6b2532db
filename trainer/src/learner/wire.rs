//! The lines between the loop and a child process: `docs/wire/learner.md`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Batch, Progress, Workspace};
use crate::metrics::StepStats;
use crate::options::LearnOptions;

/// The version of the protocol that is spoken here.
pub const PROTOCOL: u32 = 3;

/// Longest reply, beside the numbers that `log_probs` asks for. A learner may be anybody's program, so its
/// line is not held in memory for longer than it can mean something.
const REPLY_BYTES_MAX: usize = 4 << 20;
/// Longest text of a number in a reply: JSON of a 64-bit float takes 24, and what separates two of them 2.
const NUMBER_BYTES_MAX: usize = 32;

/// A call with its number.
#[derive(Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) call: Call,
}

/// What the loop asks for.
#[derive(Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub(super) enum Call {
    Hello(Box<Hello>),
    LogProbs { rollout_id: u64, samples: Vec<Sample> },
    Step { rollout_id: u64, samples: Vec<Sample> },
    Publish { step: u64 },
    Save { progress: Box<Progress> },
    SaveHf { dir: PathBuf },
}

impl Call {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Call::Hello(_) => "hello",
            Call::LogProbs { .. } => "log_probs",
            Call::Step { .. } => "step",
            Call::Publish { .. } => "publish",
            Call::Save { .. } => "save",
            Call::SaveHf { .. } => "save_hf",
        }
    }

    /// Bytes of the longest line that can be its reply.
    pub(super) fn reply_bytes_max(&self) -> usize {
        let numbers = match self {
            // Each sample has brackets, too.
            Call::LogProbs { samples, .. } => samples.iter().map(|sample| sample.response_len + 1).sum(),
            _ => 0_usize,
        };
        numbers.saturating_mul(NUMBER_BYTES_MAX).saturating_add(REPLY_BYTES_MAX)
    }
}

/// What a learner is told before anything else.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    pub(super) protocol: u32,
    #[serde(flatten)]
    pub(super) workspace: Workspace,
    seed: u64,
    /// Temperature of the rollouts.
    pub temperature: f64,
    /// What the optimiser and the loss are told.
    pub options: LearnOptions,
    /// The names of those that are not at their defaults.
    #[serde(default)]
    changed: Vec<String>,
}

impl Hello {
    pub(super) fn new(workspace: Workspace, child: &super::ChildOptions) -> Self {
        let options = child.learn.clone().completed();
        let (seed, temperature, changed) = (child.seed, child.temperature, options.changed());
        Hello { protocol: PROTOCOL, workspace, seed, temperature, options, changed }
    }
}

/// A sample, which the learner reads where it lies.
#[derive(Serialize, Deserialize)]
pub(super) struct Sample {
    pub(super) position: u64,
    /// The answer that it is part of.
    pub(super) rollout_id: u64,
    pub(super) advantage: f32,
    /// Leading response tokens that are not trained on.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) stale: usize,
    /// Tokens of its response, which are as many numbers in a reply to `log_probs`.
    #[serde(skip)]
    response_len: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

pub(super) fn samples(batch: &Batch<'_>) -> Vec<Sample> {
    let sample = |sample: &super::Sample<'_>| Sample {
        position: sample.position.0,
        rollout_id: sample.answer,
        advantage: sample.advantage,
        stale: sample.stale,
        response_len: sample.response_len(),
    };
    batch.samples.iter().map(sample).collect()
}

/// A reply, whatever was asked. Fields that a call does not have are absent.
#[derive(Deserialize)]
pub(super) struct Reply {
    pub(super) id: u64,
    pub(super) error: Option<String>,
    pub(super) protocol: Option<u32>,
    pub(super) name: Option<String>,
    pub(super) progress: Option<Progress>,
    pub(super) log_probs: Option<Vec<Vec<f32>>>,
    pub(super) stats: Option<StepStats>,
    pub(super) not_finite: Option<String>,
    pub(super) version: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_bytes_max_longest_log_probs_of_its_samples_fit() {
        let sample =
            |response_len| Sample { position: 0, rollout_id: 0, advantage: 0.0, stale: 0, response_len };
        let lengths = [0, 1, 200_000];
        let call = Call::LogProbs { rollout_id: 0, samples: lengths.map(sample).into() };
        // No number of 64 bits has a longer text; Python puts a space behind each comma.
        let numbers = lengths.map(|length| vec![-f64::MIN_POSITIVE; length]);
        let reply = serde_json::json!({"id": u64::MAX, "log_probs": numbers}).to_string().replace(',', ", ");
        assert!(reply.len() > REPLY_BYTES_MAX && reply.len() <= call.reply_bytes_max(), "{}", reply.len());
        let call = Call::Publish { step: 0 };
        assert_eq!(call.reply_bytes_max(), REPLY_BYTES_MAX);
    }
}
