//! A model with the optimizer that moves it: forward, back, and a step.

use tch::{Device, Kind, Tensor};

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::models::{Model, Pass};
use crate::optimizer::{AdamW, AdamWOptions};
use crate::ranks::Ranks;

/// What policy and critic have in common.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) model: Model,
    pub(crate) optimizer: AdamW,
    pub(crate) recompute: bool,
}

impl Trained {
    /// Takes a model into training, with other ranks if there are any; its weights are rounded to `published`.
    pub(crate) fn new(
        mut model: Model,
        published: Kind,
        options: AdamWOptions,
        ranks: Option<&Ranks>,
    ) -> Result<Trained> {
        let optimizer = AdamW::new(&mut model, published, options, ranks)?;
        Ok(Trained { model, optimizer, recompute: false })
    }

    /// The forward pass, and the hidden states `[M, hidden]` that predict trained tokens.
    pub(crate) fn forward(&self, batch: &Batch) -> Result<(Pass, Tensor)> {
        let pass = self.model.pass(&batch.tokens, &batch.lengths, self.recompute)?;
        let hidden = pass.hidden.f_index_select(0, &batch.trained)?;
        Ok((pass, hidden))
    }

    /// Takes the gradient `[M, hidden]` of these hidden states back through the model.
    pub(crate) fn backward(&mut self, pass: Pass, batch: &Batch, gradient: &Tensor) -> Result<()> {
        let whole = pass.hidden.f_zeros_like()?;
        let whole = whole.f_index_copy(0, &batch.trained, gradient)?;
        let Trained { model, optimizer, .. } = self;
        model.backward(pass, &whole, &mut optimizer.gradients)
    }

    /// Applies the gradients of a loss, of which this is the rank's part, and returns their norm.
    pub(crate) fn apply(&mut self, loss: f64, lr: f64) -> Result<f64> {
        let mut loss = [loss];
        self.optimizer.sum(&mut loss)?;
        let [loss] = loss;
        if !loss.is_finite() {
            return Err(Error::NotFinite { what: "loss", found: loss, step: self.optimizer.steps() });
        }
        self.optimizer.step(&mut self.model, lr)
    }

    /// Goes on after `steps` steps with the state that `put` puts in place.
    pub(crate) fn restore(&mut self, steps: u64, put: impl FnOnce(&mut AdamW) -> Result<()>) -> Result<()> {
        put(&mut self.optimizer)?;
        self.optimizer.resume(&mut self.model, steps)
    }

    /// Moves weights, masters and moments to host memory, until [`Trained::onload`].
    pub(crate) fn offload(&mut self) -> Result<()> {
        self.move_to(Device::Cpu)
    }

    /// Moves them back to the model's device.
    pub(crate) fn onload(&mut self) -> Result<()> {
        self.move_to(self.model.device())
    }

    fn move_to(&mut self, device: Device) -> Result<()> {
        self.model.move_to(device)?;
        self.optimizer.move_to(device)
    }
}

/// Hidden states `[M, hidden]` that predict a batch's trained tokens, without gradients.
pub(crate) fn hidden(model: &Model, batch: &Batch) -> Result<Tensor> {
    tch::no_grad(|| Ok(model.packed(&batch.tokens, &batch.lengths)?.f_index_select(0, &batch.trained)?))
}
