//! Weights in host memory: compared and written by threads.

#![allow(unsafe_code, reason = "the weights are another program's memory")]

use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use driftless_transport::prepared::{PreparedArrays, PreparedDelta};

use super::compare::BATCH_BYTES;
use super::layout::Layout;
use super::memory::{Found, Memory, Piece};
use super::part::{BLOCK_CHANGES, ONE_IN, Part, Parts};
use crate::error::{Error, Result};

/// More threads than this only wait for memory.
const THREADS_MAX: u64 = 16;
/// Blocks that a thread takes at a time.
const TURN: u64 = 8;

/// Weights in host memory.
#[derive(Debug, Default)]
pub(super) struct Host {
    ready: Option<(PreparedArrays, Parts)>,
    /// What is compared.
    room: Vec<u8>,
}

impl Memory for Host {
    fn prepare(&mut self, layout: &Layout, delta: &PreparedDelta) -> Result<(u64, Found)> {
        self.ready = None;
        let arrays = delta.read().map_err(|error| Error::Offer { source: error.into() })?;
        let (first, start) = (arrays.bytes().as_ptr() as u64, delta.arrays().1.start);
        let parts = Parts::new(layout, delta.tensors(), |byte| first.wrapping_add(byte).wrapping_sub(start))?;
        // SAFETY: the layout's maker promised the storages, and that the engine, which may read them now, is
        // the only other one there. The arrays were read for these tensors, whose positions were checked.
        let found = unsafe { run(&parts, Task::Compare) };
        let changes = parts.changes;
        self.ready = Some((arrays, parts));
        Ok((changes, found))
    }

    fn write(&mut self, stays: &mut dyn FnMut(&Result<Found>) -> bool) -> Result<Found> {
        let ready = self.ready.take();
        // SAFETY: as in `prepare`; the arrays are held, and the engine stands still for a patch.
        let found =
            ready.as_ref().map_or_else(Found::default, |(_, parts)| unsafe { run(parts, Task::Write) });
        let written = Ok(found);
        if !stays(&written) || found.others > 0 {
            // SAFETY: likewise.
            let _ = ready.as_ref().map(|(_, parts)| unsafe { run(parts, Task::TakeBack) });
        }
        written
    }

    fn room(&mut self) -> Result<&mut [u8]> {
        self.room.resize(BATCH_BYTES, 0);
        Ok(&mut self.room)
    }

    fn compare(&mut self, layout: &Layout, pieces: &[Piece<'_>]) -> Result<Found> {
        let mut found = Found::default();
        for (index, piece) in pieces.iter().enumerate() {
            let (mut others, width) = (0, piece.info.dtype.size());
            for (live, place) in layout.places(piece.info)? {
                let held_width = live.dtype.size();
                place.view.runs(&piece.among(), &mut |from, to, run| {
                    let start = piece.at + ((from - piece.first) * width) as usize;
                    let expected = &self.room[start..start + (run * width) as usize];
                    let held = (live.address + to * held_width) as *const u8;
                    // SAFETY: the view fits in the storage, which the layout's maker promised; the engine, which alone
                    // writes there, stands still.
                    let held = unsafe { slice::from_raw_parts(held, (run * held_width) as usize) };
                    let equal = match (place.table, held_width) {
                        (0, _) => held == expected,
                        // SAFETY: the layout has seen that the table is one for elements of this width.
                        (table, 2) => unsafe { are_made::<2>(table, expected, held) },
                        // SAFETY: likewise.
                        (table, _) => unsafe { are_made::<4>(table, expected, held) },
                    };
                    others += u64::from(!equal);
                });
            }
            found = found.and(Found::of(others, index));
        }
        Ok(found)
    }
}

/// What is done with each change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Sees whether old values are there.
    Compare,
    /// Writes the new one where the old one is.
    Write,
    /// Writes the old one where the new one is.
    TakeBack,
}

/// Does something with all changes, or compares some, and returns which values are others. A write ends soon
/// after the first.
///
/// # Safety
/// The parts' addresses are those of arrays of as many changes, and of storages that their views fit in. No
/// element belongs to two changes. Nothing else writes to the storages, and nothing reads them while this
/// writes.
pub(super) unsafe fn run(parts: &Parts, task: Task) -> Found {
    let cores = thread::available_parallelism().map_or(1, usize::from) as u64;
    let blocks = if task == Task::Compare { parts.compared } else { parts.blocks };
    let threads = cores.min(THREADS_MAX).min(blocks.div_ceil(TURN)).max(1);
    let (next, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let work = || {
        let mut found = Found::default();
        while !over.load(Ordering::Relaxed) {
            let first = next.fetch_add(TURN, Ordering::Relaxed);
            if first >= blocks {
                break;
            }
            for number in first..blocks.min(first + TURN) {
                // SAFETY: the caller's promise; each block is one thread's.
                found = found.and(unsafe { block(parts, number, task) });
            }
            if task == Task::Write && found.others > 0 {
                over.store(true, Ordering::Relaxed);
            }
        }
        found
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let ended = others.into_iter().map(thread::ScopedJoinHandle::join);
        ended.fold(work(), |found, ended| match ended {
            Ok(more) => found.and(more),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// # Safety
/// As for [`run`].
unsafe fn block(parts: &Parts, number: u64, task: Task) -> Found {
    let (begin, step): (fn(&Part) -> u64, u64) = match task {
        Task::Compare => (|part| part.first_compared, ONE_IN),
        _ => (|part| part.first_block, 1),
    };
    let index = parts.parts.partition_point(|part| begin(part) <= number).saturating_sub(1);
    let Some(part) = parts.parts.get(index) else { return Found::default() };
    let first = (number - begin(part)) * step * BLOCK_CHANGES;
    let changes = first..part.changes.min(first + BLOCK_CHANGES);
    // SAFETY: the caller's promise; the width is that of the part's elements.
    let others = unsafe {
        match (part.table, part.width) {
            (0, 1) => exchange::<1, 1>(part, changes, task, |value| value),
            (0, 2) => exchange::<2, 2>(part, changes, task, |value| value),
            (0, 4) => exchange::<4, 4>(part, changes, task, |value| value),
            (0, _) => exchange::<8, 8>(part, changes, task, |value| value),
            (table, 2) => exchange::<2, 2>(part, changes, task, |value| made::<2>(table, value)),
            (table, _) => exchange::<2, 4>(part, changes, task, |value| made::<4>(table, value)),
        }
    };
    Found::of(others, parts.tensors.get(index).copied().unwrap_or_default())
}

/// Does something with some changes of a part, and returns how many values are others.
///
/// # Safety
/// As for [`run`]; the delta's elements have `V` bytes, of which `make` makes the storage's, which have `W`.
unsafe fn exchange<const V: usize, const W: usize>(
    part: &Part,
    changes: std::ops::Range<u64>,
    task: Task,
    make: impl Fn([u8; V]) -> [u8; W],
) -> u64 {
    let positions = part.positions as *const u32;
    let (new, old) = (part.new as *const [u8; V], part.old as *const [u8; V]);
    let (from, to) = if task == Task::TakeBack { (new, old) } else { (old, new) };
    let live = part.live as *mut [u8; W];
    let is_run = matches!(part.dims, 0) || part.dims == 1 && (part.dim[0][0], part.dim[0][2]) == (1, 1);
    let run = if part.dims == 0 { 1 } else { part.dim[0][1] };
    let mut others = 0;
    for index in changes.start as usize..changes.end as usize {
        // SAFETY: the arrays have so many elements, of whatever alignment.
        let (position, from, to) = unsafe {
            (u64::from(positions.add(index).read_unaligned()), from.add(index).read(), to.add(index).read())
        };
        let place = if is_run {
            let place = position.wrapping_sub(part.from);
            if place >= run {
                continue;
            }
            place + part.to
        } else {
            match part.place(position) {
                Some(place) => place,
                None => continue,
            }
        };
        // SAFETY: the view fits in the storage; arrays of bytes have no alignment.
        unsafe {
            let element = live.add(place as usize);
            if element.read() != make(from) {
                others += 1;
            } else if task != Task::Compare {
                element.write(make(to));
            }
        }
    }
    others
}

/// What a table has in the place of a value.
///
/// # Safety
/// The table has 65,536 elements of `W` bytes.
unsafe fn made<const W: usize>(table: u64, value: [u8; 2]) -> [u8; W] {
    // SAFETY: the caller's promise; arrays of bytes have no alignment.
    unsafe { (table as *const [u8; W]).add(u16::from_ne_bytes(value).into()).read() }
}

/// Whether elements are what a table makes of as many values.
///
/// # Safety
/// As for [`made`].
unsafe fn are_made<const W: usize>(table: u64, values: &[u8], held: &[u8]) -> bool {
    let (values, held) = (values.as_chunks().0, held.as_chunks().0);
    // SAFETY: the caller's promise.
    values.iter().zip(held).all(|(value, held)| unsafe { made::<W>(table, *value) } == *held)
}

impl Part {
    /// Where an element of the tensor lies in the storage, if the view has it.
    fn place(&self, position: u64) -> Option<u64> {
        let (mut rest, mut place) = (position.checked_sub(self.from)?, self.to);
        for [from, size, to] in &self.dim[..self.dims as usize] {
            let index = rest / from;
            if index >= *size {
                return None;
            }
            rest -= index * from;
            place += index * to;
        }
        (rest == 0).then_some(place)
    }
}
