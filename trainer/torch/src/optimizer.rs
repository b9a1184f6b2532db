//! AdamW (Loshchilov & Hutter 2019) over f32 masters.
//!
//! The model computes with weights rounded to the dtype that is published, so that the trainer's log-probs are
//! those of the engines. Gradients of the rounded weights are applied to the f32 masters unchanged (straight
//! through), and the rounding is redone after every step: small steps add up until they cross a rounding border.

use tch::{Kind, Tensor};

use crate::error::{Error, Result, input};
use crate::models::Model;

/// Constants of AdamW; the learning rate is given with each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices; norms are never decayed.
    pub weight_decay: f64,
    /// Gradients are scaled down to this L2 norm over all parameters; infinity to leave them.
    pub clip_grad: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, clip_grad: 1.0 }
    }
}

/// Masters, moments and the gradient being accumulated, one of each per parameter of the model.
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    rounded: Kind,
    states: Vec<State>,
    step: u64,
}

/// One parameter's state; all f32, on the parameter's device, of its shape.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) name: String,
    pub(crate) master: Tensor,
    pub(crate) mean: Tensor,
    pub(crate) square: Tensor,
    grad: Tensor,
}

impl AdamW {
    /// State for a model, whose weights become the first masters; then rounds the model's weights to `rounded`
    /// (`Float` or `BFloat16`) and makes them collect gradients.
    ///
    /// # Errors
    /// [`Error::Input`] for another kind, or a bf16 model that should compute with f32 weights.
    pub fn new(model: &mut Model, rounded: Kind, options: AdamWOptions) -> Result<AdamW> {
        if !matches!((model.kind(), rounded), (_, Kind::BFloat16) | (Kind::Float, Kind::Float)) {
            let found = format!("weights in {rounded:?}, model in {:?}", model.kind());
            return Err(input("published weights", "a kind the model can hold", found));
        }
        let states = tch::no_grad(|| {
            let state = |parameter: &crate::models::Parameter| {
                let master = parameter.tensor.f_detach_copy()?.f_to_kind(Kind::Float)?;
                let zeros = || master.f_zeros_like();
                let (mean, square, grad) = (zeros()?, zeros()?, zeros()?);
                Ok(State { name: parameter.name.clone(), master, mean, square, grad })
            };
            model.parameters().iter().map(state).collect::<Result<Vec<_>>>()
        })?;
        let optimizer = AdamW { options, rounded, states, step: 0 };
        optimizer.write_weights(model)?;
        for parameter in model.parameters_mut() {
            parameter.tensor = parameter.tensor.f_set_requires_grad(true)?;
        }
        Ok(optimizer)
    }

    /// Steps done.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Kind that the model's weights are rounded to.
    #[must_use]
    pub fn rounded(&self) -> Kind {
        self.rounded
    }

    /// Moves the gradients that the model's weights have collected into the f32 sum for the next step.
    ///
    /// # Errors
    /// [`Error::Torch`] if libtorch refuses.
    pub fn accumulate(&mut self, model: &mut Model) -> Result<()> {
        tch::no_grad(|| {
            for (state, parameter) in self.states.iter_mut().zip(model.parameters_mut()) {
                let grad = parameter.tensor.f_grad()?;
                if grad.defined() {
                    let _ = state.grad.f_add_(&grad.f_to_kind(Kind::Float)?)?;
                    parameter.tensor.zero_grad();
                }
            }
            Ok(())
        })
    }

    /// Applies the accumulated gradients, clears them, and rewrites the model's weights. Returns the gradients'
    /// L2 norm before clipping.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if that norm is NaN or infinite: masters, moments and weights are then unchanged and
    /// the gradients dropped.
    pub fn step(&mut self, model: &mut Model, lr: f64) -> Result<f64> {
        tch::no_grad(|| {
            let norm = self.grad_norm()?;
            if !norm.is_finite() {
                self.clear()?;
                return Err(Error::NotFinite { what: "gradient norm", found: norm, step: self.step });
            }
            self.step += 1;
            let scale = (self.options.clip_grad / (norm + 1e-6)).min(1.0);
            for state in &mut self.states {
                state.update(&self.options, self.step, lr, scale)?;
            }
            self.clear()?;
            self.write_weights(model)?;
            Ok(norm)
        })
    }

    /// Replaces the state: per parameter (master, mean, square) as f32 in the order of [`Model::parameters`].
    pub(crate) fn restore(&mut self, model: &mut Model, step: u64, states: &[[Tensor; 3]]) -> Result<()> {
        tch::no_grad(|| {
            for (state, [master, mean, square]) in self.states.iter_mut().zip(states) {
                state.master.f_copy_(master)?;
                state.mean.f_copy_(mean)?;
                state.square.f_copy_(square)?;
            }
            self.step = step;
            self.clear()?;
            self.write_weights(model)
        })
    }

    /// All states, in the order of [`Model::parameters`].
    pub(crate) fn states(&self) -> &[State] {
        &self.states
    }

    fn grad_norm(&self) -> Result<f64> {
        let square = |state: &State| state.grad.f_square()?.f_sum(Kind::Double);
        let squares = self.states.iter().map(square).collect::<Result<Vec<_>, _>>()?;
        Ok(f64::try_from(Tensor::f_stack(&squares, 0)?.f_sum(Kind::Double)?)?.sqrt())
    }

    fn clear(&mut self) -> Result<()> {
        for state in &mut self.states {
            let _ = state.grad.f_zero_()?;
        }
        Ok(())
    }

    fn write_weights(&self, model: &mut Model) -> Result<()> {
        tch::no_grad(|| {
            for (state, parameter) in self.states.iter().zip(model.parameters_mut()) {
                parameter.tensor.f_copy_(&state.master.f_to_kind(self.rounded)?)?;
            }
            Ok(())
        })
    }
}

impl State {
    fn update(&mut self, options: &AdamWOptions, step: u64, lr: f64, scale: f64) -> Result<()> {
        let AdamWOptions { beta1, beta2, eps, weight_decay, .. } = *options;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let grad = self.grad.f_mul_scalar(scale)?;
        if weight_decay > 0.0 && self.master.dim() > 1 {
            let _ = self.master.f_mul_scalar_(1.0 - lr * weight_decay)?;
        }
        let _ = self.mean.f_mul_scalar_(beta1)?.f_add_(&grad.f_mul_scalar(1.0 - beta1)?)?;
        let _ = self.square.f_mul_scalar_(beta2)?.f_add_(&grad.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
        let root = self.square.f_div_scalar(correction(beta2))?.f_sqrt()?.f_add_scalar(eps)?;
        let _ = self.master.f_sub_(&self.mean.f_div(&root)?.f_mul_scalar(lr / correction(beta1))?)?;
        Ok(())
    }
}
