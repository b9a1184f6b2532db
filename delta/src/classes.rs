//! Where each class of a block has its members: from position to rank, and back.
//!
//! The class of an element is a number of four bits, kept as four bit planes of 64 elements: one row of a block. From them
//! the mask of any class in any row is three operations away, so that rows in which nothing changed cost a count only.

use crate::element::Element;
use crate::scan::{Path, Work, select};
use crate::table::{CLASSES_MAX, Table};

/// Bit `k` of the classes of 64 elements, for k = 0 to 3.
pub(crate) type Planes = [u64; 4];

/// Which bits of each class are 0: all ones there.
const INVERT: [[u64; CLASSES_MAX]; 4] = {
    let mut invert = [[0; CLASSES_MAX]; 4];
    let mut at = 0;
    while at < 4 * CLASSES_MAX {
        let (bit, class) = (at % 4, at / 4);
        if class >> bit & 1 == 0 {
            invert[bit][class] = u64::MAX;
        }
        at += 1;
    }
    invert
};

/// The classes of one block.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    rows: Vec<Planes>,
    /// Members of each class in the rows before; the last row is filled up to a power of two with rows beyond any rank.
    before: Vec<[u16; CLASSES_MAX]>,
    members: [u32; CLASSES_MAX],
}

impl Classes {
    /// Sorts the elements of a block, `base`, into the classes of `table`.
    pub(crate) fn fill(&mut self, path: Path, element: Element, base: &[u8], table: &Table) {
        let elements = base.len() / element.size();
        let rows = elements.div_ceil(64);
        self.rows.resize(rows, [0; 4]);
        self.before.resize(rows.next_power_of_two(), [u16::MAX; CLASSES_MAX]);
        self.before[rows..].fill([u16::MAX; CLASSES_MAX]);
        path.planes(element, base, table, &mut self.rows);
        self.members = path.run(Count { rows: &self.rows, before: &mut self.before });
        // What the last row lacks counts for class 0, behind all that are there.
        self.members[0] -= (rows * 64 - elements) as u32;
    }

    /// Members of all classes.
    pub(crate) fn members(&self) -> &[u32; CLASSES_MAX] {
        &self.members
    }

    #[inline(always)]
    fn mask(&self, row: usize, class: usize) -> u64 {
        let planes = &self.rows[row];
        (0..4).fold(u64::MAX, |mask, bit| mask & (planes[bit] ^ INVERT[bit][class]))
    }

    /// The class of the element at `position`, and how many of its class stand before it.
    #[inline(always)]
    pub(crate) fn rank(&self, position: u16) -> (usize, u32) {
        let (row, bit) = (usize::from(position) / 64, position % 64);
        let class = (0..4).fold(0, |class, k| class | (self.rows[row][k] >> bit & 1) << k) as usize;
        let below = self.mask(row, class) & ((1 << bit) - 1);
        (class, u32::from(self.before[row][class]) + below.count_ones())
    }

    /// The position of the member of `class` with `rank`, which is below the class's number of members.
    #[inline(always)]
    pub(crate) fn position(&self, class: usize, rank: u32) -> u32 {
        // No branch: which way a search goes cannot be guessed.
        let mut row = 0;
        let mut half = self.before.len() / 2;
        while half > 0 {
            let there = u32::from(self.before[row + half][class]) <= rank;
            row += half * usize::from(there);
            half /= 2;
        }
        let inside = rank - u32::from(self.before[row][class]);
        row as u32 * 64 + select(self.mask(row, class), inside)
    }
}

/// Counts the members of each class: `before` each row, and in all.
struct Count<'a> {
    rows: &'a [Planes],
    before: &'a mut [[u16; CLASSES_MAX]],
}

impl Work for Count<'_> {
    type Output = [u32; CLASSES_MAX];

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut sums = [0_u64; CLASSES_MAX];
        for (planes, before) in self.rows.iter().zip(self.before) {
            for class in 0..CLASSES_MAX {
                before[class] = sums[class] as u16;
                let mask = (planes[0] ^ INVERT[0][class])
                    & (planes[1] ^ INVERT[1][class])
                    & (planes[2] ^ INVERT[2][class])
                    & (planes[3] ^ INVERT[3][class]);
                sums[class] += u64::from(mask.count_ones());
            }
        }
        sums.map(|sum| sum as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::ALL;
    use crate::scan::tests::{paths, sample};
    use crate::table::Class;

    #[test]
    fn ranks_and_positions_are_inverse() {
        let class = Class { inverted: false, run: 0, large_run: 0, rice: 0 };
        let mut classes = Classes::default();
        for element in ALL.into_iter().filter(|element| *element != Element::Bytes) {
            let middle = element.exponent(element.mask()) / 2;
            for (count, elements) in [(2, 65_536), (16, 65_536), (16, 65_535), (5, 4099), (16, 64), (3, 1)] {
                if middle + count > element.exponent(element.mask()) {
                    continue;
                }
                let table = Table::new(middle, vec![class; count as usize]);
                let base = sample(elements * element.size(), 3);
                for path in paths() {
                    classes.fill(path, element, &base, &table);
                    let mut seen = [0; CLASSES_MAX];
                    for at in 0..elements {
                        let exponent = element.exponent(element.load(&base, at));
                        let expected = exponent.saturating_sub(middle).min(count - 1) as usize;
                        assert_eq!(
                            classes.rank(at as u16),
                            (expected, seen[expected]),
                            "{path:?} {element:?} {at}"
                        );
                        assert_eq!(classes.position(expected, seen[expected]), at as u32);
                        seen[expected] += 1;
                    }
                    assert_eq!(*classes.members(), seen);
                }
            }
        }
        // One class that is all of the block: its last rank is the largest number that fits.
        let table = Table::new(3, [class; 2]);
        classes.fill(Path::best(), Element::Bf16, &[0; 131_072], &table);
        assert_eq!(classes.position(0, 65_535), 65_535);
        assert_eq!(classes.members()[0], 65_536);
    }
}
