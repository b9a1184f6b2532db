//! A delta for a layout: what threads, or the threads of a GPU, carry out.

use driftless_transport::prepared::PreparedTensor;

use super::layout::{DIMS_MAX, Layout};
use crate::error::Result;

/// Changes that are looked at together, by a block of the kernel or a turn of a thread: `CHANGES` of
/// `patch.cu`.
pub(super) const BLOCK_CHANGES: u64 = 2048;

/// When a delta is readied, the first block of a part is compared, and of those behind it each one of so many:
/// `ONE_IN` of `patch.cu`. Scattered reads of all would cost the engine's decoding more than the rest together.
/// Each value is compared when it is written.
pub(super) const ONE_IN: u64 = 16;

/// What changes in one copy: `struct Part` of `patch.cu`. Addresses are of the memory that weights lie in,
/// strides and offsets count elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// The storage.
    pub(super) live: u64,
    pub(super) positions: u64,
    pub(super) new: u64,
    pub(super) old: u64,
    pub(super) changes: u64,
    /// Blocks of the parts before.
    pub(super) first_block: u64,
    /// Those of them that are compared when the delta is readied.
    pub(super) first_compared: u64,
    /// Bytes of an element of the storage: 1, 2, 4 or 8; with a table 2 or 4.
    pub(super) width: u64,
    /// What the storage has in the place of each value of the tensor, which has 2 bytes then; 0: the same.
    pub(super) table: u64,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) dims: u64,
    /// Stride in the tensor, size, stride in the storage.
    pub(super) dim: [[u64; 3]; DIMS_MAX],
}

#[cfg(any(feature = "cuda", test))]
impl Part {
    /// Bytes of an element of the tensor: of the delta's old and new values.
    pub(super) fn value_bytes(&self) -> u64 {
        if self.table == 0 { self.width } else { 2 }
    }
}

/// All parts of a delta.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) parts: Vec<Part>,
    /// The tensor of each part, an index of the delta's.
    pub(super) tensors: Vec<usize>,
    pub(super) blocks: u64,
    pub(super) compared: u64,
    pub(super) changes: u64,
}

impl Parts {
    /// What a delta of these tensors changes in a layout; byte `n` of its file lies at `at(n)`.
    ///
    /// # Errors
    /// As [`Layout::places`].
    pub(super) fn new(layout: &Layout, tensors: &[PreparedTensor], at: impl Fn(u64) -> u64) -> Result<Self> {
        let mut out = Self::default();
        // A tied head changes with the word embeddings, as `tied` has seen.
        let placed = tensors.iter().enumerate().filter(|(_, tensor)| !layout.is_tied_head(&tensor.name));
        for (index, tensor) in placed {
            for (live, place) in layout.places(&tensor.info())? {
                if tensor.changed == 0 {
                    continue;
                }
                out.tensors.push(index);
                let (view, mut dim) = (&place.view, [[0; 3]; DIMS_MAX]);
                dim.iter_mut().zip(&view.dims).for_each(|(dim, found)| *dim = *found);
                out.parts.push(Part {
                    live: live.address,
                    positions: at(tensor.positions),
                    new: at(tensor.new),
                    old: at(tensor.old),
                    changes: tensor.changed,
                    first_block: out.blocks,
                    first_compared: out.compared,
                    width: live.dtype.size(),
                    table: place.table,
                    from: view.from,
                    to: view.to,
                    dims: view.dims.len() as u64,
                    dim,
                });
                let blocks = tensor.changed.div_ceil(BLOCK_CHANGES);
                out.blocks += blocks;
                out.compared += blocks.div_ceil(ONE_IN);
                out.changes += tensor.changed;
            }
        }
        Ok(out)
    }
}
