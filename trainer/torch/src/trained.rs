//! A model with the optimizer that moves it: forward, back, and a step.

use tch::{Kind, Tensor};

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::models::{Model, Pass};
use crate::optimizer::{AdamW, AdamWOptions};

/// What policy and critic have in common.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) model: Model,
    pub(crate) optimizer: AdamW,
    pub(crate) recompute: bool,
}

impl Trained {
    /// Takes a model into training; its weights are rounded to `published`.
    pub(crate) fn new(mut model: Model, published: Kind, options: AdamWOptions) -> Result<Trained> {
        let optimizer = AdamW::new(&mut model, published, options)?;
        Ok(Trained { model, optimizer, recompute: false })
    }

    /// The forward pass, and the hidden states `[M, hidden]` that predict trained tokens.
    pub(crate) fn forward(&self, batch: &Batch) -> Result<(Pass, Tensor)> {
        let pass = self.model.pass(&batch.tokens, &batch.lengths, self.recompute)?;
        let hidden = pass.hidden().f_detach()?.f_index_select(0, &batch.trained)?;
        Ok((pass, hidden))
    }

    /// Takes the gradient `[M, hidden]` of these hidden states back through the model.
    pub(crate) fn backward(&mut self, pass: Pass, batch: &Batch, gradient: &Tensor) -> Result<()> {
        let whole = pass.hidden().f_detach()?.f_zeros_like()?;
        let whole = whole.f_index_copy(0, &batch.trained, gradient)?;
        let Trained { model, optimizer, .. } = self;
        model.backward(pass, &whole, &mut |index, gradient| optimizer.add(index, gradient))
    }

    /// Applies the gradients of a loss of this size, and returns their norm.
    pub(crate) fn apply(&mut self, loss: f64, lr: f64) -> Result<f64> {
        if !loss.is_finite() {
            return Err(Error::NotFinite { what: "loss", found: loss, step: self.optimizer.steps() });
        }
        self.optimizer.step(&mut self.model, lr)
    }

    /// Moves weights, masters and moments to host memory, until [`Trained::onload`].
    pub(crate) fn offload(&mut self) -> Result<()> {
        self.model.offload()?;
        self.optimizer.offload()
    }

    /// Moves them back.
    pub(crate) fn onload(&mut self) -> Result<()> {
        self.model.onload()?;
        self.optimizer.onload()
    }
}

/// Hidden states `[M, hidden]` that predict a batch's trained tokens, without gradients.
pub(crate) fn hidden(model: &Model, batch: &Batch) -> Result<Tensor> {
    tch::no_grad(|| Ok(model.packed(&batch.tokens, &batch.lengths)?.f_index_select(0, &batch.trained)?))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::config::Config;
    use crate::models::Family;

    fn config() -> Config {
        Config {
            // With biases.
            family: Family::Qwen2,
            vocab_size: 8,
            hidden_size: 8,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            head_dim: 8,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: None,
            max_position_embeddings: 8,
            tie_word_embeddings: false,
            initializer_range: 0.5,
            bos_token_id: None,
            eos_token_ids: vec![1],
            pad_token_id: None,
        }
    }

    #[test]
    fn adamw_is_its_formula_and_decays_matrices_only() {
        let options = AdamWOptions { weight_decay: 0.1, clip_grad: 0.0, ..AdamWOptions::default() };
        let model = Model::fresh(config(), 3, Kind::Float, Device::Cpu).unwrap();
        let mut trained = Trained::new(model, Kind::Float, options).unwrap();
        let values = |tensor: &Tensor| {
            Vec::<f64>::try_from(tensor.detach().flatten(0, -1).to_kind(Kind::Double)).unwrap()
        };
        let parameters = |trained: &Trained| -> Vec<Vec<f64>> {
            trained.model.parameters().iter().map(|parameter| values(&parameter.tensor)).collect()
        };
        let mut expected = parameters(&trained);
        let mut moments: Vec<Vec<[f64; 2]>> =
            expected.iter().map(|values| vec![[0.0; 2]; values.len()]).collect();
        let lr = 1e-2;
        for step in 1..=3 {
            trained.optimizer.clear().unwrap();
            for (index, values) in expected.iter_mut().enumerate() {
                let parameter = &trained.model.parameters()[index].tensor;
                let gradient: Vec<f32> = (0..values.len())
                    .map(|at| ((at * 7 + index + step * 3) % 11) as f32 / 5.0 - 1.0)
                    .collect();
                let decay = if parameter.dim() > 1 { 1.0 - lr * 0.1 } else { 1.0 };
                for ((value, [mean, square]), gradient) in
                    values.iter_mut().zip(&mut moments[index]).zip(&gradient)
                {
                    let gradient = f64::from(*gradient);
                    *mean = options.beta1 * *mean + (1.0 - options.beta1) * gradient;
                    *square = options.beta2 * *square + (1.0 - options.beta2) * gradient * gradient;
                    let correct = |moment: f64, beta: f64| moment / (1.0 - beta.powi(step as i32));
                    let root = correct(*square, options.beta2).sqrt() + options.eps;
                    *value = *value * decay - lr * correct(*mean, options.beta1) / root;
                }
                let shaped = Tensor::from_slice(&gradient).view(parameter.size().as_slice());
                trained.optimizer.add(index, &shaped).unwrap();
            }
            trained.apply(0.0, lr).unwrap();
        }
        let found = parameters(&trained);
        let kinds: Vec<usize> =
            trained.model.parameters().iter().map(|parameter| parameter.tensor.dim()).collect();
        assert!(kinds.contains(&1) && kinds.contains(&2));
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }
}
