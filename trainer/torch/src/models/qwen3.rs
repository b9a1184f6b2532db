//! Qwen3 dense (`Qwen3ForCausalLM`): grouped-query attention with normalised queries and keys, rotary
//! positions, SwiGLU, RMSNorm before each block, tied or separate output head.
//!
//! The arithmetic follows Hugging Face's `modeling_qwen3.py` operation by operation, so that logits agree with
//! it to rounding.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use driftless_transport::{Checkpoint, Dtype, Snapshot, TensorInfo};
use tch::{Device, Kind, Tensor};

use super::cache::{KvCache, Window};
use super::rope::{Angles, Rope};
use crate::config::Config;
use crate::error::{Error, Result, input};
use crate::torch::tensor_of;

/// One weight of a model.
#[derive(Debug)]
pub struct Parameter {
    /// Hugging Face name.
    pub name: String,
    /// The weight in the model's kind, on its device.
    pub tensor: Tensor,
}

/// A Qwen3 dense model in one kind (`Float` or `BFloat16`) on one device.
#[derive(Debug)]
pub struct Qwen3 {
    config: Config,
    kind: Kind,
    device: Device,
    parameters: Vec<Parameter>,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Tensor,
    rope: Rope,
}

#[derive(Debug)]
struct Layer {
    input_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

#[derive(Debug)]
struct Attention {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    query_norm: RmsNorm,
    key_norm: RmsNorm,
    heads: i64,
    kv_heads: i64,
}

#[derive(Debug)]
struct Mlp {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

#[derive(Debug)]
struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl Qwen3 {
    /// A model with fresh weights: matrices normal with `initializer_range`, norms one.
    ///
    /// Reseeds libtorch's generator, so the weights are a function of `seed` alone.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Input`] for another kind, or [`Error::Torch`] when the memory is not there.
    pub fn fresh(config: Config, seed: i64, kind: Kind, device: Device) -> Result<Qwen3> {
        // The generator is the process's: of two models that are made at once, each would disturb the other's draws.
        static GENERATOR: Mutex<()> = Mutex::new(());
        let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(seed);
        let (tensors, range) = (config.tensors(), config.initializer_range);
        let weights = tensors.iter().map(|(_, shape)| {
            let float = (Kind::Float, Device::Cpu);
            Ok(match shape.as_slice() {
                [_] => Tensor::f_ones(shape, float)?,
                _ => Tensor::f_randn(shape, float)?.f_mul_scalar(range)?,
            })
        });
        Qwen3::build(config, kind, device, weights)
    }

    /// Loads a checkpoint directory: `config.json` and safetensors of dtype F32, BF16 or F16.
    ///
    /// # Errors
    /// [`Error::Config`] for an unsupported model, [`Error::Tensor`] naming the first tensor that does not fit.
    pub fn open(checkpoint_dir: &Path, kind: Kind, device: Device) -> Result<Qwen3> {
        let config = Config::open(checkpoint_dir)?;
        let checkpoint = Checkpoint::open(checkpoint_dir)?;
        let places = locate(&config, &checkpoint)?;
        Qwen3::build(config, kind, device, places.iter().map(|&index| read(&checkpoint, index)))
    }

    /// Overwrites every weight in place. Checks all names, shapes and dtypes first: after an error that names a
    /// tensor, no weight has changed.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming the first tensor that does not fit.
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
    ) -> Result<Qwen3> {
        config.check()?;
        if !matches!(kind, Kind::Float | Kind::BFloat16) {
            return Err(input("model kind", "Float or BFloat16", format!("{kind:?}")));
        }
        let mut parameters = Vec::new();
        for ((name, _), weight) in config.tensors().into_iter().zip(weights) {
            let tensor = weight?.f_to_device(device)?.f_to_kind(kind)?;
            parameters.push(Parameter { name, tensor });
        }
        let by_name: BTreeMap<&str, &Tensor> =
            parameters.iter().map(|p| (p.name.as_str(), &p.tensor)).collect();
        let get = |name: &str| by_name[name].shallow_clone();
        let norm = |name: &str| RmsNorm { weight: get(name), eps: config.rms_norm_eps };
        let layers = (0..config.num_hidden_layers)
            .map(|index| {
                let name = |part: &str| format!("model.layers.{index}.{part}.weight");
                Layer {
                    input_norm: norm(&name("input_layernorm")),
                    attention: Attention {
                        query: get(&name("self_attn.q_proj")),
                        key: get(&name("self_attn.k_proj")),
                        value: get(&name("self_attn.v_proj")),
                        output: get(&name("self_attn.o_proj")),
                        query_norm: norm(&name("self_attn.q_norm")),
                        key_norm: norm(&name("self_attn.k_norm")),
                        heads: config.num_attention_heads,
                        kv_heads: config.num_key_value_heads,
                    },
                    mlp_norm: norm(&name("post_attention_layernorm")),
                    mlp: Mlp {
                        gate: get(&name("mlp.gate_proj")),
                        up: get(&name("mlp.up_proj")),
                        down: get(&name("mlp.down_proj")),
                    },
                }
            })
            .collect();
        let embedding = get("model.embed_tokens.weight");
        let head = match config.tie_word_embeddings {
            true => embedding.shallow_clone(),
            false => get("lm_head.weight"),
        };
        let norm = norm("model.norm.weight");
        let rope = Rope::new(&config, kind, device)?;
        Ok(Qwen3 { config, kind, device, parameters, embedding, layers, norm, head, rope })
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
    /// [`Error::Torch`] when the memory is not there.
    pub fn cache(&self, slots: usize) -> Result<KvCache> {
        KvCache::new(&self.config, slots, self.kind, self.device)
    }

    /// Last hidden states `[B, T, hidden]` of whole sequences `tokens` `[B, T]` (i64, right-padded with any
    /// valid id). A position sees only those before it, so padding changes nothing left of it.
    ///
    /// # Errors
    /// [`Error::Input`] if the sequences are longer than the model's positions, [`Error::Torch`] for an id
    /// outside the vocabulary.
    pub fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, length) = tokens.size2()?;
        if length > self.config.max_position_embeddings {
            return Err(input("sequence length", self.config.max_position_embeddings, length));
        }
        let angles = self.rope.leading(length)?;
        self.run(tokens, |_, attention, x| attention.forward(x, &angles))
    }

    /// Continues sequences in a cache: `tokens` `[R, T]` (i64) hold `lengths[r]` new tokens for slot
    /// `slots[r]`, right-padded with any valid id. Returns hidden states `[R, T, hidden]`; those at padding mean
    /// nothing. On an error no sequence has grown. Meant for `tch::no_grad`.
    ///
    /// # Errors
    /// [`Error::Input`] for a slot named twice or not there, a length outside `1..=T`, or a sequence that would
    /// outgrow the model's positions; [`Error::Torch`] for an id outside the vocabulary or lack of memory.
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
    /// [`Error::Torch`] for another width.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(linear(hidden, &self.head)?.f_to_kind(Kind::Float)?)
    }

    /// Logits `[B, T, vocab]`, f32, of whole sequences: [`Qwen3::logits`] of [`Qwen3::hidden`].
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

impl Attention {
    fn forward(&self, x: &Tensor, angles: &Angles) -> Result<Tensor> {
        let (query, key, value) = self.project(x, angles)?;
        self.mix(&query, &key, &value, None)
    }

    fn extend(
        &self,
        x: &Tensor,
        angles: &Angles,
        layer: usize,
        window: &Window,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let (query, key, value) = self.project(x, angles)?;
        let (keys, values) = cache.extend(layer, window, &key, &value)?;
        self.mix(&query, &keys, &values, Some(&window.mask))
    }

    /// `[B, T, hidden]` to queries, keys and values `[B, T, heads, head_dim]`, normed and rotated.
    fn project(&self, x: &Tensor, angles: &Angles) -> Result<(Tensor, Tensor, Tensor)> {
        let heads = |weight: &Tensor, count: i64| linear(x, weight)?.f_unflatten(-1, [count, -1]);
        let query = self.query_norm.forward(&heads(&self.query, self.heads)?)?;
        let key = self.key_norm.forward(&heads(&self.key, self.kv_heads)?)?;
        let value = heads(&self.value, self.kv_heads)?;
        Ok((angles.rotate(&query)?, angles.rotate(&key)?, value))
    }

    /// Attention proper; causal when there is no mask.
    fn mix(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let mixed = Tensor::f_scaled_dot_product_attention(
            &query.f_transpose(1, 2)?,
            &key.f_transpose(1, 2)?,
            &value.f_transpose(1, 2)?,
            mask,
            0.0,
            mask.is_none(),
            None,
            self.heads != self.kv_heads,
        )?;
        Ok(linear(&mixed.f_transpose(1, 2)?.f_flatten(2, 3)?, &self.output)?)
    }
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = linear(x, &self.gate)?.f_silu()?;
        Ok(linear(&gate.f_mul(&linear(x, &self.up)?)?, &self.down)?)
    }
}

impl RmsNorm {
    /// `x / sqrt(mean(x²) + eps) * weight` over the last dimension, the mean in f32.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let kind = x.f_kind()?;
        let wide = x.f_to_kind(Kind::Float)?;
        let square = wide.f_mul(&wide)?.f_mean_dim(-1, true, Kind::Float)?;
        let scale = square.f_add_scalar(self.eps)?.f_rsqrt()?;
        Ok(wide.f_mul(&scale)?.f_to_kind(kind)?.f_mul(&self.weight)?)
    }
}

/// `x weightᵀ`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor, tch::TchError> {
    x.f_linear::<&Tensor>(weight, None)
}

/// Finds the model's tensors, in the order of [`Config::tensors`], after checking that `weights` are exactly the
/// model's: every name, shape and dtype. A tied model may come with its head spelled out, as Hugging Face tolerates.
fn locate(config: &Config, weights: &dyn Snapshot) -> Result<Vec<usize>> {
    let wrong = |name: &str, expected: String, found: String| Error::Tensor {
        name: name.to_owned(),
        expected,
        found,
    };
    let tensors = weights.tensors().len();
    // Before the names of them all are made, which a damaged config may want millions of.
    if usize::try_from(config.num_hidden_layers).map_or(true, |layers| layers > tensors) {
        let (expected, found) =
            (format!("at most the {tensors} tensors"), config.num_hidden_layers.to_string());
        return Err(Error::Config { field: "num_hidden_layers", expected, found });
    }
    let mut found: BTreeMap<&str, usize> =
        weights.tensors().iter().enumerate().map(|(index, tensor)| (tensor.name.as_str(), index)).collect();
    let mut places = Vec::new();
    for (name, shape) in config.tensors() {
        let expected = || format!("{shape:?} of F32, BF16 or F16");
        let index = found.remove(name.as_str());
        let index = index.ok_or_else(|| wrong(&name, expected(), "nothing".to_owned()))?;
        let tensor = &weights.tensors()[index];
        if kind_of(tensor.dtype).is_none() || shape_of(tensor) != shape {
            return Err(wrong(&name, expected(), format!("{:?} of {}", tensor.shape, tensor.dtype)));
        }
        places.push(index);
    }
    if config.tie_word_embeddings {
        found.remove("lm_head.weight");
    }
    match found.first_key_value() {
        Some((surplus, _)) => Err(wrong(surplus, "no such tensor".to_owned(), "one".to_owned())),
        None => Ok(places),
    }
}

/// Reads a tensor that [`locate`] has checked.
fn read(weights: &dyn Snapshot, index: usize) -> Result<Tensor> {
    let tensor = &weights.tensors()[index];
    let kind = kind_of(tensor.dtype).ok_or_else(|| input("dtype", "F32, BF16 or F16", tensor.dtype))?;
    tensor_of(&weights.bytes(index)?, &shape_of(tensor), kind)
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::Bf16 => Some(Kind::BFloat16),
        Dtype::F16 => Some(Kind::Half),
        _ => None,
    }
}

/// Extents as libtorch counts them. One beyond its range equals no extent of a model.
fn shape_of(tensor: &TensorInfo) -> Vec<i64> {
    tensor.shape.iter().map(|&extent| i64::try_from(extent).unwrap_or(-1)).collect()
}
