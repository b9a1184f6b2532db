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
/// Value of [`Class::large_run`] that means: every step is one ulp.
pub(crate) const NONE_LARGE: u32 = 8;
/// Largest Rice parameter of step sizes.
pub(crate) const RICE_MAX: u32 = 31;

/// Numbers of classes in all: from [`CLASSES_MAX`] on they hold elements that have moved.
pub(crate) const NUMBERS_MAX: usize = 2 * CLASSES_MAX;
/// A class of elements that have moved holds 2⁰ to 2³ exponents.
pub(crate) const MERGE_MAX: u32 = 3;

/// Value of [`Class::turns`] that means: a bit for each step.
pub(crate) const PLAIN: u32 = 8;
/// Largest value of [`Class::turns`]: no step goes on. At 0 none turns.
pub(crate) const TURNS_MAX: u32 = 2 * PLAIN;

/// Parameters of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    /// Positions name the elements that did *not* change.
    pub(crate) inverted: bool,
    /// Base-2 logarithm of the run in the position code.
    pub(crate) run: u32,
    /// Base-2 logarithm of the run in the code of steps larger than one ulp, or [`EXPLICIT`] or [`NONE_LARGE`].
    pub(crate) large_run: u32,
    /// Rice parameter of step sizes.
    pub(crate) rice: u32,
    /// How directions are coded, relative to the last move; the larger, the rarer is it that a step goes on. Below [`PLAIN`], steps that turn are
    /// marked, with runs of 2^(7 - turns), and at 0 there are none; above it those that go on, with runs of 2^(turns - 9), and at
    /// [`TURNS_MAX`] there are none. In classes of elements that have not moved it is [`PLAIN`], and directions are absolute.
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
    /// As many as `count`, then [`BEFORE`].
    classes: [Class; CLASSES_MAX],
    count: usize,
    /// Those of elements that have moved, and the base-2 logarithm of how many exponents each of them holds, if they are told apart.
    moved: Option<([Class; CLASSES_MAX], u32)>,
}

impl Table {
    /// A table with 1 to [`CLASSES_MAX`] classes; what is beyond that is left out.
    pub(crate) fn new(first: u32, classes: impl IntoIterator<Item = Class>) -> Self {
        let mut table = Self { first, classes: [BEFORE; CLASSES_MAX], count: 0, moved: None };
        for (slot, class) in table.classes.iter_mut().zip(classes) {
            *slot = class;
            table.count += 1;
        }
        table
    }

    pub(crate) fn classes(&self) -> &[Class] {
        &self.classes[..self.count]
    }

    /// The same table, which has at least two classes, with classes of elements that have moved: as many as [`Table::moved_classes`] says.
    pub(crate) fn with_moved(mut self, merge: u32, classes: impl IntoIterator<Item = Class>) -> Self {
        let mut moved = [Class::UNUSED; CLASSES_MAX];
        moved.iter_mut().zip(classes).for_each(|(slot, class)| *slot = class);
        self.moved = Some((moved, merge));
        self
    }

    /// How many classes of elements that have moved there are if each of them holds 2^`merge` exponents.
    pub(crate) fn moved_classes(&self, merge: u32) -> usize {
        ((self.count - 1) >> merge) + 1
    }

    /// Whether elements that have moved have classes of their own.
    pub(crate) fn has_moved(&self) -> bool {
        self.moved.is_some()
    }

    /// Base-2 logarithm of how many exponents a class of elements that have moved holds.
    pub(crate) fn merge(&self) -> u32 {
        self.moved.map_or(0, |(_, merge)| merge)
    }

    /// All classes with their numbers, those of elements that have moved last, if a block tells these apart.
    pub(crate) fn numbered(&self, moved: bool) -> impl Iterator<Item = (usize, &Class)> {
        let moved = self.moved.as_ref().filter(|_| moved);
        let moved = moved.map_or(&[][..], |(classes, merge)| &classes[..self.moved_classes(*merge)]);
        (0..).zip(self.classes()).chain((CLASSES_MAX..).zip(moved))
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
        if self.has_moved() {
            bits.put(self.merge(), 2);
        }
        let mut before = BEFORE;
        for (number, class) in self.numbered(true) {
            if number == CLASSES_MAX {
                before = BEFORE_MOVED;
            }
            if inverts {
                bits.put(class.inverted.into(), 1);
            }
            bits.near(class.run as i32 - before.run as i32 - 1);
            bits.near(class.large_run as i32 - before.large_run as i32);
            bits.near(class.rice as i32 - before.rice as i32);
            if number >= CLASSES_MAX {
                bits.near(class.turns as i32 - before.turns as i32);
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
        let inverts = bits.get(1) == 1;
        let mut table = Self { first, classes: [BEFORE; CLASSES_MAX], count: count as usize, moved: None };
        if moved {
            if count == 1 {
                return Err(corrupt("one class beside those of elements that have moved"));
            }
            table.moved = Some(([Class::UNUSED; CLASSES_MAX], bits.get(2)));
        }
        read_classes(&mut bits, inverts, BEFORE, &mut table.classes[..table.count])
            .ok_or(corrupt("parameter out of range"))?;
        let moved = table.moved_classes(table.merge());
        if let Some((classes, _)) = &mut table.moved {
            read_classes(&mut bits, inverts, BEFORE_MOVED, &mut classes[..moved])
                .ok_or(corrupt("parameter out of range"))?;
        }
        if bits.finish("coder table")? == bytes.len() {
            Ok(table)
        } else {
            Err(corrupt("bytes follow the end"))
        }
    }
}

/// Reads classes one after the other, the first one as it differs from `before`. `None` if a parameter is out of range.
fn read_classes(bits: &mut BitReader<'_>, inverts: bool, mut before: Class, out: &mut [Class]) -> Option<()> {
    let moved = before == BEFORE_MOVED;
    for class in out {
        let inverted = inverts && bits.get(1) == 1;
        let mut parameter = |before: u32, max: u32| {
            u32::try_from(before as i32 + bits.near()).ok().filter(|value| *value <= max)
        };
        before = Class {
            inverted,
            run: parameter(before.run + 1, RUN_MAX)?,
            large_run: parameter(before.large_run, NONE_LARGE)?,
            rice: parameter(before.rice, RICE_MAX)?,
            turns: if moved { parameter(before.turns, TURNS_MAX)? } else { PLAIN },
        };
        *class = before;
    }
    Some(())
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
                large_run: (i * 3) % 9,
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
            if count == 1 {
                assert!(Table::read(Element::Bf16, &bytes, 0, true).is_err());
                continue;
            }
            let merge = count % 4;
            let own = (0..16).map(|turns: u32| Class { turns: turns * 5 % 17, run: turns, ..BEFORE_MOVED });
            let table = table.with_moved(merge, own.take(table.moved_classes(merge)));
            assert_eq!(table.numbered(true).count(), count as usize + table.moved_classes(merge));
            bytes.clear();
            table.write(&mut bytes);
            assert_eq!(Table::read(Element::Bf16, &bytes, 0, true), Ok(table));
            assert!(Table::read(Element::Bf16, &bytes[..bytes.len() - 1], 0, true).is_err());
        }
    }
}
