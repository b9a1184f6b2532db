//! How `driftless train` learns: the options of a learner, and flags that say them in other words.

use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers;
use driftless::trainer::options::{CriticOptions, Estimator, LearnOptions};

#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
pub(super) struct LearnArgs {
    /// Steps in a row that may be left out because a loss or a gradient is NaN or infinite.
    #[arg(long, default_value_t = 3, value_parser = numbers::ordinal())]
    pub(super) max_skipped_steps: u64,
    /// The same as --global-batch-size by the number of optimiser steps on a rollout.
    #[arg(long, value_name = "STEPS", value_parser = numbers::count::<u64>())]
    num_steps_per_rollout: Option<u64>,
    /// Bound a pass by --max-tokens-per-gpu alone, whatever --micro-batch-size says.
    #[arg(long)]
    use_dynamic_batch_size: bool,
    #[command(flatten)]
    pub(super) options: LearnOptions,
}

/// What the learner's options follow from, besides its own flags.
pub(super) struct Run {
    pub(super) lr: f64,
    pub(super) num_rollout: u64,
    pub(super) rollout_batch_size: u64,
    pub(super) n_samples_per_prompt: u64,
}

impl LearnArgs {
    /// What the learner is told.
    pub(super) fn options(&self, run: &Run) -> Result<LearnOptions> {
        check(&self.options)?;
        let steps = self.steps(run)?;
        let mut options = self.options.clone();
        options.lr = run.lr;
        options.lr_decay_iters.get_or_insert(run.num_rollout.saturating_mul(steps.unwrap_or(1)));
        options.global_batch_size =
            steps.map(|steps| (run.rollouts(options.advantage_estimator) / steps) as usize);
        options.micro_batch_size = options.micro_batch_size.filter(|_| !self.use_dynamic_batch_size);
        Ok(options.completed())
    }

    /// Optimiser steps on a rollout, if a flag says how many.
    fn steps(&self, run: &Run) -> Result<Option<u64>> {
        let rollouts = run.rollouts(self.options.advantage_estimator);
        let size = self.options.global_batch_size.map(|size| size as u64);
        let (flag, parts) = match (size, self.num_steps_per_rollout) {
            (None, None) => return Ok(None),
            (Some(size), Some(steps)) if size.saturating_mul(steps) != rollouts => {
                let expected = format!("{rollouts} samples of a rollout / --num-steps-per-rollout {steps}");
                return Err(Error::usage("--global-batch-size", expected, size));
            }
            (Some(size), _) => ("--global-batch-size", size),
            (None, Some(steps)) => ("--num-steps-per-rollout", steps),
        };
        if !rollouts.is_multiple_of(parts) {
            let expected = format!("a number that divides the {rollouts} samples of a rollout");
            return Err(Error::usage(flag, expected, parts));
        }
        Ok(Some(self.num_steps_per_rollout.unwrap_or(rollouts / parts)))
    }
}

/// Refuses flags that would change nothing.
fn check(options: &LearnOptions) -> Result<()> {
    use Estimator::{Ppo, ReinforcePlusPlus, ReinforcePlusPlusBaseline};
    let estimator = options.advantage_estimator;
    let of = |wanted: &[Estimator]| !wanted.contains(&estimator);
    let critic = critic_flag(options);
    let idle = [
        (options.gamma != 1.0 && of(&[Ppo, ReinforcePlusPlus]), "--gamma", "ppo or reinforce_plus_plus"),
        (options.lambd != 1.0 && of(&[Ppo]), "--lambd", "ppo"),
        (critic.is_some() && of(&[Ppo]), critic.as_deref().unwrap_or_default(), "ppo"),
        (
            options.kl_coef > 0.0 && of(&[Ppo, ReinforcePlusPlus, ReinforcePlusPlusBaseline]),
            "--kl-coef",
            "ppo, reinforce_plus_plus or reinforce_plus_plus_baseline; --use-kl-loss is for all",
        ),
    ];
    if let Some((_, flag, wanted)) = idle.into_iter().find(|(idle, ..)| *idle) {
        return Err(Error::usage(flag, format!("--advantage-estimator {wanted}"), estimator));
    }
    let needs_penalty = [
        (options.ref_load.is_some(), "--ref-load"),
        (options.ref_update_interval.is_some(), "--ref-update-interval"),
    ];
    match needs_penalty.into_iter().find(|(given, _)| *given && !options.has_reference()) {
        Some((_, flag)) => Err(Error::usage(flag, "--use-kl-loss, or --kl-coef above 0", "neither")),
        None => Ok(()),
    }
}

/// The first flag of the critic that asks for something.
fn critic_flag(options: &LearnOptions) -> Option<String> {
    let own = serde_json::to_value(CriticOptions::default()).ok()?;
    let name = options.changed().into_iter().find(|name| own.get(name).is_some())?;
    Some(format!("--{}", name.replace('_', "-")))
}

impl Run {
    /// What is learned from of a rollout: samples, or the best of each prompt's.
    fn rollouts(&self, estimator: Estimator) -> u64 {
        let of_prompt = if estimator == Estimator::RejectionSampling { 1 } else { self.n_samples_per_prompt };
        self.rollout_batch_size.saturating_mul(of_prompt)
    }
}
