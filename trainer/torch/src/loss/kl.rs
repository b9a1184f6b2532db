//! Estimates of the distance to another policy.

use driftless_trainer::options::Kl;
use tch::Tensor;

use super::bounded;
use crate::error::Result;

/// Estimates `[m]` of KL(policy ‖ reference) from both log-probs `[m]` of the sampled tokens. With the
/// probability ratio `[m]` of policy and old policy as `weight`, the gradient is unbiased (DeepSeek-V3.2, 2025).
///
/// # Errors
/// [`crate::Error::Torch`] if shapes disagree.
pub fn kl(kind: Kl, policy: &Tensor, reference: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
    let d = policy.f_sub(reference)?;
    let estimate = match kind {
        Kl::K1 => d,
        Kl::K2 => d.f_square()?.f_mul_scalar(0.5)?,
        Kl::K3 => k3(&d)?,
        // Beyond the inner bound the outer one holds: the estimate stays the same, and its gradient finite.
        Kl::LowVarKl => k3(&bounded(&d)?)?,
    };
    let estimate = weight.map_or(Ok(estimate.shallow_clone()), |weight| estimate.f_mul(weight))?;
    Ok(match kind {
        Kl::LowVarKl => estimate.f_clamp_max(10.0)?,
        Kl::K1 | Kl::K2 | Kl::K3 => estimate,
    })
}

pub(super) fn k3(d: &Tensor) -> Result<Tensor> {
    Ok(d.f_neg()?.f_expm1()?.f_add(d)?)
}
