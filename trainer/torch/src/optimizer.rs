//! AdamW (Loshchilov & Hutter 2019) over f32 masters.
//!
//! The model computes with weights rounded to the dtype that is published, so that the trainer's log-probs
//! are those of the engines. Gradients of the rounded weights are applied to the f32 masters unchanged
//! (straight through), and the rounding is redone after every step: small steps add up until they cross a
//! rounding border.
//!
//! Masters, moments and gradients lie in one buffer each, and a step goes through them in slices: a few dozen
//! operations instead of ten for each of hundreds of tensors, and working memory of a slice.

use driftless_trainer::LearnOptions;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, input};
use crate::models::Model;

/// Elements of a slice: 64 MiB of f32.
const SLICE: i64 = 1 << 24;

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
    /// Gradients are scaled down to this L2 norm over all parameters; 0 leaves them.
    pub clip_grad: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, clip_grad: 1.0 }
    }
}

impl AdamWOptions {
    /// Those of a run.
    pub(crate) fn of(learn: &LearnOptions) -> AdamWOptions {
        AdamWOptions {
            beta1: learn.adam_beta1,
            beta2: learn.adam_beta2,
            weight_decay: learn.weight_decay,
            clip_grad: learn.clip_grad,
            ..AdamWOptions::default()
        }
    }
}

/// Masters, moments and the gradient being accumulated: f32, on the model's device.
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    rounded: Kind,
    states: Vec<State>,
    flat: Flat,
    device: Device,
    step: u64,
}

/// The buffers: elements of all parameters in the order of [`Model::parameters`].
#[derive(Debug)]
struct Flat {
    master: Tensor,
    mean: Tensor,
    square: Tensor,
    grad: Tensor,
}

/// One parameter's part of the buffers, of its shape.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) name: String,
    pub(crate) master: Tensor,
    pub(crate) mean: Tensor,
    pub(crate) square: Tensor,
    grad: Tensor,
}

impl AdamW {
    /// State for a model, whose weights become the first masters; then rounds the model's weights to
    /// `rounded` (`Float` or `BFloat16`) and makes them collect gradients.
    ///
    /// # Errors
    /// [`Error::Input`] for another kind, or a bf16 model that should compute with f32 weights.
    pub fn new(model: &mut Model, rounded: Kind, options: AdamWOptions) -> Result<AdamW> {
        if !matches!((model.kind(), rounded), (_, Kind::BFloat16) | (Kind::Float, Kind::Float)) {
            let found = format!("weights in {rounded:?}, model in {:?}", model.kind());
            return Err(input("published weights", "a kind the model can hold", found));
        }
        let (flat, states) = tch::no_grad(|| Flat::of(model))?;
        let optimizer = AdamW { options, rounded, states, flat, device: model.device(), step: 0 };
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

    /// Adds a gradient of the weight at `index` of [`Model::parameters`], of any kind, to the sum for the
    /// next step.
    pub(crate) fn add(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        tch::no_grad(|| {
            let _ = self.states[index].grad.f_add_(gradient)?;
            Ok(())
        })
    }

    /// Drops the gradients that have been added.
    pub(crate) fn clear(&mut self) -> Result<()> {
        let _ = self.flat.grad.f_zero_()?;
        Ok(())
    }

    /// Applies the gradients that have been added since the last [`AdamW::clear`], and rewrites the model's
    /// weights. Returns the gradients' L2 norm before clipping.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if that norm is NaN or infinite: masters, moments and weights are then unchanged.
    pub(crate) fn step(&mut self, model: &mut Model, lr: f64) -> Result<f64> {
        tch::no_grad(|| {
            let norm = self.flat.grad_norm()?;
            if !norm.is_finite() {
                return Err(Error::NotFinite { what: "gradient norm", found: norm, step: self.step });
            }
            self.step += 1;
            let scale = match self.options.clip_grad {
                0.0 => 1.0,
                clip_grad => (clip_grad / (norm + 1e-6)).min(1.0),
            };
            if self.options.weight_decay > 0.0 {
                for state in self.states.iter_mut().filter(|state| state.master.dim() > 1) {
                    let _ = state.master.f_mul_scalar_(1.0 - lr * self.options.weight_decay)?;
                }
            }
            self.flat.update(&self.options, self.step, lr, scale)?;
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
            self.write_weights(model)
        })
    }

    /// Moves masters and moments to host memory, until [`AdamW::onload`].
    pub(crate) fn offload(&mut self) -> Result<()> {
        self.move_to(Device::Cpu)
    }

    /// Moves them back to where the model computes.
    pub(crate) fn onload(&mut self) -> Result<()> {
        self.move_to(self.device)
    }

    fn move_to(&mut self, device: Device) -> Result<()> {
        for buffer in [&mut self.flat.master, &mut self.flat.mean, &mut self.flat.square, &mut self.flat.grad]
        {
            *buffer = buffer.f_to_device(device)?;
        }
        let mut start = 0;
        for state in &mut self.states {
            state.place(&self.flat, start)?;
            start += state.master.numel() as i64;
        }
        Ok(())
    }

    /// All states, in the order of [`Model::parameters`].
    pub(crate) fn states(&self) -> &[State] {
        &self.states
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
    /// Lets it be the part of the buffers that begins at `start`, of its shape.
    fn place(&mut self, flat: &Flat, start: i64) -> Result<()> {
        let (shape, length) = (self.master.size(), self.master.numel() as i64);
        let part = |buffer: &Tensor| buffer.f_narrow(0, start, length)?.f_view(shape.as_slice());
        self.master = part(&flat.master)?;
        self.mean = part(&flat.mean)?;
        self.square = part(&flat.square)?;
        self.grad = part(&flat.grad)?;
        Ok(())
    }
}

impl Flat {
    /// Buffers that begin with the model's weights, and each parameter's part of them.
    fn of(model: &Model) -> Result<(Flat, Vec<State>)> {
        let elements =
            model.parameters().iter().map(|parameter| parameter.tensor.numel() as i64).sum::<i64>();
        let empty = || Tensor::f_zeros([elements], (Kind::Float, model.device()));
        let flat = Flat { master: empty()?, mean: empty()?, square: empty()?, grad: empty()? };
        let mut start = 0;
        let state = |parameter: &crate::models::Parameter| {
            let [master, mean, square, grad] = [(); 4].map(|()| parameter.tensor.shallow_clone());
            let mut state = State { name: parameter.name.clone(), master, mean, square, grad };
            state.place(&flat, start)?;
            state.master.f_copy_(&parameter.tensor.f_detach()?)?;
            start += parameter.tensor.numel() as i64;
            Ok(state)
        };
        let states = model.parameters().iter().map(state).collect::<Result<Vec<_>>>()?;
        Ok((flat, states))
    }

    /// The ranges of the slices: (first element, elements).
    fn slices(&self) -> impl Iterator<Item = (i64, i64)> + use<> {
        let elements = self.grad.numel() as i64;
        (0..(elements + SLICE - 1) / SLICE).map(move |i| (i * SLICE, SLICE.min(elements - i * SLICE)))
    }

    fn grad_norm(&self) -> Result<f64> {
        let square = |(start, length)| self.grad.f_narrow(0, start, length)?.f_square()?.f_sum(Kind::Double);
        let squares = self.slices().map(square).collect::<Result<Vec<_>, _>>()?;
        Ok(f64::try_from(Tensor::f_stack(&squares, 0)?.f_sum(Kind::Double)?)?.sqrt())
    }

    fn update(&mut self, options: &AdamWOptions, step: u64, lr: f64, scale: f64) -> Result<()> {
        let AdamWOptions { beta1, beta2, eps, .. } = *options;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        for (start, length) in self.slices() {
            let part = |buffer: &Tensor| buffer.f_narrow(0, start, length);
            let (mut master, mut mean, mut square) =
                (part(&self.master)?, part(&self.mean)?, part(&self.square)?);
            let grad = part(&self.grad)?.f_mul_scalar(scale)?;
            let _ = mean.f_mul_scalar_(beta1)?.f_add_(&grad.f_mul_scalar(1.0 - beta1)?)?;
            let _ = square.f_mul_scalar_(beta2)?.f_add_(&grad.f_square()?.f_mul_scalar_(1.0 - beta2)?)?;
            let mut root = square.f_div_scalar(correction(beta2))?;
            let root = root.f_sqrt_()?.f_add_scalar_(eps)?;
            let _ = master.f_sub_(&mean.f_div(&root)?.f_mul_scalar_(lr / correction(beta1))?)?;
        }
        Ok(())
    }
}
