//! Grouped-query attention with rotary positions.

use tch::{Device, Kind, Tensor};

use super::cache::{KvCache, Window};
use super::flash;
use super::layout::{Layout, Run};
use super::parts::{Linear, RmsNorm};
use super::rope::Angles;
use crate::error::Result;

/// The CPU's kernel sums over keys in vectors of so many. With a number of keys that they divide, a query's
/// result does not depend on how many keys its mask hides: a token alone, after a cache, gets the bits that
/// it gets in its sequence.
pub(super) const KEYS: i64 = 16;

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
    /// Over whole sequences `[N, hidden]`.
    pub(super) fn forward(&self, x: &Tensor, angles: &Angles, layout: &Layout) -> Result<Tensor> {
        let (query, key, value) = self.project(x, angles)?;
        let mixed = match layout.runs.as_slice() {
            [run] => self.run(&query, &key, &value, *run)?,
            _ if flash::takes(&query) => flash::attention(&query, &key, &value, &layout.bounds)?,
            runs => {
                let mixed = runs.iter().map(|run| self.run(&query, &key, &value, *run));
                Tensor::f_cat(&mixed.collect::<Result<Vec<_>>>()?, 0)?
            }
        };
        self.output.forward(&mixed.f_flatten(1, 2)?)
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
        let mixed = self.mix(&query, &keys, &values, Some(&window.mask))?;
        self.output.forward(&mixed.f_flatten(2, 3)?)
    }

    /// `[…, hidden]` to queries, keys and values `[…, heads, head_dim]`, normed and rotated.
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

    /// Causal attention `[count × length, heads, head_dim]` within the sequences of a run.
    fn run(&self, query: &Tensor, key: &Tensor, value: &Tensor, run: Run) -> Result<Tensor> {
        let Run { start, count, length } = run;
        let padding = match query.device() {
            Device::Cpu => (KEYS - length % KEYS) % KEYS,
            _ => 0,
        };
        let rows = |x: &Tensor| {
            let rows = x.f_narrow(0, start, count * length)?.f_unflatten(0, [count, length])?;
            if padding == 0 { Ok(rows) } else { rows.f_constant_pad_nd([0, 0, 0, 0, 0, padding]) }
        };
        let mixed = self.mix(&rows(query)?, &rows(key)?, &rows(value)?, None)?;
        Ok(mixed.f_narrow(1, 0, length)?.f_flatten(0, 1)?)
    }

    /// Attention proper over `[B, T, heads, head_dim]`; causal when there is no mask.
    fn mix(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let grouped = self.heads != self.kv_heads;
        // Of CUDA's kernels only those for 16 bits share keys between heads; in f32 that would be the one
        // that stores every score.
        let spread = grouped && query.device().is_cuda() && query.f_kind()? == Kind::Float;
        let heads = |x: &Tensor| {
            let heads = x.f_transpose(1, 2)?;
            if !spread {
                return Ok(heads);
            }
            heads.f_repeat_interleave_self_int(self.heads / self.kv_heads, 1, None)
        };
        let mixed = Tensor::f_scaled_dot_product_attention(
            &query.f_transpose(1, 2)?,
            &heads(key)?,
            &heads(value)?,
            mask,
            0.0,
            mask.is_none(),
            None,
            grouped && !spread,
        )?;
        Ok(mixed.f_transpose(1, 2)?)
    }
}
