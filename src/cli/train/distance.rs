//! Flags about how far the policy may be from the engines, a reference and a teacher.

use crate::cli::shared::numbers::{self, named};
use driftless::trainer::options::{Kl, KlPenalty, Level, Opd, Rs, Tis, TisMode};
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(next_help_heading = "Distances")]
pub(super) struct DistanceArgs {
    /// Take the engines' log-probs for those of the old policy, instead of the trainer's before the rollout's
    /// first step.
    #[arg(long, conflicts_with = "use_tis")]
    pub(super) use_rollout_logprobs: bool,
    /// Weigh each token by the trainer's probability over the engine's (importance sampling).
    #[arg(long)]
    use_tis: bool,
    /// Largest such weight.
    #[arg(long, default_value_t = 2.0, value_parser = numbers::positive, requires = "use_tis")]
    tis_clip: f64,
    /// Least such weight.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero, requires = "use_tis")]
    tis_clip_low: f64,
    /// What has a weight: a token, a sequence (the product over its tokens), or geometric (their geometric mean).
    #[arg(long, default_value = "token", value_parser = named::<Level>, requires = "use_tis")]
    tis_level: Level,
    /// What becomes of weights out of bounds: clip (TIS), or mask, which makes them 0 (MIS; IcePop for tokens).
    #[arg(long, default_value = "clip", value_parser = named::<TisMode>, requires = "use_tis")]
    tis_mode: TisMode,
    /// Reject tokens whose probability ratio of trainer and engine is out of bounds.
    #[arg(long)]
    use_rs: bool,
    /// Largest ratio that is not rejected.
    #[arg(long, default_value_t = 2.0, value_parser = numbers::positive, requires = "use_rs")]
    rs_upper_bound: f64,
    /// Least ratio that is not rejected.
    #[arg(long, default_value_t = 0.5, value_parser = numbers::at_least_zero, requires = "use_rs")]
    rs_lower_bound: f64,
    /// What has a ratio: token, sequence or geometric, as for --tis-level.
    #[arg(long, default_value = "token", value_parser = named::<Level>, requires = "use_rs")]
    rs_level: Level,
    /// Reject a whole sample for one token whose ratio is below this.
    #[arg(long, value_parser = numbers::positive, requires = "use_rs")]
    rs_veto_threshold: Option<f64>,
    /// Leave out samples of negative advantage that the policy has moved away from (off-policy sequence masking).
    #[arg(long)]
    use_opsm: bool,
    /// Mean of old - new log-prob beyond which it has.
    #[arg(long, default_value_t = 1e-4, value_parser = numbers::at_least_zero, requires = "use_opsm")]
    opsm_delta: f64,
    /// Penalise the distance to a reference policy in the loss.
    #[arg(long, conflicts_with = "kl_coef")]
    use_kl_loss: bool,
    /// Weight of that penalty.
    #[arg(long, default_value_t = 0.0, value_parser = numbers::at_least_zero, requires = "use_kl_loss")]
    kl_loss_coef: f64,
    /// Penalise the distance to a reference policy in the rewards of tokens, with this weight: for ppo and the two of
    /// REINFORCE++.
    #[arg(long, value_parser = numbers::at_least_zero)]
    kl_coef: Option<f64>,
    /// Estimator of that distance: k1, k2, k3 or low_var_kl.
    #[arg(long, default_value = "k1", value_parser = named::<Kl>)]
    kl_loss_type: Kl,
    /// Weigh the penalty of the loss by the probability ratio of policy and old policy, so that its gradient has no
    /// bias.
    #[arg(long, requires = "use_kl_loss")]
    pub(super) use_unbiased_kl: bool,
    /// Checkpoint directory of the reference policy [default: --hf-checkpoint].
    #[arg(long, value_name = "DIR")]
    pub(super) ref_load: Option<PathBuf>,
    /// Take the policy for the reference after every so many rollouts.
    #[arg(long, value_name = "N", value_parser = numbers::count::<u64>())]
    pub(super) ref_update_interval: Option<u64>,
    /// Learn from a teacher what it would have said to what the policy samples (on-policy distillation).
    #[arg(long)]
    use_opd: bool,
    /// Weight of the distance to the teacher.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::at_least_zero, requires = "use_opd")]
    opd_kl_coef: f64,
    /// Checkpoint directory of the teacher, which has the policy's tokens [default: the log has its log-probs].
    #[arg(long, value_name = "DIR", requires = "use_opd")]
    pub(super) opd_teacher_load: Option<PathBuf>,
}

impl DistanceArgs {
    pub(super) fn tis(&self) -> Option<Tis> {
        let tis =
            Tis { low: self.tis_clip_low, high: self.tis_clip, level: self.tis_level, mode: self.tis_mode };
        self.use_tis.then_some(tis)
    }

    pub(super) fn rs(&self) -> Option<Rs> {
        let rs = Rs {
            low: self.rs_lower_bound,
            high: self.rs_upper_bound,
            level: self.rs_level,
            veto: self.rs_veto_threshold,
        };
        self.use_rs.then_some(rs)
    }

    pub(super) fn opsm_delta(&self) -> Option<f64> {
        self.use_opsm.then_some(self.opsm_delta)
    }

    pub(super) fn kl_loss(&self) -> Option<KlPenalty> {
        self.use_kl_loss.then(|| self.penalty(self.kl_loss_coef))
    }

    pub(super) fn kl_reward(&self) -> Option<KlPenalty> {
        self.kl_coef.filter(|coef| *coef > 0.0).map(|coef| self.penalty(coef))
    }

    fn penalty(&self, coef: f64) -> KlPenalty {
        KlPenalty { kind: self.kl_loss_type, coef, ref_load: self.ref_load.clone() }
    }

    pub(super) fn opd(&self) -> Option<Opd> {
        let opd = Opd { kl_coef: self.opd_kl_coef, teacher_load: self.opd_teacher_load.clone() };
        self.use_opd.then_some(opd)
    }
}
