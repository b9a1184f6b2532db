//! How `driftless train` learns.

use crate::cli::shared::numbers;
use driftless::trainer::lr::Decay;
use driftless::trainer::{Dtype, Estimator, Kl, KlLoss, LearnOptions, Tis};
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
pub(super) struct LearnArgs {
    /// How rewards become advantages.
    #[arg(long, value_enum, default_value_t = AdvantageEstimator::Grpo)]
    advantage_estimator: AdvantageEstimator,
    /// Do not divide by the group's standard deviation.
    #[arg(long)]
    disable_grpo_std_normalization: bool,
    /// Normalise advantages over the trained tokens of a step; the two of REINFORCE++ always do.
    #[arg(long)]
    normalize_advantages: bool,
    /// Lower clip of the probability ratio.
    #[arg(long, default_value_t = 0.2, value_parser = numbers::positive)]
    eps_clip: f64,
    /// Upper clip of the probability ratio [default: --eps-clip].
    #[arg(long, value_parser = numbers::positive)]
    eps_clip_high: Option<f64>,
    /// Upper bound of the ratio where the advantage is negative (dual clip); above 1.
    #[arg(long, value_parser = numbers::above_one)]
    eps_clip_c: Option<f64>,
    /// Penalise the distance to a reference policy.
    #[arg(long)]
    use_kl_loss: bool,
    /// Weight of that penalty.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero, requires = "use_kl_loss")]
    kl_loss_coef: f64,
    /// Estimator of that distance.
    #[arg(long, value_enum, default_value_t = KlLossType::K1, requires = "use_kl_loss")]
    kl_loss_type: KlLossType,
    /// Checkpoint directory of the reference policy [default: --hf-checkpoint].
    #[arg(long, value_name = "DIR", requires = "use_kl_loss")]
    pub(super) ref_load: Option<PathBuf>,
    /// Weigh each token by the trainer's probability over the engine's (truncated importance sampling).
    #[arg(long)]
    use_tis: bool,
    /// Largest such weight.
    #[arg(long, default_value_t = 2.0, value_parser = numbers::positive, requires = "use_tis")]
    tis_clip: f64,
    /// Least such weight.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero, requires = "use_tis")]
    tis_clip_low: f64,
    /// Mean over all tokens of a step, instead of over each sample's and then over samples.
    #[arg(long)]
    calculate_per_token_loss: bool,
    /// Steps over which the learning rate rises from 0.
    #[arg(long, default_value_t = 0, value_parser = numbers::ordinal())]
    lr_warmup_iters: u64,
    /// How the learning rate falls after that.
    #[arg(long, value_enum, default_value_t = LrDecayStyle::Constant)]
    lr_decay_style: LrDecayStyle,
    /// Step at which the learning rate has fallen to --min-lr [default: --num-rollout].
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
    /// Tokens of one forward and backward pass.
    #[arg(long, default_value_t = 16384, value_parser = numbers::count::<usize>())]
    max_tokens_per_gpu: usize,
    /// Compute activations again on the way back, instead of keeping them.
    #[arg(long, value_enum, default_value_t = Granularity::None)]
    recompute_granularity: Granularity,
    /// Tokens whose logits are held at once [default: as many as fit half a GiB].
    #[arg(long, value_parser = numbers::count::<usize>())]
    log_probs_chunk_size: Option<usize>,
}

impl LearnArgs {
    /// What the learner is told.
    pub(super) fn options(self, lr: f64, dtype: Option<DtypeArg>, num_rollout: u64) -> LearnOptions {
        let kind = match self.kl_loss_type {
            KlLossType::K1 => Kl::K1,
            KlLossType::K2 => Kl::K2,
            KlLossType::K3 => Kl::K3,
            KlLossType::LowVarKl => Kl::LowVarKl,
        };
        let decay = match self.lr_decay_style {
            LrDecayStyle::Constant => Decay::Constant,
            LrDecayStyle::Linear => Decay::Linear,
            LrDecayStyle::Cosine => Decay::Cosine,
        };
        let kl_loss = KlLoss { kind, coef: self.kl_loss_coef, ref_load: self.ref_load };
        LearnOptions {
            dtype: dtype.map(DtypeArg::dtype),
            lr,
            min_lr: self.min_lr,
            lr_warmup_iters: self.lr_warmup_iters,
            lr_decay_style: decay,
            lr_decay_iters: self.lr_decay_iters.unwrap_or(num_rollout),
            weight_decay: self.weight_decay,
            adam_beta1: self.adam_beta1,
            adam_beta2: self.adam_beta2,
            clip_grad: self.clip_grad,
            eps_clip: self.eps_clip,
            eps_clip_high: self.eps_clip_high.unwrap_or(self.eps_clip),
            eps_clip_c: self.eps_clip_c,
            tis: self.use_tis.then_some(Tis { low: self.tis_clip_low, high: self.tis_clip }),
            kl_loss: self.use_kl_loss.then_some(kl_loss),
            calculate_per_token_loss: self.calculate_per_token_loss,
            entropy_coef: self.entropy_coef,
            advantage_estimator: self.advantage_estimator.estimator(),
            grpo_std_normalization: !self.disable_grpo_std_normalization,
            normalize_advantages: self.normalize_advantages,
            max_tokens_per_gpu: self.max_tokens_per_gpu,
            recompute: self.recompute_granularity == Granularity::Full,
            log_probs_chunk_size: self.log_probs_chunk_size,
        }
    }
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

#[derive(Clone, Copy, clap::ValueEnum)]
enum KlLossType {
    K1,
    K2,
    K3,
    #[value(name = "low_var_kl")]
    LowVarKl,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum LrDecayStyle {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum AdvantageEstimator {
    Grpo,
    Gspo,
    Cispo,
    #[value(name = "reinforce_plus_plus")]
    ReinforcePlusPlus,
    #[value(name = "reinforce_plus_plus_baseline")]
    ReinforcePlusPlusBaseline,
}

impl AdvantageEstimator {
    fn estimator(self) -> Estimator {
        match self {
            AdvantageEstimator::Grpo => Estimator::Grpo,
            AdvantageEstimator::Gspo => Estimator::Gspo,
            AdvantageEstimator::Cispo => Estimator::Cispo,
            AdvantageEstimator::ReinforcePlusPlus => Estimator::ReinforcePlusPlus,
            AdvantageEstimator::ReinforcePlusPlusBaseline => Estimator::ReinforcePlusPlusBaseline,
        }
    }
}
