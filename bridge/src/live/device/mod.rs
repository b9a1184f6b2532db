//! Weights in the memory of a device: deltas go there while the engine generates, and a kernel compares and
//! writes.
//!
//! The kernel is `patch.cu`, and [`Cuda`] runs it. Tests run its source on the host.

#![allow(unsafe_code, reason = "the memory of a device is raw addresses")]

mod cuda;
mod pieces;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use driftless_transport::prepared::PreparedDelta;
use memmap2::{MmapOptions, MmapRaw};

use super::layout::Layout;
use super::memory::{Found, Memory, Piece};
use super::part::{Part, Parts};
use crate::error::{Error, Result};

pub(super) use cuda::Cuda;

use self::pieces::Room;

/// Threads of a block of the kernels: `THREADS` of `patch.cu`.
const THREADS: u32 = 256;
/// Words of the results: values that are others, the first part with one, and parts of the checksum.
const RESULTS: usize = 2 + 64;

/// What a device does for [`Device`]. Addresses are the device's.
pub(super) trait Machine: Send {
    /// Memory of the device, for as long as this value lives.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Locks pages of the host, and returns where the device sees them.
    ///
    /// # Safety
    /// The pages are mapped until [`Machine::unlock`] is called with `start`.
    unsafe fn lock(&self, start: *mut u8, bytes: usize) -> Result<u64>;

    /// Unlocks what was locked.
    ///
    /// # Safety
    /// It was locked, and the device does not read it any more.
    unsafe fn unlock(&self, start: *mut u8);

    /// Begins to copy what lies at an address of the device, or at one that [`Machine::lock`] gave.
    ///
    /// # Safety
    /// Both places have so many bytes.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()>;

    /// Copies words of the host, which have been read when this returns. Nothing is under way here: the driver
    /// would keep the engine's calls waiting for its end as well.
    ///
    /// # Safety
    /// There is room for them at `to`.
    unsafe fn upload(&self, to: u64, words: &[u64]) -> Result<()>;

    /// Begins to run a kernel.
    ///
    /// # Safety
    /// What its arguments say is true: parts as [`Parts::new`] makes them of this device's addresses.
    unsafe fn launch(&self, kernel: Kernel, blocks: u32) -> Result<()>;

    /// Waits for all that was begun here.
    fn finish(&self) -> Result<()>;

    /// Copies words to the host. Nothing is under way here, as for [`Machine::upload`].
    ///
    /// # Safety
    /// There are so many at `from`.
    unsafe fn download(&self, from: u64, words: &mut [u64]) -> Result<()>;

    /// Waits for all that anybody has begun on the device.
    fn drain(&self) -> Result<()>;
}

/// A kernel and its arguments.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kernel {
    /// Compares, writes or takes back.
    Patch { parts: u64, count: u32, task: u32, results: u64 },
    /// Adds up the checksum of words, of which the first is the file's word `start`.
    Checksum { words: u64, start: u64, count: u64, results: u64 },
}

const COMPARE: u32 = 0;
const WRITE: u32 = 1;
const TAKE_BACK: u32 = 2;

/// Blocks that add up the checksum.
const CHECKSUM_BLOCKS: u64 = 1024;

/// Weights in a device's memory.
pub(super) struct Device<M: Machine> {
    machine: M,
    /// Where results lie, and behind them parts.
    results: u64,
    parts_max: usize,
    /// Where deltas go that fit; the kernels read others from the host.
    arena: u64,
    arena_bytes: u64,
    pages: Option<Pages>,
    /// Where the kernel finds what is compared, once something was.
    room: Option<Room>,
    ready: Option<Parts>,
}

/// A file whose pages are locked: the follower writes each delta into the same one.
struct Pages {
    map: MmapRaw,
    file: (u64, u64),
    address: u64,
}

impl<M: Machine> Device<M> {
    /// Takes the memory that it will ever need: an engine gives the rest to its cache afterwards.
    pub(super) fn new(machine: M, layout: &Layout, arena_bytes: u64) -> Result<Self> {
        let parts_max = layout.copies().max(1);
        let results = machine.allocate((RESULTS * 8 + parts_max * size_of::<Part>()) as u64)?;
        let arena = if arena_bytes == 0 { None } else { machine.allocate(arena_bytes).ok() };
        let (arena, arena_bytes) = arena.map_or((0, 0), |arena| (arena, arena_bytes));
        let device =
            Self { machine, results, parts_max, arena, arena_bytes, pages: None, room: None, ready: None };
        // The driver loads a kernel when it is launched first, which must not be in a pause.
        device.begin()?;
        let parts = results + RESULTS as u64 * 8;
        // SAFETY: results and parts have room; there is no word to add up, and of no part's changes one to
        // look at.
        unsafe {
            device.machine.upload(parts, &[0; size_of::<Part>() / 8])?;
            device.machine.launch(Kernel::Checksum { words: 0, start: 0, count: 0, results }, 1)?;
            device.machine.launch(Kernel::Patch { parts, count: 1, task: COMPARE, results }, 1)?;
        }
        device.results(&Parts::default())?;
        Ok(device)
    }

    /// Sets the results to those of nothing.
    fn begin(&self) -> Result<()> {
        let mut words = [0; RESULTS];
        words[1] = u64::MAX;
        // SAFETY: the results have room for these.
        unsafe { self.machine.upload(self.results, &words) }
    }

    /// Begins to do something with the parts, which are on the device.
    fn launch(&self, parts: &Parts, task: u32) -> Result<()> {
        self.launch_at(self.results + RESULTS as u64 * 8, parts, task)
    }

    /// Begins to do something with the parts, which the device sees at an address.
    fn launch_at(&self, at: u64, parts: &Parts, task: u32) -> Result<()> {
        let count = parts.parts.len() as u32;
        let blocks = if task == COMPARE { parts.compared } else { parts.blocks };
        let blocks = u32::try_from(blocks).map_err(|_| {
            Error::live("a delta", "at most 2^43 changes", format!("{} changes", parts.changes))
        })?;
        let kernel = Kernel::Patch { parts: at, count, task, results: self.results };
        // SAFETY: the callers have put the parts there.
        if blocks == 0 { Ok(()) } else { unsafe { self.machine.launch(kernel, blocks) } }
    }

    /// Waits, and returns the results: what was found, and the checksum.
    fn results(&self, parts: &Parts) -> Result<(Found, u64)> {
        let mut words = [0; RESULTS];
        self.machine.finish()?;
        // SAFETY: there are so many.
        unsafe { self.machine.download(self.results, &mut words)? };
        let tensor = parts.tensors.get(words[1] as usize).copied().unwrap_or_default();
        let sum = words[2..].iter().fold(0, |sum: u64, word| sum.wrapping_add(*word));
        Ok((Found::of(words[0], tensor), sum))
    }

    /// Does something with the parts, which are on the device, and waits.
    fn run(&self, parts: &Parts, task: u32) -> Result<Found> {
        self.begin()?;
        self.launch(parts, task)?;
        Ok(self.results(parts)?.0)
    }

    /// The pages of a delta's file, locked; they stay locked while it is the same file.
    fn pages(&mut self, file: &File, end: u64) -> Result<u64> {
        let fail = |what: &'static str| {
            move |source: std::io::Error| {
                Error::live(format!("{what} a prepared delta"), "success", source.to_string())
            }
        };
        let found = file.metadata().map_err(fail("looking at"))?;
        let (id, bytes) = ((found.dev(), found.ino()), found.len().max(end) as usize);
        if let Some(pages) =
            self.pages.as_ref().filter(|pages| pages.file == id && pages.map.len() as u64 >= end)
        {
            return Ok(pages.address);
        }
        self.release();
        let map = MmapOptions::new().len(bytes).map_raw(file).map_err(fail("mapping"))?;
        // SAFETY: the map is unlocked before it ends. The processor never touches it: a file that was made
        // shorter would end the process. The pages themselves stay as long as they are locked.
        let address = unsafe { self.machine.lock(map.as_mut_ptr(), map.len())? };
        self.pages = Some(Pages { map, file: id, address });
        Ok(address)
    }

    fn release(&mut self) {
        if let Some(pages) = self.pages.take() {
            // SAFETY: it was locked, and what read it has ended: each prepare and write waits for its end.
            unsafe { self.machine.unlock(pages.map.as_mut_ptr()) };
        }
    }
}

impl<M: Machine> Memory for Device<M> {
    fn prepare(&mut self, layout: &Layout, delta: &PreparedDelta) -> Result<(u64, Found)> {
        self.ready = None;
        let (file, arrays) = delta.arrays();
        let (start, bytes) = (arrays.start, arrays.end - arrays.start);
        let host = self.pages(file, arrays.end)? + start;
        let first = if bytes <= self.arena_bytes { self.arena } else { host };
        let parts = Parts::new(layout, delta.tensors(), |byte| first.wrapping_add(byte.wrapping_sub(start)))?;
        if parts.parts.len() > self.parts_max {
            let (expected, found) = (self.parts_max.to_string(), parts.parts.len().to_string());
            return Err(Error::live("copies that change", expected, found));
        }
        self.begin()?;
        let (at, results) = (self.results + RESULTS as u64 * 8, self.results);
        let sum = Kernel::Checksum { words: first, start: start / 8, count: bytes / 8, results };
        // SAFETY: results and parts have room by their allocation, the arena by the comparison. The layout's
        // maker promised the storages; `PreparedDelta::open` checked that arrays lie within the file, which
        // is mapped that far.
        unsafe {
            self.machine.upload(at, words(&parts.parts))?;
            if first != host {
                self.machine.copy(first, host, bytes)?;
            }
            self.machine
                .launch(sum, bytes.div_ceil(8 * u64::from(THREADS)).clamp(1, CHECKSUM_BLOCKS) as u32)?;
        }
        // Whatever the arrays hold: a position that no view has is passed over.
        self.launch(&parts, COMPARE)?;
        let (found, sum) = self.results(&parts)?;
        delta.check(sum).map_err(|source| Error::Offer { source: source.into() })?;
        let changes = parts.changes;
        self.ready = Some(parts);
        Ok((changes, found))
    }

    fn write(&mut self, stays: &mut dyn FnMut(&Result<Found>) -> bool) -> Result<Found> {
        let parts = self.ready.take().unwrap_or_default();
        // The engine may have a step in flight, which reads the weights.
        let written = self.machine.drain().and_then(|()| self.run(&parts, WRITE));
        if !stays(&written) || !matches!(written, Ok(Found { others: 0, .. })) {
            self.run(&parts, TAKE_BACK)?;
        }
        written
    }

    fn room(&mut self) -> Result<&mut [u8]> {
        self.values()
    }

    fn compare(&mut self, layout: &Layout, pieces: &[Piece<'_>]) -> Result<Found> {
        self.compare_pieces(layout, pieces)
    }
}

impl<M: Machine> Drop for Device<M> {
    fn drop(&mut self) {
        self.release();
        self.release_room();
    }
}

/// Parts as the words that they are.
fn words(parts: &[Part]) -> &[u64] {
    // SAFETY: a part is 24 numbers of 64 bits without a gap.
    unsafe { std::slice::from_raw_parts(parts.as_ptr().cast(), std::mem::size_of_val(parts) / 8) }
}
