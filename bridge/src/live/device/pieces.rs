//! Comparison of a checkpoint's pieces with weights on the device.
//!
//! To the kernel a piece is a delta that changes each of its elements: the piece's bytes are the old values. They lie in
//! locked pages of the host, where the kernel reads them.

use std::io;
use std::ops::Range;

use memmap2::MmapMut;

use super::{COMPARE, Device, Machine, words};
use crate::error::{Error, Result};
use crate::live::compare::{BATCH_BYTES, BATCH_ELEMENTS};
use crate::live::layout::{DIMS_MAX, Layout};
use crate::live::memory::{Found, Piece};
use crate::live::part::{BLOCK_CHANGES, ONE_IN, Part, Parts};

/// Parts that are compared by one launch.
const PARTS_MAX: usize = 8192;
/// Behind the parts: positions from 0 on, those of pieces that begin within a row, and values.
const POSITIONS: usize = PARTS_MAX * size_of::<Part>();
const OWN: usize = POSITIONS + BATCH_ELEMENTS * size_of::<u32>();
const VALUES: usize = OWN + BATCH_ELEMENTS * size_of::<u32>();

/// Locked pages with what the kernel compares, and where that goes on the device. A kernel that read it all from the
/// host's memory would take fifty times as long; it does where the device has no room.
pub(super) struct Room {
    map: MmapMut,
    /// Where the device sees the pages.
    locked: u64,
    /// Where the kernel reads.
    address: u64,
}

impl<M: Machine> Device<M> {
    /// See [`Memory::room`](crate::live::memory::Memory::room).
    pub(super) fn values(&mut self) -> Result<&mut [u8]> {
        let room = match self.room.take() {
            Some(room) => room,
            None => self.make_room()?,
        };
        Ok(&mut self.room.insert(room).map[VALUES..])
    }

    fn make_room(&self) -> Result<Room> {
        let fail = |source: io::Error| Error::live("memory for a comparison", "success", source.to_string());
        let mut map = MmapMut::map_anon(VALUES + BATCH_BYTES).map_err(fail)?;
        put_positions(&mut map[POSITIONS..OWN], 0);
        // SAFETY: the map is unlocked before it ends.
        let locked = unsafe { self.machine.lock(map.as_mut_ptr(), map.len())? };
        let address = self.machine.allocate(map.len() as u64).unwrap_or(locked);
        let room = Room { map, locked, address };
        self.send(&room, POSITIONS..OWN)?;
        self.machine.finish()?;
        Ok(room)
    }

    /// Begins to copy a part of the room to where the kernel reads it.
    fn send(&self, room: &Room, part: Range<usize>) -> Result<()> {
        if room.address == room.locked || part.is_empty() {
            return Ok(());
        }
        let (to, from) = (room.address + part.start as u64, room.locked + part.start as u64);
        // SAFETY: both are as long as the map, which has the part.
        unsafe { self.machine.copy(to, from, part.len() as u64) }
    }

    pub(super) fn release_room(&mut self) {
        if let Some(mut room) = self.room.take() {
            // SAFETY: it was locked, and each comparison waits for its end.
            unsafe { self.machine.unlock(room.map.as_mut_ptr()) };
        }
    }

    /// See [`Memory::compare`](crate::live::memory::Memory::compare).
    pub(super) fn compare_pieces(&mut self, layout: &Layout, pieces: &[Piece<'_>]) -> Result<Found> {
        // What the engine has begun to write is there before it is read.
        self.machine.drain()?;
        let Some(mut room) = self.room.take() else { return Ok(Found::default()) };
        let found = self.compare_in(&mut room, layout, pieces);
        self.room = Some(room);
        found
    }

    fn compare_in(&self, room: &mut Room, layout: &Layout, pieces: &[Piece<'_>]) -> Result<Found> {
        let (mut found, mut parts, mut end) = (Found::default(), Parts::default(), OWN);
        for (index, piece) in pieces.iter().enumerate() {
            let (among, mut own) = (piece.among(), None);
            for (live, place) in layout.places(piece.info)? {
                let span = place.view.span();
                if span.end <= among.start || among.end <= span.start {
                    continue;
                }
                let (view, positions) = match place.view.from(piece.first) {
                    Some(view) => (view, POSITIONS),
                    None => {
                        if own.is_none() {
                            (own, end) = (Some(end), room.put_own(end, piece)?);
                        }
                        (place.view.clone(), own.unwrap_or(end))
                    }
                };
                let mut part = Part {
                    live: live.address,
                    width: live.dtype.size(),
                    table: place.table,
                    positions: room.address + positions as u64,
                    old: room.address + (VALUES + piece.at) as u64,
                    from: view.from,
                    to: view.to,
                    dims: view.dims.len() as u64,
                    ..no_part(piece)
                };
                part.dim.iter_mut().zip(&view.dims).for_each(|(dim, found)| *dim = *found);
                if parts.parts.len() + ONE_IN as usize > PARTS_MAX {
                    found = found.and(self.compare_parts(room, &std::mem::take(&mut parts), end)?);
                }
                add(&mut parts, index, &part);
            }
        }
        Ok(found.and(self.compare_parts(room, &parts, end)?))
    }

    /// Compares parts, whose own positions end at a place of the room.
    fn compare_parts(&self, room: &mut Room, parts: &Parts, own: usize) -> Result<Found> {
        let table = words(&parts.parts);
        for (place, word) in room.map.chunks_exact_mut(size_of::<u64>()).zip(table) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        self.begin()?;
        for part in [0..size_of_val(table), OWN..own, VALUES..room.map.len()] {
            self.send(room, part)?;
        }
        self.launch_at(room.address, parts, COMPARE)?;
        Ok(self.results(parts)?.0)
    }
}

impl Room {
    /// Writes the positions of a piece's elements in its tensor, and returns where they end.
    fn put_own(&mut self, start: usize, piece: &Piece<'_>) -> Result<usize> {
        let among = piece.among();
        let (Ok(first), Ok(_)) = (u32::try_from(among.start), u32::try_from(among.end)) else {
            let found = format!("{:?}", piece.info.shape);
            return Err(Error::live(format!("tensor {}", piece.info.name), "less than 2^32 elements", found));
        };
        let stop = start + piece.elements as usize * size_of::<u32>();
        put_positions(&mut self.map[start..stop], first);
        Ok(stop)
    }
}

/// Writes ascending positions.
fn put_positions(places: &mut [u8], first: u32) {
    let places = places.chunks_exact_mut(size_of::<u32>());
    places.zip(first..).for_each(|(place, position)| place.copy_from_slice(&position.to_ne_bytes()));
}

/// A piece as a delta, without its places.
fn no_part(piece: &Piece<'_>) -> Part {
    Part {
        live: 0,
        positions: 0,
        new: 0,
        old: 0,
        changes: piece.elements,
        first_block: 0,
        first_compared: 0,
        width: 0,
        table: 0,
        from: 0,
        to: 0,
        dims: 0,
        dim: [[0; 3]; DIMS_MAX],
    }
}

/// Adds a part so often, each a block later, that all blocks are among those that the kernel compares of each.
fn add(parts: &mut Parts, piece: usize, part: &Part) {
    for skipped in
        (0..ONE_IN).map(|block| block * BLOCK_CHANGES).take_while(|skipped| *skipped < part.changes)
    {
        let changes = part.changes - skipped;
        parts.tensors.push(piece);
        parts.parts.push(Part {
            positions: part.positions + skipped * size_of::<u32>() as u64,
            old: part.old + skipped * part.value_bytes(),
            changes,
            first_compared: parts.compared,
            ..*part
        });
        parts.compared += changes.div_ceil(BLOCK_CHANGES).div_ceil(ONE_IN);
    }
}
