//! What lies between matrix products, forward and backward: one kernel each on CUDA in bf16, else libtorch's
//! operations.
//!
//! The two agree to rounding: a kernel rounds to bf16 once, where Hugging Face's models, which `plain`
//! follows, round after every operation. Engines' kernels round once, too.

mod device;
mod kernels;
mod plain;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::config::Config;
use crate::error::Result;
use kernels::{Kernels, Machine, definitions};
pub(crate) use plain::pull;

/// Ways through these operations for one model.
#[derive(Clone, Debug)]
pub(crate) struct Ops {
    kernels: Option<Arc<Kernels>>,
    pub(crate) heads: Heads,
    eps: f64,
}

/// Cosines and sines of the positions of one pass, `[…, 1, head_dim / 2]`.
#[derive(Debug)]
pub(crate) struct Angles {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

/// How the columns of queries, keys and values, `[…, (heads + 2 kv heads) × head_dim]`, are shared out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) head_dim: i64,
}

impl Heads {
    fn of(config: &Config) -> Heads {
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        Heads { heads, kv_heads, head_dim: config.head_dim }
    }
}

/// Weights `[head_dim]` that queries and keys are normalised with.
pub(crate) type HeadNorms<'a> = Option<[&'a Tensor; 2]>;

/// Log-probs of some labels, and what the way back to the logits needs.
pub(crate) struct Scored {
    /// `[m]` f32: log-probs of the labels.
    pub(crate) log_probs: Tensor,
    /// `[m]` f32: entropies in nats, if they were asked for.
    pub(crate) entropy: Option<Tensor>,
    way: Way,
}

enum Way {
    /// Over the logits themselves.
    Kernels { logits: Tensor, entropy: Tensor, log_sum: Tensor },
    /// From the log-probs of the whole vocabulary.
    Plain { log_probs: Tensor, kind: Kind },
}

impl Ops {
    /// For a model of this shape, kind and device; compiles the kernels where there are some.
    ///
    /// # Errors
    /// [`crate::Error::Kernels`] if they do not compile or load.
    pub(crate) fn new(config: &Config, kind: Kind, device: Device) -> Result<Ops> {
        let kernels = match device {
            Device::Cuda(index) if kind == Kind::BFloat16 && Kernels::take(config) => {
                let device = device::Device::open(index, &definitions(config))?;
                Some(Arc::new(Kernels::new(Machine::Device(device), config)))
            }
            _ => None,
        };
        Ok(Ops { kernels, heads: Heads::of(config), eps: config.rms_norm_eps })
    }

    /// Kind of the tables that [`Angles`] are rows of, for a model of this kind.
    pub(crate) fn angle_kind(&self, kind: Kind) -> Kind {
        if self.kernels.is_some() { Kind::Float } else { kind }
    }

    /// RMSNorm over the last dimension: `x / sqrt(mean(x²) + eps) × weight`.
    pub(crate) fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        match &self.kernels {
            Some(kernels) => kernels.norm(x, weight),
            None => plain::norm(x, weight, self.eps),
        }
    }

    /// Back through [`Ops::norm`]: the gradient of `x`, to which `rest` is added, and that of the weight, f32.
    pub(crate) fn norm_backward(
        &self,
        gradient: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        rest: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        if let Some(kernels) = &self.kernels {
            return kernels.norm_backward(gradient, x, weight, rest);
        }
        let forward = |[x, weight]: [&Tensor; 2]| Ok(vec![plain::norm(x, weight, self.eps)?]);
        let [own, of_weight] = plain::backward([x, weight], &[gradient], forward)?;
        let own = rest.map_or_else(|| Ok(own.shallow_clone()), |rest| own.f_add(rest))?;
        Ok((own, of_weight.f_to_kind(Kind::Float)?))
    }

    /// Queries, keys and values `[…, heads, head_dim]`: the first two normed, if the model does that, and
    /// rotated by their positions.
    pub(crate) fn turn(&self, qkv: &Tensor, norms: HeadNorms<'_>, angles: &Angles) -> Result<[Tensor; 3]> {
        match &self.kernels {
            Some(kernels) => kernels.turn(qkv, norms, angles),
            None => plain::turn(qkv, norms, angles, self.heads, self.eps),
        }
    }

    /// Back through [`Ops::turn`]: the gradient of `qkv`, and those of the norms' weights, f32.
    pub(crate) fn turn_backward(
        &self,
        gradients: [&Tensor; 3],
        qkv: &Tensor,
        norms: HeadNorms<'_>,
        angles: &Angles,
    ) -> Result<(Tensor, Option<[Tensor; 2]>)> {
        if let Some(kernels) = &self.kernels {
            return kernels.turn_backward(gradients, qkv, norms, angles);
        }
        let forward = |qkv: &Tensor, norms: HeadNorms<'_>| {
            plain::turn(qkv, norms, angles, self.heads, self.eps).map(Vec::from)
        };
        let Some([query, key]) = norms else {
            let [own] = plain::backward([qkv], &gradients, |[qkv]| forward(qkv, None))?;
            return Ok((own, None));
        };
        let normed = |[qkv, query, key]: [&Tensor; 3]| forward(qkv, Some([query, key]));
        let [own, query, key] = plain::backward([qkv, query, key], &gradients, normed)?;
        Ok((own, Some([query.f_to_kind(Kind::Float)?, key.f_to_kind(Kind::Float)?])))
    }

    /// The middle of SwiGLU: `silu(gate) × up` `[…, width]`, of both side by side.
    pub(crate) fn gate(&self, gate_up: &Tensor) -> Result<Tensor> {
        match &self.kernels {
            Some(kernels) => kernels.gate(gate_up),
            None => plain::gate(gate_up),
        }
    }

    /// Back through [`Ops::gate`]: the gradient of `gate_up`, and the product again, which is not kept.
    pub(crate) fn gate_backward(&self, gradient: &Tensor, gate_up: &Tensor) -> Result<(Tensor, Tensor)> {
        if let Some(kernels) = &self.kernels {
            return kernels.gate_backward(gradient, gate_up);
        }
        let mut product = None;
        let forward = |[gate_up]: [&Tensor; 1]| {
            let forward = plain::gate(gate_up)?;
            product = Some(forward.f_detach()?);
            Ok(vec![forward])
        };
        let [own] = plain::backward([gate_up], &[gradient], forward)?;
        let product = product.map_or_else(|| plain::gate(gate_up), Ok)?;
        Ok((own, product))
    }

    /// Log-probs of `labels` `[m]` (i64) under `logits` `[m, vocab]`, which are divided by `temperature`; and
    /// entropies, if `entropy`. Takes the logits: the way back writes over them.
    pub(crate) fn score(
        &self,
        logits: Tensor,
        labels: &Tensor,
        temperature: f64,
        entropy: bool,
    ) -> Result<Scored> {
        if let Some(kernels) = self.kernels.as_ref().filter(|_| logits.size()[1] % 8 == 0) {
            let [log_probs, found, log_sum] = kernels.score(&logits, labels, temperature)?;
            let wanted = entropy.then(|| found.shallow_clone());
            let way = Way::Kernels { logits, entropy: found, log_sum };
            return Ok(Scored { log_probs, entropy: wanted, way });
        }
        let kind = logits.f_kind()?;
        let all = plain::log_softmax(&logits.f_to_kind(Kind::Float)?, temperature)?;
        let log_probs = all.f_gather(-1, &labels.f_unsqueeze(-1)?, false)?.f_squeeze_dim(-1)?;
        let entropy = if entropy { Some(plain::entropy(&all)?) } else { None };
        Ok(Scored { log_probs, entropy, way: Way::Plain { log_probs: all, kind } })
    }

    /// Back through [`Ops::score`]: the gradient of the logits, in their kind, from those of the log-probs and
    /// of the entropies.
    pub(crate) fn score_backward(
        &self,
        scored: Scored,
        labels: &Tensor,
        temperature: f64,
        gradient: &Tensor,
        entropy_gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        match (scored.way, &self.kernels) {
            (Way::Kernels { logits, entropy, log_sum }, Some(kernels)) => {
                let gradients = (gradient, entropy_gradient);
                kernels.score_backward(&logits, labels, &entropy, &log_sum, gradients, temperature)?;
                Ok(logits)
            }
            (Way::Kernels { logits, .. }, None) => Ok(logits),
            (Way::Plain { log_probs, kind }, _) => {
                let back =
                    plain::score_backward(&log_probs, labels, temperature, gradient, entropy_gradient)?;
                Ok(back.f_to_kind(kind)?)
            }
        }
    }
}

/// Log-probs `[…, V]` of a softmax over `logits` `[…, V]` (f32) divided by `temperature`, a scalar or a
/// column.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch refuses.
pub(crate) fn log_softmax(logits: &Tensor, temperature: &Tensor) -> Result<Tensor> {
    // By a tensor, not by a number: on CUDA libtorch multiplies by a number's reciprocal, which rounds
    // otherwise.
    Ok(logits.f_div(temperature)?.f_log_softmax(-1, Kind::Float)?)
}
