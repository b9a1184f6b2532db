//! How `driftless train` learns.

use super::critic::CriticArgs;
use super::distance::DistanceArgs;
use crate::cli::shared::error::{Error, Result};
use crate::cli::shared::numbers::{self, named};
use driftless::trainer::lr::Decay;
use driftless::trainer::options::{Dtype, Estimator, LearnOptions};

#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
pub(super) struct LearnArgs {
    /// How rewards become advantages, and the loss: grpo, gspo, cispo, ppo, reinforce_plus_plus,
    /// reinforce_plus_plus_baseline or rejection_sampling.
    #[arg(long, default_value = "grpo", value_parser = named::<Estimator>)]
    advantage_estimator: Estimator,
    /// Do not divide by the group's standard deviation.
    #[arg(long)]
    disable_grpo_std_normalization: bool,
    /// Normalise advantages over the trained tokens of a rollout; the two of REINFORCE++ always do.
    #[arg(long)]
    normalize_advantages: bool,
    /// Discount of rewards for each token before them: for ppo and reinforce_plus_plus.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::share)]
    gamma: f64,
    /// λ of generalised advantage estimation: for ppo.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::up_to_one)]
    lambd: f64,
    /// Lower clip of the probability ratio.
    #[arg(long, default_value_t = 0.2, value_parser = numbers::positive)]
    eps_clip: f64,
    /// Upper clip of the probability ratio [default: --eps-clip].
    #[arg(long, value_parser = numbers::positive)]
    eps_clip_high: Option<f64>,
    /// Upper bound of the ratio where the advantage is negative (dual clip); above 1.
    #[arg(long, value_parser = numbers::above_one)]
    eps_clip_c: Option<f64>,
    /// Mean over all tokens of a step, instead of over each sample's and then over samples.
    #[arg(long)]
    calculate_per_token_loss: bool,
    /// Steps over which the learning rate rises from 0.
    #[arg(long, default_value_t = 0, value_parser = numbers::ordinal())]
    lr_warmup_iters: u64,
    /// How the learning rate falls after that: constant, linear or cosine.
    #[arg(long, default_value = "constant", value_parser = named::<Decay>)]
    lr_decay_style: Decay,
    /// Step at which the learning rate has fallen to --min-lr [default: the last of the run].
    #[arg(long, value_parser = numbers::count::<u64>())]
    lr_decay_iters: Option<u64>,
    /// Learning rate at the end of the decay.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero)]
    min_lr: f64,
    /// Weight of the entropy bonus.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero)]
    entropy_coef: f64,
    /// Weight decay of AdamW.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero)]
    weight_decay: f64,
    /// Decay of the first moment.
    #[arg(long, default_value_t = 0.9, value_parser = numbers::decay)]
    adam_beta1: f64,
    /// Decay of the second moment.
    #[arg(long, default_value_t = 0.95, value_parser = numbers::decay)]
    adam_beta2: f64,
    /// Gradient norm to clip to; 0: none.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::at_least_zero)]
    clip_grad: f64,
    /// Steps in a row that may be left out because a loss or a gradient is NaN or infinite.
    #[arg(long, default_value_t = 3, value_parser = numbers::ordinal())]
    pub(super) max_skipped_steps: u64,
    /// Samples of an optimiser step, which divide those of a rollout [default: all of them]. What comes of one
    /// prompt and one generation counts once.
    #[arg(long, value_name = "SAMPLES", value_parser = numbers::count::<u64>())]
    global_batch_size: Option<u64>,
    /// The same by the number of optimiser steps on a rollout.
    #[arg(long, value_name = "STEPS", value_parser = numbers::count::<u64>())]
    num_steps_per_rollout: Option<u64>,
    /// Samples of one forward and backward pass, at most [default: as --max-tokens-per-gpu allows].
    #[arg(long, value_name = "SAMPLES", value_parser = numbers::count::<usize>())]
    micro_batch_size: Option<usize>,
    /// Bound a pass by --max-tokens-per-gpu alone, whatever --micro-batch-size says.
    #[arg(long)]
    use_dynamic_batch_size: bool,
    /// Tokens of one forward and backward pass.
    #[arg(long, default_value_t = 16384, value_parser = numbers::count::<usize>())]
    max_tokens_per_gpu: usize,
    /// Compute activations again on the way back, instead of keeping them.
    #[arg(long, value_enum, default_value_t = Granularity::None)]
    recompute_granularity: Granularity,
    /// Keep masters and moments in host memory and update them there: 12 of 18 bytes a weight leave the GPU.
    #[arg(long)]
    optimizer_cpu_offload: bool,
    /// Deal samples out to GPUs by the operations that they take, instead of in turn.
    #[arg(long)]
    balance_data: bool,
    /// Tokens whose logits are held at once [default: as many as fit half a GiB].
    #[arg(long, value_parser = numbers::count::<usize>())]
    log_probs_chunk_size: Option<usize>,
    #[command(flatten)]
    pub(super) distance: DistanceArgs,
    #[command(flatten)]
    pub(super) critic: CriticArgs,
}

/// What the learner's options follow from, besides its own flags.
pub(super) struct Run {
    pub(super) lr: f64,
    pub(super) dtype: Option<DtypeArg>,
    pub(super) num_rollout: u64,
    pub(super) rollout_batch_size: u64,
    pub(super) n_samples_per_prompt: u64,
}

impl LearnArgs {
    /// What the learner is told.
    pub(super) fn options(&self, run: &Run) -> Result<LearnOptions> {
        self.check()?;
        let steps = self.steps(run)?;
        let Run { lr, dtype, num_rollout, .. } = *run;
        let (distance, estimator) = (&self.distance, self.advantage_estimator);
        Ok(LearnOptions {
            dtype: dtype.map(DtypeArg::dtype),
            lr,
            min_lr: self.min_lr,
            lr_warmup_iters: self.lr_warmup_iters,
            lr_decay_style: self.lr_decay_style,
            lr_decay_iters: self.lr_decay_iters.unwrap_or(num_rollout.saturating_mul(steps.unwrap_or(1))),
            weight_decay: self.weight_decay,
            adam_beta1: self.adam_beta1,
            adam_beta2: self.adam_beta2,
            clip_grad: self.clip_grad,
            eps_clip: self.eps_clip,
            eps_clip_high: self.eps_clip_high.unwrap_or(self.eps_clip),
            eps_clip_c: self.eps_clip_c,
            use_rollout_logprobs: distance.use_rollout_logprobs,
            tis: distance.tis(),
            rs: distance.rs(),
            opsm_delta: distance.opsm_delta(),
            kl_loss: distance.kl_loss(),
            kl_reward: distance.kl_reward(),
            use_unbiased_kl: distance.use_unbiased_kl,
            ref_update_interval: distance.ref_update_interval,
            opd: distance.opd(),
            calculate_per_token_loss: self.calculate_per_token_loss,
            entropy_coef: self.entropy_coef,
            advantage_estimator: estimator,
            grpo_std_normalization: !self.disable_grpo_std_normalization,
            normalize_advantages: self.normalize_advantages,
            gamma: self.gamma,
            lambd: self.lambd,
            global_batch_size: steps.map(|steps| (run.rollouts(estimator) / steps) as usize),
            micro_batch_size: self.micro_batch_size.filter(|_| !self.use_dynamic_batch_size),
            critic: (estimator == Estimator::Ppo).then(|| self.critic.options(lr)),
            max_tokens_per_gpu: self.max_tokens_per_gpu,
            recompute: self.recompute_granularity == Granularity::Full,
            optimizer_cpu_offload: self.optimizer_cpu_offload,
            balance_data: self.balance_data,
            log_probs_chunk_size: self.log_probs_chunk_size,
        })
    }

    /// Refuses flags that would change nothing.
    fn check(&self) -> Result<()> {
        use Estimator::{Ppo, ReinforcePlusPlus, ReinforcePlusPlusBaseline};
        let (estimator, distance) = (self.advantage_estimator, &self.distance);
        let penalised = distance.kl_loss().or(distance.kl_reward()).is_some();
        let of = |wanted: &[Estimator]| !wanted.contains(&estimator);
        let idle = [
            (self.gamma != 1.0 && of(&[Ppo, ReinforcePlusPlus]), "--gamma", "ppo or reinforce_plus_plus"),
            (self.lambd != 1.0 && of(&[Ppo]), "--lambd", "ppo"),
            (self.critic.given().is_some() && of(&[Ppo]), self.critic.given().unwrap_or_default(), "ppo"),
            (
                distance.kl_reward().is_some() && of(&[Ppo, ReinforcePlusPlus, ReinforcePlusPlusBaseline]),
                "--kl-coef",
                "ppo, reinforce_plus_plus or reinforce_plus_plus_baseline; --use-kl-loss is for all",
            ),
        ];
        if let Some((_, flag, wanted)) = idle.into_iter().find(|(idle, ..)| *idle) {
            return Err(usage(flag, format!("--advantage-estimator {wanted}"), name(estimator)));
        }
        let needs_penalty = [
            (distance.ref_load.is_some(), "--ref-load"),
            (distance.ref_update_interval.is_some(), "--ref-update-interval"),
        ];
        match needs_penalty.into_iter().find(|(given, _)| *given && !penalised) {
            Some((_, flag)) => {
                Err(usage(flag, "--use-kl-loss, or --kl-coef above 0".into(), "neither".into()))
            }
            None => Ok(()),
        }
    }

    /// Optimiser steps on a rollout, if a flag says how many.
    fn steps(&self, run: &Run) -> Result<Option<u64>> {
        let rollouts = run.rollouts(self.advantage_estimator);
        let (flag, parts) = match (self.global_batch_size, self.num_steps_per_rollout) {
            (None, None) => return Ok(None),
            (Some(size), Some(steps)) if size.saturating_mul(steps) != rollouts => {
                let expected = format!("{rollouts} samples of a rollout / --num-steps-per-rollout {steps}");
                return Err(usage("--global-batch-size", expected, size.to_string()));
            }
            (Some(size), _) => ("--global-batch-size", size),
            (None, Some(steps)) => ("--num-steps-per-rollout", steps),
        };
        if !rollouts.is_multiple_of(parts) {
            let expected = format!("a number that divides the {rollouts} samples of a rollout");
            return Err(usage(flag, expected, parts.to_string()));
        }
        Ok(Some(self.num_steps_per_rollout.unwrap_or(rollouts / parts)))
    }
}

impl Run {
    /// What is learned from of a rollout: samples, or the best of each prompt's.
    fn rollouts(&self, estimator: Estimator) -> u64 {
        let of_prompt = if estimator == Estimator::RejectionSampling { 1 } else { self.n_samples_per_prompt };
        self.rollout_batch_size.saturating_mul(of_prompt)
    }
}

fn usage(what: &str, expected: String, found: String) -> Error {
    Error::Usage { what: what.to_owned(), expected, found }
}

/// The name of an estimator, as its flag has it.
fn name(estimator: Estimator) -> String {
    serde_json::to_value(estimator).ok().and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default()
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub(super) enum DtypeArg {
    Bfloat16,
    Float32,
}

impl DtypeArg {
    pub(super) fn dtype(self) -> Dtype {
        match self {
            DtypeArg::Bfloat16 => Dtype::Bfloat16,
            DtypeArg::Float32 => Dtype::Float32,
        }
    }
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Granularity {
    /// Whole layers: only what flows between them is kept.
    Full,
    /// Nothing.
    None,
}
