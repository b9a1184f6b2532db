//! Memory that an apply uses again, tensor after tensor, and frees once an engine can load the version.
//!
//! Mapping and unmapping memory for each tensor costs a fault per page. All threads that do so wait for each
//! other, because a process has one list of maps.

use std::fmt;
use std::sync::Mutex;

use driftless_delta::{Decoder, Patch};
use driftless_store::wait::lock;

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
#[derive(Default)]
pub(super) struct Buffers {
    scratches: Mutex<Kept<Scratch>>,
    bytes: Mutex<Kept<Vec<u8>>>,
}

/// Values, each with the bytes that it holds.
#[derive(Default)]
struct Kept<T> {
    values: Vec<(T, usize)>,
    bytes: usize,
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers").finish_non_exhaustive()
    }
}

impl Buffers {
    pub(super) fn take_scratch(&self) -> Scratch {
        lock(&self.scratches).take()
    }

    pub(super) fn give_scratch(&self, scratch: Scratch) {
        let bytes = scratch.patches.iter().map(|(_, patch)| patch.memory()).sum();
        lock(&self.scratches).give(scratch, bytes);
    }

    /// Gives all of it back.
    pub(super) fn clear(&self) {
        let scratches = std::mem::take(&mut *lock(&self.scratches));
        let bytes = std::mem::take(&mut *lock(&self.bytes));
        drop((scratches, bytes));
    }

    pub(super) fn take_bytes(&self) -> Vec<u8> {
        lock(&self.bytes).take()
    }

    pub(super) fn give_bytes(&self, bytes: Vec<u8>) {
        let capacity = bytes.capacity();
        lock(&self.bytes).give(bytes, capacity);
    }
}

impl<T: Default> Kept<T> {
    fn take(&mut self) -> T {
        let Some((value, bytes)) = self.values.pop() else { return T::default() };
        self.bytes -= bytes;
        value
    }

    fn give(&mut self, value: T, bytes: usize) {
        if self.bytes + bytes <= KEPT_BYTES {
            self.bytes += bytes;
            self.values.push((value, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_unless_it_is_too_much() {
        let buffers = Buffers::default();
        buffers.give_bytes(Vec::with_capacity(1000));
        buffers.give_bytes(Vec::with_capacity(KEPT_BYTES - 999));
        assert_eq!([buffers.take_bytes().capacity(), buffers.take_bytes().capacity()], [1000, 0]);
        buffers.give_bytes(Vec::with_capacity(KEPT_BYTES));
        assert_eq!(buffers.take_bytes().capacity(), KEPT_BYTES, "what was taken makes room");
        buffers.give_scratch(Scratch { patches: vec![(7, Patch::new())], ..Scratch::default() });
        assert_eq!([buffers.take_scratch().patches.len(), buffers.take_scratch().patches.len()], [1, 0]);
        buffers.give_bytes(Vec::with_capacity(1000));
        buffers.give_scratch(Scratch { patches: vec![(7, Patch::new())], ..Scratch::default() });
        buffers.clear();
        assert_eq!((buffers.take_bytes().capacity(), buffers.take_scratch().patches.len()), (0, 0));
    }
}
