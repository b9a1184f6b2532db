//! The reference: element by element.

use super::GROUP;
use crate::element::Element;
use crate::scan::PLANES;

pub(super) fn changed(element: Element, base: &[u8], new: &[u8], masks: &mut [u64]) -> bool {
    let group = GROUP * element.size();
    let mut any = false;
    for (mask, (base, new)) in masks.iter_mut().zip(base.chunks(group).zip(new.chunks(group))) {
        *mask = 0;
        if base != new {
            any = true;
            (0..base.len() / element.size())
                .for_each(|i| *mask |= u64::from(element.load(base, i) != element.load(new, i)) << i);
        }
    }
    any
}

/// Fills rows from `first_row` on; elements beyond the end of `base` count as class 0.
pub(super) fn planes(
    element: Element,
    base: &[u8],
    first: u32,
    last: u32,
    planes: &mut [u64],
    first_row: usize,
) {
    let rows = planes.len() / PLANES;
    for (row, base) in (first_row..).zip(base.chunks(GROUP * element.size())) {
        (0..PLANES).for_each(|bit| planes[bit * rows + row] = 0);
        for i in 0..base.len() / element.size() {
            let class = element.exponent(element.load(base, i)).saturating_sub(first).min(last);
            (0..PLANES).for_each(|bit| planes[bit * rows + row] |= u64::from(class >> bit & 1) << i);
        }
    }
}
