//! Keys and values of sequences in progress, one slot per sequence.

use tch::{Device, Kind, Tensor};

use super::attention::{padded_keys, padded_queries};
use crate::config::Config;
use crate::error::{Result, input};

/// Keys and values of up to `slots` sequences, each of its own length.
///
/// A slot is a row: sequences enter and leave without moving the others, so that an engine can batch
/// continuously. Memory is `slots × capacity` positions; the capacity doubles when a sequence outgrows it.
#[derive(Debug)]
pub struct KvCache {
    /// Per layer: `[slots, capacity, kv heads, head_dim]`. The capacity may go past the last position, as
    /// reads do.
    layers: Vec<(Tensor, Tensor)>,
    lengths: Vec<i64>,
    capacity: i64,
    longest: i64,
}

/// Where one forward pass writes and what it may look at.
pub(super) struct Window {
    /// `[R, 1]` i64: slot of each row.
    slots: Tensor,
    /// First slot when the rows are consecutive slots: they are then read without a copy.
    consecutive: Option<i64>,
    /// `[R, T]` i64: position of each new token.
    pub(super) positions: Tensor,
    /// `[R, 1, T and padding, K]` bool: true where a new token may attend to a cached one.
    pub(super) mask: Tensor,
    rows: i64,
    keys: i64,
}

impl KvCache {
    /// An empty cache for `slots` sequences of a model.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when the memory is not there.
    pub fn new(config: &Config, slots: usize, kind: Kind, device: Device) -> Result<KvCache> {
        let capacity = 32.min(config.max_position_embeddings);
        let shape = [slots as i64, capacity, config.num_key_value_heads, config.head_dim];
        let empty = || Tensor::f_zeros(shape, (kind, device));
        let layers =
            (0..config.num_hidden_layers).map(|_| Ok((empty()?, empty()?))).collect::<Result<_>>()?;
        Ok(KvCache { layers, lengths: vec![0; slots], capacity, longest: config.max_position_embeddings })
    }

    /// Tokens held for a slot; 0 for a slot that does not exist.
    #[must_use]
    pub fn length(&self, slot: usize) -> usize {
        self.lengths.get(slot).map_or(0, |&length| length as usize)
    }

    /// Forgets a slot's tokens from `length` on; `truncate(slot, 0)` frees the slot.
    pub fn truncate(&mut self, slot: usize, length: usize) {
        if let Some(held) = self.lengths.get_mut(slot) {
            *held = (*held).min(length as i64);
        }
    }

    /// Checks the rows, makes room for them, and plans the pass. Changes no length: see [`KvCache::commit`].
    pub(super) fn window(&mut self, width: i64, lengths: &[usize], slots: &[usize]) -> Result<Window> {
        let device = self.layers.first().map_or(Device::Cpu, |(keys, _)| keys.device());
        let mut starts = Vec::with_capacity(slots.len());
        for (row, &slot) in slots.iter().enumerate() {
            let held = self.lengths.get(slot).copied();
            let start = held.ok_or_else(|| input("slot", format!("0..{}", self.lengths.len()), slot))?;
            if slots[..row].contains(&slot) {
                return Err(input("slots", "each slot once", slot));
            }
            let new = lengths.get(row).copied().unwrap_or(0) as i64;
            if !(1..=width).contains(&new) {
                return Err(input("row length", format!("1..={width}"), new));
            }
            if start + new > self.longest {
                let expected = format!("at most {} (max_position_embeddings)", self.longest);
                return Err(input("sequence length", expected, start + new));
            }
            starts.push(start);
        }
        // A padded row writes its padding too: past its end, where the next tokens will overwrite it.
        let keys = starts.iter().max().map_or(0, |start| start + width);
        let keys = padded_keys(keys, device);
        self.grow(keys)?;
        let fresh = starts.iter().zip(slots).filter(|(start, _)| **start == 0);
        self.blank(&fresh.map(|(_, &slot)| slot as i64).collect::<Vec<_>>())?;
        let slot_ids: Vec<i64> = slots.iter().map(|&slot| slot as i64).collect();
        let column = |values: &[i64]| Tensor::f_from_slice(values)?.f_to_device(device)?.f_unsqueeze(1);
        let integers = (Kind::Int64, device);
        let seen = column(&starts)?.f_add(&Tensor::f_arange(padded_queries(width, device), integers)?)?;
        let mask = Tensor::f_arange(keys, integers)?.f_le_tensor(&seen.f_unsqueeze(-1)?)?;
        let positions = seen.f_narrow(1, 0, width)?;
        Ok(Window {
            slots: column(&slot_ids)?,
            consecutive: slots.windows(2).all(|pair| pair[1] == pair[0] + 1).then_some(slot_ids[0]),
            positions,
            mask: mask.f_unsqueeze(1)?,
            rows: slots.len() as i64,
            keys,
        })
    }

    /// Makes the new tokens of a finished pass part of their sequences.
    pub(super) fn commit(&mut self, lengths: &[usize], slots: &[usize]) {
        for (&slot, &new) in slots.iter().zip(lengths) {
            self.lengths[slot] += new as i64;
        }
    }

    /// Writes `[R, T, kv heads, head_dim]` keys and values of a layer, and returns all of the rows'
    /// `[R, K, kv heads, head_dim]`.
    pub(super) fn extend(
        &mut self,
        layer: usize,
        window: &Window,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let at = [Some(&window.slots), Some(&window.positions)];
        let (cached_keys, cached_values) = &mut self.layers[layer];
        let _ = cached_keys.f_index_put_(&at, keys, false)?;
        let _ = cached_values.f_index_put_(&at, values, false)?;
        Ok((window.rows_of(cached_keys)?, window.rows_of(cached_values)?))
    }

    /// Clears slots that begin anew. Reads go past a row's end, and a mask does not hide NaN.
    fn blank(&mut self, slots: &[i64]) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        for (keys, values) in &mut self.layers {
            let slots = Tensor::f_from_slice(slots)?.f_to_device(keys.device())?;
            let _ = keys.f_index_fill_(0, &slots, 0.0)?;
            let _ = values.f_index_fill_(0, &slots, 0.0)?;
        }
        Ok(())
    }

    fn grow(&mut self, needed: i64) -> Result<()> {
        if needed <= self.capacity {
            return Ok(());
        }
        let capacity = needed.max(2 * self.capacity);
        let extra = capacity - self.capacity;
        let pad = |tensor: &Tensor| tensor.f_constant_pad_nd([0, 0, 0, 0, 0, extra]);
        let grown = self.layers.iter().map(|(keys, values)| Ok((pad(keys)?, pad(values)?)));
        self.layers = grown.collect::<Result<_>>()?;
        self.capacity = capacity;
        Ok(())
    }
}

impl Window {
    fn rows_of(&self, cached: &Tensor) -> Result<Tensor> {
        let visible = cached.f_narrow(1, 0, self.keys)?;
        Ok(match self.consecutive {
            Some(first) => visible.f_narrow(0, first, self.rows)?,
            None => visible.f_index_select(0, &self.slots.f_squeeze_dim(1)?)?,
        })
    }
}
