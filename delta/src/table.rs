//! Coder tables: how a segment's elements are split into classes by the base's exponent, and the parameters of each class.

use crate::Element;
use crate::bits::{BitReader, BitWriter};
use crate::{Error, Result};

/// A table has at most this many classes.
pub(crate) const CLASSES_MAX: usize = 16;
/// A run of 2¹⁶ covers a whole block.
pub(crate) const RUN_MAX: u32 = 16;
/// Value of [`Class::large_run`] that means: every step has its size written, none is assumed to be one ulp.
pub(crate) const EXPLICIT: u32 = 7;
/// Largest Rice parameter of step sizes.
pub(crate) const RICE_MAX: u32 = 31;

/// Number of the class that holds elements that have moved, in the lowest exponents. Classes from here on hold those elements, each of
/// them the exponents of [`MOVED_MERGED`] classes of the others.
pub(crate) const MOVED_FIRST: usize = 12;
/// How many classes of elements that have not moved one class of those that have goes with.
pub(crate) const MOVED_MERGED: usize = 4;
/// Value of [`Class::turns`] that means: a bit for each step.
pub(crate) const PLAIN: u32 = 7;
/// Bit of [`Class::turns`] that means: steps that go on are marked, not those that turn.
pub(crate) const MARKS_KEPT: u32 = 8;

/// Parameters of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    /// Positions name the elements that did *not* change.
    pub(crate) inverted: bool,
    /// Base-2 logarithm of the run in the position code.
    pub(crate) run: u32,
    /// Base-2 logarithm of the run in the code of steps larger than one ulp, or [`EXPLICIT`].
    pub(crate) large_run: u32,
    /// Rice parameter of step sizes.
    pub(crate) rice: u32,
    /// How directions are coded, relative to the last move: base-2 logarithm of the run between marked steps, and [`MARKS_KEPT`]; or [`PLAIN`].
    /// In classes of elements that have not moved it is [`PLAIN`], and directions are absolute.
    pub(crate) turns: u32,
}

impl Class {
    /// No class in particular.
    pub(crate) const UNUSED: Self = BEFORE;
}

/// What stands before the first class: parameters are written as differences.
const BEFORE: Class = Class { inverted: false, run: 5, large_run: 3, rice: 0, turns: PLAIN };

/// What stands before the first class of elements that have moved.
const BEFORE_MOVED: Class = Class { inverted: false, run: 1, large_run: 3, rice: 0, turns: PLAIN };

/// Classes of one segment. Class 0 holds the base exponents up to `first`, each further class one exponent more, the last one all above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) first: u32,
    /// As many as `count`, then [`BEFORE`]; from [`MOVED_FIRST`] on those of elements that have moved, if there are any.
    classes: [Class; CLASSES_MAX],
    count: usize,
    /// Classes of elements that have moved; none if these are not told apart.
    moved: usize,
}

impl Table {
    /// A table with 1 to [`CLASSES_MAX`] classes; what is beyond that is left out.
    pub(crate) fn new(first: u32, classes: impl IntoIterator<Item = Class>) -> Self {
        let mut table = Self { first, classes: [BEFORE; CLASSES_MAX], count: 0, moved: 0 };
        for (slot, class) in table.classes.iter_mut().zip(classes) {
            *slot = class;
            table.count += 1;
        }
        table
    }

    pub(crate) fn classes(&self) -> &[Class] {
        &self.classes[..self.count]
    }

    /// The same table, which also has these classes of elements that have moved: as many as [`Table::moved_classes`]
    /// says. It has 2 to [`MOVED_FIRST`] others.
    pub(crate) fn with_moved(mut self, classes: impl IntoIterator<Item = Class>) -> Self {
        for (slot, class) in self.classes[MOVED_FIRST..].iter_mut().zip(classes) {
            *slot = class;
            self.moved += 1;
        }
        self
    }

    /// How many classes of elements that have moved go with so many others.
    pub(crate) fn moved_classes(count: usize) -> usize {
        count.div_ceil(MOVED_MERGED)
    }

    /// Whether elements that have moved have classes of their own.
    pub(crate) fn has_moved(&self) -> bool {
        self.moved > 0
    }

    /// All classes with their numbers, those of elements that have moved last, if a block tells these apart.
    pub(crate) fn numbered(&self, moved: bool) -> impl Iterator<Item = (usize, &Class)> {
        let moved = MOVED_FIRST..MOVED_FIRST + if moved { self.moved } else { 0 };
        (0..self.count).chain(moved).map(|number| (number, &self.classes[number]))
    }

    /// Number of the last class of elements of which it is not told whether they have moved.
    pub(crate) fn last(&self) -> u32 {
        self.count as u32 - 1
    }

    /// Whether positions can be decoded without looking at the base.
    pub(crate) fn is_flat(&self) -> bool {
        self.count == 1
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let mut bits = BitWriter::new(out);
        bits.put(self.count as u32 - 1, 4);
        if !self.is_flat() {
            bits.put(self.first, 8);
        }
        let inverts = self.numbered(true).any(|(_, class)| class.inverted);
        bits.put(inverts.into(), 1);
        let mut before = BEFORE;
        for (number, class) in self.numbered(true) {
            if self.has_moved() && number == MOVED_FIRST {
                before = BEFORE_MOVED;
            }
            if inverts {
                bits.put(class.inverted.into(), 1);
            }
            bits.near(class.run as i32 - before.run as i32 - 1);
            bits.near(class.large_run as i32 - before.large_run as i32);
            bits.near(class.rice as i32 - before.rice as i32);
            if self.has_moved() && number >= MOVED_FIRST {
                bits.put(class.turns, 4);
            }
            before = *class;
        }
        bits.finish();
    }

    /// Reads a table that fills `bytes`, which lie at `offset` of the payload, and has classes of elements that have `moved`, or not.
    pub(crate) fn read(element: Element, bytes: &[u8], offset: usize, moved: bool) -> Result<Self> {
        let corrupt = |why| Error::Corrupt { what: "coder table", offset, why };
        let mut bits = BitReader::new(bytes);
        let count = bits.get(4) + 1;
        let first = if count > 1 { bits.get(8) } else { 0 };
        if count > 1 && (first + count - 1) << element.mantissa_bits() > element.mask() >> 1 {
            return Err(corrupt("classes lie beyond the largest exponent"));
        }
        let count = count as usize;
        if moved && !(2..=MOVED_FIRST).contains(&count) {
            return Err(corrupt("one class, or more than 12, beside those of elements that have moved"));
        }
        let inverts = bits.get(1) == 1;
        let moved = if moved { Self::moved_classes(count) } else { 0 };
        let mut table = Self { first, classes: [BEFORE; CLASSES_MAX], count, moved };
        let mut before = BEFORE;
        for number in (0..count).chain(MOVED_FIRST..MOVED_FIRST + moved) {
            if moved > 0 && number == MOVED_FIRST {
                before = BEFORE_MOVED;
            }
            let inverted = inverts && bits.get(1) == 1;
            let mut parameter = |before: u32, max: u32| {
                u32::try_from(before as i32 + bits.near()).ok().filter(|value| *value <= max)
            };
            let class = (
                parameter(before.run + 1, RUN_MAX),
                parameter(before.large_run, EXPLICIT),
                parameter(before.rice, RICE_MAX),
            );
            let (Some(run), Some(large_run), Some(rice)) = class else {
                return Err(corrupt("parameter out of range"));
            };
            let turns = if moved > 0 && number >= MOVED_FIRST { bits.get(4) } else { PLAIN };
            if turns == PLAIN | MARKS_KEPT {
                return Err(corrupt("parameter out of range"));
            }
            before = Class { inverted, run, large_run, rice, turns };
            table.classes[number] = before;
        }
        if bits.finish("coder table")? == bytes.len() {
            Ok(table)
        } else {
            Err(corrupt("bytes follow the end"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_round_trip() {
        for count in 1..=CLASSES_MAX as u32 {
            let classes = (0..count).map(|i| Class {
                inverted: i % 5 == 4,
                run: (i * 7) % 17,
                large_run: (i * 3) % 8,
                rice: (i * 11) % 32,
                turns: PLAIN,
            });
            let table = Table::new(if count > 1 { 100 } else { 0 }, classes);
            let mut bytes = Vec::new();
            table.write(&mut bytes);
            assert_eq!(Table::read(Element::Bf16, &bytes, 0, false), Ok(table));
            assert!(Table::read(Element::Bf16, &bytes[..bytes.len() - 1], 0, false).is_err());
            if count > 1 {
                assert!(Table::read(Element::F8E5M2, &bytes, 0, false).is_err(), "exponent 100 in five bits");
            }
            if !(2..=MOVED_FIRST as u32).contains(&count) {
                assert!(Table::read(Element::Bf16, &bytes, 0, true).is_err());
                continue;
            }
            let turns = [3, PLAIN, MARKS_KEPT | 6];
            let moved = Table::moved_classes(count as usize);
            let table =
                table.with_moved(turns[..moved].iter().map(|&turns| Class { turns, ..Class::UNUSED }));
            assert_eq!(table.numbered(true).count(), count as usize + moved);
            bytes.clear();
            table.write(&mut bytes);
            assert_eq!(Table::read(Element::Bf16, &bytes, 0, true), Ok(table));
            assert!(Table::read(Element::Bf16, &bytes[..bytes.len() - 1], 0, true).is_err());
        }
    }
}
