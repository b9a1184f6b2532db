//! The way forward through a model and back: gradients of its weights, by layer where activations are
//! recomputed.

use tch::{Kind, Tensor};

use super::model::{Model, Plan};
use crate::error::Result;

/// A forward pass over whole sequences that can be gone back through once.
#[derive(Debug)]
pub(crate) struct Pass {
    tokens: Tensor,
    plan: Plan,
    /// The residual stream before each layer and after the last, where activations are recomputed; else none.
    stream: Vec<Tensor>,
    hidden: Tensor,
}

impl Pass {
    /// Last hidden states `[N, hidden]`.
    pub(crate) fn hidden(&self) -> &Tensor {
        &self.hidden
    }
}

impl Model {
    /// As [`Model::packed`], for weights that collect gradients. With `recompute` only what flows between
    /// layers is kept (`--recompute-granularity full`), else every activation.
    ///
    /// # Errors
    /// As for [`Model::packed`].
    pub(crate) fn pass(&self, tokens: &Tensor, lengths: &[i64], recompute: bool) -> Result<Pass> {
        let plan = self.plan(tokens, lengths)?;
        let tokens = tokens.shallow_clone();
        if !recompute {
            let mut x = self.embed(&tokens)?;
            for index in 0..self.layers.len() {
                x = self.layer(index, &x, &plan)?;
            }
            let hidden = self.norm.forward(&x)?;
            return Ok(Pass { tokens, plan, stream: Vec::new(), hidden });
        }
        tch::no_grad(|| {
            let mut stream = vec![self.embed(&tokens)?];
            for index in 0..self.layers.len() {
                stream.push(self.layer(index, &stream[index], &plan)?);
            }
            let hidden = self.norm.forward(&stream[self.layers.len()])?;
            Ok(Pass { tokens, plan, stream, hidden })
        })
    }

    /// Goes back through `pass`. `gradient` `[N, hidden]` is the loss's with respect to the hidden states.
    /// Each weight's gradient goes to `collect(index in Model::parameters, gradient)`, of some weights in
    /// parts.
    ///
    /// # Errors
    /// Whatever libtorch or `collect` answer.
    pub(crate) fn backward(
        &self,
        mut pass: Pass,
        gradient: &Tensor,
        collect: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let Some(last) = pass.stream.pop() else {
            let weights: Vec<usize> = (0..self.parameters.len()).collect();
            self.collect(&weights, &pull(&pass.hidden, gradient, &self.tensors(&weights))?, collect)?;
            return Ok(());
        };
        let of = |prefix: &str| -> Vec<usize> {
            let named = |index: &usize| self.parameters[*index].name.starts_with(prefix);
            (0..self.parameters.len()).filter(named).collect()
        };
        // One part of the model at a time: computed again from what flowed into it, then gone back through.
        let mut part =
            |x: Tensor, weights: &[usize], gradient: &Tensor, forward: &dyn Fn(&Tensor) -> Result<Tensor>| {
                let x = x.f_detach()?.f_set_requires_grad(true)?;
                let inputs: Vec<&Tensor> = [&x].into_iter().chain(self.tensors(weights)).collect();
                let mut gradients = pull(&forward(&x)?, gradient, &inputs)?;
                let rest = gradients.split_off(1);
                self.collect(weights, &rest, collect)?;
                Ok::<_, crate::Error>(gradients.swap_remove(0))
            };
        let mut gradient = part(last, &of("model.norm."), gradient, &|x| self.norm.forward(x))?;
        for index in (0..self.layers.len()).rev() {
            let Some(x) = pass.stream.pop() else { break };
            let weights = of(&format!("model.layers.{index}."));
            gradient = part(x, &weights, &gradient, &|x| self.layer(index, x, &pass.plan))?;
        }
        let embedding = of("model.embed_tokens.");
        let gradients = pull(&self.embed(&pass.tokens)?, &gradient, &self.tensors(&embedding))?;
        self.collect(&embedding, &gradients, collect)
    }

    fn layer(&self, index: usize, x: &Tensor, plan: &Plan) -> Result<Tensor> {
        self.layers[index].forward(x, |attention, x| attention.forward(x, &plan.angles, &plan.layout))
    }

    fn tensors(&self, weights: &[usize]) -> Vec<&Tensor> {
        weights.iter().map(|&index| &self.parameters[index].tensor).collect()
    }

    fn collect(
        &self,
        weights: &[usize],
        gradients: &[Tensor],
        collect: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        for (&index, gradient) in weights.iter().zip(gradients) {
            // A head of its own has no part in the hidden states.
            if gradient.defined() {
                collect(index, gradient)?;
            }
        }
        Ok(())
    }
}

/// Gradients of `inputs`, given `gradient` of `output`. The sum's own gradient is 1 everywhere, so that the
/// product's is `gradient` to the bit.
fn pull(output: &Tensor, gradient: &Tensor, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let product = output.f_mul(gradient)?.f_sum(Kind::Float)?;
    Ok(Tensor::f_run_backward(&[product], inputs, false, false)?)
}
