//! The lines between the loop and a child process: `docs/wire/learner.md`.

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::{Batch, Progress, Workspace};
use crate::metrics::StepStats;
use crate::options::LearnOptions;

/// The version of the protocol that is spoken here.
pub const PROTOCOL: u32 = 3;

/// Longest reply, beside the numbers that `log_probs` and `step` ask for. A learner may be anybody's program, so its
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
    LogProbs {
        rollout_id: u64,
        samples: Vec<Sample>,
    },
    Step {
        rollout_id: u64,
        samples: Vec<Sample>,
        /// Whether the reply may have them, which an earlier loop has no room for.
        #[serde(default)]
        trained_log_probs: bool,
    },
    Publish {
        step: u64,
    },
    Save {
        progress: Box<Progress>,
    },
    SaveHf {
        dir: PathBuf,
    },
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
            // Each sample has brackets, too. Base64 of a number is shorter.
            Call::LogProbs { samples, .. } | Call::Step { samples, .. } => {
                samples.iter().map(|sample| sample.response_len + 1).sum()
            }
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

/// [`Learner::take_log_probs`](super::Learner::take_log_probs) as text: base64 of little-endian 32-bit floats, which is a
/// quarter of what they are as numbers of JSON, and which has NaN.
pub(super) fn encode(log_probs: &[f32]) -> String {
    STANDARD.encode(log_probs.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

/// The other way; `None` of what is no number for each response token of a batch, NaN where none is trained on.
pub(super) fn decode(text: &str, batch: &Batch<'_>) -> Option<Vec<f32>> {
    let bytes = STANDARD.decode(text).ok()?;
    let (numbers, rest) = bytes.as_chunks::<4>();
    let log_probs: Vec<f32> = numbers.iter().map(|number| f32::from_le_bytes(*number)).collect();
    let trained =
        batch.samples.iter().flat_map(|sample| (0..sample.response_len()).map(|at| sample.is_trained(at)));
    let fits = log_probs.iter().map(|value| !value.is_nan()).eq(trained);
    (rest.is_empty() && fits).then_some(log_probs)
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
    pub(super) trained_log_probs: Option<String>,
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
        let call = Call::Step { rollout_id: 0, samples: lengths.map(sample).into(), trained_log_probs: true };
        let numbers = encode(&vec![f32::NAN; lengths.iter().sum()]);
        assert!(
            numbers.len() > REPLY_BYTES_MAX / 6 && numbers.len() + REPLY_BYTES_MAX <= call.reply_bytes_max()
        );
        let call = Call::Publish { step: 0 };
        assert_eq!(call.reply_bytes_max(), REPLY_BYTES_MAX);
    }

    #[test]
    fn log_probs_that_fit_a_batch_come_back_and_others_are_refused() {
        let one = super::super::Sample { tokens: &[1, 2, 3], prompt_len: 1, ..Default::default() };
        let two = super::super::Sample { loss_mask: &[0, 1], ..one };
        let batch = Batch { rollout_id: 0, samples: vec![one, two] };
        let log_probs = [-1.0, -0.1, f32::NAN, f32::MIN_POSITIVE];
        let found = decode(&encode(&log_probs), &batch).unwrap();
        assert_eq!(found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), log_probs.map(f32::to_bits));
        let mistaken = [&log_probs[..3], &[-1.0; 4], &[-1.0, f32::NAN, f32::NAN, -1.0], &[-1.0; 5]];
        let mut texts: Vec<_> = mistaken.into_iter().map(encode).collect();
        texts.extend(["AAAA", "no base64", ""].map(String::from));
        for text in texts {
            assert_eq!(decode(&text, &batch), None, "{text}");
        }
    }
}
