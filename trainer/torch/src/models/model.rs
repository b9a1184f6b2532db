//! The decoder that all families share: embedding, layers of attention and SwiGLU with RMSNorm before each,
//! tied or separate output head. All weights lie in one buffer.
//!
//! The arithmetic follows Hugging Face's models operation by operation, so that logits agree with theirs to
//! rounding.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use driftless_transport::{Checkpoint, Snapshot};
use tch::{Device, Kind, Tensor};

use super::attention::cached;
use super::cache::KvCache;
use super::critic::VALUE_HEAD;
use super::layer::Layer;
use super::layout::Layout;
use super::parts::Linear;
use super::rope::Rope;
use super::weights::{Parameter, Places, Weight, Weights, check_depth, locate, read};
use crate::config::Config;
use crate::error::{Result, input};
use crate::libtorch::Rest;
use crate::ops::{Angles, Ops};

/// A model of one of the [families](crate::Family) in one kind (`Float` or `BFloat16`) on one device.
#[derive(Debug)]
pub struct Model {
    config: Config,
    kind: Kind,
    device: Device,
    /// Where each weight lies in `flat`.
    pub(crate) places: Places,
    /// All weights.
    pub(crate) flat: Tensor,
    rest: Rest,
    pub(super) parts: Parts,
    /// What lies between its matrix products.
    pub(crate) ops: Ops,
    rope: Rope,
}

/// The weights as they take part, in the buffer.
#[derive(Debug)]
pub(super) struct Parts {
    /// Each of them, sorted by name.
    parameters: Vec<Parameter>,
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Weight,
    head: Linear,
}

/// What a forward pass over whole sequences needs besides their tokens.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    pub(super) angles: Angles,
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
            for (parameter, index) in self.parts.parameters.iter_mut().zip(places) {
                fail::fail_point!("engine.load");
                parameter.tensor.f_copy_(&read(weights, index)?)?;
            }
            Ok(())
        })
    }

    /// Overwrites the weights by others of these shapes, in the order of [`Model::parameters`].
    pub(crate) fn copy_from(&mut self, weights: &[Tensor]) -> Result<()> {
        tch::no_grad(|| {
            for (parameter, weight) in self.parts.parameters.iter_mut().zip(weights) {
                parameter.tensor.f_copy_(weight)?;
            }
            Ok(())
        })
    }

    /// Moves the weights. Elsewhere than on its device the model cannot compute.
    pub(crate) fn move_to(&mut self, device: Device) -> Result<()> {
        self.flat = self.rest.moved(&self.flat, device)?;
        self.parts = Parts::new(&self.config, &self.places, &self.flat)?;
        Ok(())
    }

    /// Takes the weights in the order of their names and shapes, which are sorted.
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
        let places = Places::new(tensors);
        let flat = Tensor::f_zeros([places.length], (kind, device))?;
        for ((_, span), weight) in places.spans().zip(weights) {
            span.of(&flat)?.f_copy_(&weight?)?;
        }
        let ops = Ops::new(&config, kind, device)?;
        let parts = Parts::new(&config, &places, &flat)?;
        let rope = Rope::new(&config, ops.angle_kind(kind), device)?;
        Ok(Model { config, kind, device, places, flat, rest: Rest::default(), parts, ops, rope })
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

    /// All weights, sorted by name; a tied head is not listed. The tensors share memory with the model.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parts.parameters
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
        self.run(tokens, |index, x| self.layer_once(index, x, &plan))
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
        let hidden = self.run(tokens, |index, x| {
            let attend = |[query, key, value]: [Tensor; 3]| {
                let (keys, values) = cache.extend(index, &window, &key, &value)?;
                Ok((cached(&query, &keys, &values, &window.mask)?, ()))
            };
            Ok(self.parts.layers[index].forward(&self.ops, x, &angles, attend)?.0)
        })?;
        cache.commit(lengths, slots);
        Ok(hidden)
    }

    /// The output head.
    pub(crate) fn head(&self) -> &Linear {
        &self.parts.head
    }

    /// Logits `[…, vocab]`, f32, of hidden states `[…, hidden]`.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for another width.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.parts.head.forward(hidden)?.f_to_kind(Kind::Float)?)
    }

    /// Logits `[B, T, vocab]`, f32, of whole sequences: [`Model::logits`] of [`Model::hidden`].
    ///
    /// # Errors
    /// As those two.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.logits(&self.hidden(tokens)?)
    }

    /// The residual stream through all layers; `layer(index, x)`.
    fn run(
        &self,
        tokens: &Tensor,
        mut layer: impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = self.embed(tokens)?;
        for index in 0..self.parts.layers.len() {
            x = layer(index, &x)?;
        }
        self.ops.norm(&x, &self.parts.norm.tensor)
    }

    pub(super) fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(Tensor::f_embedding(&self.parts.embedding.tensor, tokens, -1, false, false)?)
    }
}

impl Parts {
    fn new(config: &Config, places: &Places, flat: &Tensor) -> Result<Parts> {
        let weights = Weights { places, flat };
        let parameters = places
            .spans()
            .map(|(name, span)| Ok(Parameter { name: name.to_owned(), tensor: span.of(flat)? }));
        let layers = (0..config.num_hidden_layers).map(|index| Layer::new(&weights, index));
        let embedding = "model.embed_tokens.weight";
        let head = match weights.find(VALUE_HEAD)? {
            Some(head) => head,
            None => weights.get(if config.tie_word_embeddings { embedding } else { "lm_head.weight" })?,
        };
        Ok(Parts {
            parameters: parameters.collect::<Result<_>>()?,
            embedding: weights.get(embedding)?,
            layers: layers.collect::<Result<_>>()?,
            norm: weights.get("model.norm.weight")?,
            head: Linear { weight: head, bias: None },
        })
    }
}

/// A tied model may come with its head spelled out, as Hugging Face tolerates.
fn spare(config: &Config) -> &'static [&'static str] {
    if config.tie_word_embeddings { &["lm_head.weight"] } else { &[] }
}
