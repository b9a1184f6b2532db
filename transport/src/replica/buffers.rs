//! Memory that an apply uses again, tensor after tensor, and frees once an engine can load the version.
//!
//! Mapping and unmapping memory for each tensor costs a fault per page. All threads that do so wait for each
//! other, because a process has one list of maps.

use driftless_delta::{Decoder, Patch};
use driftless_store::pool::Reused;

/// Memory of either kind that is kept at most.
const KEPT_BYTES: usize = 256 << 20;

/// What one thread decodes a tensor with: the decoder, and patches, each with the byte of the tensor at which
/// it begins.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) decoder: Decoder,
    pub(super) patches: Vec<(u64, Patch)>,
}

/// Scratch, and memory for patches in their journal form, that no thread uses at the moment.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) scratches: Reused<Scratch>,
    pub(super) bytes: Reused<Vec<u8>>,
}

impl Default for Buffers {
    fn default() -> Self {
        Self { scratches: Reused::new(KEPT_BYTES), bytes: Reused::new(KEPT_BYTES) }
    }
}

impl Buffers {
    pub(super) fn give_scratch(&self, scratch: Scratch) {
        let bytes = scratch.patches.iter().map(|(_, patch)| patch.memory()).sum();
        self.scratches.give(scratch, bytes);
    }

    /// Gives all of it back.
    pub(super) fn clear(&self) {
        self.scratches.clear();
        self.bytes.clear();
    }

    pub(super) fn give_bytes(&self, bytes: Vec<u8>) {
        let capacity = bytes.capacity();
        self.bytes.give(bytes, capacity);
    }
}
