//! The decoder that all families share: embedding, layers of attention and SwiGLU with RMSNorm before each,
//! tied or separate output head.
//!
//! The arithmetic follows Hugging Face's models operation by operation, so that logits agree with theirs to
//! rounding.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use driftless_transport::{Checkpoint, Snapshot};
use tch::{Device, Kind, Tensor};

use super::attention::Attention;
use super::cache::KvCache;
use super::parts::{Linear, Mlp, RmsNorm};
use super::rope::Rope;
use super::weights::{Parameter, Weights, locate, read};
use crate::config::Config;
use crate::error::{Result, input};

/// A model of one of the [families](crate::Family) in one kind (`Float` or `BFloat16`) on one device.
#[derive(Debug)]
pub struct Model {
    config: Config,
    kind: Kind,
    device: Device,
    parameters: Vec<Parameter>,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rope: Rope,
}

#[derive(Debug)]
struct Layer {
    input_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl Model {
    /// A model with fresh weights: matrices normal with `initializer_range`, norms one, biases zero.
    ///
    /// Reseeds libtorch's generator, so the weights are a function of `seed` alone.
    ///
    /// # Errors
    /// [`crate::Error::Config`], [`crate::Error::Input`] for another kind, or [`crate::Error::Torch`] when
    /// the memory is not there.
    pub fn fresh(config: Config, seed: i64, kind: Kind, device: Device) -> Result<Model> {
        // The generator is the process's: of two models that are made at once, each would disturb the other's
        // draws.
        static GENERATOR: Mutex<()> = Mutex::new(());
        let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(seed);
        let (tensors, range) = (config.tensors(), config.initializer_range);
        let weights = tensors.iter().map(|(name, shape)| {
            let float = (Kind::Float, Device::Cpu);
            Ok(match shape.as_slice() {
                [_] if name.ends_with(".bias") => Tensor::f_zeros(shape, float)?,
                [_] => Tensor::f_ones(shape, float)?,
                _ => Tensor::f_randn(shape, float)?.f_mul_scalar(range)?,
            })
        });
        Model::build(config, kind, device, weights)
    }

    /// Loads a checkpoint directory: `config.json` and safetensors of dtype F32, BF16 or F16.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an unsupported model, [`crate::Error::Tensor`] naming the first tensor
    /// that does not fit.
    pub fn open(checkpoint_dir: &Path, kind: Kind, device: Device) -> Result<Model> {
        let config = Config::open(checkpoint_dir)?;
        let checkpoint = Checkpoint::open(checkpoint_dir)?;
        let places = locate(&config, &checkpoint)?;
        Model::build(config, kind, device, places.iter().map(|&index| read(&checkpoint, index)))
    }

    /// Overwrites every weight in place. Checks all names, shapes and dtypes first: after an error that names
    /// a tensor, no weight has changed.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] naming the first tensor that does not fit.
    pub fn load_from(&mut self, weights: &dyn Snapshot) -> Result<()> {
        let places = locate(&self.config, weights)?;
        tch::no_grad(|| {
            for (parameter, index) in self.parameters.iter_mut().zip(places) {
                fail::fail_point!("engine.load");
                parameter.tensor.f_copy_(&read(weights, index)?)?;
            }
            Ok(())
        })
    }

    /// Takes the weights in the order of [`Config::tensors`].
    fn build(
        config: Config,
        kind: Kind,
        device: Device,
        weights: impl Iterator<Item = Result<Tensor>>,
    ) -> Result<Model> {
        config.check()?;
        if !matches!(kind, Kind::Float | Kind::BFloat16) {
            return Err(input("model kind", "Float or BFloat16", format!("{kind:?}")));
        }
        let mut parameters = Vec::new();
        for ((name, _), weight) in config.tensors().into_iter().zip(weights) {
            let tensor = weight?.f_to_device(device)?.f_to_kind(kind)?;
            parameters.push(Parameter { name, tensor });
        }
        let weights = Weights::new(&config, &parameters);
        let layers =
            (0..config.num_hidden_layers).map(|index| Layer::new(&config, &weights, index)).collect();
        let embedding = weights.tensor("model.embed_tokens.weight");
        let head = match config.tie_word_embeddings {
            true => Linear { weight: embedding.shallow_clone(), bias: None },
            false => weights.linear("lm_head"),
        };
        let norm = weights.norm("model.norm");
        let rope = Rope::new(&config, kind, device)?;
        Ok(Model { config, kind, device, parameters, embedding, layers, norm, head, rope })
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Kind of weights and activations.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where the weights are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The weights, to be overwritten in place by the optimizer.
    pub(crate) fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    /// All weights, sorted by name; a tied head is not listed. The tensors share memory with the model.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// An empty cache for `slots` sequences of this model.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when the memory is not there.
    pub fn cache(&self, slots: usize) -> Result<KvCache> {
        KvCache::new(&self.config, slots, self.kind, self.device)
    }

    /// Last hidden states `[B, T, hidden]` of whole sequences `tokens` `[B, T]` (i64, right-padded with any
    /// valid id). A position sees only those before it, so padding changes nothing left of it.
    ///
    /// # Errors
    /// [`crate::Error::Input`] if the sequences are longer than the model's positions,
    /// [`crate::Error::Torch`] for an id outside the vocabulary.
    pub fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, length) = tokens.size2()?;
        if length > self.config.max_position_embeddings {
            return Err(input("sequence length", self.config.max_position_embeddings, length));
        }
        let angles = self.rope.leading(length)?;
        self.run(tokens, |_, attention, x| attention.forward(x, &angles))
    }

    /// Continues sequences in a cache: `tokens` `[R, T]` (i64) hold `lengths[r]` new tokens for slot
    /// `slots[r]`, right-padded with any valid id. Returns hidden states `[R, T, hidden]`; those at padding
    /// mean nothing. On an error no sequence has grown. Meant for `tch::no_grad`.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for a slot named twice or not there, a length outside `1..=T`, or a sequence
    /// that would outgrow the model's positions; [`crate::Error::Torch`] for an id outside the vocabulary or
    /// lack of memory.
    pub fn extend(
        &self,
        tokens: &Tensor,
        lengths: &[usize],
        slots: &[usize],
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let (rows, width) = tokens.size2()?;
        if rows == 0 || rows != slots.len() as i64 || rows != lengths.len() as i64 {
            let found = format!("{} slots, {} lengths", slots.len(), lengths.len());
            return Err(input("rows", format!("one slot and one length for each of {rows} rows"), found));
        }
        let window = cache.window(width, lengths, slots)?;
        // Padding may lie beyond the last position; its angle does not matter.
        let last = self.config.max_position_embeddings - 1;
        let angles = self.rope.at(&window.positions.f_clamp_max(last)?)?;
        let hidden =
            self.run(tokens, |layer, attention, x| attention.extend(x, &angles, layer, &window, cache))?;
        cache.commit(lengths, slots);
        Ok(hidden)
    }

    /// Logits `[…, vocab]`, f32, of hidden states `[…, hidden]`.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for another width.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head.forward(hidden)?.f_to_kind(Kind::Float)?)
    }

    /// Logits `[B, T, vocab]`, f32, of whole sequences: [`Model::logits`] of [`Model::hidden`].
    ///
    /// # Errors
    /// As those two.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.logits(&self.hidden(tokens)?)
    }

    /// The residual stream through all layers; `attend(layer index, attention, normed x)`.
    fn run(
        &self,
        tokens: &Tensor,
        mut attend: impl FnMut(usize, &Attention, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = Tensor::f_embedding(&self.embedding, tokens, -1, false, false)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let mixed = attend(index, &layer.attention, &layer.input_norm.forward(&x)?)?;
            x = x.f_add(&mixed)?;
            let mixed = layer.mlp.forward(&layer.mlp_norm.forward(&x)?)?;
            x = x.f_add(&mixed)?;
        }
        self.norm.forward(&x)
    }
}

impl Layer {
    fn new(config: &Config, weights: &Weights<'_>, index: i64) -> Layer {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        Layer {
            input_norm: weights.norm(&name("input_layernorm")),
            attention: Attention {
                query: weights.linear(&name("self_attn.q_proj")),
                key: weights.linear(&name("self_attn.k_proj")),
                value: weights.linear(&name("self_attn.v_proj")),
                output: weights.linear(&name("self_attn.o_proj")),
                query_norm: weights.norm_if_any(&name("self_attn.q_norm")),
                key_norm: weights.norm_if_any(&name("self_attn.k_norm")),
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
            },
            mlp_norm: weights.norm(&name("post_attention_layernorm")),
            mlp: Mlp {
                gate: weights.linear(&name("mlp.gate_proj")),
                up: weights.linear(&name("mlp.up_proj")),
                down: weights.linear(&name("mlp.down_proj")),
            },
        }
    }
}
