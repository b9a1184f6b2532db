//! Flags of PPO's critic.

use crate::cli::shared::numbers;
use driftless::trainer::options::CriticOptions;
use std::path::PathBuf;

/// Only for `--advantage-estimator ppo`.
#[derive(clap::Args)]
#[command(next_help_heading = "Critic (--advantage-estimator ppo)")]
pub(super) struct CriticArgs {
    /// The critic's learning rate [default: that of the policy].
    #[arg(long, value_parser = numbers::positive)]
    critic_lr: Option<f64>,
    /// Steps over which it rises from 0.
    #[arg(long, value_parser = numbers::ordinal())]
    critic_lr_warmup_iters: Option<u64>,
    /// Checkpoint directory that the critic starts from: a language model, or a sequence classifier with one
    /// label, such as a reward model [default: --hf-checkpoint].
    #[arg(long, value_name = "DIR")]
    pub(super) critic_load: Option<PathBuf>,
    /// Write the critic there with each training checkpoint, as a sequence classifier with one label.
    #[arg(long, value_name = "DIR")]
    pub(super) critic_save: Option<PathBuf>,
    /// Rollouts that only the critic learns from, at the beginning.
    #[arg(long, value_name = "N", value_parser = numbers::ordinal())]
    num_critic_only_steps: Option<u64>,
    /// How far a value counts from what it was before the rollout's first step [default: 0.2].
    #[arg(long, value_parser = numbers::positive)]
    value_clip: Option<f64>,
}

impl CriticArgs {
    /// The first flag that was given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let flags = [
            (self.critic_lr.is_some(), "--critic-lr"),
            (self.critic_lr_warmup_iters.is_some(), "--critic-lr-warmup-iters"),
            (self.critic_load.is_some(), "--critic-load"),
            (self.critic_save.is_some(), "--critic-save"),
            (self.num_critic_only_steps.is_some(), "--num-critic-only-steps"),
            (self.value_clip.is_some(), "--value-clip"),
        ];
        flags.into_iter().find(|(given, _)| *given).map(|(_, flag)| flag)
    }

    /// What the critic is told, where the policy's learning rate is `lr`.
    pub(super) fn options(&self, lr: f64) -> CriticOptions {
        CriticOptions {
            lr: self.critic_lr.unwrap_or(lr),
            lr_warmup_iters: self.critic_lr_warmup_iters.unwrap_or(0),
            value_clip: self.value_clip.unwrap_or(0.2),
            num_critic_only_steps: self.num_critic_only_steps.unwrap_or(0),
            load: self.critic_load.clone(),
            save: self.critic_save.clone(),
        }
    }
}
