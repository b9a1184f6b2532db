//! Everything the loop is told, in one place; the command line fills it.

use driftless_bridge::{Keys, SamplingParams};
use driftless_trainer::Mode;
use driftless_trainer::rollout::EvalSet;
use driftless_trainer::tasks::Task;
use driftless_transport::{SignKey, Store, TrustKey};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Settings of a run of the RL loop. Field names follow the flags of `driftless train`, which follow slime's.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Hugging Face checkpoint the policy starts from; version 0 refers to it.
    pub hf_checkpoint: PathBuf,
    /// Directory of the run's state: training checkpoints, baseline, rollout log, metrics.
    pub save: PathBuf,
    /// Where the final policy goes as a Hugging Face checkpoint.
    pub save_hf: Option<PathBuf>,
    /// The store that publications go to.
    pub store: Arc<dyn Store>,
    /// Name of the run in the store.
    pub run: String,
    /// What signs the versions, if they are signed; those that it has not signed are not gone on from.
    pub sign_key: Option<SignKey>,
    /// Other keys whose versions are gone on from.
    pub trust_keys: Vec<TrustKey>,
    /// Engines, as `host:port` or URLs.
    pub rollout_external_engine_addrs: Vec<String>,
    /// The engines' API keys.
    pub keys: Keys,
    /// Synchronous or one step off.
    pub mode: Mode,
    /// What to leave out, for debugging.
    pub debug: Debug,
    /// Steps of the whole run.
    pub num_rollout: u64,
    /// Prompts of a rollout.
    pub rollout_batch_size: u64,
    /// Samples of a prompt; they form a group.
    pub n_samples_per_prompt: u64,
    /// What is learned.
    pub task: Arc<dyn Task>,
    /// How tokens of rollouts are drawn; each sample gets a seed of its own.
    pub sampling: SamplingParams,
    /// Tokens that prompt and response may have together.
    pub rollout_max_context_len: Option<usize>,
    /// Requests an engine is given at once.
    pub server_concurrency: usize,
    /// Full or delta publications.
    pub update_weight_mode: UpdateWeightMode,
    /// Publish after every so many steps.
    pub update_weights_interval: u64,
    /// Carry full tensors too in every version whose number is a multiple of this; never, if `None`.
    pub anchor_every: Option<u64>,
    /// After every update compare the engines' checksums with those of the trainer's bytes.
    pub check_weight_update_equal: bool,
    /// Measure success on held-out problems after every so many steps; only at both ends, if 0.
    pub eval_interval: u64,
    /// What is measured then.
    pub eval: Evaluation,
    /// Write a training checkpoint after every so many steps.
    pub save_interval: u64,
    /// Training checkpoints kept.
    pub keep_checkpoints: usize,
    /// Learning.
    pub learn: LearnOptions,
    /// Seed of data and sampling.
    pub seed: u64,
    /// CPU threads of libtorch.
    pub num_threads: usize,
    /// `cpu` or `cuda:N`.
    pub device: String,
    /// How long an engine may take to come to a new version.
    pub update_deadline: Duration,
    /// How long one generation may take, retries included.
    pub generate_deadline: Duration,
}

/// Held-out prompts to measure on.
#[derive(Debug, Clone, Default)]
pub struct Evaluation {
    /// The task's own problems, sampled as the rollouts are and greedily.
    pub held_out: Option<[EvalSet; 2]>,
    /// Sets by name.
    pub sets: Vec<EvalSet>,
}

/// What the optimiser and the loss are told.
#[derive(Debug, Clone)]
pub struct LearnOptions {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay of AdamW.
    pub weight_decay: f64,
    /// First moment's decay.
    pub adam_beta1: f64,
    /// Second moment's decay.
    pub adam_beta2: f64,
    /// Gradient norm to clip to.
    pub clip_grad: f64,
    /// Lower clip of the probability ratio.
    pub eps_clip: f64,
    /// Upper clip of the probability ratio.
    pub eps_clip_high: f64,
    /// Weight of the entropy bonus.
    pub entropy_coef: f64,
    /// How rewards become advantages.
    pub advantage_estimator: Estimator,
    /// Divide by the group's standard deviation (`grpo`).
    pub grpo_std_normalization: bool,
    /// Padded tokens of one forward and backward pass.
    pub max_tokens_per_gpu: usize,
}

/// How rewards become advantages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Estimator {
    /// The reward against its group's mean.
    Grpo,
    /// The same, then normalised over the tokens of the batch.
    ReinforcePlusPlusBaseline,
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
