//! The weights of a model: from a checkpoint into its parts.

use std::collections::BTreeMap;

use driftless_transport::snapshot::TensorInfo;
use driftless_transport::{Dtype, Snapshot};
use tch::{Kind, Tensor};

use super::parts::{Linear, RmsNorm};
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

/// The weights by name, to build the parts from. All that [`Config::tensors`] names are there.
pub(super) struct Weights<'a> {
    by_name: BTreeMap<&'a str, &'a Tensor>,
    eps: f64,
}

impl<'a> Weights<'a> {
    pub(super) fn new(config: &Config, parameters: &'a [Parameter]) -> Weights<'a> {
        let by_name = parameters.iter().map(|p| (p.name.as_str(), &p.tensor)).collect();
        Weights { by_name, eps: config.rms_norm_eps }
    }

    pub(super) fn tensor(&self, name: &str) -> Tensor {
        self.by_name[name].shallow_clone()
    }

    /// The matrix `name.weight`, with `name.bias` if there is one.
    pub(super) fn linear(&self, name: &str) -> Linear {
        let bias = self.by_name.get(format!("{name}.bias").as_str()).map(|bias| bias.shallow_clone());
        Linear { weight: self.tensor(&format!("{name}.weight")), bias }
    }

    /// The norm `name.weight`.
    pub(super) fn norm(&self, name: &str) -> RmsNorm {
        RmsNorm { weight: self.tensor(&format!("{name}.weight")), eps: self.eps }
    }

    /// The norm `name.weight` if there is one.
    pub(super) fn norm_if_any(&self, name: &str) -> Option<RmsNorm> {
        self.by_name.contains_key(format!("{name}.weight").as_str()).then(|| self.norm(name))
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

/// Finds the model's tensors, in the order of `wanted`, after checking that `weights` are exactly the model's:
/// every name, shape and dtype. Those that `spare` names may be there beside them.
pub(super) fn locate(
    wanted: &[(String, Vec<i64>)],
    spare: &[&str],
    weights: &dyn Snapshot,
) -> Result<Vec<usize>> {
    let wrong = |name: &str, expected: String, found: String| Error::Tensor {
        name: name.to_owned(),
        expected,
        found,
    };
    let mut found: BTreeMap<&str, usize> =
        weights.tensors().iter().enumerate().map(|(index, tensor)| (tensor.name.as_str(), index)).collect();
    let mut places = Vec::new();
    for (name, shape) in wanted {
        let expected = || format!("{shape:?} of F32, BF16 or F16");
        let index = found.remove(name.as_str());
        let index = index.ok_or_else(|| wrong(name, expected(), "nothing".to_owned()))?;
        let tensor = &weights.tensors()[index];
        if kind_of(tensor.dtype).is_none() || shape_of(tensor) != *shape {
            return Err(wrong(name, expected(), format!("{:?} of {}", tensor.shape, tensor.dtype)));
        }
        places.push(index);
    }
    found.retain(|name, _| !spare.contains(name));
    match found.first_key_value() {
        Some((surplus, _)) => Err(wrong(surplus, "no such tensor".to_owned(), "one".to_owned())),
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
