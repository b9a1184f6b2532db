//! The parts of a layer that do not look at other positions.

use tch::{Kind, Tensor};

use crate::error::Result;

/// `x weightᵀ + bias`.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
}

/// SwiGLU: `down(silu(gate x) · up x)`.
#[derive(Debug)]
pub(super) struct Mlp {
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// Root mean square normalisation over the last dimension.
#[derive(Debug)]
pub(super) struct RmsNorm {
    pub(super) weight: Tensor,
    pub(super) eps: f64,
}

impl Linear {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_linear(&self.weight, self.bias.as_ref())?)
    }
}

impl Mlp {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.gate.forward(x)?.f_silu()?;
        self.down.forward(&gate.f_mul(&self.up.forward(x)?)?)
    }
}

impl RmsNorm {
    /// `x / sqrt(mean(x²) + eps) * weight`, the mean in f32.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let kind = x.f_kind()?;
        let wide = x.f_to_kind(Kind::Float)?;
        let square = wide.f_mul(&wide)?.f_mean_dim(-1, true, Kind::Float)?;
        let scale = square.f_add_scalar(self.eps)?.f_rsqrt()?;
        Ok(wide.f_mul(&scale)?.f_to_kind(kind)?.f_mul(&self.weight)?)
    }
}
