//! What runs kernels: a device, or in tests a processor that does the same.

use std::ops::DerefMut;

use super::Result;
use crate::{DigestTable, Element};

/// Threads of a thread block, for every kernel but those that say otherwise.
pub(super) const THREADS: u32 = 256;

/// Kernels of `kernels/`, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    Sample,
    Scan,
    Digest,
    Choose,
    EmitFlat,
    Emit,
    Frame,
    Pack,
    Classify,
    Parse,
    Resolve,
    Apply,
}

impl Kernel {
    pub(super) const ALL: [Self; 12] = [
        Self::Sample,
        Self::Scan,
        Self::Digest,
        Self::Choose,
        Self::EmitFlat,
        Self::Emit,
        Self::Frame,
        Self::Pack,
        Self::Classify,
        Self::Parse,
        Self::Resolve,
        Self::Apply,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sample => "sample",
            Self::Scan => "scan",
            Self::Digest => "digest",
            Self::Choose => "choose",
            Self::EmitFlat => "emit_flat",
            Self::Emit => "emit",
            Self::Frame => "frame",
            Self::Pack => "pack",
            Self::Classify => "classify",
            Self::Parse => "parse",
            Self::Resolve => "resolve",
            Self::Apply => "apply",
        }
    }
}

/// Thread blocks of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: usize,
    pub(super) threads: u32,
    /// Bytes of shared memory beyond what the kernel declares.
    pub(super) shared: usize,
}

impl Grid {
    /// So many thread blocks of the usual size.
    pub(super) fn of(blocks: usize) -> Self {
        Self { blocks, threads: THREADS, shared: 0 }
    }
}

/// Arguments of kernels: plain numbers and addresses, as the `struct` of the same name in `kernels/` has
/// them.
///
/// # Safety
/// Implementors are `repr(C)` without padding and have the fields of that `struct`.
pub(super) unsafe trait Arguments: Copy {}

/// Runs kernels in the order in which they are asked for. Addresses are those of its own memory.
pub(super) trait Machine {
    /// Memory that kernels work on; it is given back when dropped.
    type Memory;
    /// Memory of the host that copies go to and from at full speed.
    type Pinned: DerefMut<Target = [u8]>;

    /// Room for so many bytes, at least one, with whatever is in them.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory>;
    fn address(memory: &Self::Memory) -> u64;
    fn pinned(&self, bytes: usize) -> Result<Self::Pinned>;
    /// Thread blocks of [`Kernel::Emit`] that run at the same time.
    fn emitters(&self) -> usize;

    /// # Safety
    /// `bytes` bytes at `address` belong to this machine, and nothing else uses them until
    /// [`Machine::finish`].
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()>;
    /// # Safety
    /// As for [`Machine::clear`]; `from` lives unchanged until [`Machine::finish`].
    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()>;
    /// # Safety
    /// As for [`Machine::clear`]; nothing looks at `to` before [`Machine::finish`].
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;
    /// # Safety
    /// All addresses in `arguments` belong to this machine, with as much behind them as the kernel uses,
    /// until [`Machine::finish`].
    unsafe fn launch<A: Arguments>(
        &self,
        element: Element,
        kernel: Kernel,
        grid: Grid,
        arguments: &A,
    ) -> Result<()>;
    /// Waits until all of it is done.
    fn finish(&self) -> Result<()>;
}

/// Memory that grows when it must and is kept. What was in it is lost then.
pub(super) struct Room<M> {
    memory: Option<M>,
    bytes: usize,
}

impl<M> Default for Room<M> {
    fn default() -> Self {
        Self { memory: None, bytes: 0 }
    }
}

impl<M> Room<M> {
    /// The address of room for so many bytes. Nothing queued may use the room that was.
    pub(super) fn address(&mut self, machine: &impl Machine<Memory = M>, bytes: usize) -> Result<u64> {
        fn address_of<K: Machine>(_: &K, memory: &K::Memory) -> u64 {
            K::address(memory)
        }
        if self.memory.is_none() || self.bytes < bytes {
            self.memory = None;
            let bytes = bytes.max(256).next_multiple_of(256);
            self.memory = Some(machine.allocate(bytes)?);
            self.bytes = bytes;
        }
        Ok(self.memory.as_ref().map_or(0, |memory| address_of(machine, memory)))
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The same in the host's memory.
pub(super) struct HostRoom<P> {
    memory: Option<P>,
}

impl<P> Default for HostRoom<P> {
    fn default() -> Self {
        Self { memory: None }
    }
}

impl<P: DerefMut<Target = [u8]>> HostRoom<P> {
    /// Exactly so many bytes. Nothing queued may use the memory that was.
    pub(super) fn bytes(&mut self, machine: &impl Machine<Pinned = P>, bytes: usize) -> Result<&mut [u8]> {
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            self.memory = None;
            self.memory = Some(machine.pinned(bytes.next_power_of_two().max(4096))?);
        }
        Ok(self.memory.as_mut().map(|memory| &mut memory[..bytes]).unwrap_or_default())
    }

    pub(super) fn filled(&self, bytes: usize) -> &[u8] {
        self.memory.as_ref().and_then(|memory| memory.get(..bytes)).unwrap_or_default()
    }
}

/// Address of the keys of the digest that kernels look up; `kept` holds them from the first call on.
pub(super) fn keys_on<M: Machine>(machine: &M, kept: &mut Option<M::Memory>) -> Result<u64> {
    if let Some(keys) = kept {
        return Ok(M::address(keys));
    }
    let bytes: Vec<u8> = DigestTable::stripe_keys().iter().flat_map(|key| key.to_le_bytes()).collect();
    let memory = machine.allocate(bytes.len())?;
    let address = M::address(&memory);
    // SAFETY: the memory was allocated for these bytes, which live until the wait below.
    unsafe {
        machine.upload(address, &bytes)?;
    }
    machine.finish()?;
    *kept = Some(memory);
    Ok(address)
}

/// A tensor in memory of the machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// Reads little-endian numbers out of what kernels wrote.
pub(super) fn numbers<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}
