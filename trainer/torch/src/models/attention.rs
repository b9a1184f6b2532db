//! Grouped-query attention with rotary positions.

use tch::Tensor;

use super::cache::{KvCache, Window};
use super::parts::{Linear, RmsNorm};
use super::rope::Angles;
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Attention {
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    pub(super) output: Linear,
    /// Over the width of a head, in families that have them.
    pub(super) query_norm: Option<RmsNorm>,
    pub(super) key_norm: Option<RmsNorm>,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
}

impl Attention {
    /// Over whole sequences `[B, T, hidden]`.
    pub(super) fn forward(&self, x: &Tensor, angles: &Angles) -> Result<Tensor> {
        let (query, key, value) = self.project(x, angles)?;
        self.mix(&query, &key, &value, None)
    }

    /// Over new tokens `[R, T, hidden]` and what the cache holds of their sequences.
    pub(super) fn extend(
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
        let heads = |part: &Linear, count: i64| -> Result<Tensor> {
            Ok(part.forward(x)?.f_unflatten(-1, [count, -1])?)
        };
        let normed = |x: Tensor, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        };
        let query = normed(heads(&self.query, self.heads)?, &self.query_norm)?;
        let key = normed(heads(&self.key, self.kv_heads)?, &self.key_norm)?;
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
        self.output.forward(&mixed.f_transpose(1, 2)?.f_flatten(2, 3)?)
    }
}
