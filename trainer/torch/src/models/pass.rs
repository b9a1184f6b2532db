//! The way forward through a model and back: gradients of its weights, with activations that were kept or are
//! computed again.

use tch::Tensor;

use super::attention::{self, Attended};
use super::gradients::Gradients;
use super::layer::Kept;
use super::model::{Model, Plan};
use crate::error::Result;

/// A forward pass over whole sequences that can be gone back through once.
#[derive(Debug)]
pub(crate) struct Pass {
    tokens: Tensor,
    plan: Plan,
    layers: Vec<Memory>,
    /// The residual stream after the last layer.
    last: Tensor,
    /// Last hidden states `[N, hidden]`.
    pub(crate) hidden: Tensor,
}

/// What is kept of a layer.
#[derive(Debug)]
enum Memory {
    /// What its way back needs.
    Activations(Kept<Attended>),
    /// What flowed into it.
    Input(Tensor),
}

impl Model {
    /// As [`Model::packed`], to be gone back through. With `recompute` only what flows between layers is kept
    /// (`--recompute-granularity full`).
    ///
    /// # Errors
    /// As for [`Model::packed`].
    pub(crate) fn pass(&self, tokens: &Tensor, lengths: &[i64], recompute: bool) -> Result<Pass> {
        tch::no_grad(|| {
            let plan = self.plan(tokens, lengths)?;
            let (mut x, mut layers) = (self.embed(tokens)?, Vec::with_capacity(self.parts.layers.len()));
            for index in 0..self.parts.layers.len() {
                let (y, memory) = if recompute {
                    (self.layer_once(index, &x, &plan)?, Memory::Input(x))
                } else {
                    let (y, kept) = self.layer(index, &x, &plan)?;
                    (y, Memory::Activations(kept))
                };
                layers.push(memory);
                x = y;
            }
            let hidden = self.ops.norm(&x, &self.parts.norm.tensor)?;
            Ok(Pass { tokens: tokens.shallow_clone(), plan, layers, last: x, hidden })
        })
    }

    /// Goes back through `pass`. `gradient` `[N, hidden]` is the loss's with respect to the hidden states.
    /// Each weight's gradient is added to `gradients`.
    ///
    /// # Errors
    /// Whatever libtorch answers; `gradients` are then worth nothing.
    pub(crate) fn backward(&self, pass: Pass, gradient: &Tensor, gradients: &mut Gradients) -> Result<()> {
        let Pass { tokens, plan, mut layers, last, .. } = pass;
        tch::no_grad(|| {
            let (mut gradient, of_norm) =
                self.ops.norm_backward(gradient, &last, &self.parts.norm.tensor, None)?;
            gradients.add(&self.parts.norm, &of_norm)?;
            for (index, layer) in self.parts.layers.iter().enumerate().rev() {
                let kept = match layers.pop() {
                    Some(Memory::Activations(kept)) => kept,
                    Some(Memory::Input(x)) => self.layer(index, &x, &plan)?.1,
                    None => break,
                };
                gradient = layer.backward(&self.ops, &gradient, kept, &plan.angles, gradients)?;
            }
            gradients.add_rows(&self.parts.embedding, &tokens, &gradient)
        })
    }

    fn layer(&self, index: usize, x: &Tensor, plan: &Plan) -> Result<(Tensor, Kept<Attended>)> {
        self.parts.layers[index].forward(&self.ops, x, &plan.angles, |qkv| {
            let attended = attention::whole(qkv, &plan.layout)?;
            Ok((attended.mixed(), attended))
        })
    }

    /// The stream after a layer, with no way back.
    pub(super) fn layer_once(&self, index: usize, x: &Tensor, plan: &Plan) -> Result<Tensor> {
        let attend = |qkv| Ok((attention::whole_once(qkv, &plan.layout)?, ()));
        Ok(self.parts.layers[index].forward(&self.ops, x, &plan.angles, attend)?.0)
    }
}
