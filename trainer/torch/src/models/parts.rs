//! Matrix products, forward and backward.

use tch::{Kind, Tensor};

use super::gradients::Gradients;
use super::weights::Weight;
use crate::error::Result;

/// `x weightᵀ + bias`.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Weight>,
}

/// Rows that libtorch's f32 product takes together on the CPU. In a multiple of them it sums each row alike,
/// whatever comes with it and however many threads share the rows; a rest it sums in another order.
pub(super) const ROWS: i64 = 4;

impl Linear {
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (&self.weight.tensor, self.bias.as_ref().map(|bias| &bias.tensor));
        if x.device().is_cuda() {
            return Ok(x.f_linear(weight, bias)?);
        }
        let kind = x.f_kind()?;
        let wide = |x: &Tensor| x.f_to_kind(Kind::Float);
        let bias = bias.map(wide).transpose()?;
        let (size, width) = (x.size(), weight.size()[1]);
        let rows = wide(x)?.f_reshape([-1, width])?;
        let count = rows.size()[0];
        let missing = (ROWS - count % ROWS) % ROWS;
        let padded = if missing > 0 { rows.f_constant_pad_nd([0, 0, 0, missing])? } else { rows };
        let y = padded.f_linear(&wide(weight)?, bias.as_ref())?;
        let y = if missing > 0 { y.f_narrow(0, 0, count)? } else { y };
        let shape: Vec<i64> = size[..size.len() - 1].iter().copied().chain([-1]).collect();
        Ok(y.f_to_kind(kind)?.f_view(shape.as_slice())?)
    }

    /// The gradient of `x` `[N, in]`, given that `[N, out]` of what came of it; those of the weights are added
    /// to `gradients`.
    pub(crate) fn backward(
        &self,
        gradient: &Tensor,
        x: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        self.collect(gradient, x, gradients)?;
        self.pull(gradient)
    }

    /// The gradients of the weights alone.
    pub(crate) fn collect(&self, gradient: &Tensor, x: &Tensor, gradients: &mut Gradients) -> Result<()> {
        gradients.add_product(&self.weight, gradient, x)?;
        match &self.bias {
            Some(bias) => gradients.add(bias, &gradient.f_sum_dim_intlist(0_i64, false, Kind::Float)?),
            None => Ok(()),
        }
    }

    /// The gradient `[N, in]` of what came in, given that of what came of it.
    pub(crate) fn pull(&self, gradient: &Tensor) -> Result<Tensor> {
        if gradient.device().is_cuda() {
            return Ok(gradient.f_mm(&self.weight.tensor)?);
        }
        let weight = self.weight.tensor.f_to_kind(Kind::Float)?;
        Ok(gradient.f_to_kind(Kind::Float)?.f_mm(&weight)?.f_to_kind(gradient.f_kind()?)?)
    }
}
