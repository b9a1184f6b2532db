//! Comparison of a checkpoint's pieces with weights on the device.
//!
//! To the kernel a piece is a delta that changes each of its elements: the piece's bytes are the old values. They lie in
//! locked pages of the host, where the kernel reads them.

use std::io;

use memmap2::MmapMut;

use super::{COMPARE, Device, Machine, words};
use crate::error::{Error, Result};
use crate::live::compare::{BATCH_BYTES, BATCH_ELEMENTS};
use crate::live::layout::{DIMS_MAX, Layout};
use crate::live::memory::{Found, Piece};
use crate::live::part::{BLOCK_CHANGES, ONE_IN, Part, Parts};

/// Parts that are compared by one launch.
const PARTS_MAX: usize = 8192;
/// Where positions and values begin, behind the parts.
const POSITIONS: usize = PARTS_MAX * size_of::<Part>();
const VALUES: usize = POSITIONS + BATCH_ELEMENTS * size_of::<u32>();

/// Locked pages with what the kernel compares.
pub(super) struct Room {
    map: MmapMut,
    /// Where the device sees them.
    address: u64,
}

impl<M: Machine> Device<M> {
    /// See [`Memory::compare`](crate::live::memory::Memory::compare).
    pub(super) fn compare_pieces(
        &mut self,
        layout: &Layout,
        pieces: &[Piece<'_>],
        bytes: &[u8],
    ) -> Result<Found> {
        // What the engine has begun to write is there before it is read.
        self.machine.drain()?;
        let mut room = match self.room.take() {
            Some(room) => room,
            None => self.make_room()?,
        };
        let found = self.compare_in(&mut room, layout, pieces, bytes);
        self.room = Some(room);
        found
    }

    fn make_room(&self) -> Result<Room> {
        let fail = |source: io::Error| Error::live("memory for a comparison", "success", source.to_string());
        let mut map = MmapMut::map_anon(VALUES + BATCH_BYTES).map_err(fail)?;
        // SAFETY: the map is unlocked before it ends.
        let address = unsafe { self.machine.lock(map.as_mut_ptr(), map.len())? };
        Ok(Room { map, address })
    }

    pub(super) fn release_room(&mut self) {
        if let Some(mut room) = self.room.take() {
            // SAFETY: it was locked, and each comparison waits for its end.
            unsafe { self.machine.unlock(room.map.as_mut_ptr()) };
        }
    }

    fn compare_in(
        &self,
        room: &mut Room,
        layout: &Layout,
        pieces: &[Piece<'_>],
        bytes: &[u8],
    ) -> Result<Found> {
        room.map[VALUES..VALUES + bytes.len()].copy_from_slice(bytes);
        let (mut found, mut parts, mut end) = (Found::default(), Parts::default(), POSITIONS);
        for (index, piece) in pieces.iter().enumerate() {
            let part = Part {
                positions: room.address + end as u64,
                old: room.address + (VALUES + piece.at) as u64,
                ..no_part(piece)
            };
            end = room.put_positions(end, piece)?;
            let among = piece.among();
            for (live, view) in layout.places(piece.info)? {
                let span = view.span();
                if span.end <= among.start || among.end <= span.start {
                    continue;
                }
                let mut part = Part { live: live.address, from: view.from, to: view.to, ..part };
                part.dims = view.dims.len() as u64;
                part.dim.iter_mut().zip(&view.dims).for_each(|(dim, found)| *dim = *found);
                if parts.parts.len() + ONE_IN as usize > PARTS_MAX {
                    found = found.and(self.compare_parts(room, &std::mem::take(&mut parts))?);
                }
                add(&mut parts, index, &part);
            }
        }
        Ok(found.and(self.compare_parts(room, &parts)?))
    }

    fn compare_parts(&self, room: &mut Room, parts: &Parts) -> Result<Found> {
        let table = words(&parts.parts);
        for (place, word) in room.map.chunks_exact_mut(size_of::<u64>()).zip(table) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        self.begin()?;
        self.launch_at(room.address, parts, COMPARE)?;
        Ok(self.results(parts)?.0)
    }
}

impl Room {
    /// Writes the positions of a piece's elements, and returns where they end.
    fn put_positions(&mut self, start: usize, piece: &Piece<'_>) -> Result<usize> {
        let among = piece.among();
        let (Ok(first), Ok(end)) = (u32::try_from(among.start), u32::try_from(among.end)) else {
            let found = format!("{:?}", piece.info.shape);
            return Err(Error::live(format!("tensor {}", piece.info.name), "less than 2^32 elements", found));
        };
        let stop = start + (end - first) as usize * size_of::<u32>();
        let places = self.map[start..stop].chunks_exact_mut(size_of::<u32>());
        places.zip(first..end).for_each(|(place, position)| place.copy_from_slice(&position.to_ne_bytes()));
        Ok(stop)
    }
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
        width: piece.info.dtype.size(),
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
            old: part.old + skipped * part.width,
            changes,
            first_compared: parts.compared,
            ..*part
        });
        parts.compared += changes.div_ceil(BLOCK_CHANGES).div_ceil(ONE_IN);
    }
}
