//! Sums of gradients: one f32 buffer, laid out as the model's weights are.

use tch::{Device, Kind, Tensor};

use super::{Model, Weight};
use crate::error::Result;
use crate::libtorch::Rest;

/// The gradients of all weights of a model, added up in f32 over micro-batches.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// All of them.
    pub(crate) flat: Tensor,
    rest: Rest,
}

impl Gradients {
    /// Zeros, beside the weights.
    pub(crate) fn new(model: &Model) -> Result<Gradients> {
        let flat = Tensor::f_zeros(model.flat.size(), (Kind::Float, model.device()))?;
        Ok(Gradients { flat, rest: Rest::default() })
    }

    /// Moves the buffer.
    pub(crate) fn move_to(&mut self, device: Device) -> Result<()> {
        self.flat = self.rest.moved(&self.flat, device)?;
        Ok(())
    }

    /// Drops what has been added.
    pub(crate) fn clear(&mut self) -> Result<()> {
        let _ = self.flat.f_zero_()?;
        Ok(())
    }

    /// Adds a gradient of any kind.
    pub(crate) fn add(&mut self, weight: &Weight, gradient: &Tensor) -> Result<()> {
        let _ = weight.span.of(&self.flat)?.f_add_(gradient)?;
        Ok(())
    }

    /// Adds that of a matrix which has made `[N, out]`, whose gradient this is, of `x` `[N, in]`:
    /// `gradientᵀ x`.
    ///
    /// On CUDA the product of bf16 is added to the sum in f32 as it comes, by the multiplication itself.
    pub(crate) fn add_product(&mut self, weight: &Weight, gradient: &Tensor, x: &Tensor) -> Result<()> {
        let (sum, gradient) = (weight.span.of(&self.flat)?, gradient.f_transpose(0, 1)?);
        if x.device().is_cuda() && x.f_kind()? == Kind::BFloat16 {
            let sum = sum.f_unsqueeze(0)?;
            let _ =
                sum.f_baddbmm_dtype_out(&sum, &gradient.f_unsqueeze(0)?, &x.f_unsqueeze(0)?, Kind::Float)?;
            return Ok(());
        }
        let mut sum = sum;
        let _ = sum.f_addmm_(&gradient.f_to_kind(Kind::Float)?, &x.f_to_kind(Kind::Float)?)?;
        Ok(())
    }

    /// Adds gradients `[N, width]` to rows of a table, of these indices `[N]`.
    pub(crate) fn add_rows(&mut self, weight: &Weight, rows: &Tensor, gradient: &Tensor) -> Result<()> {
        let mut sum = weight.span.of(&self.flat)?;
        let _ = sum.f_index_add_(0, rows, &gradient.f_to_kind(Kind::Float)?)?;
        Ok(())
    }
}
