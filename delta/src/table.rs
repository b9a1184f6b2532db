//! Coder tables: how a segment's elements are split into classes by the base's exponent, and the parameters
//! of each class.

use crate::bits::{BitReader, BitWriter};
use crate::element::Element;
use crate::error::{Error, Result};

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

/// Parameters of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    /// Positions name the elements that did *not* change.
    pub(crate) inverted: bool,
    /// Base-2 logarithm of the run in the position code.
    pub(crate) run: u32,
    /// Base-2 logarithm of the run in the code of steps larger than one ulp, or [`EXPLICIT`] or
    /// [`NONE_LARGE`].
    pub(crate) large_run: u32,
    /// Rice parameter of step sizes.
    pub(crate) rice: u32,
}

impl Class {
    /// No class in particular.
    pub(crate) const UNUSED: Self = BEFORE;
}

/// What stands before the first class: parameters are written as differences.
const BEFORE: Class = Class { inverted: false, run: 5, large_run: 3, rice: 0 };

/// Classes of one segment. Class 0 holds the base exponents up to `first`, each further class one exponent
/// more, the last one all above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) first: u32,
    /// As many as `count`, then [`BEFORE`].
    classes: [Class; CLASSES_MAX],
    count: usize,
}

impl Table {
    /// A table with 1 to [`CLASSES_MAX`] classes; what is beyond that is left out.
    pub(crate) fn new(first: u32, classes: impl IntoIterator<Item = Class>) -> Self {
        let mut table = Self { first, classes: [BEFORE; CLASSES_MAX], count: 0 };
        for (slot, class) in table.classes.iter_mut().zip(classes) {
            *slot = class;
            table.count += 1;
        }
        table
    }

    pub(crate) fn classes(&self) -> &[Class] {
        &self.classes[..self.count]
    }

    /// Number of the last class.
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
        let inverts = self.classes().iter().any(|class| class.inverted);
        bits.put(inverts.into(), 1);
        let mut before = BEFORE;
        for class in self.classes() {
            if inverts {
                bits.put(class.inverted.into(), 1);
            }
            bits.near(class.run as i32 - before.run as i32 - 1);
            bits.near(class.large_run as i32 - before.large_run as i32);
            bits.near(class.rice as i32 - before.rice as i32);
            before = *class;
        }
        bits.finish();
    }

    /// Reads a table that fills `bytes`, which lie at `offset` of the payload.
    pub(crate) fn read(element: Element, bytes: &[u8], offset: usize) -> Result<Self> {
        let corrupt = |why| Error::Corrupt { what: "coder table", offset, why };
        let mut bits = BitReader::new(bytes);
        let count = bits.get(4) + 1;
        let first = if count > 1 { bits.get(8) } else { 0 };
        if count > 1 && (first + count - 1) << element.mantissa_bits() > element.mask() >> 1 {
            return Err(corrupt("classes lie beyond the largest exponent"));
        }
        let inverts = bits.get(1) == 1;
        let mut table = Self { first, classes: [BEFORE; CLASSES_MAX], count: count as usize };
        read_classes(&mut bits, inverts, &mut table.classes[..table.count])
            .ok_or(corrupt("parameter out of range"))?;
        if bits.finish("coder table")? == bytes.len() {
            Ok(table)
        } else {
            Err(corrupt("bytes follow the end"))
        }
    }
}

/// Reads classes one after the other. `None` if a parameter is out of range.
fn read_classes(bits: &mut BitReader<'_>, inverts: bool, out: &mut [Class]) -> Option<()> {
    let mut before = BEFORE;
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
            });
            let table = Table::new(if count > 1 { 100 } else { 0 }, classes);
            let mut bytes = Vec::new();
            table.write(&mut bytes);
            assert_eq!(Table::read(Element::Bf16, &bytes, 0), Ok(table));
            assert!(Table::read(Element::Bf16, &bytes[..bytes.len() - 1], 0).is_err());
            if count > 1 {
                assert!(Table::read(Element::F8E5M2, &bytes, 0).is_err(), "exponent 100 in five bits");
            }
        }
    }
}
