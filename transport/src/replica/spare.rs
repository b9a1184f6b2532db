//! Memory that an apply uses again, tensor after tensor, and frees once an engine can load the version.
//!
//! Mapping and unmapping memory for each tensor costs a fault per page. All threads that do so wait for each
//! other, because a process has one list of maps.

use std::fmt;
use std::sync::Mutex;

use driftless_delta::{Decoder, Patch};
use driftless_store::wait::lock;

/// What is larger is not kept: sixteen threads that have each seen an embedding would hold too much.
const KEPT_BYTES: usize = 2 << 20;

/// What one thread decodes a tensor with: the decoder, and patches, each with the byte of the tensor at which
/// it begins.
#[derive(Default)]
pub(super) struct Kit {
    pub(super) decoder: Decoder,
    pub(super) patches: Vec<(u64, Patch)>,
}

/// Kits, and memory for patches in their journal form, that nobody uses at the moment.
#[derive(Default)]
pub(super) struct Spare {
    kits: Mutex<Vec<Kit>>,
    bytes: Mutex<Vec<Vec<u8>>>,
}

impl fmt::Debug for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spare").finish_non_exhaustive()
    }
}

impl Spare {
    pub(super) fn take_kit(&self) -> Kit {
        take(&self.kits)
    }

    pub(super) fn give_kit(&self, kit: Kit) {
        if kit.patches.iter().map(|(_, patch)| patch.memory()).sum::<usize>() <= KEPT_BYTES {
            give(&self.kits, kit);
        }
    }

    /// Gives all of it back.
    pub(super) fn clear(&self) {
        let kits = std::mem::take(&mut *lock(&self.kits));
        let bytes = std::mem::take(&mut *lock(&self.bytes));
        drop((kits, bytes));
    }

    pub(super) fn take_bytes(&self) -> Vec<u8> {
        take(&self.bytes)
    }

    pub(super) fn give_bytes(&self, bytes: Vec<u8>) {
        if bytes.capacity() <= KEPT_BYTES {
            give(&self.bytes, bytes);
        }
    }
}

fn take<T: Default>(from: &Mutex<Vec<T>>) -> T {
    lock(from).pop().unwrap_or_default()
}

fn give<T>(to: &Mutex<Vec<T>>, value: T) {
    lock(to).push(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_unless_it_is_large() {
        let spare = Spare::default();
        spare.give_bytes(Vec::with_capacity(1000));
        spare.give_bytes(Vec::with_capacity(KEPT_BYTES + 1));
        assert_eq!([spare.take_bytes().capacity(), spare.take_bytes().capacity()], [1000, 0]);
        spare.give_kit(Kit { patches: vec![(7, Patch::new())], ..Kit::default() });
        assert_eq!([spare.take_kit().patches.len(), spare.take_kit().patches.len()], [1, 0]);
        spare.give_bytes(Vec::with_capacity(1000));
        spare.give_kit(Kit { patches: vec![(7, Patch::new())], ..Kit::default() });
        spare.clear();
        assert_eq!((spare.take_bytes().capacity(), spare.take_kit().patches.len()), (0, 0));
    }
}
