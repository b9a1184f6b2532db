//! Where each class of a block has its members: from position to rank, and back.
//!
//! The class of an element is a number of four bits, kept as four bit planes; a row is a word of each, for 64
//! elements. From them the mask of any class in any row is three operations away, so that rows in which
//! nothing changed cost a count only.

use crate::element::{BLOCK_ELEMENTS, Element};
use crate::scan::{GROUP, PLANES, Path, Work, select};
use crate::table::{CLASSES_MAX, Table};

/// Rows of a block.
const ROWS: usize = BLOCK_ELEMENTS / GROUP;

/// Which bits of each class are 0: all ones there.
const INVERT: [[u64; CLASSES_MAX]; PLANES] = {
    let mut invert = [[0; CLASSES_MAX]; PLANES];
    let mut at = 0;
    while at < PLANES * CLASSES_MAX {
        let (bit, class) = (at % PLANES, at / PLANES);
        if class >> bit & 1 == 0 {
            invert[bit][class] = u64::MAX;
        }
        at += 1;
    }
    invert
};

/// The classes of one block.
pub(crate) struct Classes {
    /// One plane after the other.
    planes: Vec<u64>,
    rows: usize,
    /// Members of each class in the rows before a row. Rows after the last one, up to a power of two, have
    /// more than any rank.
    before: Box<[[u16; CLASSES_MAX]; ROWS]>,
    members: [u32; CLASSES_MAX],
}

impl Default for Classes {
    fn default() -> Self {
        let before = Box::new([[0; CLASSES_MAX]; ROWS]);
        Self { planes: Vec::new(), rows: 0, before, members: [0; CLASSES_MAX] }
    }
}

impl Classes {
    /// Sorts the elements of a block, `base`, into the classes of `table`.
    pub(crate) fn fill(&mut self, path: Path, element: Element, base: &[u8], table: &Table) {
        let elements = base.len() / element.size();
        self.planes.resize(elements.div_ceil(GROUP) * PLANES, 0);
        path.planes(element, base, table.first, table.last(), &mut self.planes);
        self.count(path, elements);
    }

    /// The same from planes that hold finer classes, those of [`Path::planes`] from exponent `first` on. The
    /// table's classes lie within them.
    pub(crate) fn fill_from(&mut self, path: Path, fine: &[u64], first: u32, elements: usize, table: &Table) {
        self.planes.resize(fine.len(), 0);
        path.run(Merge { fine, less: table.first - first, last: table.last(), planes: &mut self.planes });
        self.count(path, elements);
    }

    fn count(&mut self, path: Path, elements: usize) {
        self.rows = self.planes.len() / PLANES;
        self.before[self.rows..self.rows.next_power_of_two()].fill([u16::MAX; CLASSES_MAX]);
        self.members = path.run(Count { planes: &self.planes, before: &mut self.before[..self.rows] });
        // What the last row lacks counts for class 0, behind all that are there.
        self.members[0] -= (self.rows * GROUP - elements) as u32;
    }

    /// Members of the class with this number.
    pub(crate) fn members(&self, class: usize) -> u32 {
        self.members[class]
    }

    #[inline(always)]
    fn mask(&self, row: usize, class: usize) -> u64 {
        mask([0, 1, 2, 3].map(|bit| self.planes[bit * self.rows + row]), class)
    }

    /// The class of the element at `position`, and how many of its class stand before it.
    #[inline(always)]
    pub(crate) fn rank(&self, position: u16) -> (usize, u32) {
        let (row, bit) = (usize::from(position) / GROUP, usize::from(position) % GROUP);
        let class = (0..PLANES).fold(0, |class, k| class | (self.planes[k * self.rows + row] >> bit & 1) << k)
            as usize;
        let below = self.mask(row, class) & ((1 << bit) - 1);
        (class, u32::from(self.before[row][class]) + below.count_ones())
    }

    /// The position of the member of the class that has `rank`, which is below the class's number of members.
    #[inline(always)]
    pub(crate) fn position(&self, class: usize, rank: u32) -> u32 {
        // Computed, because a branch would be as good as random: the sign of a difference says which way to
        // go.
        let mut row = 0;
        for level in (0..self.rows.next_power_of_two().trailing_zeros()).rev() {
            let before = u32::from(self.before[(row + (1 << level)) % ROWS][class]);
            row += ((before.wrapping_sub(rank + 1) >> 31) as usize) << level;
        }
        row %= ROWS;
        let inside = rank - u32::from(self.before[row][class]);
        (row * GROUP) as u32 + select(self.mask(row, class), inside)
    }
}

/// The rows of `planes`.
#[inline(always)]
fn rows(planes: &[u64]) -> impl Iterator<Item = [u64; PLANES]> {
    let (low, high) = planes.split_at(planes.len() / 2);
    let ((a, b), (c, d)) = (low.split_at(low.len() / 2), high.split_at(high.len() / 2));
    a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| [*a, *b, *c, *d])
}

/// The elements of a row that are of a class.
#[inline(always)]
fn mask(row: [u64; PLANES], class: usize) -> u64 {
    (row[0] ^ INVERT[0][class])
        & (row[1] ^ INVERT[1][class])
        & (row[2] ^ INVERT[2][class])
        & (row[3] ^ INVERT[3][class])
}

/// Adds the members of each class in a row to `sums`.
#[inline(always)]
fn add(sums: &mut [u64; CLASSES_MAX], row: [u64; PLANES]) {
    for (class, sum) in sums.iter_mut().enumerate() {
        *sum += u64::from(mask(row, class).count_ones());
    }
}

/// Counts the members of each class: `before` each row, and in all.
struct Count<'a> {
    planes: &'a [u64],
    before: &'a mut [[u16; CLASSES_MAX]],
}

impl Work for Count<'_> {
    type Output = [u32; CLASSES_MAX];

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut sums = [0; CLASSES_MAX];
        for (row, before) in rows(self.planes).zip(self.before) {
            *before = sums.map(|sum| sum as u16);
            add(&mut sums, row);
        }
        sums.map(|sum| sum as u32)
    }
}

/// Counts the members of each class in every `apart`-th row.
pub(crate) struct Sample<'a> {
    pub(crate) planes: &'a [u64],
    pub(crate) apart: usize,
}

impl Work for Sample<'_> {
    type Output = [u64; CLASSES_MAX];

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut sums = [0; CLASSES_MAX];
        // No closure, which would not be compiled for the path.
        for row in rows(self.planes).step_by(self.apart) {
            add(&mut sums, row);
        }
        sums
    }
}

/// Makes classes of finer ones: each less by `less`, at least 0 and at most `last`.
struct Merge<'a> {
    fine: &'a [u64],
    less: u32,
    last: u32,
    planes: &'a mut [u64],
}

impl Work for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let all =
            |number: u32| [0, 1, 2, 3].map(|bit| (number >> bit & 1).wrapping_neg() as i32 as i64 as u64);
        let (less, last) = (all(self.less), all(self.last));
        let majority = |a: u64, b: u64, c: u64| (a & b) | (c & (a | b));
        let (low, high) = self.planes.split_at_mut(self.planes.len() / 2);
        let ((a, b), (c, d)) = (low.split_at_mut(low.len() / 2), high.split_at_mut(high.len() / 2));
        for ((((row, a), b), c), d) in rows(self.fine).zip(a).zip(b).zip(c).zip(d) {
            // All 64 numbers of the row at once, bit by bit: the difference, with a borrow, and then whether
            // `last` is smaller.
            let (mut difference, mut borrow) = ([0; PLANES], 0);
            for bit in 0..PLANES {
                difference[bit] = row[bit] ^ less[bit] ^ borrow;
                borrow = majority(!row[bit], less[bit], borrow);
            }
            let mut beyond = 0;
            for bit in 0..PLANES {
                difference[bit] &= !borrow;
                beyond = majority(difference[bit], !last[bit], beyond);
            }
            for (bit, plane) in [a, b, c, d].into_iter().enumerate() {
                *plane = (difference[bit] & !beyond) | (last[bit] & beyond);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::ALL;
    use crate::scan::tests::{paths, sample};
    use crate::table::Class;

    /// Miri has no time for whole blocks.
    const MOST: usize = if cfg!(miri) { 66 } else { BLOCK_ELEMENTS };
    /// Nor for every case: one in so many is looked at.
    const APART: usize = if cfg!(miri) { 4 } else { 1 };

    #[test]
    fn ranks_and_positions_are_inverse() {
        let class = Class::UNUSED;
        let sizes = [(2, 65_536), (16, 65_536), (16, 65_535), (5, 4099), (16, 64), (3, 1)];
        let mut classes = Classes::default();
        for element in ALL.into_iter().filter(|element| *element != Element::Bytes).step_by(APART) {
            let middle = element.exponent(element.mask()) / 2;
            for (count, elements) in sizes.into_iter().rev().step_by(APART) {
                let elements = elements.min(MOST);
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
                    assert_eq!(classes.members, seen);
                    let mut finer = vec![0; elements.div_ceil(GROUP) * PLANES];
                    for less in (0..3).filter(|less| less + count <= 16) {
                        path.planes(element, &base, middle - less, 15, &mut finer);
                        let mut merged = Classes::default();
                        merged.fill_from(path, &finer, middle - less, elements, &table);
                        assert_eq!(merged.planes, classes.planes, "{path:?} {element:?} {table:?}");
                        assert_eq!(merged.members, classes.members);
                    }
                }
            }
        }
        // One class that is all of the block: its last rank is the largest number that fits.
        let table = Table::new(3, [class; 2]);
        classes.fill(Path::best(), Element::Bf16, &[0; 2 * MOST], &table);
        assert_eq!(classes.position(0, MOST as u32 - 1), MOST as u32 - 1);
        assert_eq!(classes.members(0), MOST as u32);
    }
}
