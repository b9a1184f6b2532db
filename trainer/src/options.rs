//! What advantages, loss and optimiser are told, and the words that the loop's settings are made of.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::lr::{Decay, LrSchedule};

/// What advantages, loss and optimiser are told. A child process gets it as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct LearnOptions {
    /// What the policy computes in; as the checkpoint, which engines compute in, if `None`.
    pub dtype: Option<Dtype>,
    /// Learning rate, after the warm-up and before the decay.
    pub lr: f64,
    /// Learning rate at the end of the decay.
    pub min_lr: f64,
    /// Steps over which the learning rate rises from 0.
    pub lr_warmup_iters: u64,
    /// How the learning rate falls after that.
    pub lr_decay_style: Decay,
    /// Step at which it has fallen.
    pub lr_decay_iters: u64,
    /// Weight decay of AdamW.
    pub weight_decay: f64,
    /// First moment's decay.
    pub adam_beta1: f64,
    /// Second moment's decay.
    pub adam_beta2: f64,
    /// Gradient norm to clip to; 0 leaves gradients as they are.
    pub clip_grad: f64,
    /// Lower clip of the probability ratio.
    pub eps_clip: f64,
    /// Upper clip of the probability ratio.
    pub eps_clip_high: f64,
    /// Bound of the ratio where the advantage is negative.
    pub eps_clip_c: Option<f64>,
    /// Take the engine's log-probs for those of the old policy, instead of the trainer's before the rollout's
    /// first step.
    pub use_rollout_logprobs: bool,
    /// Importance sampling between engine and trainer.
    pub tis: Option<Tis>,
    /// Rejection of tokens that engine and trainer disagree about.
    pub rs: Option<Rs>,
    /// Leave out samples of negative advantage whose mean of old − new log-prob is above this (off-policy
    /// sequence masking).
    pub opsm_delta: Option<f64>,
    /// Penalty on the distance to the reference policy, as part of the loss.
    pub kl_loss: Option<KlPenalty>,
    /// The same as part of the rewards of tokens (`--kl-coef`).
    pub kl_reward: Option<KlPenalty>,
    /// Weigh the KL term of the loss by the probability ratio, which makes its gradient unbiased.
    pub use_unbiased_kl: bool,
    /// Take the policy for the reference after every so many rollouts.
    pub ref_update_interval: Option<u64>,
    /// Distillation from a teacher, on what the policy samples.
    pub opd: Option<Opd>,
    /// The critic of [`Estimator::Ppo`].
    pub critic: Option<CriticOptions>,
    /// Mean over all tokens of a step, instead of over each rollout's and then over rollouts.
    pub calculate_per_token_loss: bool,
    /// Weight of the entropy bonus.
    pub entropy_coef: f64,
    /// How rewards become advantages.
    pub advantage_estimator: Estimator,
    /// Divide by the group's standard deviation (`grpo`).
    pub grpo_std_normalization: bool,
    /// Normalise advantages over the trained tokens of the rollout, as REINFORCE++ does in any case.
    pub normalize_advantages: bool,
    /// Discount of a token's reward for each trained token before it.
    #[serde(skip_serializing_if = "is_one")]
    pub gamma: f64,
    /// λ of generalised advantage estimation.
    #[serde(skip_serializing_if = "is_one")]
    pub lambd: f64,
    /// Rollouts of an optimiser step; all of them, if `None`.
    pub global_batch_size: Option<usize>,
    /// Samples of one forward and backward pass, at most.
    pub micro_batch_size: Option<usize>,
    /// Tokens of one forward and backward pass.
    pub max_tokens_per_gpu: usize,
    /// Compute activations again on the way back (`--recompute-granularity full`).
    pub recompute: bool,
    /// Keep the optimiser's state in host memory.
    pub optimizer_cpu_offload: bool,
    /// Deal samples out to ranks by their operations.
    pub balance_data: bool,
    /// Tokens whose logits are held at once; as many as fit half a GiB, if `None`.
    pub log_probs_chunk_size: Option<usize>,
}

impl Default for LearnOptions {
    /// As `driftless train` has it where no flag is given.
    fn default() -> Self {
        LearnOptions {
            dtype: None,
            lr: 1e-6,
            min_lr: 0.0,
            lr_warmup_iters: 0,
            lr_decay_style: Decay::Constant,
            lr_decay_iters: 0,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            clip_grad: 1.0,
            eps_clip: 0.2,
            eps_clip_high: 0.2,
            eps_clip_c: None,
            use_rollout_logprobs: false,
            tis: None,
            rs: None,
            opsm_delta: None,
            kl_loss: None,
            kl_reward: None,
            use_unbiased_kl: false,
            ref_update_interval: None,
            opd: None,
            critic: None,
            calculate_per_token_loss: false,
            entropy_coef: 0.0,
            advantage_estimator: Estimator::Grpo,
            grpo_std_normalization: true,
            normalize_advantages: false,
            gamma: 1.0,
            lambd: 1.0,
            global_batch_size: None,
            micro_batch_size: None,
            max_tokens_per_gpu: 16_384,
            recompute: false,
            optimizer_cpu_offload: false,
            balance_data: false,
            log_probs_chunk_size: None,
        }
    }
}

impl LearnOptions {
    /// The learning rate of each step.
    #[must_use]
    pub fn lr_schedule(&self) -> LrSchedule {
        LrSchedule {
            lr: self.lr,
            min_lr: self.min_lr,
            warmup_iters: self.lr_warmup_iters,
            decay: self.lr_decay_style,
            decay_iters: self.lr_decay_iters,
        }
    }

    /// Whether the tokens of a sample differ in their advantages: the learner then works them out, from what
    /// the policy, its reference, a teacher or a critic say of each.
    #[must_use]
    pub fn per_token(&self) -> bool {
        let discounted = self.advantage_estimator == Estimator::ReinforcePlusPlus && self.gamma != 1.0;
        let critic = self.advantage_estimator == Estimator::Ppo;
        critic || discounted || self.kl_reward.is_some() || self.opd.is_some()
    }

    /// Whether advantages are normalised.
    #[must_use]
    pub fn normalizes(&self) -> bool {
        self.normalize_advantages || self.advantage_estimator.normalizes()
    }

    /// The penalty on the distance to a reference policy, in loss or rewards, if there is one.
    #[must_use]
    pub fn kl_penalty(&self) -> Option<&KlPenalty> {
        self.kl_loss.as_ref().or(self.kl_reward.as_ref())
    }
}

impl CriticOptions {
    /// The critic's learning rate of each step.
    #[must_use]
    pub fn lr_schedule(&self, of_policy: &LearnOptions) -> LrSchedule {
        LrSchedule { lr: self.lr, warmup_iters: self.lr_warmup_iters, ..of_policy.lr_schedule() }
    }
}

/// Whether a factor changes nothing: JSON leaves it out then, so that learners need not know it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

/// What a model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// bf16.
    Bfloat16,
    /// f32.
    Float32,
}

/// Importance sampling between the engine that sampled and the trainer (`--use-tis`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tis {
    /// Least weight (`--tis-clip-low`).
    pub low: f64,
    /// Largest weight (`--tis-clip`).
    pub high: f64,
    /// What has a weight.
    pub level: Level,
    /// What becomes of weights out of these bounds.
    pub mode: TisMode,
}

/// Rejection of what engine and trainer disagree about (`--use-rs`): tokens whose probability ratio is out of
/// bounds are not learned from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rs {
    /// Least ratio.
    pub low: f64,
    /// Largest ratio.
    pub high: f64,
    /// What has a ratio.
    pub level: Level,
    /// A sample with a token whose ratio is below this is rejected whole.
    pub veto: Option<f64>,
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

/// A penalty on the distance to a reference policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlPenalty {
    /// Estimator.
    pub kind: Kl,
    /// Weight.
    pub coef: f64,
    /// Checkpoint of the reference policy; the one that the run starts from, if `None`.
    pub ref_load: Option<PathBuf>,
}

/// On-policy distillation (`--use-opd`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Opd {
    /// Weight of the distance to the teacher.
    pub kl_coef: f64,
    /// Checkpoint of the teacher; the log has its log-probs, if `None`.
    pub teacher_load: Option<PathBuf>,
}

/// What the critic is told, beyond what holds for the policy too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriticOptions {
    /// Learning rate, after the warm-up and before the decay.
    pub lr: f64,
    /// Steps over which the learning rate rises from 0.
    pub lr_warmup_iters: u64,
    /// How far a value may move from what it was before the rollout's first step, to count.
    pub value_clip: f64,
    /// Rollouts that only the critic learns from, at the beginning.
    pub num_critic_only_steps: u64,
    /// Checkpoint that it starts from; that of the policy, if `None`.
    pub load: Option<PathBuf>,
    /// Where it is written with each training checkpoint, as a Hugging Face checkpoint.
    pub save: Option<PathBuf>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Rollout `r + 1` is generated while step `r` trains: samples are at most one step old.
    OneStepOff,
}
