//! Frames between reservation and stable storage: pure bookkeeping, no clock, no memory, no
//! file.
//!
//! A slot goes `Reserved → Committed → Durable`, or `Reserved → Void → Durable`. Slots leave from the front
//! only, and only when durable, so what has left is a prefix of the log without gaps: that is what readers
//! see.
//!
//! Of a void slot nothing but its header matters, and there any state that recovery can step over will do. So
//! a reservation that is given up after a sync has stored its header counts as durable at once: no thread
//! waits for another sync.

use std::collections::VecDeque;
use std::ops::Range;

use crate::layout::segment::Entry;

/// How far one slot has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Reserved,
    Committed,
    Void,
    Durable,
}

#[derive(Debug, Clone)]
struct Slot {
    state: SlotState,
    /// A sync has stored the header, in whatever state it was.
    stored: bool,
    segment: u64,
    range: Range<usize>,
    entry: Entry,
}

/// The frames that readers do not see yet.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    first: u64,
    slots: VecDeque<Slot>,
    /// Bytes of all slots.
    bytes: usize,
    /// Slots that are committed or void, and not durable.
    dirty: usize,
}

/// What one sync has to flush, and what it acknowledges.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Batch {
    /// Per segment (by its first record), the bytes to flush, oldest segment first.
    pub(crate) ranges: Vec<(u64, Range<usize>)>,
    sequences: Vec<u64>,
    /// One past the last position that the ranges cover.
    end: u64,
}

/// A slot that became visible.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Published {
    pub(crate) sequence: u64,
    pub(crate) segment: u64,
    pub(crate) entry: Entry,
}

impl Ledger {
    /// An empty ledger whose next record is `first`.
    pub(crate) fn new(first: u64) -> Self {
        Self { first, ..Self::default() }
    }

    /// Number of the next reservation.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.slots.len() as u64
    }

    /// Everything before this number is durable and visible.
    pub(crate) fn visible(&self) -> u64 {
        self.first
    }

    /// Bytes reserved or committed, and not visible yet.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of slots, committed or void, that no sync has covered.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty
    }

    /// Is something before `end` committed or void, and not durable?
    pub(crate) fn dirty_before(&self, end: u64) -> bool {
        let count = usize::try_from(end.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.dirty > 0
            && self
                .slots
                .iter()
                .take(count)
                .any(|slot| matches!(slot.state, SlotState::Committed | SlotState::Void))
    }

    /// Takes the next number for the frame at `range`. `entry` stands for it should it be given up.
    pub(crate) fn reserve(&mut self, segment: u64, range: Range<usize>, entry: Entry) -> u64 {
        let sequence = self.next();
        self.bytes += range.len();
        self.slots.push_back(Slot { state: SlotState::Reserved, stored: false, segment, range, entry });
        sequence
    }

    fn slot(&mut self, sequence: u64) -> Option<&mut Slot> {
        let index = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        self.slots.get_mut(index)
    }

    /// Is this slot still its producer's to commit or give up?
    pub(crate) fn is_reserved(&mut self, sequence: u64) -> bool {
        self.slot(sequence).is_some_and(|slot| slot.state == SlotState::Reserved)
    }

    /// The body is complete. `false` when the reservation was reclaimed before.
    pub(crate) fn commit(&mut self, sequence: u64, entry: Entry) -> bool {
        match self.slot(sequence) {
            Some(slot) if slot.state == SlotState::Reserved => {
                slot.state = SlotState::Committed;
                slot.entry = entry;
                self.dirty += 1;
                true
            }
            _ => false,
        }
    }

    /// Gives a reservation up and tells its segment and range. `None` when it was committed or given up
    /// before.
    pub(crate) fn void(&mut self, sequence: u64) -> Option<(u64, Range<usize>)> {
        let slot = self.slot(sequence).filter(|slot| slot.state == SlotState::Reserved)?;
        slot.state = if slot.stored { SlotState::Durable } else { SlotState::Void };
        let (stored, place) = (slot.stored, (slot.segment, slot.range.clone()));
        self.dirty += usize::from(!stored);
        Some(place)
    }

    /// Is the record on stable storage?
    pub(crate) fn is_durable(&mut self, sequence: u64) -> bool {
        sequence < self.first || self.slot(sequence).is_some_and(|slot| slot.state == SlotState::Durable)
    }

    /// Everything that a sync started now can acknowledge; `None` when there is nothing.
    ///
    /// The ranges begin at the oldest frame that is not durable, even if it is only reserved: recovery walks
    /// over its header to reach the ones behind it.
    pub(crate) fn batch(&self) -> Option<Batch> {
        let mut batch = Batch { ranges: Vec::new(), sequences: Vec::new(), end: self.next() };
        let pending = |slot: &&Slot| slot.state != SlotState::Durable;
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| pending(slot)) {
            match batch.ranges.last_mut() {
                Some((segment, range)) if *segment == slot.segment => range.end = slot.range.end,
                _ => batch.ranges.push((slot.segment, slot.range.clone())),
            }
            if slot.state != SlotState::Reserved {
                batch.sequences.push(self.first + index as u64);
            }
        }
        (!batch.sequences.is_empty()).then_some(batch)
    }

    /// The batch is on stable storage.
    pub(crate) fn finish(&mut self, batch: &Batch) {
        let covered = usize::try_from(batch.end.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.slots.iter_mut().take(covered).for_each(|slot| slot.stored = true);
        let given_up_meanwhile = |slot: &&mut Slot| slot.state == SlotState::Void && slot.stored;
        for slot in self.slots.iter_mut().take(covered).filter(given_up_meanwhile) {
            slot.state = SlotState::Durable;
            self.dirty -= 1;
        }
        for &sequence in &batch.sequences {
            if let Some(slot) = self.slot(sequence).filter(|slot| slot.state != SlotState::Durable) {
                slot.state = SlotState::Durable;
                self.dirty -= 1;
            }
        }
    }

    /// Takes what readers may see from now on, in order.
    pub(crate) fn publish(&mut self) -> Vec<Published> {
        let mut published = Vec::new();
        while self.slots.front().is_some_and(|slot| slot.state == SlotState::Durable) {
            if let Some(slot) = self.slots.pop_front() {
                self.bytes -= slot.range.len();
                published.push(Published { sequence: self.first, segment: slot.segment, entry: slot.entry });
                self.first += 1;
            }
        }
        published
    }

    /// Does a frame of this segment still wait to become visible?
    pub(crate) fn holds(&self, segment: u64) -> bool {
        self.slots.iter().any(|slot| slot.segment == segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::segment::EntryState;

    fn entry(state: EntryState) -> Entry {
        Entry::empty(state, 0, 64)
    }

    fn reserve(ledger: &mut Ledger, at: usize) -> u64 {
        ledger.reserve(0, at..at + 64, entry(EntryState::Void))
    }

    fn finish(ledger: &mut Ledger, batch: &Batch) -> Vec<u64> {
        ledger.finish(batch);
        ledger.publish().iter().map(|slot| slot.sequence).collect()
    }

    #[test]
    fn giving_up_a_stored_reservation_needs_no_sync() {
        let mut ledger = Ledger::new(0);
        let (a, b) = (reserve(&mut ledger, 0), reserve(&mut ledger, 64));
        assert!(ledger.commit(b, entry(EntryState::Record)));
        let batch = ledger.batch().unwrap();
        assert!(finish(&mut ledger, &batch).is_empty());
        assert!(ledger.void(a).is_some());
        let published: Vec<u64> = ledger.publish().iter().map(|slot| slot.sequence).collect();
        assert_eq!((published, ledger.dirty()), (vec![0, 1], 0));
    }

    #[test]
    fn records_become_visible_in_order_and_acknowledged_out_of_it() {
        let mut ledger = Ledger::new(10);
        let (a, b) = (reserve(&mut ledger, 0), reserve(&mut ledger, 64));
        assert_eq!((a, b, ledger.next()), (10, 11, 12));
        assert!(ledger.commit(b, entry(EntryState::Record)));
        let batch = ledger.batch().unwrap();
        assert_eq!(batch.ranges, [(0, 0..128)], "the open reservation's header goes along");
        assert!(finish(&mut ledger, &batch).is_empty());
        assert!(ledger.is_durable(b) && !ledger.is_durable(a));
        assert!(ledger.batch().is_none());
        assert!(ledger.commit(a, entry(EntryState::Record)));
        let batch = ledger.batch().unwrap();
        assert_eq!(batch.ranges, [(0, 0..64)]);
        assert_eq!(finish(&mut ledger, &batch), [10, 11]);
        assert_eq!((ledger.visible(), ledger.bytes()), (12, 0));
    }

    #[test]
    fn a_reservation_ends_once() {
        let mut ledger = Ledger::new(0);
        let a = reserve(&mut ledger, 0);
        assert_eq!(ledger.void(a), Some((0, 0..64)));
        assert!(!ledger.commit(a, entry(EntryState::Record)) && ledger.void(a).is_none());
        let batch = ledger.batch().unwrap();
        let b = reserve(&mut ledger, 64);
        assert!(ledger.commit(b, entry(EntryState::Record)));
        assert_eq!(finish(&mut ledger, &batch), [0], "a later commit is not in an earlier batch");
        assert!(!ledger.is_durable(b));
        assert_eq!(ledger.dirty(), 1);
    }
}
