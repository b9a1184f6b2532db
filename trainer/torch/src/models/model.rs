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
use super::critic::VALUE_HEAD;
use super::layout::Layout;
use super::parts::{Linear, Mlp, RmsNorm};
use super::rope::{Angles, Rope};
use super::weights::{Parameter, Weights, check_depth, locate, read};
use crate::config::Config;
use crate::error::{Result, input};

/// A model of one of the [families](crate::Family) in one kind (`Float` or `BFloat16`) on one device.
#[derive(Debug)]
pub struct Model {
    config: Config,
    kind: Kind,
    device: Device,
    pub(super) parameters: Vec<Parameter>,
    embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: RmsNorm,
    head: Linear,
    head_name: &'static str,
    rope: Rope,
}

/// What a forward pass over whole sequences needs besides their tokens.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    pub(super) angles: Angles,
}

#[derive(Debug)]
pub(super) struct Layer {
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
        Model::build(config, &tensors, kind, device, weights)
    }

    /// Loads a checkpoint directory: `config.json` and safetensors of dtype F32, BF16 or F16.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an unsupported model, [`crate::Error::Tensor`] naming the first tensor
    /// that does not fit.
    pub fn open(checkpoint_dir: &Path, kind: Kind, device: Device) -> Result<Model> {
        let config = Config::open(checkpoint_dir)?;
        let checkpoint = Checkpoint::open(checkpoint_dir)?;
        check_depth(&config, &checkpoint)?;
        let tensors = config.tensors();
        let places = locate(&tensors, spare(&config), &checkpoint)?;
        Model::build(config, &tensors, kind, device, places.iter().map(|&index| read(&checkpoint, index)))
    }

    /// Overwrites every weight in place. Checks all names, shapes and dtypes first: after an error that names
    /// a tensor, no weight has changed.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] naming the first tensor that does not fit.
    pub fn load_from(&mut self, weights: &dyn Snapshot) -> Result<()> {
        let places = locate(&self.config.tensors(), spare(&self.config), weights)?;
        tch::no_grad(|| {
            for (parameter, index) in self.parameters.iter_mut().zip(places) {
                fail::fail_point!("engine.load");
                parameter.tensor.f_copy_(&read(weights, index)?)?;
            }
            Ok(())
        })
    }

    /// Overwrites the weights by others of these shapes, in the order of [`Model::parameters`].
    pub(crate) fn copy_from(&mut self, weights: &[Tensor]) -> Result<()> {
        tch::no_grad(|| {
            for (parameter, weight) in self.parameters.iter_mut().zip(weights) {
                parameter.tensor.f_copy_(weight)?;
            }
            Ok(())
        })
    }

    /// Moves the weights to host memory, until [`Model::onload`]. The model cannot compute meanwhile.
    pub(crate) fn offload(&mut self) -> Result<()> {
        self.move_to(Device::Cpu)
    }

    /// Moves the weights back to the model's device.
    pub(crate) fn onload(&mut self) -> Result<()> {
        self.move_to(self.device)
    }

    fn move_to(&mut self, device: Device) -> Result<()> {
        for parameter in &mut self.parameters {
            let moved = parameter.tensor.f_detach()?.f_to_device(device)?;
            // The layers hold the same tensors, and see it too.
            parameter.tensor.f_set_data(&moved)?;
        }
        Ok(())
    }

    /// Takes the weights in the order of their names and shapes.
    pub(super) fn build(
        config: Config,
        tensors: &[(String, Vec<i64>)],
        kind: Kind,
        device: Device,
        weights: impl Iterator<Item = Result<Tensor>>,
    ) -> Result<Model> {
        config.check()?;
        if !matches!(kind, Kind::Float | Kind::BFloat16) {
            return Err(input("model kind", "Float or BFloat16", format!("{kind:?}")));
        }
        let mut parameters = Vec::new();
        for ((name, _), weight) in tensors.iter().zip(weights) {
            let tensor = weight?.f_to_device(device)?.f_to_kind(kind)?;
            parameters.push(Parameter { name: name.clone(), tensor });
        }
        let weights = Weights::new(&config, &parameters);
        let layers =
            (0..config.num_hidden_layers).map(|index| Layer::new(&config, &weights, index)).collect();
        let embedding = weights.tensor("model.embed_tokens.weight");
        let head_name = match config.tie_word_embeddings {
            _ if tensors.iter().any(|(name, _)| name == VALUE_HEAD) => "score",
            true => "model.embed_tokens",
            false => "lm_head",
        };
        let head = weights.linear(head_name);
        let norm = weights.norm("model.norm");
        let rope = Rope::new(&config, kind, device)?;
        Ok(Model { config, kind, device, parameters, embedding, layers, norm, head, head_name, rope })
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
    /// As for [`Model::packed`].
    pub fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let (rows, length) = tokens.size2()?;
        let lengths = vec![length; usize::try_from(rows).unwrap_or(0)];
        Ok(self.packed(&tokens.f_flatten(0, 1)?, &lengths)?.f_unflatten(0, [rows, length])?)
    }

    /// Last hidden states `[N, hidden]` of whole sequences that lie one after the other in `tokens` `[N]`
    /// (i64), of these `lengths`. None sees another.
    ///
    /// # Errors
    /// [`crate::Error::Input`] if a sequence is empty or longer than the model's positions, or the lengths do
    /// not add up to N; [`crate::Error::Torch`] for an id outside the vocabulary.
    pub fn packed(&self, tokens: &Tensor, lengths: &[i64]) -> Result<Tensor> {
        let plan = self.plan(tokens, lengths)?;
        self.run(tokens, |_, attention, x| attention.forward(x, &plan.angles, &plan.layout))
    }

    /// Where the sequences lie, and the angles of their positions.
    pub(super) fn plan(&self, tokens: &Tensor, lengths: &[i64]) -> Result<Plan> {
        let longest = self.config.max_position_embeddings;
        let layout = Layout::new(lengths, tokens.size1()?, longest, self.device)?;
        Ok(Plan { angles: self.rope.at(&layout.positions)?, layout })
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

    /// The weight of the output head, `[vocab, hidden]`.
    pub(crate) fn head(&self) -> &Tensor {
        &self.head.weight
    }

    /// Its place in [`Model::parameters`]; that of the embedding if they are tied.
    pub(crate) fn head_index(&self) -> usize {
        let name = format!("{}.weight", self.head_name);
        self.parameters.iter().position(|parameter| parameter.name == name).unwrap_or(0)
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
        let mut x = self.embed(tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, |attention, x| attend(index, attention, x))?;
        }
        self.norm.forward(&x)
    }

    pub(super) fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(Tensor::f_embedding(&self.embedding, tokens, -1, false, false)?)
    }
}

/// A tied model may come with its head spelled out, as Hugging Face tolerates.
fn spare(config: &Config) -> &'static [&'static str] {
    if config.tie_word_embeddings { &["lm_head.weight"] } else { &[] }
}

impl Layer {
    /// The residual stream after this layer; `attend(attention, normed x)`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        attend: impl FnOnce(&Attention, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let x = x.f_add(&attend(&self.attention, &self.input_norm.forward(x)?)?)?;
        Ok(x.f_add(&self.mlp.forward(&self.mlp_norm.forward(&x)?)?)?)
    }

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
