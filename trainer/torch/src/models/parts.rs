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

/// Rows that libtorch's f32 product takes alike on the CPU, whatever comes with them; fewer it sums in
/// another order.
const ROWS_MIN: i64 = 4;

impl Linear {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.device().is_cuda() || (x.f_kind()? == Kind::BFloat16 && has_bf16()) {
            return Ok(x.f_linear(&self.weight, self.bias.as_ref())?);
        }
        let kind = x.f_kind()?;
        let wide = |x: &Tensor| x.f_to_kind(Kind::Float);
        let bias = self.bias.as_ref().map(wide).transpose()?;
        let (size, width) = (x.size(), self.weight.size()[1]);
        let rows = wide(x)?.f_reshape([-1, width])?;
        let missing = (ROWS_MIN - rows.size()[0]).max(0);
        let padded = if missing > 0 { rows.f_constant_pad_nd([0, 0, 0, missing])? } else { rows };
        let y = padded.f_linear(&wide(&self.weight)?, bias.as_ref())?;
        let y = if missing > 0 { y.f_narrow(0, 0, ROWS_MIN - missing)? } else { y };
        let shape: Vec<i64> = size[..size.len() - 1].iter().copied().chain([-1]).collect();
        Ok(y.f_to_kind(kind)?.f_view(shape.as_slice())?)
    }
}

/// Whether libtorch has a fast bf16 product for this CPU. Without one it is an order of magnitude slower than
/// in f32, which gives the same sums, rounded once.
fn has_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512bw");
    #[cfg(not(target_arch = "x86_64"))]
    true
}

impl Mlp {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.gate.forward(x)?.f_silu()?;
        self.down.forward(&gate.f_mul(&self.up.forward(x)?)?)
    }
}

impl RmsNorm {
    /// `x / sqrt(mean(x²) + eps) * weight`, the mean in f32.
    ///
    /// The weight is not part of libtorch's fused operation: with it, bf16 would be rounded once, where
    /// Hugging Face's models round before and after.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = x.f_rms_norm(self.weight.size(), None::<&Tensor>, self.eps)?;
        Ok(normed.f_mul(&self.weight)?)
    }
}
