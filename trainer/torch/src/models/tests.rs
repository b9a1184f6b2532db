//! The way back by hand against autograd through the formulas, written out.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

pub(crate) use super::Family;
use super::Model;
use super::gradients::Gradients;
use crate::config::Config;
use crate::tasks::tiny;

const LENGTHS: [i64; 4] = [5, 5, 3, 1];

pub(crate) fn config(family: Family, tie_word_embeddings: bool) -> Config {
    Config {
        family,
        vocab_size: 11,
        hidden_size: 24,
        intermediate_size: 32,
        num_hidden_layers: 2,
        head_dim: 8,
        rope_theta: 100.0,
        max_position_embeddings: 16,
        tie_word_embeddings,
        initializer_range: 0.3,
        ..tiny::config()
    }
}

/// Weights that collect gradients, by name.
struct Leaves(BTreeMap<String, Tensor>);

impl Leaves {
    fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        let Some(weight) = self.0.get(name) else { return x.shallow_clone() };
        let square = (x * x).mean_dim(-1_i64, true, Kind::Float);
        x * (square + 1e-6).rsqrt() * weight
    }

    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        x.linear(&self.0[&format!("{name}.weight")], self.0.get(&format!("{name}.bias")))
    }

    /// Hidden states of one sequence, `[length, hidden]`.
    fn hidden(&self, config: &Config, tokens: &Tensor) -> Tensor {
        let (length, half) = (tokens.size()[0], config.head_dim / 2);
        let float = (Kind::Float, Device::Cpu);
        let exponents = Tensor::arange(half, float) / half as f64;
        let frequencies = Tensor::from(config.rope_theta as f32).pow(&exponents.neg());
        let angles = Tensor::arange(length, float).outer(&frequencies).unsqueeze(1);
        let turn = |x: Tensor| {
            let (a, b) = (x.narrow(-1, 0, half), x.narrow(-1, half, half));
            let (cos, sin) = (angles.cos(), angles.sin());
            Tensor::cat(&[&a * &cos - &b * &sin, &b * &cos + &a * &sin], -1)
        };
        let later = Tensor::ones([length, length], (Kind::Bool, Device::Cpu)).triu(1);
        let mut x = self.0["model.embed_tokens.weight"].index_select(0, tokens);
        for layer in 0..config.num_hidden_layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let normed = self.norm(&x, &name("input_layernorm.weight"));
            let heads = |part: &str, heads: i64| {
                self.linear(&normed, &name(&format!("self_attn.{part}_proj"))).view([length, heads, -1])
            };
            let query = turn(self.norm(&heads("q", 4), &name("self_attn.q_norm.weight")));
            let key = turn(self.norm(&heads("k", 2), &name("self_attn.k_norm.weight")));
            let spread = |x: Tensor| x.repeat_interleave_self_int(2, 1, None).transpose(0, 1);
            let (query, key, value) = (query.transpose(0, 1), spread(key), spread(heads("v", 2)));
            let scores = query.matmul(&key.transpose(1, 2)) / (config.head_dim as f64).sqrt();
            let shares = scores.masked_fill(&later, f64::NEG_INFINITY).softmax(-1, Kind::Float);
            let mixed = shares.matmul(&value).transpose(0, 1).reshape([length, -1]);
            x = &x + self.linear(&mixed, &name("self_attn.o_proj"));
            let normed = self.norm(&x, &name("post_attention_layernorm.weight"));
            let gate = self.linear(&normed, &name("mlp.gate_proj")).silu();
            x = &x
                + self.linear(&(gate * self.linear(&normed, &name("mlp.up_proj"))), &name("mlp.down_proj"));
        }
        self.norm(&x, "model.norm.weight")
    }
}

fn furthest(a: &Tensor, b: &Tensor) -> f64 {
    f64::try_from((a - b).abs().max()).unwrap()
}

#[test]
fn gradients_of_every_weight_are_those_of_autograd() {
    for (family, tied) in [(Family::Qwen3, true), (Family::Qwen2, false), (Family::Llama, true)] {
        let config = config(family, tied);
        let model = Model::fresh(config.clone(), 3, Kind::Float, Device::Cpu).unwrap();
        for (place, parameter) in model.parameters().iter().enumerate() {
            // Ones and zeros would hide a weight that is left out.
            let noise = Tensor::arange(parameter.tensor.numel() as i64, (Kind::Float, Device::Cpu));
            let noise = ((noise + place as f64) * 1.3).sin().view(parameter.tensor.size().as_slice()) * 0.2;
            let _ = parameter.tensor.shallow_clone().f_add_(&noise).unwrap();
        }
        let leaf = |tensor: &Tensor| tensor.copy().set_requires_grad(true);
        let leaves = model.parameters().iter().map(|p| (p.name.clone(), leaf(&p.tensor))).collect();
        let leaves = Leaves(leaves);
        let total = LENGTHS.iter().sum::<i64>();
        let tokens = (Tensor::arange(total, (Kind::Int64, Device::Cpu)) * 7 + 2).remainder(11);
        let rows = tokens.split_with_sizes(LENGTHS, 0);
        let expected: Vec<_> = rows.iter().map(|row| leaves.hidden(&config, row)).collect();
        let expected = Tensor::cat(&expected, 0);
        let gradient = (Tensor::arange(total * 24, (Kind::Float, Device::Cpu)) * 0.7).cos().view([total, 24]);
        (&expected * &gradient).sum(Kind::Float).backward();
        for recompute in [false, true] {
            let pass = model.pass(&tokens, &LENGTHS, recompute).unwrap();
            assert!(furthest(&pass.hidden, &expected) < 1e-4, "{family:?}");
            let mut gradients = Gradients::new(&model).unwrap();
            model.backward(pass, &gradient, &mut gradients).unwrap();
            for (name, span) in model.places.spans() {
                let found = span.of(&gradients.flat).unwrap();
                let Some(expected) = Some(leaves.0[name].grad()).filter(Tensor::defined) else {
                    assert_eq!(name, "lm_head.weight", "has no part in the hidden states");
                    assert_eq!(f64::try_from(found.abs().max()).unwrap(), 0.0);
                    continue;
                };
                let size = f64::try_from(expected.abs().max()).unwrap();
                assert!(size > 1e-3, "{family:?} {name}: a gradient to compare with, found {size}");
                let apart = furthest(&found, &expected);
                assert!(apart < 1e-4 * size.max(1.0), "{family:?} {name}: {apart} apart, of {size}");
            }
        }
    }
}
