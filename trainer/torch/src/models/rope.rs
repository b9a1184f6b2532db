//! Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face's Llama and Qwen.

use tch::{Device, Kind, Tensor};

use crate::config::{Config, RopeScaling};
use crate::error::Result;
use crate::ops::Angles;

/// Cosines and sines of every position: `[max_position_embeddings, head_dim / 2]`.
#[derive(Debug)]
pub(super) struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub(super) fn new(config: &Config, kind: Kind, device: Device) -> Result<Rope> {
        let float = (Kind::Float, device);
        let exponents = Tensor::f_arange_start_step(0, config.head_dim, 2, float)?
            .f_div_scalar(config.head_dim as f64)?;
        let mut frequencies =
            Tensor::f_full([1], config.rope_theta, float)?.f_pow(&exponents)?.f_reciprocal()?;
        if let Some(scaling) = &config.rope_scaling {
            frequencies = stretched(&frequencies, scaling)?;
        }
        let positions = Tensor::f_arange(config.max_position_embeddings, float)?;
        let angles = positions.f_outer(&frequencies)?;
        Ok(Rope { cos: angles.f_cos()?.f_to_kind(kind)?, sin: angles.f_sin()?.f_to_kind(kind)? })
    }

    /// Angles of `positions`, i64 of any shape.
    pub(super) fn at(&self, positions: &Tensor) -> Result<Angles> {
        let flat = positions.f_flatten(0, -1)?;
        let shape: Vec<i64> = positions.size().into_iter().chain([1, -1]).collect();
        let rows = |table: &Tensor| table.f_index_select(0, &flat)?.f_view(shape.as_slice());
        Ok(Angles { cos: rows(&self.cos)?, sin: rows(&self.sin)? })
    }
}

/// As `_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`, operation by operation.
fn stretched(frequencies: &Tensor, scaling: &RopeScaling) -> Result<Tensor> {
    let original = scaling.original_max_position_embeddings as f64;
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    let waves = frequencies.f_reciprocal()?.f_mul_scalar(2.0 * std::f64::consts::PI)?;
    let (long, short) = (waves.f_gt(original / low)?, waves.f_lt(original / high)?);
    // 0 at the long end of the middle band, 1 at the short end.
    let share = waves.f_reciprocal()?.f_mul_scalar(original)?.f_sub_scalar(low)?.f_div_scalar(high - low)?;
    let rest = share.f_neg()?.f_add_scalar(1.0)?;
    let between = rest.f_mul(frequencies)?.f_div_scalar(scaling.factor)?.f_add(&share.f_mul(frequencies)?)?;
    let ends = frequencies.f_div_scalar(scaling.factor)?.f_where_self(&long, frequencies)?;
    Ok(ends.f_where_self(&long.f_logical_or(&short)?, &between)?)
}
