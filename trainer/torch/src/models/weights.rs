//! The weights of a model: from a checkpoint into one buffer, and out of it.

use std::collections::BTreeMap;

use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Dtype, Snapshot};
use tch::{Kind, Tensor};

use crate::config::Config;
use crate::error::{Error, Result, input};
use crate::libtorch::tensor_of;

/// The buffer's length is a multiple of this, so that up to eight ranks can have equal parts of it, each of
/// which begins at a multiple of 16 elements: 840 is the least number that 1 to 8 divide.
const PADDING: i64 = 840 * 16;

/// One weight of a model.
#[derive(Debug)]
pub struct Parameter {
    /// Hugging Face name.
    pub name: String,
    /// The weight in the model's kind, on its device.
    pub tensor: Tensor,
}

/// Where a weight, or neighbours that are taken as one, lie in a flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: i64,
    pub(crate) shape: Vec<i64>,
}

impl Span {
    /// That part of the buffer, of the weight's shape.
    pub(crate) fn of(&self, flat: &Tensor) -> Result<Tensor> {
        Ok(flat.f_narrow(0, self.start, self.length())?.f_view(self.shape.as_slice())?)
    }

    /// Its elements.
    pub(crate) fn length(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// A part of the buffer that takes part in the computation.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) tensor: Tensor,
    pub(crate) span: Span,
}

/// Where each weight lies: matrices first, which are what decays, and side by side what is multiplied as one.
#[derive(Debug)]
pub(crate) struct Places {
    spans: BTreeMap<String, Span>,
    /// Elements of the matrices.
    pub(crate) matrices: i64,
    /// Elements of the buffer.
    pub(crate) length: i64,
}

impl Places {
    pub(super) fn new(tensors: &[(String, Vec<i64>)]) -> Places {
        let order = |name: &str, shape: &[i64]| {
            let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
            let (layer, part) = module.rsplit_once('.').unwrap_or(("", module));
            // Queries, keys, values; the others are in order by their names.
            let rank = ["q_proj", "k_proj", "v_proj"].iter().position(|name| *name == part).unwrap_or(3);
            (shape.len() == 1, layer.to_owned(), rank, part.to_owned())
        };
        let mut sorted: Vec<_> = tensors.iter().collect();
        sorted.sort_by_cached_key(|(name, shape)| order(name, shape));
        let (mut spans, mut start, mut matrices) = (BTreeMap::new(), 0, 0);
        for (name, shape) in sorted {
            spans.insert(name.clone(), Span { start, shape: shape.clone() });
            start += shape.iter().product::<i64>();
            if shape.len() > 1 {
                matrices = start;
            }
        }
        let length = (start + PADDING - 1) / PADDING * PADDING;
        Places { spans, matrices, length }
    }

    /// Where the weight of this name lies.
    pub(crate) fn span(&self, name: &str) -> Option<&Span> {
        self.spans.get(name)
    }

    /// The weights, sorted by name.
    pub(crate) fn spans(&self) -> impl Iterator<Item = (&str, &Span)> {
        self.spans.iter().map(|(name, span)| (name.as_str(), span))
    }
}

/// The weights by name, to build the parts from.
pub(super) struct Weights<'a> {
    pub(super) places: &'a Places,
    pub(super) flat: &'a Tensor,
}

impl Weights<'_> {
    /// The weight `name`, if there is one.
    pub(super) fn find(&self, name: &str) -> Result<Option<Weight>> {
        self.places
            .span(name)
            .map(|span| Ok(Weight { tensor: span.of(self.flat)?, span: span.clone() }))
            .transpose()
    }

    /// The weight `name`.
    pub(super) fn get(&self, name: &str) -> Result<Weight> {
        self.find(name)?.ok_or_else(|| missing(name))
    }

    /// Weights of these names, one below the other, which is how they lie.
    pub(super) fn joined(&self, names: &[String]) -> Result<Weight> {
        let spans = names.iter().map(|name| self.places.span(name).ok_or_else(|| missing(name)));
        let spans = spans.collect::<Result<Vec<_>>>()?;
        let mut joined = Span { start: spans[0].start, shape: spans[0].shape.clone() };
        joined.shape[0] = spans.iter().map(|span| span.shape[0]).sum();
        Ok(Weight { tensor: joined.of(self.flat)?, span: joined })
    }
}

/// Refuses a config of more layers than there are tensors, before the names of them all are made: a damaged one may
/// want millions.
pub(super) fn check_depth(config: &Config, weights: &dyn Snapshot) -> Result<()> {
    let tensors = weights.tensors().len();
    if usize::try_from(config.num_hidden_layers).is_ok_and(|layers| layers <= tensors) {
        return Ok(());
    }
    let (expected, found) = (format!("at most the {tensors} tensors"), config.num_hidden_layers.to_string());
    Err(Error::Config { field: "num_hidden_layers", expected, found })
}

fn missing(name: &str) -> Error {
    wrong(name, "one".to_owned(), "none")
}

fn wrong(name: &str, expected: String, found: impl Into<String>) -> Error {
    Error::Tensor { name: name.to_owned(), expected, found: found.into() }
}

/// Finds the model's tensors, in the order of `wanted`, after checking that `weights` are exactly the model's:
/// every name, shape and dtype. Those that `spare` names may be there beside them.
pub(super) fn locate(
    wanted: &[(String, Vec<i64>)],
    spare: &[&str],
    weights: &dyn Snapshot,
) -> Result<Vec<usize>> {
    let mut found: BTreeMap<&str, usize> =
        weights.tensors().iter().enumerate().map(|(index, tensor)| (tensor.name.as_str(), index)).collect();
    let mut places = Vec::new();
    for (name, shape) in wanted {
        let expected = || format!("{shape:?} of F32, BF16 or F16");
        let index = found.remove(name.as_str());
        let index = index.ok_or_else(|| wrong(name, expected(), "nothing"))?;
        let tensor = &weights.tensors()[index];
        if kind_of(tensor.dtype).is_none() || shape_of(tensor) != *shape {
            return Err(wrong(name, expected(), format!("{:?} of {}", tensor.shape, tensor.dtype)));
        }
        places.push(index);
    }
    found.retain(|name, _| !spare.contains(name));
    match found.first_key_value() {
        Some((surplus, _)) => Err(wrong(surplus, "no such tensor".to_owned(), "one")),
        None => Ok(places),
    }
}

/// Reads a tensor that [`locate`] has checked.
pub(super) fn read(weights: &dyn Snapshot, index: usize) -> Result<Tensor> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_cover_the_buffer_with_matrices_first() {
        let name = |layer: &str, part: &str| format!("model.layers.{layer}.{part}");
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![10, 4]),
            ("model.norm.weight".to_owned(), vec![4]),
        ];
        for layer in ["0", "10", "2"] {
            for (part, shape) in [
                ("self_attn.k_proj.bias", vec![2]),
                ("self_attn.k_proj.weight", vec![2, 4]),
                ("self_attn.o_proj.weight", vec![4, 6]),
                ("self_attn.q_proj.bias", vec![6]),
                ("self_attn.q_proj.weight", vec![6, 4]),
                ("self_attn.v_proj.bias", vec![2]),
                ("self_attn.v_proj.weight", vec![2, 4]),
                ("mlp.gate_proj.weight", vec![8, 4]),
                ("mlp.up_proj.weight", vec![8, 4]),
            ] {
                tensors.push((name(layer, part), shape));
            }
        }
        let places = Places::new(&tensors);
        let mut spans: Vec<_> =
            places.spans().map(|(_, span)| (span.start, span.shape.iter().product::<i64>())).collect();
        spans.sort_unstable();
        let mut end = 0;
        for (start, length) in spans {
            assert_eq!(start, end);
            end += length;
        }
        assert!(end <= places.length && places.length % PADDING == 0);
        for (_, span) in places.spans() {
            assert_eq!(span.shape.len() > 1, span.start < places.matrices);
        }
        let flat = Tensor::zeros([places.length], (Kind::Float, tch::Device::Cpu));
        let weights = Weights { places: &places, flat: &flat };
        for layer in ["0", "10", "2"] {
            for kind in ["weight", "bias"] {
                let names = ["q", "k", "v"].map(|part| name(layer, &format!("self_attn.{part}_proj.{kind}")));
                let joined = weights.joined(&names).unwrap();
                let [q, k, v] = names.each_ref().map(|name| places.span(name).unwrap());
                let lengths = [q, k].map(|span| span.shape.iter().product::<i64>());
                assert_eq!((k.start, v.start), (q.start + lengths[0], k.start + lengths[1]));
                assert_eq!((joined.span.start, joined.span.shape[0]), (q.start, 10));
            }
            let [gate, up] = ["gate", "up"]
                .map(|part| places.span(&name(layer, &format!("mlp.{part}_proj.weight"))).unwrap());
            assert_eq!(up.start, gate.start + 32);
        }
    }
}
