//! What runs kernels: a device, or in tests a processor that does the same.

use std::any::Any;
use std::ops::{Deref, DerefMut};

use super::Result;
use crate::digest::DigestTable;
use crate::element::Element;

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
    /// The names of all, in their order.
    pub(super) const NAMES: [&str; 12] = [
        "sample",
        "scan",
        "digest",
        "choose",
        "emit_flat",
        "emit",
        "frame",
        "pack",
        "classify",
        "parse",
        "resolve",
        "apply",
    ];

    pub(super) const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
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
pub(super) unsafe trait Arguments {}

/// Memory that kernels work on; it is given back when dropped.
pub(super) struct Memory {
    address: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Memory {
    /// What `owner` holds at `address`.
    pub(super) fn new(address: u64, owner: impl Any + Send + Sync) -> Self {
        Self { address, _owner: Box::new(owner) }
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

/// Pinned memory of the host: copies to and from it go at full speed, and a device can work on it in place.
pub struct Pinned {
    start: *mut u8,
    bytes: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the memory is this value's own, and belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// # Safety
    /// `owner` holds `bytes` bytes at `start`, all of them written, gives them back when it is dropped, and
    /// lets nothing else at them.
    pub(super) unsafe fn new(start: *mut u8, bytes: usize, owner: impl Any + Send + Sync) -> Self {
        Self { start, bytes, _owner: Box::new(owner) }
    }

    pub(super) fn address(&self) -> u64 {
        self.start as u64
    }
}

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the promise of `new`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

/// Runs kernels in the order in which they are asked for. Addresses are those of its own memory.
pub(super) trait Machine: Send {
    /// The number of the device.
    fn ordinal(&self) -> usize;
    /// Makes the device the one that this thread's calls go to.
    fn enter(&self) -> Result<()>;
    /// Compiles the kernels for an element type, if they are not.
    fn prepare(&self, element: Element) -> Result<()>;
    /// The same device, with an order of its own.
    fn fork(&self) -> Result<Box<dyn Machine>>;
    /// Room for so many bytes, at least one, with whatever is in them.
    fn allocate(&self, bytes: usize) -> Result<Memory>;
    /// So many bytes, at least one, set to zero.
    fn pinned(&self, bytes: usize) -> Result<Pinned>;
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
    /// From memory that kernels reach to memory that they reach.
    ///
    /// # Safety
    /// As for [`Machine::clear`], of both.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;
    /// # Safety
    /// All addresses in `arguments` belong to this machine, with as much behind them as the kernel uses,
    /// until [`Machine::finish`].
    unsafe fn launch(
        &self,
        element: Element,
        kernel: Kernel,
        grid: Grid,
        arguments: &dyn Arguments,
    ) -> Result<()>;
    /// Waits until all of it is done.
    fn finish(&self) -> Result<()>;
}

/// Memory that grows when it must and is kept. What was in it is lost then.
#[derive(Default)]
pub(super) struct Room {
    memory: Option<Memory>,
    bytes: usize,
}

impl Room {
    /// The address of room for so many bytes. Nothing queued may use the room that was.
    pub(super) fn address(&mut self, machine: &dyn Machine, bytes: usize) -> Result<u64> {
        if self.memory.is_none() || self.bytes < bytes {
            self.memory = None;
            let bytes = bytes.max(256).next_multiple_of(256);
            self.memory = Some(machine.allocate(bytes)?);
            self.bytes = bytes;
        }
        Ok(self.memory.as_ref().map_or(0, Memory::address))
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The same in the host's memory.
#[derive(Default)]
pub(super) struct HostRoom {
    memory: Option<Pinned>,
}

impl HostRoom {
    /// Exactly so many bytes. Nothing queued may use the memory that was.
    pub(super) fn bytes(&mut self, machine: &dyn Machine, bytes: usize) -> Result<&mut [u8]> {
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

/// Waits for all that was queued, whatever went wrong: nothing may still be reading or writing when borrows end.
pub(super) fn finished<T>(machine: &dyn Machine, queued: Result<T>) -> Result<T> {
    let finished = machine.finish();
    let done = queued?;
    finished.map(|()| done)
}

/// Address of the keys of the digest that kernels look up; `kept` holds them from the first call on.
pub(super) fn keys_on(machine: &dyn Machine, kept: &mut Option<Memory>) -> Result<u64> {
    if let Some(keys) = kept {
        return Ok(keys.address());
    }
    let bytes: Vec<u8> = DigestTable::stripe_keys().iter().flat_map(|key| key.to_le_bytes()).collect();
    let memory = machine.allocate(bytes.len())?;
    let address = memory.address();
    // SAFETY: the memory was allocated for these bytes, which live until the wait.
    finished(machine, unsafe { machine.upload(address, &bytes) })?;
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
