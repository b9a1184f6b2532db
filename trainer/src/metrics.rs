//! What a step did, one JSON line a step: the data of the final table and of the dashboard's charts.

use crate::error::{Error, Result, io};
use crate::failure::Failure;
use crate::goodput::Goodput;
use driftless_store::ContentDigest;
use driftless_transport::gc::Phases;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Name of the file in the run's directory.
pub const METRICS: &str = "metrics.jsonl";

/// One turn of the loop. Durations are in milliseconds, sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The rollout that was learned from; the step weights after it are `rollout_id + 1`.
    pub rollout_id: u64,
    /// When the step was complete, in milliseconds since 1970.
    #[serde(default)]
    pub completed_at_ms: u64,
    /// Mean reward of the rollout's samples, before it is processed.
    pub reward: f64,
    /// The same of what the rewards were made into, where that is another: steps learn from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_learned: Option<f64>,
    /// `reward` of each file of prompts, where there are several; and means of what rewards are made of, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, f64>,
    /// Share of the prompts with a sample whose reward is 1, where every reward is −1, 0 or 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<f64>,
    /// Groups that were learned from.
    #[serde(default)]
    pub groups: u64,
    /// Their answers, but for those that failed. One of several samples counts once.
    #[serde(default)]
    pub answers: u64,
    /// Groups whose samples all have one reward: nothing can be learned from comparing them.
    #[serde(default)]
    pub groups_zero_std: u64,
    /// Mean number of response tokens.
    pub response_length: f64,
    /// Tokens of all responses.
    #[serde(default)]
    pub response_tokens: u64,
    /// The same with their prompts.
    #[serde(default)]
    pub tokens: u64,
    /// Share of the samples that were cut off at the token limit.
    #[serde(default)]
    pub truncated: f64,
    /// Groups that were left out because too few of their answers were generated, or they got no reward.
    #[serde(default)]
    pub groups_failed: u64,
    /// Attempts at answers that failed since the step before, by why; none of them is learned from.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub answers_failed: BTreeMap<Failure, u64>,
    /// Those of them after which the answer was made again.
    #[serde(default)]
    pub answers_made_again: u64,
    /// Groups that the filter left out.
    #[serde(default)]
    pub groups_filtered: u64,
    /// Groups of which every token was older than the run may train on.
    #[serde(default)]
    pub groups_too_old: u64,
    /// Whether the step was left out because it was not finite.
    #[serde(default)]
    pub skipped: bool,
    /// What the learner says of its steps.
    #[serde(flatten)]
    pub stats: StepStats,
    /// [`StepStats::log_prob_diff_mean`] of the tokens of each engine, by its URL: of the 64 with the largest, and of a
    /// learner that tells its log-probs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub log_prob_diff_by_engine: BTreeMap<String, f64>,
    /// Mean over tokens of: trainer step minus the step of the weights that generated the token.
    pub staleness_mean: f64,
    /// Largest such difference.
    pub staleness_max: u64,
    /// The largest that the run trains on, if that is bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_staleness: Option<u64>,
    /// Response tokens that were left out because their difference is larger than the run allows.
    #[serde(default)]
    pub tokens_too_old: u64,
    /// How many tokens have the difference 0, 1, 2, …
    #[serde(default)]
    pub staleness: Vec<u64>,
    /// Time to generate the rollout (in one-step-off mode it overlaps with training).
    pub generate_ms: f64,
    /// Time of forward, backward and optimiser.
    pub train_ms: f64,
    /// Time for which the learner waited for the rollout.
    #[serde(default)]
    pub train_wait_ms: f64,
    /// Time for which no rollout was generated before this one, since the one before was complete.
    #[serde(default)]
    pub rollout_wait_ms: f64,
    /// Response tokens generated in a second of `generate_ms`.
    #[serde(default)]
    pub rollout_tokens_per_s: f64,
    /// Tokens learned from in a second of `train_ms`.
    #[serde(default)]
    pub train_tokens_per_s: f64,
    /// Since the step before was complete, or the loop began.
    #[serde(default)]
    pub wall_ms: f64,
    /// What weights cost of it: the learner published, or waited until engines served the version, as rollouts did where
    /// none was under way; and where one was, the engines' longest pause.
    #[serde(default)]
    pub weights_ms: f64,
    /// The version published after this step, if one was.
    pub publication: Option<PublicationMetrics>,
    /// Versions of steps before that engines have come to since, where the loop does not wait for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub converged: Vec<Converged>,
    /// Where the time of engines' places went, since this process began to count; absent where no fleet was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<Goodput>,
    /// What was measured on held-out prompts after this step, if it was time.
    pub eval: Option<EvalMetrics>,
}

/// What the optimiser steps on a rollout were like. What a learner does not measure is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepStats {
    /// The policy's loss before the step.
    pub loss: f64,
    /// L2 norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Share of trained tokens whose probability ratio was clipped.
    pub pg_clipfrac: f64,
    /// Mean of old − new log-prob over trained tokens.
    pub ppo_kl: f64,
    /// Mean estimate of KL(policy ‖ reference), if it is part of the loss.
    pub kl_loss: f64,
    /// Share of trained tokens whose importance weight was cut.
    pub tis_clipfrac: f64,
    /// Estimate k3 of KL(engine ‖ learner).
    pub mismatch_k3: f64,
    /// Share of trained tokens that were rejected (`--use-rs`).
    pub rs_clipfrac: f64,
    /// Share of trained tokens in samples that are left out for their distance (`--use-opsm`).
    pub opsm_clipfrac: f64,
    /// Mean estimate of KL(old policy ‖ reference), if it is part of the rewards.
    pub kl: f64,
    /// Mean of old policy's − teacher's log-prob, with on-policy distillation.
    pub opd_reverse_kl: f64,
    /// The critic's loss before its step.
    pub value_loss: f64,
    /// Share of trained tokens whose value was clipped.
    pub value_clipfrac: f64,
    /// L2 norm of the critic's gradients before clipping.
    pub critic_grad_norm: f64,
    /// The critic's learning rate.
    pub critic_lr: f64,
    /// Mean entropy of the policy at the trained tokens, in nats.
    pub entropy: f64,
    /// Mean of |learner's log-prob − engine's log-prob| over trained tokens.
    pub log_prob_diff_mean: f64,
    /// What 99 % of those differences are below.
    pub log_prob_diff_p99: f64,
    /// The largest of those differences.
    pub log_prob_diff_max: f64,
    /// Share of the devices' bf16 operations that the policy's steps took, if the devices are known.
    pub mfu: f64,
}

impl StepStats {
    /// Adds the figures of one of several steps on a rollout, which count for `share` of it. Learning rates and
    /// the largest difference are the largest of all steps; `log_prob_diff_p99` and `mfu` are of the whole rollout.
    pub fn add(&mut self, mut step: StepStats, share: f64) {
        for (all, own) in self.sums().into_iter().zip(step.sums()) {
            *all += share * *own;
        }
        self.grad_norm += share * step.grad_norm;
        self.critic_grad_norm += share * step.critic_grad_norm;
        self.lr = self.lr.max(step.lr);
        self.critic_lr = self.critic_lr.max(step.critic_lr);
        self.log_prob_diff_max = self.log_prob_diff_max.max(step.log_prob_diff_max);
    }

    /// The figures that add up over what ranks have of a step. The others are the same on all, or are compared.
    pub fn sums(&mut self) -> [&mut f64; 14] {
        [
            &mut self.loss,
            &mut self.pg_clipfrac,
            &mut self.ppo_kl,
            &mut self.kl_loss,
            &mut self.tis_clipfrac,
            &mut self.mismatch_k3,
            &mut self.rs_clipfrac,
            &mut self.opsm_clipfrac,
            &mut self.kl,
            &mut self.opd_reverse_kl,
            &mut self.value_loss,
            &mut self.value_clipfrac,
            &mut self.entropy,
            &mut self.log_prob_diff_mean,
        ]
    }
}

/// A version that engines came to beside the loop.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Converged {
    /// Its number.
    pub version: u64,
    /// From its commit until every engine that answers served it.
    pub convergence_ms: f64,
    /// Engines that were gone on without.
    pub engines_behind: u64,
}

/// One publication and what became of it on the hosts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PublicationMetrics {
    /// The version's number.
    pub version: u64,
    /// Digest of its weights: of the digests of all tensors. Runs of earlier releases have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_digest: Option<ContentDigest>,
    /// Bytes of the objects and the manifest.
    pub publication_bytes: u64,
    /// Bytes of the same version in full.
    pub full_bytes: u64,
    /// Changed elements / all elements.
    pub density: f64,
    /// Bytes of the tensors that were encoded on the device where they lie; the others were encoded on the host.
    #[serde(default)]
    pub device_bytes: u64,
    /// Diff, encode, upload and commit.
    pub encode_publish_ms: f64,
    /// Of `encode_publish_ms`, until everything was encoded; objects are stored meanwhile.
    #[serde(default)]
    pub encode_ms: f64,
    /// Of `encode_publish_ms`, from then until the version was committed.
    #[serde(default)]
    pub put_ms: f64,
    /// When it was committed, in milliseconds since 1970 by the trainer's clock; 0 where another process did.
    #[serde(default)]
    pub committed_at_ms: u64,
    /// Fetch, verify and apply on the slowest host, if its follower has told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare_ms: Option<f64>,
    /// Longest time for which an engine did not generate because of this version, if that was told in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// From commit until every engine served the version. Absent where the loop went on before: a later step has it
    /// among those that [`StepMetrics::converged`] tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convergence_ms: Option<f64>,
    /// The phases of this version on each host, by its follower's name, and of earlier ones that were told of since the
    /// step before.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hosts: BTreeMap<String, Vec<Phases>>,
    /// Engines that the loop went on without: they did not answer, or were too slow.
    #[serde(default)]
    pub engines_behind: u64,
    /// Engines whose checksums were compared with those of the trainer's bytes, and equal.
    pub engines_checked: u64,
    /// An engine that serves the version and of whose live weights nothing was compared, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_compared: Option<String>,
}

/// The set of a task's own held-out problems, sampled as the rollouts are.
pub const HELD_OUT: &str = "held-out";
/// The same problems, answered greedily.
pub const HELD_OUT_GREEDY: &str = "held-out-greedy";

/// What was measured on held-out prompts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "EvalRecord")]
pub struct EvalMetrics {
    /// Of each set, by its name.
    pub sets: BTreeMap<String, SetMetrics>,
}

/// [`EvalMetrics`] as files have them. Older ones keep a task's own problems apart from the sets.
#[derive(Default, Deserialize)]
#[serde(default)]
struct EvalRecord {
    sets: BTreeMap<String, SetMetrics>,
    problems: u64,
    sampled: f64,
    greedy: f64,
}

impl From<EvalRecord> for EvalMetrics {
    fn from(EvalRecord { mut sets, problems, sampled, greedy }: EvalRecord) -> Self {
        for (name, share) in [(HELD_OUT, sampled), (HELD_OUT_GREEDY, greedy)] {
            if problems > 0 {
                let set = SetMetrics {
                    prompts: problems,
                    samples: 1,
                    reward: share,
                    pass: Some(share),
                    pass_1: Some(share),
                    ..SetMetrics::default()
                };
                sets.insert(name.to_owned(), set);
            }
        }
        EvalMetrics { sets }
    }
}

/// What was measured on one set of prompts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SetMetrics {
    /// Prompts that were asked.
    pub prompts: u64,
    /// Samples of each.
    pub samples: u64,
    /// Mean reward.
    pub reward: f64,
    /// Share of the prompts, failed ones included, with a sample whose reward is 1: pass@k, with k samples of each. Absent
    /// unless every reward is −1, 0 or 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<f64>,
    /// Share of the samples, those of failed prompts included, whose reward is 1: pass@1. Absent where `pass` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_1: Option<f64>,
    /// Mean number of response tokens.
    pub response_length: f64,
    /// Share of the samples that were cut off at the token limit.
    pub truncated: f64,
    /// Prompts of which a sample was not generated or got no reward. Rewards and lengths leave them out.
    pub failed: u64,
}

/// A moment as microseconds since 1970.
pub(crate) fn unix_us(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or_default()
}

/// Whether a reward says no more than right or wrong: only of such rewards a share of right answers is told.
pub(crate) fn is_verdict(reward: f32) -> bool {
    [-1.0, 0.0, 1.0].contains(&reward)
}

/// `metrics.jsonl` of a run; appended to, and cut back when a run resumes from an older checkpoint.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file and drops what a crashed run wrote beyond step `resume_at`, or wrote half.
    ///
    /// # Errors
    /// [`Error::Io`] with the path.
    pub fn open(path: &Path, resume_at: u64) -> Result<Self> {
        let mut text = String::new();
        for step in read(path)?.iter().filter(|step| step.rollout_id < resume_at) {
            text.push_str(&line(step, path)?);
            text.push('\n');
        }
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, text).map_err(io("write", &fresh))?;
        std::fs::rename(&fresh, path).map_err(io("replace", path))?;
        let file = File::options().append(true).open(path).map_err(io("open", path))?;
        Ok(MetricsFile { path: path.to_path_buf(), file })
    }

    /// Appends one step.
    ///
    /// # Errors
    /// [`Error::Io`] with the path.
    pub fn append(&mut self, step: &StepMetrics) -> Result<()> {
        writeln!(self.file, "{}", line(step, &self.path)?).map_err(io("write", &self.path))
    }
}

/// The steps in a metrics file, each once and in order; none if it is absent. Lines that are no step are left out:
/// a crash may have torn one.
///
/// # Errors
/// [`Error::Io`] with the path.
pub fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(io("read", path)(source)),
    };
    let lines = bytes.split(|byte| *byte == b'\n');
    let steps = lines.filter_map(|line| serde_json::from_slice::<StepMetrics>(line).ok());
    let steps: BTreeMap<u64, StepMetrics> = steps.map(|step| (step.rollout_id, step)).collect();
    Ok(steps.into_values().collect())
}

fn line(step: &StepMetrics, path: &Path) -> Result<String> {
    serde_json::to_string(step).map_err(|source| Error::Json { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn lines_that_are_no_step_or_stand_twice_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let step = |rollout_id| StepMetrics { rollout_id, ..StepMetrics::default() };
        let line = |rollout_id| line(&step(rollout_id), &path).unwrap();
        let text = format!("{}\nnot a step\n{}\n{}\n{}", line(0), line(1), line(1), &line(2)[..9]);
        std::fs::write(&path, [b"\xff\xfe\n", text.as_bytes()].concat()).unwrap();
        assert_eq!(read(&path).unwrap(), [step(0), step(1)]);
        MetricsFile::open(&path, u64::MAX).unwrap().append(&step(2)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
    }

    #[test]
    fn eval_of_an_older_run_is_read_as_named_sets() {
        let set = r#"{"prompts": 5, "samples": 2, "reward": 0.5, "pass": 0.8, "response_length": 3, "truncated": 0, "failed": 0}"#;
        let old =
            format!(r#"{{"problems": 512, "sampled": 0.25, "greedy": 0.5, "sets": {{"test": {set}}}}}"#);
        let read: EvalMetrics = serde_json::from_str(&old).unwrap();
        let figures = |set: &SetMetrics| (set.prompts, set.samples, set.reward, set.pass);
        let figures: Vec<_> = read.sets.iter().map(|(name, set)| (name.as_str(), figures(set))).collect();
        let expected = [
            (HELD_OUT, (512, 1, 0.25, Some(0.25))),
            (HELD_OUT_GREEDY, (512, 1, 0.5, Some(0.5))),
            ("test", (5, 2, 0.5, Some(0.8))),
        ];
        assert_eq!(figures, expected);
        let written = serde_json::to_string(&read).unwrap();
        assert!(!written.contains("problems"), "{written}");
        assert_eq!(serde_json::from_str::<EvalMetrics>(&written).unwrap(), read);
    }

    #[test]
    fn eval_of_an_older_run_without_problems_has_its_sets_only() {
        let old = r#"{"problems": 0, "sampled": 0.0, "greedy": 0.0}"#;
        assert_eq!(serde_json::from_str::<EvalMetrics>(old).unwrap(), EvalMetrics::default());
    }
}
