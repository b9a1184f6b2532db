//! AdamW (Loshchilov & Hutter 2019) over f32 masters.
//!
//! The model computes with weights rounded to the dtype that is published, so that the trainer's log-probs
//! are those of the engines. Gradients of the rounded weights are applied to the f32 masters unchanged
//! (straight through), and the rounding is redone after every step: small steps add up until they cross a
//! rounding border.
//!
//! Masters, moments and gradients lie in one buffer each, as the weights do. Of several ranks each keeps its part
//! of masters and moments: gradients are added up over ranks, each updates its part, and all get all weights.

use std::ops::Range;

use derive_setters::Setters;
use driftless_trainer::options::LearnOptions;
use tch::{Device, Kind, Tensor};

use crate::dispatcher::{Value, call};
use crate::error::{Error, Result, input};
use crate::libtorch::{self, Rest};
use crate::models::Gradients;
use crate::models::{Model, Places, Span};
use crate::ranks::{Ranks, locked, part};

/// Elements that are updated at once: 256 MiB of f32.
const PIECE: i64 = 1 << 26;

/// Constants of AdamW; the learning rate is given with each step.
#[derive(Clone, Copy, Debug, PartialEq, Setters)]
#[setters(prefix = "with_")]
#[non_exhaustive]
pub struct AdamWOptions {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices; norms and biases are never decayed.
    pub weight_decay: f64,
    /// Gradients are scaled down to this L2 norm over all parameters; 0 leaves them.
    pub clip_grad: f64,
    /// Masters and moments are in host memory, and are updated there, instead of on the model's device.
    pub cpu_offload: bool,
}

impl Default for AdamWOptions {
    /// Those of a run whose options are at their defaults.
    fn default() -> Self {
        AdamWOptions::of(&LearnOptions::default())
    }
}

/// Masters, moments and the gradients being added up, f32.
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    rounded: Kind,
    /// Where the model computes.
    device: Device,
    /// The other ranks, if there are any.
    ranks: Option<Ranks>,
    /// The elements whose masters and moments are here.
    own: Range<i64>,
    /// By [`Part`]; laid out as the model's weights are.
    states: [Tensor; 3],
    rests: [Rest; 3],
    /// Where pieces cross between host and device, if the states are not where the model is: pinned memory.
    crossing: Option<Tensor>,
    pub(crate) gradients: Gradients,
    step: u64,
}

impl AdamWOptions {
    /// Those of a run.
    pub(crate) fn of(learn: &LearnOptions) -> AdamWOptions {
        AdamWOptions {
            beta1: learn.adam_beta1,
            beta2: learn.adam_beta2,
            eps: 1e-8,
            weight_decay: learn.weight_decay,
            clip_grad: learn.clip_grad,
            cpu_offload: learn.optimizer_cpu_offload,
        }
    }
}

/// What is kept of each weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Master,
    /// Of gradients.
    Mean,
    /// Mean of squared gradients.
    Square,
}

impl Part {
    pub(crate) const ALL: [Part; 3] = [Part::Master, Part::Mean, Part::Square];

    /// As checkpoints call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Part::Master => "master",
            Part::Mean => "mean",
            Part::Square => "square",
        }
    }
}

impl AdamW {
    /// State for a model, whose weights become the first masters, shared out to ranks if there are any; then rounds
    /// the model's weights to `rounded` (`Float` or `BFloat16`).
    ///
    /// # Errors
    /// [`Error::Input`] for another kind, or a bf16 model that should compute with f32 weights.
    pub(crate) fn new(
        model: &mut Model,
        rounded: Kind,
        options: AdamWOptions,
        ranks: Option<&Ranks>,
    ) -> Result<AdamW> {
        if !matches!((model.kind(), rounded), (_, Kind::BFloat16) | (Kind::Float, Kind::Float)) {
            let found = format!("weights in {rounded:?}, model in {:?}", model.kind());
            return Err(input("published weights", "a kind the model can hold", found));
        }
        let (length, ranks) = (model.places.length, ranks.cloned());
        let own = ranks.as_ref().map_or(0..length, |ranks| {
            let (rank, ranks) = locked(ranks).place();
            part(length, rank, ranks)
        });
        tch::no_grad(|| {
            let weights = model.flat.f_narrow(0, own.start, own.end - own.start)?;
            let crosses = options.cpu_offload && model.device().is_cuda();
            let length = weights.numel() as i64;
            let state = || match options.cpu_offload {
                false => Ok(Tensor::f_zeros(length, (Kind::Float, model.device()))?),
                true if crosses => libtorch::pinned(length, Kind::Float),
                true => Ok(Tensor::f_zeros(length, (Kind::Float, Device::Cpu))?),
            };
            let mut states = [state()?, state()?, state()?];
            states[Part::Master as usize].f_copy_(&weights)?;
            let crossing = crosses.then(|| libtorch::pinned(PIECE.min(length), Kind::Float)).transpose()?;
            let gradients = Gradients::new(model)?;
            let device = model.device();
            let optimizer = AdamW {
                options,
                rounded,
                device,
                ranks,
                own,
                states,
                rests: Default::default(),
                crossing,
                gradients,
                step: 0,
            };
            optimizer.write_weights(model)?;
            Ok(optimizer)
        })
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

    /// Applies the gradients that have been added since they were cleared, by all ranks, and rewrites the
    /// model's weights. Returns the gradients' L2 norm before clipping.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if that norm is NaN or infinite: masters, moments and weights are then unchanged, on
    /// every rank. [`Error::Rank`] if another is gone: this one is of no more use.
    pub(crate) fn step(&mut self, model: &mut Model, lr: f64) -> Result<f64> {
        tch::no_grad(|| {
            if let Some(ranks) = &self.ranks {
                locked(ranks).reduce_scatter(&self.gradients.flat)?;
            }
            let norm = self.grad_norm()?;
            if !norm.is_finite() {
                return Err(Error::NotFinite { what: "gradient norm", found: norm, step: self.step });
            }
            self.step += 1;
            self.update(&model.places, lr, norm)?;
            self.write_weights(model)?;
            Ok(norm)
        })
    }

    /// Which rank this is, and how many there are.
    pub(crate) fn rank(&self) -> (usize, usize) {
        self.ranks.as_ref().map_or((0, 1), |ranks| locked(ranks).place())
    }

    /// Makes each number the sum over all ranks.
    pub(crate) fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| locked(ranks).sum(numbers))
    }

    /// The largest of what the ranks have.
    pub(crate) fn largest(&self, number: f64) -> Result<f64> {
        self.ranks.as_ref().map_or(Ok(number), |ranks| locked(ranks).largest(number))
    }

    /// Replaces the state of a weight, as far as it is here.
    pub(crate) fn put(&mut self, part: Part, span: &Span, values: &Tensor) -> Result<()> {
        let (start, end) = (span.start.max(self.own.start), (span.start + span.length()).min(self.own.end));
        if start >= end {
            return Ok(());
        }
        let values = values.f_flatten(0, -1)?.f_narrow(0, start - span.start, end - start)?;
        let mut place = self.states[part as usize].f_narrow(0, start - self.own.start, end - start)?;
        tch::no_grad(|| Ok(place.f_copy_(&values)?))
    }

    /// Goes on after `step` steps with the state that was put in place.
    pub(crate) fn resume(&mut self, model: &mut Model, step: u64) -> Result<()> {
        self.step = step;
        tch::no_grad(|| self.write_weights(model))
    }

    /// The state of all weights. Ranks ask for it together, and get it in the buffer of the gradients.
    pub(crate) fn state(&self, part: Part) -> Result<Tensor> {
        let own = &self.states[part as usize];
        let Some(ranks) = &self.ranks else { return Ok(own.shallow_clone()) };
        tch::no_grad(|| {
            // A critic at rest has its buffer in host memory, where not every exchange reaches.
            let all = self.gradients.flat.f_to_device(self.device)?;
            self.own(&all)?.f_copy_(own)?;
            locked(ranks).all_gather(&all)?;
            Ok(all)
        })
    }

    /// This rank's part of a buffer.
    fn own(&self, buffer: &Tensor) -> Result<Tensor> {
        Ok(buffer.f_narrow(0, self.own.start, self.own.end - self.own.start)?)
    }

    /// Moves everything that is not in host memory anyway.
    pub(crate) fn move_to(&mut self, device: Device) -> Result<()> {
        self.gradients.move_to(device)?;
        if !self.options.cpu_offload {
            for (state, rest) in self.states.iter_mut().zip(&mut self.rests) {
                *state = rest.moved(state, device)?;
            }
        }
        Ok(())
    }

    fn grad_norm(&self) -> Result<f64> {
        let gradients = self.own(&self.gradients.flat)?;
        let square = |(start, length)| gradients.f_narrow(0, start, length)?.f_square()?.f_sum(Kind::Double);
        let squares = pieces(0, gradients.numel() as i64).map(square).collect::<Result<Vec<_>, _>>()?;
        let mut sum = [f64::try_from(Tensor::f_stack(&squares, 0)?.f_sum(Kind::Double)?)?];
        self.sum(&mut sum)?;
        Ok(sum[0].sqrt())
    }

    /// A step of libtorch's AdamW: matrices decay, vectors do not.
    fn update(&mut self, places: &Places, lr: f64, norm: f64) -> Result<()> {
        let AdamWOptions { beta1, beta2, eps, weight_decay, clip_grad, .. } = self.options;
        // What gradients are divided by.
        let scale = if clip_grad > 0.0 { ((norm + 1e-6) / clip_grad).max(1.0) } else { 1.0 };
        let one = |x: f64| Tensor::f_from_slice(&[x as f32])?.f_to_device(self.states[0].device());
        let (steps, scale) = (one(self.step as f64)?, if scale > 1.0 { Some(one(scale)?) } else { None });
        let gradients = self.own(&self.gradients.flat)?;
        // Where, of what is here, vectors begin.
        let vectors = places.matrices.clamp(self.own.start, self.own.end) - self.own.start;
        for (range, decay) in [(0..vectors, weight_decay), (vectors..gradients.numel() as i64, 0.0)] {
            for (start, length) in pieces(range.start, range.end) {
                let piece = |buffer: &Tensor| buffer.f_narrow(0, start, length);
                let [master, mean, square] = &self.states;
                let [master, mean, square] = [piece(master)?, piece(mean)?, piece(square)?];
                let gradient = self.crossed(&piece(&gradients)?, Kind::Float)?;
                let lists = [[&master], [&gradient], [&mean], [&square], [&steps]];
                let [master, gradient, mean, square, steps] = lists.each_ref().map(|one| Value::Tensors(one));
                // This AdamW keeps no largest second moments.
                let mut arguments = vec![master, gradient, mean, square, Value::Tensors(&[]), steps];
                arguments.extend([lr, beta1, beta2, decay, eps].map(Value::Float));
                let (amsgrad, maximize) = (Value::Bool(false), Value::Bool(false));
                arguments.extend([amsgrad, maximize]);
                arguments.extend([scale.as_ref(), None].map(Value::MaybeTensor));
                let [] = call(c"aten::_fused_adamw_", c"", &arguments)?;
            }
        }
        Ok(())
    }

    /// A piece in this kind: in host memory on its way over, if there is one, else where it is.
    fn crossed(&self, piece: &Tensor, kind: Kind) -> Result<Tensor> {
        let Some(crossing) = &self.crossing else { return Ok(piece.f_to_kind(kind)?) };
        let mut place = crossing.f_view_dtype(kind)?.f_narrow(0, 0, piece.numel() as i64)?;
        place.f_copy_(piece)?;
        Ok(place)
    }

    /// Rounds masters to weights, and gets those of the other ranks.
    fn write_weights(&self, model: &Model) -> Result<()> {
        let weights = self.own(&model.flat)?;
        for (start, length) in pieces(0, weights.numel() as i64) {
            let master = self.states[Part::Master as usize].f_narrow(0, start, length)?;
            weights.f_narrow(0, start, length)?.f_copy_(&self.crossed(&master, self.rounded)?)?;
        }
        self.ranks.as_ref().map_or(Ok(()), |ranks| locked(ranks).all_gather(&model.flat))
    }
}

/// A range of elements in pieces: (first element, elements).
fn pieces(start: i64, end: i64) -> impl Iterator<Item = (i64, i64)> {
    (start..end).step_by(PIECE as usize).map(move |at| (at, PIECE.min(end - at)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    use crate::models::tests::{Family, config};
    use crate::ranks::tests::on_ranks;

    const LR: f64 = 1e-2;

    /// A gradient of every weight, of the buffer's length.
    fn gradient(model: &Model, step: u64) -> Tensor {
        let places = Tensor::arange(model.places.length, (Kind::Float, Device::Cpu));
        (places * 0.37 + step as f64).sin()
    }

    fn options(clip_grad: f64) -> AdamWOptions {
        AdamWOptions { weight_decay: 0.1, clip_grad, ..AdamWOptions::default() }
    }

    fn train(model: &mut Model, optimizer: &mut AdamW, steps: u64) -> Vec<f64> {
        let step = |step| {
            let gradient = gradient(model, step);
            optimizer.gradients.clear().unwrap();
            let whole = Span { start: 0, shape: gradient.size() };
            let weight = crate::models::Weight { tensor: gradient.shallow_clone(), span: whole };
            optimizer.gradients.add(&weight, &gradient).unwrap();
            optimizer.step(model, LR).unwrap()
        };
        (0..steps).map(step).collect()
    }

    #[test]
    fn steps_are_those_of_the_formula_in_f64() {
        for clip_grad in [0.0, 1.0] {
            let mut model = Model::fresh(config(Family::Qwen3, true), 1, Kind::Float, Device::Cpu).unwrap();
            let numbers = |x: &Tensor| Vec::<f64>::try_from(x.to_kind(Kind::Double)).unwrap();
            let mut master = numbers(&model.flat);
            let (mut mean, mut square) = (vec![0.0; master.len()], vec![0.0; master.len()]);
            let mut optimizer = AdamW::new(&mut model, Kind::Float, options(clip_grad), None).unwrap();
            let norms = train(&mut model, &mut optimizer, 4);
            for (step, norm) in norms.iter().enumerate() {
                let gradient = numbers(&gradient(&model, step as u64));
                let expected = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
                assert!((norm / expected - 1.0).abs() < 1e-6, "{norm}, {expected}");
                let scale = if clip_grad > 0.0 { (clip_grad / (norm + 1e-6)).min(1.0) } else { 1.0 };
                let correction = |beta: f64| 1.0 - beta.powi(step as i32 + 1);
                for (place, g) in gradient.iter().map(|g| g * scale).enumerate() {
                    if (place as i64) < model.places.matrices {
                        master[place] *= 1.0 - LR * 0.1;
                    }
                    mean[place] = 0.9 * mean[place] + 0.1 * g;
                    square[place] = 0.95 * square[place] + 0.05 * g * g;
                    let root = (square[place] / correction(0.95)).sqrt() + 1e-8;
                    master[place] -= LR * mean[place] / correction(0.9) / root;
                }
            }
            let apart =
                numbers(&model.flat).iter().zip(&master).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart < 1e-6, "{apart} with clip_grad {clip_grad}");
        }
    }

    #[test]
    fn states_in_host_memory_move_the_weights_as_others_do() {
        let [here, there] = [false, true].map(|cpu_offload| {
            let mut model = Model::fresh(config(Family::Qwen3, true), 1, Kind::Float, Device::Cpu).unwrap();
            let options = AdamWOptions { cpu_offload, ..options(1.0) };
            let mut optimizer = AdamW::new(&mut model, Kind::BFloat16, options, None).unwrap();
            let norms = train(&mut model, &mut optimizer, 3);
            (norms, Vec::<f32>::try_from(&model.flat).unwrap())
        });
        assert_eq!(here, there);
    }

    #[test]
    fn ranks_move_the_weights_as_one_does() {
        let mut model = Model::fresh(config(Family::Qwen3, true), 1, Kind::Float, Device::Cpu).unwrap();
        let mut optimizer = AdamW::new(&mut model, Kind::BFloat16, options(1.0), None).unwrap();
        let expected = train(&mut model, &mut optimizer, 3);
        let bits = |x: &Tensor| Vec::<f32>::try_from(x).unwrap();
        for ranks in [2, 4] {
            let found = on_ranks(ranks, |star| {
                // Drawing weights takes the process's generator, and every rank starts from these.
                let mut own = Model::fresh(config(Family::Qwen3, true), 1, Kind::Float, Device::Cpu).unwrap();
                let shared: Ranks = Arc::new(Mutex::new(star));
                let options = options(1.0);
                let mut optimizer = AdamW::new(&mut own, Kind::BFloat16, options, Some(&shared)).unwrap();
                let elements = optimizer.states[0].numel() as i64;
                // Each gives the whole gradient: the sum is so many times what one has, which clipping undoes.
                let norms = train(&mut own, &mut optimizer, 3);
                let state = Part::ALL.map(|part| bits(&optimizer.state(part).unwrap()));
                (norms, bits(&own.flat), state, elements)
            });
            for (norms, weights, state, elements) in found {
                assert_eq!(elements * ranks as i64, model.places.length);
                for (norm, expected) in norms.iter().zip(&expected) {
                    assert!((norm / expected / ranks as f64 - 1.0).abs() < 1e-6, "{norm}, {expected}");
                }
                let rounded = Tensor::from_slice(&state[0]).to_kind(Kind::BFloat16).to_kind(Kind::Float);
                assert_eq!(weights, bits(&rounded), "{ranks} ranks");
                for (found, part) in state.iter().zip(Part::ALL) {
                    let expected = bits(&optimizer.state(part).unwrap());
                    let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(apart < 1e-6, "{part:?}: {apart} apart");
                }
            }
        }
    }
}
