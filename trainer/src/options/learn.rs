//! What advantages, loss and optimiser are told. Each option is declared here once: name, default, bounds, help.
//!
//! An option has one name: as a field, as a flag of `driftless train`, in `hello` of a learner
//! (`docs/wire/learner.md`), and in the settings of a training checkpoint.

use std::path::PathBuf;

use derive_setters::Setters;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::bounds::{
    self, above_one, at_least_zero, count, decay, named, ordinal, positive, share, up_to_one,
};
use super::{Dtype, Estimator, Granularity, Kl, Level, TisMode};
use crate::lr::{Decay, LrSchedule};

const DISTANCES: &str = "Distances";

/// What advantages, loss and optimiser are told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters, clap::Args)]
#[command(next_help_heading = "Learning")]
#[serde(default)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct LearnOptions {
    /// Learning rate, after the warm-up and before the decay.
    #[arg(skip = 1e-6)]
    pub lr: f64,
    /// dtype that the model computes in: bfloat16 or float32; a fresh one is written in it too [default: that of
    /// --hf-checkpoint, which engines compute in; else bfloat16].
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// How rewards become advantages, and the loss: grpo, gspo, cispo, ppo, reinforce_plus_plus,
    /// reinforce_plus_plus_baseline or rejection_sampling.
    #[arg(long, default_value = "grpo", value_parser = named::<Estimator>)]
    pub advantage_estimator: Estimator,
    /// Do not divide by the group's standard deviation.
    #[arg(long)]
    pub disable_grpo_std_normalization: bool,
    /// Normalise advantages over the trained tokens of a rollout; the two of REINFORCE++ always do.
    #[arg(long)]
    pub normalize_advantages: bool,
    /// Discount of rewards for each token before them: for ppo and reinforce_plus_plus.
    #[arg(long, default_value_t = 1.0, value_parser = share)]
    pub gamma: f64,
    /// λ of generalised advantage estimation: for ppo.
    #[arg(long, default_value_t = 1.0, value_parser = up_to_one)]
    pub lambd: f64,
    /// Lower clip of the probability ratio.
    #[arg(long, default_value_t = 0.2, value_parser = positive)]
    pub eps_clip: f64,
    /// Upper clip of the probability ratio [default: --eps-clip].
    #[arg(long, value_parser = positive)]
    pub eps_clip_high: Option<f64>,
    /// Upper bound of the ratio where the advantage is negative (dual clip); above 1.
    #[arg(long, value_parser = above_one)]
    pub eps_clip_c: Option<f64>,
    /// Mean over all tokens of a step, instead of over each sample's and then over samples.
    #[arg(long)]
    pub calculate_per_token_loss: bool,
    /// Steps over which the learning rate rises from 0.
    #[arg(long, default_value_t = 0, value_parser = ordinal())]
    pub lr_warmup_iters: u64,
    /// How the learning rate falls after that: constant, linear or cosine.
    #[arg(long, default_value = "constant", value_parser = named::<Decay>)]
    pub lr_decay_style: Decay,
    /// Step at which the learning rate has fallen to --min-lr [default: the last of the run].
    #[arg(long, value_parser = count::<u64>())]
    pub lr_decay_iters: Option<u64>,
    /// Learning rate at the end of the decay.
    #[arg(long, default_value_t = 0.0, value_parser = at_least_zero)]
    pub min_lr: f64,
    /// Weight of the entropy bonus.
    #[arg(long, default_value_t = 0.0, value_parser = at_least_zero)]
    pub entropy_coef: f64,
    /// Weight decay of AdamW.
    #[arg(long, default_value_t = 0.0, value_parser = at_least_zero)]
    pub weight_decay: f64,
    /// Decay of the first moment.
    #[arg(long, default_value_t = 0.9, value_parser = decay)]
    pub adam_beta1: f64,
    /// Decay of the second moment.
    #[arg(long, default_value_t = 0.95, value_parser = decay)]
    pub adam_beta2: f64,
    /// Gradient norm to clip to; 0: none.
    #[arg(long, default_value_t = 1.0, value_parser = at_least_zero)]
    pub clip_grad: f64,
    /// Samples of an optimiser step, which divide those of a rollout [default: all of them]. What comes of one
    /// prompt and one generation counts once.
    #[arg(long, value_name = "SAMPLES", value_parser = count::<usize>())]
    pub global_batch_size: Option<usize>,
    /// Samples of one forward and backward pass, at most [default: as --max-tokens-per-gpu allows].
    #[arg(long, value_name = "SAMPLES", value_parser = count::<usize>())]
    pub micro_batch_size: Option<usize>,
    /// Tokens of one forward and backward pass.
    #[arg(long, default_value_t = 16_384, value_parser = count::<usize>())]
    pub max_tokens_per_gpu: usize,
    /// Compute activations again on the way back, instead of keeping them: full, whose layers keep what flows
    /// between them, or none.
    #[arg(long, default_value_t = Granularity::None, value_enum)]
    pub recompute_granularity: Granularity,
    /// Keep masters and moments in host memory and update them there: 12 of 18 bytes a weight leave the GPU.
    #[arg(long)]
    pub optimizer_cpu_offload: bool,
    /// Deal samples out to GPUs by the operations that they take, instead of in turn.
    #[arg(long)]
    pub balance_data: bool,
    /// Tokens whose logits are held at once [default: as many as fit half a GiB].
    #[arg(long, value_parser = count::<usize>())]
    pub log_probs_chunk_size: Option<usize>,
    /// Take the engines' log-probs for those of the old policy, instead of the trainer's before the rollout's
    /// first step.
    #[arg(long, help_heading = DISTANCES, conflicts_with = "use_tis")]
    pub use_rollout_logprobs: bool,
    /// Weigh each token by the trainer's probability over the engine's (importance sampling).
    #[arg(long, help_heading = DISTANCES)]
    pub use_tis: bool,
    /// Largest such weight.
    #[arg(long, help_heading = DISTANCES, requires = "use_tis")]
    #[arg(default_value_t = 2.0, value_parser = positive)]
    pub tis_clip: f64,
    /// Least such weight.
    #[arg(long, help_heading = DISTANCES, requires = "use_tis")]
    #[arg(default_value_t = 0.0, value_parser = at_least_zero)]
    pub tis_clip_low: f64,
    /// What has a weight: a token, a sequence (the product over its tokens), or geometric (their geometric mean).
    #[arg(long, help_heading = DISTANCES, requires = "use_tis")]
    #[arg(default_value = "token", value_parser = named::<Level>)]
    pub tis_level: Level,
    /// What becomes of weights out of bounds: clip (TIS), or mask, which makes them 0 (MIS; IcePop for tokens).
    #[arg(long, help_heading = DISTANCES, requires = "use_tis")]
    #[arg(default_value = "clip", value_parser = named::<TisMode>)]
    pub tis_mode: TisMode,
    /// Reject tokens whose probability ratio of trainer and engine is out of bounds.
    #[arg(long, help_heading = DISTANCES)]
    pub use_rs: bool,
    /// Largest ratio that is not rejected.
    #[arg(long, help_heading = DISTANCES, requires = "use_rs")]
    #[arg(default_value_t = 2.0, value_parser = positive)]
    pub rs_upper_bound: f64,
    /// Least ratio that is not rejected.
    #[arg(long, help_heading = DISTANCES, requires = "use_rs")]
    #[arg(default_value_t = 0.5, value_parser = at_least_zero)]
    pub rs_lower_bound: f64,
    /// What has a ratio: token, sequence or geometric, as for --tis-level.
    #[arg(long, help_heading = DISTANCES, requires = "use_rs")]
    #[arg(default_value = "token", value_parser = named::<Level>)]
    pub rs_level: Level,
    /// Reject a whole sample for one token whose ratio is below this.
    #[arg(long, help_heading = DISTANCES, requires = "use_rs", value_parser = positive)]
    pub rs_veto_threshold: Option<f64>,
    /// Leave out samples of negative advantage that the policy has moved away from (off-policy sequence masking).
    #[arg(long, help_heading = DISTANCES)]
    pub use_opsm: bool,
    /// Mean of old - new log-prob beyond which it has.
    #[arg(long, help_heading = DISTANCES, requires = "use_opsm")]
    #[arg(default_value_t = 1e-4, value_parser = at_least_zero)]
    pub opsm_delta: f64,
    /// Penalise the distance to a reference policy in the loss.
    #[arg(long, help_heading = DISTANCES, conflicts_with = "kl_coef")]
    pub use_kl_loss: bool,
    /// Weight of that penalty.
    #[arg(long, help_heading = DISTANCES, requires = "use_kl_loss")]
    #[arg(default_value_t = 0.0, value_parser = at_least_zero)]
    pub kl_loss_coef: f64,
    /// Penalise the distance to a reference policy in the rewards of tokens, with this weight: for ppo and the two of
    /// REINFORCE++.
    #[arg(long, help_heading = DISTANCES, default_value_t = 0.0, value_parser = at_least_zero)]
    pub kl_coef: f64,
    /// Estimator of that distance: k1, k2, k3 or low_var_kl.
    #[arg(long, help_heading = DISTANCES, default_value = "k1", value_parser = named::<Kl>)]
    pub kl_loss_type: Kl,
    /// Weigh the penalty of the loss by the probability ratio of policy and old policy, so that its gradient has no
    /// bias.
    #[arg(long, help_heading = DISTANCES, requires = "use_kl_loss")]
    pub use_unbiased_kl: bool,
    /// Checkpoint directory of the reference policy [default: --hf-checkpoint].
    #[arg(long, help_heading = DISTANCES, value_name = "DIR")]
    #[setters(into)]
    pub ref_load: Option<PathBuf>,
    /// Take the policy for the reference after every so many rollouts.
    #[arg(long, help_heading = DISTANCES, value_name = "N", value_parser = count::<u64>())]
    pub ref_update_interval: Option<u64>,
    /// On-policy distillation: match a teacher on the policy's own samples.
    #[arg(long, help_heading = DISTANCES)]
    pub use_opd: bool,
    /// Weight of the distance to the teacher.
    #[arg(long, help_heading = DISTANCES, requires = "use_opd")]
    #[arg(default_value_t = 1.0, value_parser = at_least_zero)]
    pub opd_kl_coef: f64,
    /// Checkpoint directory of the teacher, which has the policy's tokens [default: the log has its log-probs].
    #[arg(long, help_heading = DISTANCES, value_name = "DIR", requires = "use_opd")]
    #[setters(into)]
    pub opd_teacher_load: Option<PathBuf>,
    /// The critic's own, for [`Estimator::Ppo`].
    #[command(flatten)]
    #[serde(flatten)]
    pub critic: CriticOptions,
}

/// What the critic is told, beyond what holds for the policy too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Setters, clap::Args)]
#[command(next_help_heading = "Critic (--advantage-estimator ppo)")]
#[serde(default)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct CriticOptions {
    /// The critic's learning rate [default: that of the policy].
    #[arg(long, value_parser = positive)]
    pub critic_lr: Option<f64>,
    /// Steps over which it rises from 0.
    #[arg(long, default_value_t = 0, value_parser = ordinal())]
    pub critic_lr_warmup_iters: u64,
    /// Checkpoint directory that the critic starts from: a language model, or a sequence classifier with one
    /// label, such as a reward model [default: --hf-checkpoint].
    #[arg(long, value_name = "DIR")]
    #[setters(into)]
    pub critic_load: Option<PathBuf>,
    /// Write the critic there with each training checkpoint, as a sequence classifier with one label.
    #[arg(long, value_name = "DIR")]
    #[setters(into)]
    pub critic_save: Option<PathBuf>,
    /// Rollouts that only the critic learns from, at the beginning.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = ordinal())]
    pub num_critic_only_steps: u64,
    /// How far a value counts from what it was before the rollout's first step.
    #[arg(long, default_value_t = 0.2, value_parser = positive)]
    pub value_clip: f64,
}

impl Default for LearnOptions {
    /// As flags have them.
    fn default() -> Self {
        bounds::defaults()
    }
}

impl Default for CriticOptions {
    /// As flags have them.
    fn default() -> Self {
        bounds::defaults()
    }
}

impl LearnOptions {
    /// The same, where an option that follows from another says so.
    #[must_use]
    pub fn completed(mut self) -> Self {
        self.eps_clip_high = Some(self.eps_clip_high());
        self.lr_decay_iters = Some(self.lr_schedule().decay_iters);
        if self.advantage_estimator == Estimator::Ppo {
            self.critic.critic_lr = Some(self.critic.lr_schedule(&self).lr);
        }
        self
    }

    /// All of them by name.
    #[must_use]
    pub fn by_name(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(options)) => options,
            _ => Map::new(),
        }
    }

    /// The names of those that are not at their defaults.
    #[must_use]
    pub fn changed(&self) -> Vec<String> {
        let defaults = LearnOptions::default().completed().by_name();
        let own = self.clone().completed().by_name().into_iter();
        own.filter(|(name, value)| defaults.get(name) != Some(value)).map(|(name, _)| name).collect()
    }

    /// Upper clip of the probability ratio.
    #[must_use]
    pub fn eps_clip_high(&self) -> f64 {
        self.eps_clip_high.unwrap_or(self.eps_clip)
    }

    /// The learning rate of each step.
    #[must_use]
    pub fn lr_schedule(&self) -> LrSchedule {
        LrSchedule {
            lr: self.lr,
            min_lr: self.min_lr,
            warmup_iters: self.lr_warmup_iters,
            decay: self.lr_decay_style,
            decay_iters: self.lr_decay_iters.unwrap_or_default(),
        }
    }

    /// The critic's options, if there is a critic.
    #[must_use]
    pub fn critic(&self) -> Option<&CriticOptions> {
        (self.advantage_estimator == Estimator::Ppo).then_some(&self.critic)
    }

    /// Whether the tokens of a sample differ in their advantages: the learner then works them out, from what
    /// the policy, its reference, a teacher or a critic say of each.
    #[must_use]
    pub fn per_token(&self) -> bool {
        let discounted = self.advantage_estimator == Estimator::ReinforcePlusPlus && self.gamma != 1.0;
        self.critic().is_some() || discounted || self.kl_coef > 0.0 || self.use_opd
    }

    /// Whether advantages are normalised.
    #[must_use]
    pub fn normalizes(&self) -> bool {
        self.normalize_advantages || self.advantage_estimator.normalizes()
    }

    /// Whether there is a penalty on the distance to a reference policy, in loss or rewards.
    #[must_use]
    pub fn has_reference(&self) -> bool {
        self.use_kl_loss || self.kl_coef > 0.0
    }

    /// Whether a layer's activations are computed again on the way back.
    #[must_use]
    pub fn recomputes(&self) -> bool {
        self.recompute_granularity == Granularity::Full
    }
}

impl CriticOptions {
    /// The critic's learning rate of each step.
    #[must_use]
    pub fn lr_schedule(&self, of_policy: &LearnOptions) -> LrSchedule {
        let lr = self.critic_lr.unwrap_or(of_policy.lr);
        LrSchedule { lr, warmup_iters: self.critic_lr_warmup_iters, ..of_policy.lr_schedule() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_names_what_is_not_at_its_default() {
        assert_eq!(LearnOptions::default().changed(), [""; 0]);
        let options = LearnOptions::default()
            .with_eps_clip(0.3)
            .with_critic(CriticOptions::default().with_value_clip(0.1));
        // The upper clip follows from the lower.
        assert_eq!(options.changed(), ["eps_clip", "eps_clip_high", "value_clip"]);
    }

    #[test]
    fn options_are_read_back_as_they_were_sent() {
        let critic = CriticOptions::default().with_critic_lr(1e-5).with_critic_save("critic");
        let options = LearnOptions::default().with_advantage_estimator(Estimator::Ppo).with_critic(critic);
        let sent = serde_json::Value::Object(options.by_name()).to_string();
        assert_eq!(serde_json::from_str::<LearnOptions>(&sent).ok(), Some(options));
    }
}
